"""95% confidence intervals over independent tasks: of a mean of bounded numbers, and of a ratio of means.

The t interval of a few tasks' numbers is too narrow near a bound, and has no width if all are equal. So two tasks are
added, with the smallest and the largest possible number: one task that is never and one that is always solved; for the
difference of two systems, one that only the first and one that only the second solves. For shares of single samples
that is one success and one failure for a sample (Agresti and Caffo 2000, The American Statistician 54:280), for paired
ones Bonett and Price 2012 (Journal of Educational and Behavioral Statistics 37:479). A task's number may be a mean of
samples that depend on each other, since only tasks are counted. Coverage: benchmarks/interval_coverage.py.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
Array = NDArray[np.float64]


@lru_cache(maxsize=1024)
def student(degrees: int) -> float:
    """Returns t with P(|T| <= t) = 95% for Student's T (Abramowitz and Stegun 26.7.3 and 26.7.4), to 1e-12."""
    # P is a finite series in the squared cosine of the angle whose tangent is t / sqrt(degrees).
    odd = degrees % 2
    steps = np.arange(1, degrees // 2, dtype=np.float64) if degrees > 2 else np.empty(0)
    factors = 2 * steps / (2 * steps + 1) if odd else (2 * steps - 1) / (2 * steps)
    low, high = 0.0, np.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        terms = np.cumprod(np.concatenate([[1.0], factors * np.cos(angle) ** 2])).sum()
        if odd:
            inside = 2 / np.pi * (angle + (np.sin(angle) * np.cos(angle) * terms if degrees > 1 else 0.0))
        else:
            inside = np.sin(angle) * terms
        low, high = (angle, high) if inside < LEVEL else (low, angle)
    return float(np.sqrt(degrees) * np.tan(high))


def mean_interval(values: Array, low: float = 0.0, high: float = 1.0) -> tuple[Array, Array]:
    """Returns the ends of the interval of the mean of tasks' numbers. It contains their mean and has a width.

    `values` are (..., n), one number of every task, from `low` to `high`, as are the two arrays (...) that are
    returned.
    """
    tasks = values.shape[-1] + 2
    center = (values.sum(-1) + low + high) / tasks
    squares = ((values - center[..., None]) ** 2).sum(-1) + (low - center) ** 2 + (high - center) ** 2
    half = student(tasks - 1) * np.sqrt(squares / (tasks * (tasks - 1)))
    return np.maximum(center - half, low), np.minimum(center + half, high)


def ratio_interval(amounts: Array, shares: Array) -> tuple[Array, Array]:
    """Returns the ends of the interval of mean amount / mean share, by Fieller's theorem (1954).

    The added tasks have shares 1 and 0, and amounts one standard deviation below and above the mean: they leave the
    amounts' deviation as it is.

    Args:
        amounts: (..., n), such as the tokens of every task, 0 and more.
        shares: (..., n), from 0 to 1, such as the success on every task.

    Returns two arrays (...). The upper end is infinite where the share may be 0.
    """
    mean, deviation = amounts.mean(-1, keepdims=True), amounts.std(-1, keepdims=True)
    one = np.ones_like(mean)
    amounts = np.concatenate([amounts, mean - deviation, mean + deviation], -1)
    shares = np.concatenate([shares, one, 0 * one], -1)
    tasks = amounts.shape[-1]
    factor = student(tasks - 1) ** 2 / (tasks * (tasks - 1))
    amount, share = amounts.mean(-1), shares.mean(-1)
    off_amount, off_share = amounts - amount[..., None], shares - share[..., None]
    # The ratios r at which the mean of amount - r share is within its own interval around 0: a r^2 - 2 b r + c <= 0.
    a = share**2 - factor * (off_share**2).sum(-1)
    b = amount * share - factor * (off_amount * off_share).sum(-1)
    c = amount**2 - factor * (off_amount**2).sum(-1)
    root = b + np.sqrt(np.maximum(b * b - a * c, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(c > 0, c / root, 0.0), np.where(a > 0, root / a, np.inf)
