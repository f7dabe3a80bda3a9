"""Generated tasks are the same in every process and Python version; pinned, because runs must stay comparable.

The hashes are from CPython 3.10, 3.11 and 3.12.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from verl_atgrpo.environment import Split, make

SPLITS: tuple[Split, ...] = ("train", "val")
PINNED: list[tuple[str, dict[str, Any], str]] = [
    ("plan_path", {"size": 10}, "6fd2b9187ed6f115"),
    ("plan_path", {"size": 4, "wall_density": 0.4, "seed": 7}, "2e4c7609ba804bd8"),
    ("sokoban", {"size": 6, "boxes": 1}, "fb862ac7d03d1ef2"),
    ("sokoban", {"size": 7, "boxes": 2, "seed": 7}, "784c9668aea92b96"),
    ("sudoku", {"size": 4}, "3ff0425b1db4e8a1"),
    ("sudoku", {"size": 9, "clues": 40, "seed": 7}, "1b6227873bf401c9"),
]


def digest(name: str, options: dict[str, Any]) -> str:
    env = make(name, **options)
    prints = [env.fingerprint(env.task(split, index)) for split in SPLITS for index in (*range(8), 10**6)]
    return hashlib.sha256("\n".join(prints).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("name", "options", "expected"), PINNED)
def test_generated_tasks_are_the_pinned_ones(name: str, options: dict[str, Any], expected: str) -> None:
    assert digest(name, options) == expected
