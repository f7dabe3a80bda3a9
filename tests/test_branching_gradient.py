"""The gradient that branching estimates is the exact one of the expected outcome; greedy commits estimate another."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.tables import Tables, branched, by_length, distance, tree

from verl_atgrpo.config.schema import BranchSettings

TABLES = Tables()
EXACT = TABLES.gradient()


def test_the_exact_gradient_is_that_of_finite_differences() -> None:
    step, again = 1e-6, Tables()
    for row, k in ((0, 1), (5, 0), (30, 2)):
        history = list(TABLES.policy)[row]
        shares = TABLES.policy[history] * np.exp(step * np.eye(3)[k])
        again.policy[history] = shares / shares.sum()
        assert (again.value("") - TABLES.value("")) / step == pytest.approx(EXACT[row, k], abs=1e-6)
        again.policy[history] = TABLES.policy[history]


@pytest.mark.parametrize(
    ("options", "candidates", "share", "lengths"),
    [
        (BranchSettings(at="every"), 3, 1, {0, 1, 2, 3}),
        (BranchSettings(at="first", continuations=2), 3, 1, {0}),
        (BranchSettings(at={"right": 1}), 2, 1, {3}),
        (BranchSettings(at="random"), 2, 1 / 4, {0, 1, 2, 3}),
    ],
    ids=["every", "first", "one agent's turn", "random"],
)
@pytest.mark.parametrize("episodes", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_branching_estimates_the_exact_gradient(
    options: BranchSettings, candidates: int, share: float, lengths: set[int], episodes: int
) -> None:
    """`share`: how often each decision of an episode is a branch point. `lengths`: of histories at branch points."""
    made = TABLES.estimates(lambda number: branched(TABLES, number, options, candidates), episodes)
    for length, exact in by_length(EXACT).items():
        parts = [by_length(estimate)[length] for estimate in made]
        error, expected = distance(parts, exact * share * (length in lengths))
        assert error <= 2 * expected, length


def test_greedy_commits_estimate_another_gradient() -> None:
    """Even with exact values as scores: later groups lie where the best of K leads, not where the policy does."""
    made = TABLES.estimates(lambda number: tree(TABLES, number, candidates=3), 1000)
    first = [by_length(estimate)[0] for estimate in made]
    error, expected = distance(first, by_length(EXACT)[0])
    assert error <= 2 * expected, "the first decision has no decision before it"
    later = [by_length(estimate)[3] for estimate in made]
    error, expected = distance(later, by_length(EXACT)[3])
    assert error > 8 * expected
    unselected = TABLES.estimates(lambda number: tree(TABLES, number, candidates=3, selection="first"), 1000)
    error, expected = distance(unselected, EXACT)
    assert error <= 2 * expected
