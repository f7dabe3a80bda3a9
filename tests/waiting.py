"""How tests wait: for what happens, never for seconds that a busy machine might take longer than."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANG = 900.0
"""Seconds after which a test that still waits is taken to hang. What it waits for takes a small part of that on any
machine; no outcome depends on it."""
TRAINING = 4 * HANG
"""The same for a training, which takes minutes."""


def wait_until(holds: Callable[[], object], alive: Callable[[], object] = lambda: True, limit: float = HANG) -> None:
    """Returns when the condition holds; raises AssertionError at once if it cannot any more, and after a hang.

    Args:
        holds: the condition.
        alive: whether it may still come to hold.
        limit: seconds that count as a hang.
    """
    end = time.monotonic() + limit
    while not holds():
        assert alive() or holds(), "whoever was to bring it about is gone"
        assert time.monotonic() < end, f"it did not happen in {limit:.0f} s"
        time.sleep(0.01)


async def until(holds: Callable[[], object], every: float = 0.0005) -> None:
    """The same in an event loop, by its own clock: on a virtual one no time passes."""
    loop = asyncio.get_running_loop()
    end = loop.time() + HANG
    while not holds():
        assert loop.time() < end, f"it did not happen in {HANG:.0f} s"
        await asyncio.sleep(every)
