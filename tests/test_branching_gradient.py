"""The gradient that branching estimates from samples is the exact one (without sampling: test_exact_gradient.py)."""

from __future__ import annotations

import numpy as np
import pytest
from fakes.tables import Tables, branched, by_length, distance

from verl_atgrpo.train.config.schema import BranchSettings

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
    ("options", "candidates", "lengths"),
    [
        (BranchSettings(at="every"), 3, {0, 1, 2, 3}),
        (BranchSettings(at="first", continuations=2), 3, {0}),
        (BranchSettings(at={"right": 1}), 2, {3}),
        (BranchSettings(at="random"), 2, {0, 1, 2, 3}),
        (BranchSettings(at={"left": 0, "right": 1}, nested=True), 3, {0, 3}),
    ],
    ids=["every", "first", "one agent's turn", "random", "nested"],
)
def test_branching_estimates_the_exact_gradient(options: BranchSettings, candidates: int, lengths: set[int]) -> None:
    """`lengths`: of histories at branch points."""
    made = TABLES.estimates(lambda number: branched(TABLES, number, options, candidates), 500)
    for length, exact in by_length(EXACT).items():
        parts = [by_length(estimate)[length] for estimate in made]
        error, expected = distance(parts, exact * (length in lengths))
        assert error <= 2 * expected, length
