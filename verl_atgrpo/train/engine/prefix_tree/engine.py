"""verl's FSDP engine over prefix trees: the same rows, losses and optimizer steps, fewer tokens through the model.

What changes is how rows are put into micro-batches, what the model is given of one, and where its log-probs are found.
verl's `EngineRegistry` chooses this engine in a process that has `VERL_ENGINE_VENDOR` at `VENDOR`: our workers set it
(`at_grpo.prefix_tree`), plain verl jobs may.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_from_nested

from verl_atgrpo.play.testing import in_a_line
from verl_atgrpo.train.engine.adapters import AdapterEngine
from verl_atgrpo.train.engine.prefix_tree import twin
from verl_atgrpo.train.engine.prefix_tree.forward import FLEX, Packed, log_probs, model_inputs
from verl_atgrpo.train.engine.prefix_tree.tree import TokenRows, Tree, best_cut, cost, cut, pack, sort

logger = logging.getLogger(__name__)
VENDOR = "prefix_tree"
ROW_TOKENS, MODEL_TOKENS = "row_tokens", "model_tokens"
"""Metrics of a batch: tokens of its rows, and those that went through the model."""
STATES = "hidden_states"
"""Non-tensor of a batch: whether its output has, under this name, what the model's output head reads at the last token
of each row's prompt, as (N, dimension) jagged."""
WORTH = 1.25
"""Cost of the rows over that of their trees from which on trees are used: packing takes time, too."""
TOLERANCE = 1e-3
"""Largest difference of log-probs (nats) in the self-test of a model that computes in float32."""
ROUNDED = 0.3
"""Largest median difference in dtypes of fewer digits. What is wrong with an architecture the twin tells, in float32;
this finds an engine that computes something else. Rounding moves some log-probs more, where it changes an expert."""
LEAK = 1e-3
"""Largest median change of log-probs when tokens of another branch change: only a leak changes them, in any dtype."""
DENSE = 4096
"""Most tokens of a tree with a dense mask, which has their square as entries."""
_warned: set[str] = set()
"""What this process has logged: actor and reference model give the same."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu"], vendor=VENDOR)
class TreeEngine(AdapterEngine, FSDPEngineWithLMHead):  # type: ignore[misc]
    """Runs batches whose rows share prefixes as trees, and all others as verl does."""

    refusal: str | None = None
    """Why batches are run as verl does; None where trees are used."""
    worth = WORTH
    square = math.inf
    """How long a sequence is whose attention takes as many operations as the layers' weights."""
    _waiting: Iterator[Tree] | None = None
    """The trees of the batch that runs, in the order of its micro-batches."""
    _wanted = False
    """Whether the output of the micro-batch that runs has hidden states."""
    _head_input: Tensor | None = None
    """What its output head has read, at every token that it computes logits of."""

    def initialize(self) -> None:
        """Builds the model, and compares a few rows in trees with verl's own log-probs of them."""
        super().initialize()
        if (head := self.module.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(self._note_head_input)
        self.switch = twin.position_switch(self.module.config)
        if self._implementation() == FLEX:
            # All engines' dtypes, shapes and passes are one function's; past its limit it runs with a dense mask.
            torch._dynamo.config.recompile_limit = 64
        self.refusal = self._refusal()
        if self.refusal is not None and self.rank == 0:
            self._warn_once(f"no prefix trees, every row runs with its whole prompt: {self.refusal}")

    def _note_head_input(self, _: Any, given: tuple[Tensor, ...]) -> None:
        if self._wanted:
            self._head_input = given[0]

    def _warn_once(self, what: str) -> None:
        if what not in _warned:
            _warned.add(what)
            logger.warning("%s: %s", self.model_config.local_path, what)

    def _refusal(self) -> str | None:
        """Returns why this model or configuration takes no trees; the same on every rank."""
        if self.use_ulysses_sp:
            return "ulysses_sequence_parallel_size is above 1"
        if self.model_config.use_fused_kernels:
            return "use_fused_kernels=true returns no logits"
        device = "cpu" if get_device_name() == "cpu" else f"{get_device_name()}:{get_device_id()}"
        if (reason := twin.refusal(self.module.config, self._implementation(), device)) is not None:
            return reason
        self.square = self._square()
        try:
            figures = compare(self)
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises: rows run plain, and the reason is logged
            return f"the self-test fails: {in_a_line(error)}"
        exact = self._autocast_dtype == torch.float32
        apart, allowed = (figures.largest, TOLERANCE) if exact else (figures.typical, ROUNDED)
        if not apart <= allowed:
            return f"in the self-test log-probs differ by {apart:.2g} nats (at most {allowed:.2g} is rounding)"
        if not figures.leak <= LEAK:
            return f"in the self-test tokens of one branch change another's log-probs by {figures.leak:.2g} nats"
        return None

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        """Runs a mini-batch forward, and backward unless `forward_only`; see verl's."""
        trees = self._trees_of(data) if self.refusal is None else None
        tokens = row_tokens = len(data["input_ids"].values())
        if trees is None:
            output = super().forward_backward_batch(data, loss_function, forward_only)
        else:
            tokens = sum(map(len, trees))
            tu.assign_non_tensor(data, use_dynamic_bsz=True)  # micro-batches differ in size
            with self._running(trees):
                output = super().forward_backward_batch(data, loss_function, forward_only)
        if self.refusal is None:  # lists, as all metrics of micro-batches
            output["metrics"].update({ROW_TOKENS: [row_tokens], MODEL_TOKENS: [tokens]})
        return output

    def _can_run(self, data: TensorDict, longest: int) -> bool:
        """Returns whether trees are made for rows of this kind, of `longest` tokens at most, on this rank."""
        if self.switch is not None and longest > self.switch:
            positions = f"rows longer than {self.switch} tokens change the positions of a batch"
            self._warn_once(f"{positions}: theirs run without trees")
            return False
        if data["position_ids"].dim() != 2 or any(tu.get(data, "multi_modal_inputs", ())):
            return False
        more = ("calculate_sum_pi_squared", "distillation_use_topk")
        return not any(tu.get_non_tensor_data(data=data, key=key, default=False) for key in more)

    def _trees_of(self, data: TensorDict) -> list[Tree] | None:
        """Returns the batch as as many trees as every other rank has, or None where a rank needs plain rows."""
        ids, offsets = data["input_ids"].values().cpu(), data["input_ids"].offsets().cpu()
        lengths = offsets.diff()
        prompts = lengths - data["response_mask"].offsets().cpu().diff()
        rows = TokenRows(ids.numpy(), offsets.numpy(), prompts.numpy())
        order = sort(rows)
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            budget = int(data["max_token_len_per_gpu"])
        else:
            budget = int(data["micro_batch_size_per_gpu"] * lengths.max())
        budget, trees = best_cut(rows, order, budget if self.square == math.inf else min(budget, DENSE), self.square)
        group, device = self.get_data_parallel_group(), get_device_id()
        plain, refused = cost(lengths.numpy(), self.square), not self._can_run(data, int(lengths.max()))
        costs = torch.tensor([plain, trees, refused], device=device)
        all_reduce(costs, ReduceOp.SUM, group)
        if costs[2] or costs[0] < self.worth * costs[1]:
            return None
        count = torch.tensor(len(cut(rows, order, budget)), device=device)
        all_reduce(count, ReduceOp.MAX, group)
        return [pack(rows, order, part) for part in cut(rows, order, budget, at_least=int(count))]

    def _square(self) -> float:
        """Returns `square` of this model; all experts of a mixture count.

        A weight takes 2 for a token; attention without a block mask takes 4 for a pair of tokens, dimension and layer.
        """
        if self._implementation() == FLEX:
            return math.inf
        config = self.module.config.get_text_config()
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        ends = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        vocabulary = {id(each.weight) for each in ends if each is not None}
        weights = sum(each.numel() for each in self.module.parameters() if id(each) not in vocabulary)
        return float(weights / (2 * config.num_hidden_layers * width))

    @contextmanager
    def _running(self, trees: Sequence[Tree]) -> Iterator[None]:
        """Makes verl's micro-batches of these trees, with attention that takes their masks, also in recomputations."""

        def micro_batches(data: TensorDict, **_: Any) -> tuple[list[TensorDict], list[list[int]]]:
            rows = [tree.rows.tolist() for tree in trees]
            return [tu.index_select_tensor_dict(data, mine) for mine in rows], rows

        config = self.module.config.get_text_config()
        before = transformer_impl.prepare_micro_batches, config._attn_implementation
        self._waiting = iter(trees)
        transformer_impl.prepare_micro_batches, config._attn_implementation = micro_batches, self._implementation()
        try:
            yield
        finally:
            transformer_impl.prepare_micro_batches, config._attn_implementation = before
            self._waiting = None

    def _implementation(self) -> str:
        return FLEX if get_device_name() != "cpu" else self.module.config.get_text_config()._attn_implementation

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what the model is given of a micro-batch, and what is needed to read its output."""
        self._wanted = tu.get_non_tensor_data(data=micro_batch, key=STATES, default=False)
        if self._waiting is None:
            inputs, arguments = super().prepare_model_inputs(micro_batch)
            return inputs, arguments
        packed = Packed.of(next(self._waiting), micro_batch["input_ids"].values().device)
        return model_inputs(packed, self.module.config), {"packed": packed}

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Returns log-probs and entropies of every row, where verl expects them: 0 at what is not a response's."""
        packed: Packed | None = output_args.get("packed")
        of_prompts = {STATES: _at_prompt_ends(self._head_input, packed, micro_batch)} if self._wanted else {}
        self._wanted, self._head_input = False, None
        if packed is None:
            plain: dict[str, Tensor] = super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
            return plain | of_prompts
        logits = output.logits.squeeze(0)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        temperature = micro_batch["temperature"]
        offsets = micro_batch["input_ids"].offsets()
        entropy = bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False))
        made = log_probs(logits, packed, temperature, entropy)
        # verl keeps a token's log-prob at the place of the token before it.
        ends = zip(offsets.tolist()[1:], packed.counts, strict=True)
        places = torch.cat([torch.arange(end - 1 - count, end - 1) for end, count in ends]).to(logits.device)
        return of_prompts | {
            name: torch.nested.nested_tensor_from_jagged(
                values.new_zeros(int(offsets[-1])).index_put((places,), values), offsets
            )
            for name, values in made.items()
        }


def _at_prompt_ends(states: Tensor | None, packed: Packed | None, micro_batch: TensorDict) -> Tensor:
    """Returns the hidden states at the last token of each row's prompt, (N, dimension) jagged, of float32.

    Shapes: states of a tree's nodes, (1, nodes, dimension); else of all tokens, row after row, or padded at the right.
    """
    if states is None:
        raise RuntimeError("a critic reads what the model's output head is given, and this model does not call one")
    offsets, answers = micro_batch["input_ids"].offsets(), micro_batch["response_mask"].offsets().diff()
    if packed is not None:
        found = states[0, packed.predictors[(answers.cumsum(0) - answers).to(packed.predictors.device)]]
    else:
        last = offsets.diff() - answers - 1
        if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            found = states[0, offsets[:-1] + last]
        else:
            found = states[torch.arange(len(last), device=last.device), last]
    ends = torch.arange(len(found) + 1, device=found.device) * found.shape[1]
    return torch.nested.nested_tensor_from_jagged(found.float().flatten(), ends)


class Figures(NamedTuple):
    """What the self-test of a model measures, in nats."""

    largest: float
    """Largest difference of a log-prob in a tree and row by row."""
    typical: float
    """Their median."""
    leak: float
    """Median change of a row's log-probs in a tree when another row's answer changes."""


def compare(engine: TreeEngine) -> Figures:
    """Compares log-probs of rows in a tree and one by one, on every rank at once; returns the largest figures."""
    before, vocabulary = (engine.refusal, engine.worth), engine.module.config.get_text_config().vocab_size
    rows = twin.branching(vocabulary, 12, (8, 3), (4, 7, 10, 13))
    first = min(rows, key=lambda row: row[0] + row[1])  # comes first in the tree
    changed = (first[0], [first[1][0], *((token + 1) % vocabulary for token in first[1][1:])])

    def computed(rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
        data, responses = _as_batch(rows)
        tu.assign_non_tensor(data, use_remove_padding=engine.use_remove_padding)
        with engine.eval_mode():
            output = engine.infer_batch(data)["model_output"]["log_probs"]
        values: Tensor = response_from_nested(output.cpu(), responses).values()
        return values

    try:
        engine.worth, engine.refusal = 0.0, "for comparison"
        plain = computed(rows)
        engine.refusal = None
        trees, others = computed(rows), computed([changed if row is first else row for row in rows])
    finally:
        engine.refusal, engine.worth = before
    apart = (plain - trees).abs()
    kept = torch.cat([torch.full((len(row[1]),), row is not first) for row in rows])
    figures = torch.stack([apart.max(), apart.median(), (trees - others).abs()[kept].median()])
    figures = figures.float().to(get_device_id())
    all_reduce(figures, ReduceOp.MAX, engine.get_data_parallel_group())  # all ranks decide alike
    return Figures(*figures.tolist())


def _as_batch(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[TensorDict, Tensor]:
    """Returns prompts with answers as a batch of verl's, and the mask of the answers."""

    def jagged(values: Sequence[Sequence[int]]) -> Tensor:
        made: Tensor = torch.nested.as_nested_tensor([torch.tensor(each) for each in values], layout=torch.jagged)
        return made

    ids = [prompt + response for prompt, response in rows]
    mask = jagged([[1] * len(response) for _, response in rows])
    positions = jagged([range(len(row)) for row in ids])
    fields = {"input_ids": jagged(ids), "position_ids": positions, "response_mask": mask, "loss_mask": mask}
    plain = {"temperature": 1.0, "use_dynamic_bsz": True, "pad_token_id": 0}
    return tu.get_tensordict(fields, {**plain, "max_token_len_per_gpu": sum(map(len, ids))}), mask
