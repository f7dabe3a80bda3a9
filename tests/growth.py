"""Whether work grows in proportion to its input. A bound in seconds would be one of the machine, too."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

MOST = 3.0
"""Most CPU time of twice the input, as a multiple: linear work takes twice, quadratic work four times as much."""
ATTEMPTS = 8
LEAST = 1e-3
"""Seconds below which the cost of a call, and of memory, hides how work grows."""


def seconds_of(work: Callable[[], object]) -> float:
    """Returns the CPU time of this process for some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def ratio(once: Callable[[], float], twice: Callable[[], float], most: float = MOST) -> float:
    """Returns how many times the CPU time of some work twice as much takes.

    What else happens in the process (a collection of garbage, a cold cache) only adds time, so both are the smallest
    of several attempts, until the ratio is not above `most`.

    Args:
        once: does the work and returns its CPU time.
        twice: the same for twice the input.
        most: enough.
    """
    small = large = float("inf")
    for _ in range(ATTEMPTS):
        small, large = min(small, once()), min(large, twice())
        if large <= most * small:
            break
    return large / max(small, 1e-9)


def assert_linear(work: Callable[[int], object], size: int, what: str = "") -> None:
    """Asserts that `work(2 * size)` takes at most `MOST` times the CPU time of `work(size)`."""
    once, twice = (functools.partial(seconds_of, functools.partial(work, one)) for one in (size, 2 * size))
    found = ratio(lambda: max(LEAST, once()), lambda: max(LEAST, twice()))
    assert found <= MOST, f"{what}: twice the input takes {found:.1f} times as long"
