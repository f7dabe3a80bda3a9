"""Makes the study's tables and figures from the curves that `study.py` stores.

    python examples/study/results.py [--curves examples/study/curves] [--images docs/images]

Success between two validations is interpolated. Intervals are 95% t intervals over seeds, at least as wide as those
over the validation tasks of all seeds, which is what is left where seeds agree. A seed decides starting model, tasks
and sampling, and is shared by all variants. So a variant is compared with AT-GRPO by the differences within seeds, in
percentage points.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from curves import CURVES, Curves, best, kept, tried
from variants import GAMES, VARIANTS, Game

from verl_atgrpo.lab.evaluation.intervals import mean_interval, student

BASE = "at_grpo"
"""The variant to compare with."""
TARGET = 0.9
"""The success to which tokens are counted."""
SEEDS = (0, 1, 2)
"""The seeds that compare. Another one may have run to choose a learning rate."""
VALIDATION_TASKS = 200
"""Of every training: `at_grpo.val_tasks`."""
_PLOTTED = (
    "at_grpo",
    "at_grpo_roles",
    "single_grpo",
    "single_at_grpo",
    "team_grpo",
    "team_grpo_entropy_0",
    "team_grpo_scores",
    "dr_mas",
    "dr_mas_entropy_0",
    "dr_mas_scores",
    "dr_mas_own",
    "branch_random",
    "branch_first",
    "no_local",
)
_SHORT = ("at_grpo", "at_grpo_roles", "single_at_grpo", "single_grpo", "team_grpo", "dr_mas")
"""Variants in the summary table."""
_PARTS = 60
"""Line segments of a curve in the figure."""


def interval(values: Sequence[float], low: float = 0.0) -> tuple[float, float] | None:
    """Returns the 95% t interval of the mean over seeds, at least as wide as that over all their validation tasks.

    Args:
        values: a number from `low` to 1 for every seed.
        low: 0 for success, -1 for differences, taken to be of the fewest tasks.

    Returns None for fewer than two seeds.
    """
    if len(values) < 2:
        return None
    center, tasks = mean(values), np.zeros(VALIDATION_TASKS * len(values))
    tasks[: round(abs(center) * len(tasks))] = math.copysign(1.0, center)
    least = mean_interval(tasks, low)
    half = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return max(low, min(center - half, float(least[0]))), min(1.0, max(center + half, float(least[1])))


def row(name: str, variants: Curves, game: Game) -> str:
    """Returns a variant's row of the table, at its share of the game's budget."""
    variant, curves = game.variants[name], variants[name]
    end = variant.share * (budget := game.budget)
    finals = [curve.at(end) for curve in curves.values()]
    if variant.needs:
        starts, tokens = "", "no training"
    else:
        starts = percent(mean(curve.at(0.0) for curve in curves.values()))
        tokens = price([curve.reaches(TARGET, end) for curve in curves.values()])
    seeds = ", ".join(percent(final) for final in finals)
    base = variants.get(BASE, {}) if name != BASE else {}
    gaps = [curve.at(end) - base[seed].at(budget) for seed, curve in curves.items() if seed in base]
    compared = difference(gaps) if gaps else ""
    return f"| {variant.title} | {starts} | {success(finals)} | {seeds} | {compared} | {tokens} |"


def success(finals: Sequence[float]) -> str:
    """Returns the mean success of seeds with its interval."""
    bounds = interval(finals)
    shown = "" if bounds is None else f" ({percent(bounds[0])} to {percent(bounds[1])})"
    return f"{percent(mean(finals))}{shown}"


def difference(points: Sequence[float]) -> str:
    """Returns the mean difference in percentage points with its interval."""
    bounds = interval(points, low=-1.0)
    shown = "" if bounds is None else f" ({100 * bounds[0]:+.1f} to {100 * bounds[1]:+.1f})"
    return f"{100 * mean(points):+.1f}{shown}"


def price(reached: Sequence[float | None]) -> str:
    """Returns the mean tokens to the target, with the number of seeds that reached it if not all did."""
    there = [tokens for tokens in reached if tokens is not None]
    if not there:
        return "not reached"
    shown = f"{mean(there):,.0f}"
    return shown if len(there) == len(reached) else f"{shown} ({len(there)} of {len(reached)} seeds)"


def percent(share: float) -> str:
    """Returns a share in percent."""
    return f"{100 * share:.1f}%"


def table(variants: Curves, game: Game) -> list[str]:
    """Returns one game's table in Markdown."""
    lines = [
        f"| trained by | start | success at {game.budget:,} tokens (95% interval) | seeds "
        f"| against AT-GRPO, same seeds | tokens to {TARGET:.0%} |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [row(name, variants, game) for name in variants if name in game.variants]


def in_short(games: Mapping[str, Curves]) -> list[str]:
    """Returns the table of the main variants, with a column per game; its first rows are without training."""

    def line(title: str, name: str, share: float) -> str:
        """Returns the row for the success after a share of each game's budget."""
        columns = [
            [curve.at(share * GAMES[game].budget) for curve in variants.get(name, {}).values()]
            for game, variants in games.items()
        ]
        return f"| {title} | " + " | ".join(success(seeds) if seeds else "" for seeds in columns) + " |"

    return [
        "| trained by | " + " | ".join(f"{game}, {GAMES[game].budget:,} tokens" for game in games) + " |",
        "|---" * (len(games) + 1) + "|",
        line("team, not trained", BASE, 0.0),
        line("single agent, not trained", "single_grpo", 0.0),
        *(line(VARIANTS[name].title, name, 1.0) for name in _SHORT),
    ]


def sweeps(variants: Curves, game: Game) -> list[str]:
    """Returns the table of learning rates: what ran at several, and success at the best of them.

    The best has the largest mean success over the budget with `game.selection_seed`. None are no lines.
    """
    lines = [
        f"| trained by | mean success over {game.budget:,} tokens by learning rate, seed {game.selection_seed} "
        f"| chosen | success at {game.budget:,} tokens, seeds {min(SEEDS)} to {max(SEEDS)} (95% interval) | seeds "
        f"| tokens to {TARGET:.0%} |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(found.partition("@")[0] for found in variants):
        means = tried(variants, game, name)
        if len(means) < 2:
            continue
        chosen = best(variants, game, name) or name
        shown = ", ".join(f"{rate(game, found)}: {percent(mean)}" for found, mean in means.items())
        curves = [curve for seed, curve in variants[chosen].items() if seed in SEEDS]
        finals = [curve.at(game.budget) for curve in curves]
        tokens = price([curve.reaches(TARGET, game.budget) for curve in curves]) if curves else ""
        seeds = ", ".join(map(percent, finals))
        reached = success(finals) if finals else ""
        title = game.variant(name).title
        lines.append(f"| {title} | {shown} | {rate(game, chosen)} | {reached} | {seeds} | {tokens} |")
    return lines if len(lines) > 2 else []


def rate(game: Game, name: str) -> str:
    """Returns a variant's learning rate."""
    return f"{game.learning_rate * game.variant(name).rate:.3g}"


def at_best(variants: Curves, game: Game) -> Curves:
    """Returns the curves of every variant at its best learning rate, by the variant's name without one."""
    compared = {}
    for name in dict.fromkeys(found.partition("@")[0] for found in variants):
        found = variants.get(best(variants, game, name) or name, {})
        compared[name] = {seed: curve for seed, curve in found.items() if seed in SEEDS}
    return {name: seeds for name, seeds in compared.items() if seeds}


def draw(variants: Curves, image: Path, game: Game) -> None:
    """Plots success against tokens: mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.5, 4.5), dpi=120)
    for name in _PLOTTED:
        curves = variants.get(name)
        if curves is None:
            continue
        end = min(min(curve.points[-1][0] for curve in curves.values()), game.budget)
        tokens = [end * part / _PARTS for part in range(_PARTS + 1)]
        seeds = [[100 * curve.at(spent) for spent in tokens] for curve in curves.values()]
        shown = [spent / 1000 for spent in tokens]
        (line,) = axes.plot(
            shown, [mean(values) for values in zip(*seeds, strict=True)], label=game.variants[name].title
        )
        low, high = ([pick(values) for values in zip(*seeds, strict=True)] for pick in (min, max))
        axes.fill_between(shown, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="tokens generated in training (thousands)", ylabel="validation success (%)", ylim=(0, 101))
    axes.grid(alpha=0.3)
    # Beside the axes: inside them it hides the curves that stay low.
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image)
    pyplot.close(figure)


def main() -> None:
    """Prints the tables and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    games = {name: kept(options.curves / f"{name}.jsonl") for name in GAMES}
    games = {name: variants for name, variants in games.items() if variants}
    tiny = {name: variants for name, variants in games.items() if GAMES[name].model is None}
    if not games:
        parser.error(f"--curves {options.curves}: no curves found; run study.py first")
    if tiny:
        sys.stdout.write("\n".join(["### In short", "", *in_short(tiny), ""]) + "\n")
    for name, variants in games.items():
        compared = at_best(variants, GAMES[name])
        sys.stdout.write("\n".join([f"### {name}", "", *table(compared, GAMES[name]), ""]) + "\n")
        if swept := sweeps(variants, GAMES[name]):
            sys.stdout.write("\n".join([f"### {name}, learning rates", "", *swept, ""]) + "\n")
        if BASE in compared:
            draw(compared, options.images / f"study_{name}.png", GAMES[name])


if __name__ == "__main__":
    main()
