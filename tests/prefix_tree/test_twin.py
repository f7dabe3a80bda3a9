"""Which architectures take prefix trees: small twins in float32, right ones and wrong ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fakes.small_configs import small

from verl_atgrpo.train.engine.prefix_tree import twin
from verl_atgrpo.train.engine.prefix_tree.tree import Tree, pack, sort

WINDOWED = {"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4}
EXACT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 4096}),  # in all layers
    ("qwen2", {"use_sliding_window": True, **WINDOWED}),
    ("gemma2", {}),
    ("phi3", {}),
    ("gpt2", {"summary_first_dropout": 0.1}),  # of a head that a language model lacks
    ("mixtral", {}),
    ("qwen3_moe", {}),
    ("olmo3", {}),
    ("diffllama", {}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_dropout": 0.1}, "in training mode"),
    ("gpt2", {"resid_pdrop": 0.1}, "in training mode"),
    ("phimoe", {"router_jitter_noise": 0.1}, "in training mode"),
    ("gpt_neo", {}, "local layers"),
    ("llama4_text", {"attn_temperature_tuning": True}, "attn_temperature_tuning"),
    ("mamba", {}, "MambaForCausalLM does not support"),
    ("rwkv", {}, "RwkvForCausalLM does not support"),
    ("bloom", {}, "BloomForCausalLM does not support"),
    ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "know no tree"),
    ("doge", {}, "differ by"),
    ("blenderbot", {}, "differ by"),
]


@pytest.mark.parametrize(("kind", "changes"), EXACT, ids=[f"{kind}-{len(changes)}" for kind, changes in EXACT])
def test_trees_are_exact_and_wrong_ones_are_far_off(kind: str, changes: dict[str, Any]) -> None:
    config = small(kind, **changes)
    assert twin.refusal(config, "sdpa", "cpu") is None
    model, rows = twin.twin(config, "sdpa", "cpu"), twin.sample_rows()
    tree = pack(rows, sort(rows), slice(0, len(rows)))
    right = twin.tree_log_probs(model, tree)
    for name, broken in WRONG.items():
        apart = (twin.tree_log_probs(model, broken(tree)) - right).abs().max().item()
        assert apart > 3 * twin.TOLERANCE, name


def _one_leak(tree: Tree) -> Tree:
    """The first branch that ends before the tree does is seen by the token after it."""
    ends = tree.ends.copy()
    leaf = int(np.flatnonzero(ends < len(tree))[0])
    ends[leaf] += 1
    return dataclasses.replace(tree, ends=ends)


def _shifted(tree: Tree) -> Tree:
    """Positions of the second half are one too many, as if a token had been counted twice."""
    return dataclasses.replace(tree, depths=tree.depths + (np.arange(len(tree)) >= len(tree) // 2))


WRONG: dict[str, Callable[[Tree], Tree]] = {
    "every token sees every earlier one": lambda tree: dataclasses.replace(tree, ends=np.full(len(tree), len(tree))),
    "one token is seen by one other": _one_leak,
    "positions are places in the batch": lambda tree: dataclasses.replace(tree, depths=np.arange(len(tree))),
    "positions are shifted": _shifted,
}


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[kind for kind, *_ in REFUSED])
def test_what_takes_no_trees_is_refused_by_its_reason(kind: str, changes: dict[str, Any], reason: str) -> None:
    found = twin.refusal(small(kind, **changes), "sdpa", "cpu")
    assert found is not None and reason in found and "\n" not in found


@pytest.mark.parametrize(
    ("figures", "reason"),
    [((math.nan, 0.0), "differ by nan nats with trees"), ((0.0, math.nan), "differ by nan nats in training mode")],
)
def test_what_is_not_a_number_is_no_agreement(
    figures: tuple[float, float], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin, "difference", lambda _: figures)
    found = twin.refusal(small("llama"), "sdpa", "cpu")
    assert found is not None and reason in found


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("\n"), KeyError(3), TypeError("a\nb")])
def test_whatever_a_model_raises_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> tuple[float, float]:
        raise error

    monkeypatch.setattr(twin, "difference", fails)
    found = twin.refusal(small("llama"), "sdpa", "cpu")
    assert found is not None and type(error).__name__ in found and "\n" not in found


def test_a_window_that_is_not_the_masks_is_found() -> None:
    """As long as rows are shorter than it, nothing is: the twin's window is shorter than its rows."""
    config = small("qwen2", use_sliding_window=True, **WINDOWED)
    model = twin.twin(config, "sdpa", "cpu")
    assert twin.difference(model)[0] < twin.TOLERANCE
    rows = twin.sample_rows()
    assert max(np.diff(rows.offsets)) > 2 * twin.WINDOW
    tree = pack(rows, sort(rows), slice(0, len(rows)))
    right = twin.tree_log_probs(model, tree)
    model.config.sliding_window = twin.WINDOW + 1  # of the trees' masks alone
    assert (twin.tree_log_probs(model, tree) - right).abs().max() > 3 * twin.TOLERANCE


def test_the_random_state_of_a_training_is_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert twin.refusal(small("llama"), "sdpa", "cpu") is None
    assert torch.equal(torch.get_rng_state(), before)


def test_the_models_configuration_is_left_alone() -> None:
    config = small("qwen2", use_sliding_window=True, **WINDOWED)
    before = config.to_dict()
    twin.refusal(config, "sdpa", "cpu")
    assert config.to_dict() == before


SHORT, LONG = [1.0] * 8, [4.0] * 8


@pytest.mark.parametrize(
    ("kind", "changes", "switch"),
    [
        ("llama", {}, None),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, None),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, None),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048},
            2048,
        ),
        (
            "phi3",
            {
                "rope_parameters": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG},
                "original_max_position_embeddings": 4096,
            },
            4096,
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 512}},
            512,
        ),
        ("llama", {"rope_parameters": {"type": "dynamic"}, "max_position_embeddings": 1024}, 1024),  # older files
        (
            "llama",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 256},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            256,
        ),
    ],
)
def test_positions_that_follow_the_longest_row_have_a_switch(
    kind: str, changes: dict[str, Any], switch: int | None
) -> None:
    assert twin.position_switch(small(kind, **changes)) == switch
