"""How often the trainer looks for finished episodes, and whether those who play them are still there."""

from __future__ import annotations

import time
from collections.abc import Callable

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

PAUSE = 4.0
"""Pause after a look, in times of what the look took: looking takes a fifth of the trainer's time at most."""
CHECK = 30.0
"""Seconds between two looks at the rollout workers: verl waits for the rows of a worker that has died."""


def pace(buffer: ReplayBuffer, interval: float, check: Callable[[], None]) -> None:
    """Has a replay buffer look every so many seconds, and less often where a look takes long.

    Every look copies the tags of all rows that are in the queue, through a process that also takes the rows in: some
    25 us a row, 2.7 s of 100,000 rows.

    Args:
        buffer: verl's.
        interval: seconds between two looks.
        check: is called while the trainer waits, every `CHECK` seconds.
    """
    look = buffer._sync_metadata_from_transfer_queue
    checked = time.monotonic()

    def paced() -> None:
        nonlocal checked
        if time.monotonic() - checked > CHECK:
            check()
            checked = time.monotonic()
        started = time.perf_counter()
        look()
        buffer.poll_interval = max(interval, PAUSE * (time.perf_counter() - started))

    buffer._sync_metadata_from_transfer_queue = paced
