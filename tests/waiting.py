"""Waiting for events instead of for seconds, which a busy machine may exceed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HANG = 900.0
"""Seconds after which a waiting test counts as hanging. Every event takes a small part of that on any machine; no
outcome depends on it."""
TRAINING = 4 * HANG
"""The same for a training, which takes minutes."""


def wait_until(holds: Callable[[], object], alive: Callable[[], object] = lambda: True, limit: float = HANG) -> None:
    """Returns when the condition holds; raises AssertionError when it no longer can, or after `limit` seconds.

    Args:
        holds: the condition.
        alive: whether it may still become true.
        limit: seconds that count as a hang.
    """
    end = time.monotonic() + limit
    while not holds():
        assert alive() or holds(), "its cause is gone"
        assert time.monotonic() < end, f"it did not happen in {limit:.0f} s"
        time.sleep(0.01)


async def until(holds: Callable[[], object], every: float = 0.0005) -> None:
    """The same in an event loop, with the loop's clock, which may be virtual."""
    loop = asyncio.get_running_loop()
    end = loop.time() + HANG
    while not holds():
        assert loop.time() < end, f"it did not happen in {HANG:.0f} s"
        await asyncio.sleep(every)
