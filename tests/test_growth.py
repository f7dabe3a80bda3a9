"""The measure of growth tells linear work from quadratic work, also where something else disturbs it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from growth import MOST, assert_linear, ratio

WORKS: dict[str, tuple[Callable[[int], float], bool]] = {
    "constant": (lambda size: 1.0, True),
    "linear": (lambda size: 1e-6 * size, True),
    "with a start": (lambda size: 5.0 + size, True),
    "sorting": (lambda size: size * size.bit_length(), True),
    "quadratic": (lambda size: 1e-9 * size**2, False),
    "quadratic with a start": (lambda size: 100.0 + size**2, False),
    "cubic": (lambda size: 1e-9 * size**3, False),
    "exponential": (lambda size: 1.01**size, False),
}


@pytest.mark.parametrize("name", WORKS)
def test_growth_is_told(name: str) -> None:
    work, linear = WORKS[name]
    assert (ratio(lambda: work(1000), lambda: work(2000)) <= MOST) == linear


@pytest.mark.parametrize("name", [name for name, (_, linear) in WORKS.items() if linear])
def test_a_disturbance_makes_no_linear_work_fail(name: str) -> None:
    """It may hide other work at a time, but a test is run again and again."""
    work, _ = WORKS[name]
    late = itertools.cycle([1.0, 9.0, 1.0, 7.0, 1.1, 30.0, 1.0])
    assert ratio(lambda: work(1000) * next(late), lambda: work(2000) * next(late)) <= MOST


def test_real_work_is_measured() -> None:
    assert_linear(lambda size: sum(range(size)), 200_000)
    with pytest.raises(AssertionError, match=r"^squares: twice the input takes \d"):
        assert_linear(lambda size: [sum(range(size)) for _ in range(size)], 500, "squares")
