"""Outcomes of evaluations whose true figures are known: exact chances, and simulated tasks with dependent samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from verl_atgrpo.lab.evaluation.figures import pass_at_k
from verl_atgrpo.lab.evaluation.intervals import Array


def binomial(n: int, p: float) -> Array:
    """Returns the chances (n + 1,) of 0 to n successes."""
    logs = np.array([math.lgamma(k + 1) for k in range(n + 1)])
    k = np.arange(n + 1)
    return np.exp(logs[n] - logs - logs[::-1] + k * np.log(p) + (n - k) * np.log1p(-p))


def shares(rng: np.random.Generator, size: tuple[int, int], mean: float, correlation: float) -> Array:
    """Returns the success of tasks: Beta with a mean and a correlation of a task's samples; 1 is all or nothing."""
    if correlation == 0:
        return np.full(size, mean)
    if correlation == 1:
        return (rng.random(size) < mean).astype(np.float64)
    total = 1 / correlation - 1
    return rng.beta(mean * total, (1 - mean) * total, size)


def true_pass_at_k(mean: float, correlation: float, k: int) -> float:
    """Returns pass@k of tasks whose success is distributed as in `shares`."""
    if correlation in (0, 1):
        return 1 - (1 - mean) ** (1 if correlation else k)
    total = 1 / correlation - 1
    failing = (1 - mean) * total
    logs = math.lgamma(failing + k) - math.lgamma(failing) - math.lgamma(total + k) + math.lgamma(total)
    return 1 - math.exp(logs)


def passes(rng: np.random.Generator, success: Array, samples: int, k: int) -> Array:
    """Returns the unbiased pass@k of every task from its samples; k = 1 is the mean success."""
    table = np.array([pass_at_k(samples, solved, k) for solved in range(samples + 1)])
    return table[rng.binomial(samples, success)]


def paired(
    rng: np.random.Generator, size: tuple[int, int], mean: float, gain: float, correlation: float, alike: float
) -> tuple[Array, Array]:
    """Returns the success of two systems on the same tasks.

    Args:
        rng: the source of chance.
        size: repetitions, tasks.
        mean: success of the first.
        gain: what the second has more.
        correlation: of a task's samples.
        alike: share of the tasks on which the second is the first, but for its gain; elsewhere it is independent.
    """
    first = shares(rng, size, mean, correlation)
    apart = shares(rng, size, mean + gain, correlation)
    if correlation == 1:  # a failed task is solved with the chance that makes up the gain
        same = np.maximum(first, rng.random(size) < gain / (1 - mean))
    else:
        same = 1 - (1 - first) * (1 - mean - gain) / (1 - mean)
    return first, np.where(rng.random(size) < alike, same, apart)


def coverage(
    interval: Callable[..., tuple[Array, Array]], truth: float, *values: Array, weights: Array | None = None
) -> tuple[float, float]:
    """Returns the share of repetitions whose interval contains the truth, and the intervals' mean width.

    Args:
        interval: the function to try.
        truth: the true figure.
        values: its arguments, (repetitions, tasks) each.
        weights: (repetitions,) chances of the repetitions; None for equal ones.
    """
    low, high = interval(*values)
    inside = (low <= truth + 1e-12) & (truth - 1e-12 <= high)
    return float(np.average(inside, weights=weights)), float(np.average(high - low, weights=weights))
