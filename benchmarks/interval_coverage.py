"""Shows how often the 95% intervals of `verl-atgrpo eval` and `compare` contain the true figure, and their widths.

python benchmarks/interval_coverage.py [--repetitions 500] [--tasks 20 30 50 100 200 500]

Single samples are enumerated with their exact chances, for 193 rates from .02 to .98. The rest is simulated: the
success of tasks is Beta distributed, with a correlation of a task's samples from 0 to 1 (all or nothing). The lowest
coverages of hundreds of simulated cells are low by chance, so the ten lowest of every line are simulated again with 20
times the repetitions, and the lowest of these is printed. Some ten minutes on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np
import script
from fakes.outcomes import binomial, coverage, paired, passes, shares, true_pass_at_k

from verl_atgrpo.lab.evaluation.intervals import Array, mean_interval, ratio_interval

RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
PAIRED_RATES, PAIRED_SAMPLES = (0.02, 0.1, 0.3, 0.5, 0.8, 0.95), (2, 8)
GAINS = (0.0, 0.03, 0.1, 0.3)
CORRELATIONS = (0, 0.1, 0.3, 0.6, 0.9, 1)
ALIKE = (0, 0.5, 1)
"""Shares of the tasks on which two systems are alike."""
CHUNK = 500
"""Repetitions in memory at a time."""
AGAIN = 10
"""Cells to simulate again."""
difference = partial(mean_interval, low=-1.0)
Found = tuple[float, float]
"""Coverage and mean width."""
Cell = Callable[[np.random.Generator, int], Found]


def exact(n: int) -> Iterator[tuple[str, list[Found]]]:
    """Yields single samples, and pairs where one system solves all that the other solves."""
    outcomes = (np.arange(n) < np.arange(n + 1)[:, None]).astype(np.float64)
    for name, interval in (("success, exact", mean_interval), ("difference of nested systems, exact", difference)):
        ends = interval(outcomes)
        grid = np.linspace(0.02, 0.98, 193)
        yield name, [coverage(lambda _, ends=ends: ends, p, outcomes, weights=binomial(n, p)) for p in grid]


def solved(n: int, samples: int, k: int, p: float, correlation: float) -> Cell:
    """Returns the cell of pass@k, or of success with k = 1."""

    def cell(rng: np.random.Generator, repetitions: int) -> Found:
        values = passes(rng, shares(rng, (repetitions, n), p, correlation), samples, k)
        return coverage(mean_interval, true_pass_at_k(p, correlation, k), values)

    return cell


def gained(n: int, samples: int, p: float, gain: float, correlation: float, alike: float) -> Cell:
    """Returns the cell of a paired difference."""

    def cell(rng: np.random.Generator, repetitions: int) -> Found:
        first, second = paired(rng, (repetitions, n), p, gain, correlation, alike)
        return coverage(difference, gain, passes(rng, second, samples, 1) - passes(rng, first, samples, 1))

    return cell


def spent(n: int, samples: int, p: float, correlation: float, factor: float) -> Cell:
    """Returns the cell of tokens per solved episode; a solved one has `factor` times the tokens, log-normal."""

    def cell(rng: np.random.Generator, repetitions: int) -> Found:
        success = shares(rng, (repetitions, n), p, correlation)
        wins = rng.random((repetitions, n, samples)) < success[..., None]
        tokens = rng.lognormal(-0.18, 0.6, wins.shape) * np.where(wins, factor, 1.0)
        found, _ = coverage(ratio_interval, (factor * p + 1 - p) / p, tokens.mean(-1), wins.mean(-1))
        return found, np.nan

    return cell


def families(n: int) -> Iterator[tuple[str, list[Cell]]]:
    """Yields the simulated families of a number of tasks."""
    for k in (1, 2, 4, 8):
        kinds = product((m for m in (2, 4, 8, 16) if m >= k), (k,), RATES, CORRELATIONS)
        yield (f"pass@{k}" if k > 1 else "success") + ", 2 to 16 samples", [solved(n, *kind) for kind in kinds]
    for name, samples, correlations in (("1 sample", (1,), (1,)), ("2 and 8 samples", PAIRED_SAMPLES, CORRELATIONS)):
        kinds_of = product(samples, PAIRED_RATES, GAINS, correlations, ALIKE)
        cells = [gained(n, *kind) for kind in kinds_of if kind[1] + kind[2] <= 0.98]
        yield f"paired difference, {name}", cells
    yield (
        "tokens per solved episode",
        [spent(n, *kind) for kind in product((1, 4), (0.02, 0.1, 0.5, 0.9, 0.98), (0, 0.3, 0.9), (1 / 3, 1.0, 3.0))],
    )


def simulated(cell: Cell, repetitions: int, seed: int) -> Found:
    """Returns a cell's coverage and width."""
    rng = np.random.default_rng(seed)
    chunks = [cell(rng, min(CHUNK, repetitions)) for _ in range(max(1, repetitions // CHUNK))]
    coverage_, width = np.mean(chunks, axis=0)
    return float(coverage_), float(width)


def line(name: str, n: int, found: list[Found], least: float) -> None:
    """Prints a line of the table."""
    means: Array = np.mean(found, axis=0)
    width = "" if np.isnan(means[1]) else f"{means[1]:.3f}"
    print(f"| {name} | {n} | {len(found)} | {least:.3f} | {means[0]:.3f} | {width} |", flush=True)


def main() -> None:
    """Prints the table in Markdown."""
    options = script.parser(__doc__, repetitions=500, tasks=[20, 30, 50, 100, 200, 500]).parse_args()
    print("| figure | tasks | cells | lowest coverage | mean coverage | mean width |\n|---|---|---|---|---|---|")
    for n in options.tasks:
        for name, found in exact(n):
            line(name, n, found, min(found)[0])
        for name, cells in families(n):
            found = [simulated(cell, options.repetitions, seed) for seed, cell in enumerate(cells)]
            lowest = sorted(range(len(cells)), key=found.__getitem__)[:AGAIN]
            least = min(simulated(cells[at], 20 * options.repetitions, at + 1_000_000)[0] for at in lowest)
            line(name, n, found, least)


if __name__ == "__main__":
    main()
