"""Train and validation tasks of a generator, disjoint because every task's key decides its split."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from verl_atgrpo.environment import Split, stable_hash

Task = TypeVar("Task")

VALIDATION_SHARE = 8
"""One task in this many belongs to validation."""
MOST_DRAWS = 2000
"""Draws without a fitting task after which a generator's options are at fault."""


def split_of(task_key: str) -> Split:
    """Returns the split that a task belongs to, whatever index or seed it was drawn with."""
    return "val" if stable_hash(task_key) % VALIDATION_SHARE == 0 else "train"


def draw_for(split: Split, draw: Callable[[], Task], task_key: Callable[[Task], str]) -> Task | None:
    """Returns the first task that belongs to `split`, or None if `MOST_DRAWS` draws have none."""
    for _ in range(MOST_DRAWS):
        task = draw()
        if split_of(task_key(task)) == split:
            return task
    return None
