"""Numbers of an environment: Python's own from whatever library they come, since records are JSON."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from verl_atgrpo import Outcome, Score
from verl_atgrpo.play.types import OutcomeError, float_of, plain_of

HALVES = [
    0.5,
    Fraction(1, 2),
    Decimal("0.5"),
    np.float16(0.5),
    np.float32(0.5),
    np.float64(0.5),
    np.longdouble(0.5),
    np.array(0.5),
    np.array([0.5]),
    torch.tensor(0.5),
    torch.tensor([[0.5]], dtype=torch.bfloat16),
    torch.tensor(0.5, requires_grad=True),
]
ONES = [1, True, np.bool_(True), np.int64(1), np.uint8(1), np.array(1), torch.tensor(1), torch.tensor(True)]
NONE = [
    None,
    "0.5",
    b"1",
    [0.5],
    (1,),
    {},
    1j,
    np.complex64(1),
    np.array([0.5, 1]),
    torch.zeros(2),
    np.str_("1"),
    math,
]
HUGE = [10**400, Fraction(10**400, 3), Decimal("sNaN")]
"""Numbers that are no float."""
INFINITE = [
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    torch.tensor(math.inf),
    Decimal("NaN"),
    Decimal("-Infinity"),
]


@pytest.mark.parametrize(("value", "number"), [*((half, 0.5) for half in HALVES), *((one, 1.0) for one in ONES)])
def test_a_number_of_any_library_is_a_float(value: Any, number: float) -> None:
    made = [Score(team=value).team, Score(local=value).local, Outcome(True, value).team_reward]
    made.append(Outcome(True, 0.0, {"m": value}).metrics["m"])
    assert [(type(one), one) for one in made] == [(float, number)] * 4
    json.dumps([asdict(Score(value, value)), asdict(Outcome(False, value, {"m": value}))])


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda value: Score(team=value), "Score.team"),
        (lambda value: Score(local=value), "Score.local"),
        (lambda value: Outcome(True, value), "Outcome.team_reward"),
        (lambda value: Outcome(True, 0.0, {"m": value}), "Outcome.metrics: m"),
    ],
)
@pytest.mark.parametrize("value", [*NONE, *HUGE], ids=repr)
def test_what_is_no_number_is_refused_by_its_field(make: Callable[[Any], Any], field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}=.* is no(t a finite)? number") as caught:
        make(value)
    assert isinstance(caught.value, OutcomeError) == field.startswith("Outcome")


@pytest.mark.parametrize("value", INFINITE, ids=repr)
def test_an_outcome_is_finite(value: Any) -> None:
    for made in (lambda: Outcome(True, value), lambda: Outcome(True, 0.0, {"m": value})):
        with pytest.raises(OutcomeError, match="is not a finite number"):
            made()
    assert not math.isfinite(Score(value).team)  # refused at the decision, as one reply's fault


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("kind", [bool, np.bool_, np.array, torch.tensor])
def test_success_is_a_bool_of_any_library(kind: Callable[[bool], Any], value: bool) -> None:
    assert Outcome(kind(value)).success is value


@pytest.mark.parametrize("value", [0, 1, 1.0, None, "yes", np.int64(1), np.array([True, False]), torch.tensor(1)])
def test_a_success_that_is_no_bool_is_refused(value: Any) -> None:
    with pytest.raises(OutcomeError, match=r"^Outcome\.success=.* is neither True nor False"):
        Outcome(value)


def test_what_only_looks_like_a_number_of_a_library_is_none() -> None:
    class Shop:
        def item(self, name: str) -> str:
            return name

    shop = Shop()
    assert plain_of(shop) is shop
    with pytest.raises(ValueError, match="is no number"):
        float_of(shop, "it")


def test_numbers_are_made_pythons_without_numpy() -> None:
    """An environment imports neither numpy nor torch for its scores."""
    code = "import sys; sys.modules['numpy'] = None; from verl_atgrpo import Score; Score(1)"
    subprocess.run([sys.executable, "-c", code], check=True)
