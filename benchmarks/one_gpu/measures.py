"""What is measured: a figure with its target, and the arithmetic of the model's work."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator


@dataclass(frozen=True)
class Measure:
    """One figure of a part."""

    name: str
    value: Annotated[float, BeforeValidator(lambda value: nan if value is None else value)]
    """NaN is null in files."""
    unit: str = ""
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"
    """Which direction meets the target, and is no loss against a baseline."""
    steady: bool = False
    """Whether it varies little enough for a baseline: the time of something that ran alone, or a share of it."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one. What is no number misses."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def worse_than(self, before: float) -> float:
        """Returns by which share the value is worse than an earlier one; negative if it is better."""
        change = self.value / before - 1 if before else 0.0
        return change if self.better == "lower" else -change


class Report:
    """A part's figures so far: each is written at once, so that a part that fails later keeps them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.unlink(missing_ok=True)

    def add(self, *measures: Measure) -> None:
        """Writes figures."""
        with self._path.open("a") as file:
            file.writelines(json.dumps(asdict(measure)) + "\n" for measure in measures)


def read(path: Path) -> list[Measure]:
    """Returns the figures that a `Report` has written; none if there is no file."""
    if not path.exists():
        return []
    return [Measure(**json.loads(line)) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Card:
    """A device's peaks, by its data sheet."""

    teraflops: float
    """Dense bfloat16 or float16, without sparsity."""
    terabytes: float
    """A second, of its memory."""


_CARDS = {
    "H200": Card(989, 4.8),
    "H100 80GB HBM3": Card(989, 3.35),
    "H100 PCIe": Card(756, 2.0),
    "A100-SXM4-80GB": Card(312, 2.04),
    "A100-SXM4-40GB": Card(312, 1.56),
    "A100 80GB PCIe": Card(312, 1.94),
    "L40S": Card(362, 0.864),
}


def card_of(name: str) -> Card | None:
    """Returns the peaks of the device that torch calls `name`; None if they are not known."""
    return next((card for known, card in _CARDS.items() if known in name), None)


@dataclass(frozen=True)
class Shape:
    """What a causal language model computes and keeps for a token."""

    body: int
    """Parameters without embedding and output head."""
    head: int
    """Parameters of the output head: width x vocabulary."""
    layers: int
    width: int
    """Of the queries: heads x their dimension."""
    kv_width: int
    """Of the keys: key-value heads x their dimension; the values are as wide."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Returns the shape of a Qwen or Llama from its config.json."""
        hidden, inner, heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
        size = config.get("head_dim") or hidden // heads
        width, kv_width = heads * size, config["num_key_value_heads"] * size
        layer = hidden * (2 * width + 2 * kv_width) + 3 * hidden * inner
        layers = config["num_hidden_layers"]
        return cls(layers * layer, hidden * config["vocab_size"], layers, width, kv_width)


@dataclass(frozen=True)
class Rows:
    """A step's rows of equal lengths: decisions with K candidates each."""

    decisions: int
    candidates: int
    prompt: int
    answer: int

    def tokens(self, trees: bool) -> int:
        """Returns how many tokens go through the model: a prompt once a decision with trees, else once a candidate."""
        prompts = self.decisions * (1 if trees else self.candidates)
        return prompts * self.prompt + self.decisions * self.candidates * self.answer

    def pairs(self, trees: bool) -> int:
        """Returns how many pairs of a token and one that it sees, itself included, attention computes."""
        prompts = self.decisions * (1 if trees else self.candidates)
        answers = self.decisions * self.candidates
        own = self.answer * (self.answer + 1) // 2
        return prompts * self.prompt * (self.prompt + 1) // 2 + answers * (self.answer * self.prompt + own)


def forward_flops(shape: Shape, rows: Rows, trees: bool) -> float:
    """Returns the floating-point operations of one forward pass: 2 for a weight, 4 x width x layers for a pair.

    The output head counts for answers only: nothing else is predicted (with trees nothing else is computed).
    """
    answers = rows.decisions * rows.candidates * rows.answer
    weights = shape.body * rows.tokens(trees) + shape.head * answers
    return 2.0 * weights + 4.0 * shape.layers * shape.width * rows.pairs(trees)


def update_flops(shape: Shape, rows: Rows, trees: bool) -> float:
    """Returns the operations of a forward and a backward pass, three times a forward one; recomputation is no work."""
    return 3 * forward_flops(shape, rows, trees)


def decoded_bytes(shape: Shape, rows: Rows, steps: int, digits: int = 2) -> float:
    """Returns the bytes that decoding reads at least: all weights in each step, and keys and values of what it sees.

    A prompt's keys and values are read once a decision, not once a candidate: by tokens that went through the model.

    Args:
        shape: the model's.
        rows: what is decoded.
        steps: of the engine, see `decoding_steps`.
        digits: bytes of a number.
    """
    prompts = rows.decisions * rows.answer * rows.prompt
    answers = rows.decisions * rows.candidates * rows.answer * (rows.answer + 1) // 2
    kept = 2 * shape.layers * shape.kv_width * (prompts + answers)
    return float(digits) * (steps * (shape.body + shape.head) + kept)


def decoding_steps(rows: Rows, chain: int, slots: int) -> int:
    """Returns in how many engine steps the answers can be decoded at best: a step gives each slot one token.

    Args:
        rows: what is decoded.
        chain: decisions of an episode that wait for one another.
        slots: requests that the engine decodes at a time (`rollout.max_num_seqs`).
    """
    return max(chain * rows.answer, -(-rows.decisions * rows.candidates * rows.answer // slots))


_NO_COST = ("gen", "old_log_prob", "ref", "update_actor", "save_checkpoint")
COSTS = ("submit", "end_rollout", "bookkeeping", "deal", "adv", "empty_cache", "update_weights", "between_steps")
"""Timers of what is neither sampling nor the model."""


def constant_cost(step: Mapping[str, float]) -> float:
    """Returns the seconds from step to step that are neither sampling nor the model, validation nor checkpoints.

    `timing_s/step` has no validation in it. `timing_s/gen` includes putting servers to sleep, which is no sampling.
    """
    others = sum(step.get(f"timing_s/{stage}", 0.0) for stage in _NO_COST)
    costs = sum(step.get(f"timing_s/{stage}", 0.0) for stage in ("end_rollout", "between_steps"))
    return step["timing_s/step"] + costs - others


def untimed_cost(step: Mapping[str, float]) -> float:
    """Returns the part of it that is in none of `COSTS`."""
    return constant_cost(step) - sum(step.get(f"timing_s/{stage}", 0.0) for stage in COSTS)


def middle(steps: Sequence[Mapping[str, float]], key: str) -> float:
    """Returns the median of a metric over the steps that have it; NaN if none has."""
    values = [step[key] for step in steps if key in step]
    return median(values or [nan])


def success_at(metrics: Mapping[int, Mapping[str, float]], step: int) -> float:
    """Returns the validation success of a step, from a run's metrics; NaN if it was not validated."""
    found = [value for key, value in metrics.get(step, {}).items() if key.startswith("val-core/") and "/acc/" in key]
    return next(iter(found), nan)
