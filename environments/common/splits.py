"""Disjoint training and validation tasks of a generator: every task's key decides its split."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from verl_atgrpo import Split, stable_hash

Task = TypeVar("Task")

VALIDATION_SHARE = 8
"""One task in this many belongs to validation."""
MOST_DRAWS = 2000
"""Draws without a task of the split after which the generator's options are considered unsuitable."""


def split_of(task_key: str) -> Split:
    """Returns the split that a task belongs to; its index and seed do not matter."""
    return "val" if stable_hash(task_key) % VALIDATION_SHARE == 0 else "train"


def part_of(values: Sequence[Task], split: Split) -> list[Task]:
    """Returns the part of few values that belongs to `split`, the same for the same values; at least one.

    The hash of few keys may put nearly all into one split.
    """
    shuffled = random.Random(stable_hash("part_of", len(values))).sample(values, len(values))
    validation = max(1, len(values) // VALIDATION_SHARE)
    return shuffled[:validation] if split == "val" else shuffled[validation:]


def draw_for(split: Split, draw: Callable[[], Task], task_key: Callable[[Task], str]) -> Task | None:
    """Returns the first drawn task that belongs to `split`, or None after `MOST_DRAWS` draws without one."""
    for _ in range(MOST_DRAWS):
        task = draw()
        if split_of(task_key(task)) == split:
            return task
    return None
