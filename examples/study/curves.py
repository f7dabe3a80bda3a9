"""Validation success by generated tokens: curves of the study's trainings, stored in `curves/<game>.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from variants import ALL, Game

from verl_atgrpo.lab.report.learning_curve import Point

CURVES = Path(__file__).parent / "curves"


@dataclass(frozen=True)
class Curve:
    """Validation success of one training, by tokens generated."""

    points: tuple[tuple[float, float], ...]
    """Tokens and success of every validation."""
    parts: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """The same for each part of a mixture."""

    @classmethod
    def of(cls, validations: Sequence[Point]) -> Curve:
        """Returns the curve of a training's validations."""
        parts = dict.fromkeys(validations[0].each) if len(validations[0].each) > 1 else {}
        return cls(
            tuple((point.tokens, point.success) for point in validations),
            {part: tuple((point.tokens, point.each[part]) for point in validations) for part in parts},
        )

    def at(self, tokens: float) -> float:
        """Returns the success after `tokens` tokens, interpolated; after the last validation its success."""
        return float(np.interp(tokens, *zip(*self.points, strict=True)))

    def mean(self, budget: float) -> float:
        """Returns the mean success over the first `budget` tokens, interpolated linearly."""
        ends = [(tokens, success) for tokens, success in self.points if tokens < budget] + [(budget, self.at(budget))]
        pieces = pairwise(ends)
        return sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pieces) / budget

    def reaches(self, success: float, within: float) -> float | None:
        """Returns the tokens until `success` is first reached, or None if that takes more than `within` tokens."""
        if self.points[0][1] >= success:
            return 0.0
        for (before, low), (after, high) in pairwise(self.points):
            if high >= success:
                tokens = before + (success - low) / (high - low) * (after - before)
                return tokens if tokens <= within else None
        return None


Curves = Mapping[str, Mapping[int, Curve]]
"""Variant -> seed -> curve, in the order of `ALL`."""


def append(file: Path, variant: str, seed: int, curve: Curve) -> None:
    """Appends a training's curve to a file in one write, because several studies may run concurrently."""
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {"variant": variant, "seed": seed, "points": curve.points}
    with file.open("a") as lines:
        lines.write(json.dumps(record | ({"parts": curve.parts} if curve.parts else {})) + "\n")


def kept(file: Path) -> Curves:
    """Returns the curves in a file, the last for each variant and seed; none if the file is missing."""
    curves: dict[str, dict[int, Curve]] = {name: {} for name in ALL}
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        curve = Curve(tuple((tokens, success) for tokens, success in record["points"]))
        curves.setdefault(record["variant"], {})[record["seed"]] = curve
    return {name: dict(sorted(seeds.items())) for name, seeds in curves.items() if seeds}


def best(curves: Curves, game: Game, name: str) -> str | None:
    """Returns a variant's name at the learning rate with the largest mean of `tried`; None if none was tried."""
    means = tried(curves, game, name)
    return max(means, key=lambda other: means[other], default=None)


def tried(curves: Curves, game: Game, name: str) -> dict[str, float]:
    """Returns a variant's names at all learning rates tried with the seed that selects them, and their mean success.

    By rate; the mean is that over the budget.
    """
    found = [other for other in curves if other.partition("@")[0] == name and game.selection_seed in curves[other]]
    found.sort(key=lambda other: game.variant(other).rate)
    return {other: curves[other][game.selection_seed].mean(game.budget) for other in found}
