"""Whether a model's architecture takes prefix trees: a small twin of it in float32, with trees and without.

In bfloat16 a right tree and a leak in one layer look alike. So a model of the same kind is made on the spot, with
random weights in float32, the same layers but fewer and thinner ones, and short windows, which a few dozen tokens
reach. A wrong mask or position is off by hundredths of a nat there or more, a right one by rounding. Nothing of this
depends on the size of the model, the dtype it trains in, or how far its rows reach.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_atgrpo.play.testing import in_a_line
from verl_atgrpo.train.engine.prefix_tree.forward import FLEX, Packed, log_probs, model_inputs
from verl_atgrpo.train.engine.prefix_tree.tree import TokenRows, Tree, pack, sort

VOCABULARY = 256
WINDOW = 24
"""Tokens that a sliding window of the twin spans; half of its rows are longer."""
TOLERANCE = 1e-3
"""Largest difference of a log-prob that is float32's rounding."""
_WIDEST, _MOST_EXPERTS = 512, 32
"""Of layers without attention, which no tree changes."""
_GAIN = 2.0
"""Standard deviation of what weights make of inputs of 1: what is attended to decides what is predicted."""


def refusal(config: Any, implementation: str, device: str) -> str | None:
    """Returns why a model of transformers takes no trees with this implementation of attention, or None."""
    text = config.get_text_config()
    if getattr(text, "attn_temperature_tuning", None):
        return "attn_temperature_tuning scales attention by a token's place in the batch, not by its position"
    if "local" in (getattr(text, "attention_layers", None) or ()):
        return "its local layers count a window by places in the batch, not by positions"
    try:
        model = twin(config, implementation, device)
        apart, noise = difference(model)
    except Exception as error:  # noqa: BLE001  # of whatever kind a model's own code raises: it takes no trees then
        return f"a small model of its kind fails: {in_a_line(error)}"
    if not noise <= TOLERANCE:  # not a number is no agreement
        return (
            f"two passes over the same rows differ by {noise:.2g} nats in training mode (dropout, or noise in a "
            "router), so that rows of a tree would not be those of the rollout"
        )
    if not apart <= TOLERANCE:
        return (
            f"log-probs of a small model of its kind differ by {apart:.2g} nats with trees and without (at most "
            f"{TOLERANCE:g} is rounding)"
        )
    return None


def position_switch(config: Any) -> int | None:
    """Returns the length up to which positions are encoded alike in all batches, or None if they always are.

    With `longrope` and `dynamic` the frequencies follow the longest row of a batch: rows beside a longer one would be
    other than alone. Up to the length that the model was first trained for they do not.
    """
    text = config.get_text_config()
    lengths = []
    for settings in _mappings([getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]):
        kind = settings.get("rope_type", settings.get("type"))
        if kind == "longrope":
            original = settings.get("original_max_position_embeddings")
            lengths.append(original or getattr(text, "original_max_position_embeddings", None))
        elif kind == "dynamic":
            lengths.append(text.max_position_embeddings)
    return min((int(length or text.max_position_embeddings) for length in lengths), default=None)


def _mappings(values: Sequence[object]) -> Iterator[Mapping[str, Any]]:
    for value in values:
        if isinstance(value, Mapping):
            yield value
            yield from _mappings([*value.values()])  # one for each kind of layer


def twin(config: Any, implementation: str, device: str) -> torch.nn.Module:
    """Returns a small model of this kind: float32, the first layers of every kind, random weights, short windows."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config.get_text_config())
    small.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, 0)
    kinds = getattr(small, "layer_types", None)
    needed = 1 + max(map(kinds.index, set(kinds))) if kinds else 0
    layers = min(small.num_hidden_layers, max(2, needed))
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == small.num_hidden_layers:
            setattr(small, name, value[:layers])
        elif isinstance(value, int) and name.endswith("intermediate_size"):
            setattr(small, name, min(value, _WIDEST))
        elif isinstance(value, int) and name in ("num_experts", "num_local_experts", "n_routed_experts"):
            setattr(small, name, min(value, _MOST_EXPERTS))
    small.num_hidden_layers = layers
    if getattr(small, "sliding_window", None) is not None:
        small.sliding_window = WINDOW
    if getattr(small, "num_kv_shared_layers", 0):
        small.num_kv_shared_layers = 0  # counted from the last layer
    small.use_cache = False
    small._attn_implementation = implementation
    accelerators = [] if torch.device(device).type == "cpu" else [torch.device(device)]
    with torch.random.fork_rng(accelerators), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation=implementation)
        for parameter in model.parameters():
            if parameter.dim() > 1:  # vectors are norms and biases
                inputs = 1 if parameter.shape[0] == VOCABULARY and parameter.dim() == 2 else parameter.shape[-1]
                torch.nn.init.normal_(parameter, std=_GAIN / inputs**0.5)
        output = model.get_output_embeddings()
        torch.nn.init.normal_(output.weight, std=_GAIN / output.weight.shape[-1] ** 0.5)  # perhaps the input's, too
    made: torch.nn.Module = model.requires_grad_(False)
    return made


def branching(
    vocabulary: int, stem: int, prompts: Sequence[int], answers: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Returns prompts with answers, of random tokens and these lengths: prompts begin alike, each has all answers."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(count)]

    start = tokens(stem)
    begun = [start + tokens(count) for count in prompts]
    return [(prompt, tokens(count)) for prompt in begun for count in answers]


def sample_rows() -> TokenRows:
    """Returns rows that branch at three depths, half of them longer than WINDOW, in a tree that is longer still."""
    rows = branching(VOCABULARY, 6, (5, 3, 2 * WINDOW), (1, 5, 9))
    ids, prompts = [prompt + answer for prompt, answer in rows], [len(prompt) for prompt, _ in rows]
    return TokenRows(np.concatenate(ids).astype(np.int64), np.cumsum([0, *map(len, ids)]), np.array(prompts))


def difference(model: torch.nn.Module) -> tuple[float, float]:
    """Returns by how much (nats) log-probs of `sample_rows` differ in a tree and alone, and in two training passes."""
    rows = sample_rows()
    tree = pack(rows, sort(rows), slice(0, len(rows)))
    model.eval()
    plain = torch.cat([_alone(model, rows, row) for row in tree.rows.tolist()])
    apart = (tree_log_probs(model, tree) - plain).abs().max().item()
    model.train()
    longest = int(np.diff(rows.offsets).argmax())
    first, again = (_alone(model, rows, longest) for _ in range(2))
    model.eval()
    return apart, (first - again).abs().max().item()


@torch.no_grad()
def tree_log_probs(model: torch.nn.Module, tree: Tree) -> Tensor:
    """Returns the log-probs of all response tokens of a tree, row after row, [M]."""
    packed = Packed.of(tree, next(model.parameters()).device)
    logits = model(**model_inputs(packed, model.config)).logits.squeeze(0)
    return log_probs(logits, packed)["log_probs"]


@torch.no_grad()
def _alone(model: torch.nn.Module, rows: TokenRows, row: int) -> Tensor:
    device = next(model.parameters()).device
    ids = torch.from_numpy(rows[row]).to(device)
    prompt = int(rows.prompts[row])
    config = model.config.get_text_config()  # type: ignore[operator,union-attr]
    before = config._attn_implementation
    # FlexAttention wants a mask of its own; "sdpa" leaves out what it cannot do, such as a cap of the scores.
    config._attn_implementation = "eager" if before == FLEX else before
    try:
        logits = model(input_ids=ids[None], position_ids=torch.arange(len(ids), device=device)[None]).logits[0]
    finally:
        config._attn_implementation = before
    found: Tensor = logits[prompt - 1 : -1].float().log_softmax(-1).gather(1, ids[prompt:, None])[:, 0]
    return found
