"""Makes the study's tables and figures from what `study.py` left.

    python examples/study/results.py [--out runs/study] [--images docs/images] > table.md

Success between two validations is interpolated. Intervals are 95% t intervals over seeds: starting model, tasks and
draws all differ from seed to seed, and are the same for all variants of a seed. So a variant is compared with AT-GRPO
by the differences within seeds, in percentage points.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from variants import GAMES, VARIANTS, Game

from verl_atgrpo.learning_curve import Point, read

BASE = "at_grpo"
"""The variant that others are compared with."""
TARGET = 0.9
"""The success whose price in tokens is told."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's t for 1, 2, ... degrees of freedom."""
_DRAWN = ("at_grpo", "at_grpo_roles", "single_grpo", "team_grpo", "dr_mas", "no_local")
_SHORT = ("at_grpo", "at_grpo_roles", "single_at_grpo", "single_grpo", "team_grpo", "dr_mas")
"""The variants of the table that has all games."""
_PARTS = 60
"""Straight pieces of a curve in the figure."""


@dataclass(frozen=True)
class Curve:
    """Validation success of one training, by tokens generated."""

    points: tuple[Point, ...]

    def at(self, tokens: float) -> float:
        """Returns the success after so many tokens, or at the end if it came earlier."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.tokens >= tokens:
                share = (tokens - before.tokens) / (after.tokens - before.tokens)
                return before.success + share * (after.success - before.success)
        return self.points[-1].success

    def reaches(self, success: float) -> float | None:
        """Returns the tokens after which this success was first reached, or None."""
        if self.points[0].success >= success:
            return 0.0
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.success >= success:
                share = (success - before.success) / (after.success - before.success)
                return before.tokens + share * (after.tokens - before.tokens)
        return None


def load(folder: Path, name: str) -> dict[int, Curve]:
    """Returns seed -> curve of a variant, for the trainings that are done."""
    curves = {}
    for done in sorted(folder.glob(f"{name}_[0-9]*/done")):
        points = list(read(done.parent / "metrics.jsonl"))
        seed = int(done.parent.name.rpartition("_")[2])
        start = VARIANTS[name].start
        if start is not None:
            first = folder / f"{start}_{seed}" / "metrics.jsonl"
            points.insert(0, read(first)[0])
        curves[seed] = Curve(tuple(points))
    return curves


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95% t interval of the mean of up to ten values; None for fewer than two."""
    if len(values) < 2:
        return None
    half = _STUDENT[len(values) - 2] * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def row(name: str, variants: dict[str, dict[int, Curve]], budget: int) -> str:
    """Returns a variant's line of the table, at its share of the game's budget."""
    variant, curves = VARIANTS[name], variants[name]
    finals = [curve.at(variant.share * budget) for curve in curves.values()]
    if variant.needs:
        starts, tokens = "", "no training"
    else:
        starts = percent(mean(curve.points[0].success for curve in curves.values()))
        tokens = price([curve.reaches(TARGET) for curve in curves.values()])
    seeds = ", ".join(percent(final) for final in finals)
    base = variants[BASE] if name != BASE else {}
    gaps = [curve.at(variant.share * budget) - base[seed].at(budget) for seed, curve in curves.items() if seed in base]
    compared = difference(gaps) if gaps else ""
    return f"| {variant.title} | {starts} | {success(finals)} | {seeds} | {compared} | {tokens} |"


def success(finals: Sequence[float]) -> str:
    """Returns the mean of seeds' success with its interval, which ends at 0 and 100%."""
    bounds = interval(finals)
    shown = "" if bounds is None else f" ({percent(max(0.0, bounds[0]))} to {percent(min(1.0, bounds[1]))})"
    return f"{percent(mean(finals))}{shown}"


def difference(points: Sequence[float]) -> str:
    """Returns the mean of differences of shares, in percentage points, with its interval."""
    bounds = interval(points)
    shown = "" if bounds is None else f" ({100 * bounds[0]:+.1f} to {100 * bounds[1]:+.1f})"
    return f"{100 * mean(points):+.1f}{shown}"


def price(reached: Sequence[float | None]) -> str:
    """Returns the mean tokens to the target, or how many seeds reached it at all."""
    there = [tokens for tokens in reached if tokens is not None]
    if not there:
        return "not reached"
    told = f"{mean(there):,.0f}"
    return told if len(there) == len(reached) else f"{told} ({len(there)} of {len(reached)} seeds)"


def percent(share: float) -> str:
    """Returns a share as the tables write it."""
    return f"{100 * share:.1f}%"


def table(folder: Path, game: Game) -> list[str]:
    """Returns one game's table in Markdown."""
    lines = [
        f"| trained by | start | success at {game.budget:,} tokens (95% interval) | seeds "
        f"| against AT-GRPO, same seeds | tokens to {TARGET:.0%} |",
        "|---|---|---|---|---|---|",
    ]
    variants = {name: load(folder, name) for name in VARIANTS}
    return lines + [row(name, variants, game.budget) for name, curves in variants.items() if curves]


def in_short(out: Path, games: Mapping[str, Game]) -> list[str]:
    """Returns the table of the main variants, with a column for every game; its first lines are of prompts alone."""

    def line(title: str, name: str, share: float) -> str:
        """Success after this share of each game's budget."""
        columns = [
            [curve.at(share * game.budget) for curve in load(out / key, name).values()] for key, game in games.items()
        ]
        return f"| {title} | " + " | ".join(success(seeds) if seeds else "" for seeds in columns) + " |"

    return [
        "| trained by | " + " | ".join(f"{name}, {game.budget:,} tokens" for name, game in games.items()) + " |",
        "|---" * (len(games) + 1) + "|",
        line("team, not trained", BASE, 0.0),
        line("single agent, not trained", "single_grpo", 0.0),
        *(line(VARIANTS[name].title, name, 1.0) for name in _SHORT),
    ]


def draw(folder: Path, image: Path, game: Game) -> None:
    """Draws success against tokens: the mean over seeds, and the seeds' range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), dpi=120)
    for name in _DRAWN:
        curves = load(folder, name)
        if not curves:
            continue
        end = min(min(curve.points[-1].tokens for curve in curves.values()), game.budget)
        tokens = [end * part / _PARTS for part in range(_PARTS + 1)]
        seeds = [[100 * curve.at(spent) for spent in tokens] for curve in curves.values()]
        shown = [spent / 1000 for spent in tokens]
        (line,) = axes.plot(shown, [mean(values) for values in zip(*seeds, strict=True)], label=VARIANTS[name].title)
        low, high = ([pick(values) for values in zip(*seeds, strict=True)] for pick in (min, max))
        axes.fill_between(shown, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="tokens generated in training (thousands)", ylabel="validation success (%)", ylim=(0, 101))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image)
    pyplot.close(figure)


def main() -> None:
    """Prints the tables and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    games = {name: game for name, game in GAMES.items() if any((options.out / name).glob("*/done"))}
    if not games:
        parser.error(f"--out {options.out}: no training is done there; study.py leaves them")
    sys.stdout.write("\n".join(["### In short", "", *in_short(options.out, games), ""]) + "\n")
    for name, game in games.items():
        folder = options.out / name
        sys.stdout.write("\n".join([f"### {name}", "", *table(folder, game), ""]) + "\n")
        draw(folder, options.images / f"study_{name}.png", game)


if __name__ == "__main__":
    main()
