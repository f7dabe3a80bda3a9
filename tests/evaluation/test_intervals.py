"""Intervals hold: by exact chances for single samples, by simulation for dependent ones; and none is without width."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from fakes.outcomes import binomial, coverage, paired, passes, shares, true_pass_at_k
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo.lab.evaluation.intervals import mean_interval, ratio_interval, student

DIFFERENCE = partial(mean_interval, low=-1.0)
SIZES = (20, 30, 50, 100, 200, 500)
LEAST = 0.92
REPETITIONS = 1000
"""Of a simulation; benchmarks/interval_coverage.py has more of them, and of cells."""


@pytest.mark.parametrize(
    ("degrees", "quantile"),  # Abramowitz and Stegun, table 26.10
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (29, 2.045), (30, 2.042), (120, 1.980)],
)
def test_students_quantiles(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, abs=5e-4)


def test_students_quantiles_fall_to_the_normal_one() -> None:
    found = [student(degrees) for degrees in (*range(1, 40), 1_000, 1_001, 20_000)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.95996, abs=2e-4)


def successes(n: int) -> np.ndarray:
    """Returns all outcomes of n tasks with one sample each, by number of successes: (n + 1, n)."""
    return (np.arange(n) < np.arange(n + 1)[:, None]).astype(np.float64)


@pytest.mark.parametrize("n", SIZES)
def test_single_samples_are_covered_by_exact_chances(n: int) -> None:
    ends, grid = mean_interval(successes(n)), np.linspace(0.02, 0.98, 193)
    found = [coverage(lambda _: ends, p, np.empty(0), weights=binomial(n, p))[0] for p in grid]
    assert min(found) > 0.93
    assert np.mean(found) < 0.975  # nor are they wider than they need be


@pytest.mark.parametrize("n", SIZES)
def test_paired_differences_are_covered_by_exact_chances(n: int) -> None:
    """The second solves all that the first solves, and a share of the others: the narrowest intervals."""
    ends, grid = DIFFERENCE(successes(n)), np.linspace(0.01, 0.6, 119)
    found = [coverage(lambda _: ends, gain, np.empty(0), weights=binomial(n, gain))[0] for gain in grid]
    assert min(found) > 0.93
    assert np.mean(found) < 0.98


def test_success_at_two_percent_as_it_was_found() -> None:
    """The percentile bootstrap covered 34%; and 61% of the paired differences from .02 to .05, as below."""
    assert coverage(mean_interval, 0.02, successes(20), weights=binomial(20, 0.02))[0] > 0.94


CLUSTERS = [(n, samples, k) for n in (20, 50) for samples, k in ((2, 1), (8, 1), (2, 2), (8, 4), (8, 8))]


@pytest.mark.parametrize(("n", "samples", "k"), CLUSTERS)
def test_dependent_samples_and_pass_at_k_are_covered(n: int, samples: int, k: int) -> None:
    rng = np.random.default_rng(n + samples + k)
    for p, correlation in product((0.02, 0.3, 0.98), (0, 0.5, 1)):
        values = passes(rng, shares(rng, (REPETITIONS, n), p, correlation), samples, k)
        found, width = coverage(mean_interval, true_pass_at_k(p, correlation, k), values)
        assert found > LEAST, (p, correlation)
        assert width < 0.5


@pytest.mark.parametrize(("n", "samples"), [(20, 1), (20, 4), (50, 1), (50, 8)])
def test_paired_differences_of_dependent_samples_are_covered(n: int, samples: int) -> None:
    rng = np.random.default_rng(n + samples)
    starts = ((0.02, 0.03), (0.02, 0), (0.5, 0), (0.5, 0.1), (0.6, 0.3), (0.95, 0.03))
    for (p, gain), correlation, alike in product(starts, (0, 0.5, 1), (0, 1)):
        first, second = paired(rng, (REPETITIONS, n), p, gain, correlation, alike)
        values = passes(rng, second, samples, 1) - passes(rng, first, samples, 1)
        assert coverage(DIFFERENCE, gain, values)[0] > LEAST, (p, gain, correlation, alike)


@pytest.mark.parametrize(("n", "samples"), [(20, 1), (20, 4), (100, 1)])
def test_tokens_per_solved_episode_are_covered(n: int, samples: int) -> None:
    rng = np.random.default_rng(n + samples)
    for p, factor in product((0.02, 0.3, 0.9), (1.0, 3.0)):
        solved = rng.random((REPETITIONS, n, samples)) < p
        tokens = rng.lognormal(-0.08, 0.4, solved.shape) * np.where(solved, factor, 1)
        found, _ = coverage(ratio_interval, (factor * p + 1 - p) / p, tokens.mean(-1), solved.mean(-1))
        assert found > LEAST, (p, factor)


def test_more_samples_of_independent_tasks_are_narrower() -> None:
    rng = np.random.default_rng(0)
    widths = [
        coverage(mean_interval, 0.5, passes(rng, shares(rng, (500, 100), 0.5, 0), samples, 1))[1]
        for samples in (1, 2, 4, 8)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[3] < widths[0] / 2


# ---------------------------------------------------------------------- of no width


def bounded(low: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.sampled_from([low, 0.0, 1.0]) | st.floats(low, 1.0), min_size=1, max_size=40)


@given(st.one_of(bounded(0.0).map(lambda values: (0.0, values)), bounded(-1.0).map(lambda values: (-1.0, values))))
def test_an_interval_holds_its_mean_and_has_a_width(drawn: tuple[float, list[float]]) -> None:
    bound, values = drawn
    low, high = mean_interval(np.array(values), bound)
    assert bound <= low <= np.mean(values) + 1e-12
    assert np.mean(values) - 1e-12 <= high <= 1
    assert high - low > 1 / (len(values) + 2)


@given(st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(0.0, 1.0)), min_size=1, max_size=40))
def test_a_ratio_is_in_its_interval_which_has_a_width(tasks: list[tuple[float, float]]) -> None:
    amounts, solved = np.array(tasks).T
    low, high = ratio_interval(amounts, solved)
    ratio = amounts.mean() / solved.mean() if solved.any() else math.inf
    assert 0 <= low < high
    assert low <= ratio * (1 + 1e-9) and ratio * (1 - 1e-9) <= high


def test_the_ends_of_a_ratio_are_those_at_which_the_rest_is_just_significant() -> None:
    rng = np.random.default_rng(3)
    amounts, solved = rng.lognormal(3, 0.5, 40), (rng.random(40) < 0.7).astype(np.float64)
    mean, deviation = amounts.mean(), amounts.std()
    with_added = np.array([*amounts, mean - deviation, mean + deviation]), np.array([*solved, 1, 0])
    for ratio in ratio_interval(amounts, solved):
        rest = with_added[0] - ratio * with_added[1]
        assert abs(rest.mean()) / (rest.std(ddof=1) / math.sqrt(42)) == pytest.approx(student(41))


@pytest.mark.parametrize("n", [1, 2, 20, 5000])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_equal_tasks_have_an_interval(n: int, value: float) -> None:
    low, high = mean_interval(np.full(n, value))
    assert low <= value <= high and high - low > 1 / (n + 2)
    low, high = DIFFERENCE(np.full(n, value))
    assert low <= value <= high and high - low > 1 / (n + 2)
    low, high = ratio_interval(np.full(n, 10.0), np.full(n, value))
    assert low < 10 / max(value, 1e-9) and high > 10 / max(value, 1e-9)
