"""Generated tasks are the same in every process and Python version; pinned, because runs must stay comparable.

The hashes are from CPython 3.10, 3.11 and 3.12.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_atgrpo import Split, make

SPLITS: tuple[Split, ...] = ("train", "val")
PINNED: list[tuple[str, dict[str, Any], str]] = [
    ("plan_path", {"size": 10}, "6fd2b9187ed6f115"),
    ("plan_path", {"size": 4, "wall_density": 0.4, "seed": 7}, "2e4c7609ba804bd8"),
    ("plan_path", {"size": 6, "seed": 3}, "281153c7b372d39f"),
    ("sokoban", {"size": 6, "boxes": 1}, "fb862ac7d03d1ef2"),
    ("sokoban", {"size": 7, "boxes": 2, "seed": 7}, "784c9668aea92b96"),
    ("sokoban", {"boxes": 2, "min_solution": 8, "seed": 3}, "eb5f7f7d92ef7cc6"),
    ("sudoku", {"size": 4}, "083e906fd549f71f"),
    ("sudoku", {"clues": 5, "seed": 3}, "380724654e3d3886"),
    ("sudoku", {"size": 9, "clues": 40, "seed": 7}, "488df55dc2b17717"),
]


def digest(name: str, options: dict[str, Any]) -> str:
    env = make(name, **options)
    prints = [env.fingerprint(env.task(split, index)) for split in SPLITS for index in (*range(8), 10**6)]
    return hashlib.sha256("\n".join(prints).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("name", "options", "expected"), PINNED)
def test_generated_tasks_are_the_pinned_ones(name: str, options: dict[str, Any], expected: str) -> None:
    assert digest(name, options) == expected


@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_tasks_are_the_same_in_another_process(hash_seed: str, tmp_path: Path) -> None:
    code = (
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_reproducible import PINNED, digest\n"
        "sys.exit(sum(digest(name, options) != expected for name, options, expected in PINNED))"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
