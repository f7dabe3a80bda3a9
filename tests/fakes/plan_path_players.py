"""Grids and scripted players of Plan-Path, and an independent solver."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fakes.scripted_episodes import Script

from verl_atgrpo.environments.plan_path.grid import PlanPathTask

DELTAS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
STYLES = [{"style": "full", "tool": "moves"}, {"style": "compact", "tool": "moves"}]


def task_from(drawing: str) -> PlanPathTask:
    """The task from lines of `.`, `#`, `P` and `G`."""
    cells = {(r, c): mark for r, line in enumerate(drawing.split()) for c, mark in enumerate(line)}
    (start,) = (cell for cell, mark in cells.items() if mark == "P")
    (goal,) = (cell for cell, mark in cells.items() if mark == "G")
    walls = frozenset(cell for cell, mark in cells.items() if mark == "#")
    return PlanPathTask(len(drawing.split()), walls, start, goal)


CORRIDOR = task_from("P...G ..... ..... ..... .....")
"""Four steps to the right, nothing in the way."""
WALLED = task_from("P#G.. .#... .#.#. ...#. .....")
"""The goal is two columns away and eight steps."""


def grid_in(prompt: str) -> str:
    """The last grid in a prompt."""
    return re.findall(r"(?m)(?:^[.#PG]{2,}$\n?)+", prompt)[-1].strip()


def solve(drawing: str) -> str:
    """A shortest path by an independent search on the grid's text."""
    rows = drawing.split()
    start = next((r, c) for r, line in enumerate(rows) for c, mark in enumerate(line) if mark == "P")
    paths = {start: ""}
    queue = deque([start])
    while queue:
        r, c = queue.popleft()
        for name, (dr, dc) in DELTAS.items():
            cell = (r + dr, c + dc)
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0])
            if inside and cell not in paths and rows[cell[0]][cell[1]] != "#":
                paths[cell] = paths[r, c] + name
                if rows[cell[0]][cell[1]] == "G":
                    return paths[cell]
                queue.append(cell)
    raise AssertionError(f"no way to the goal in\n{drawing}")


def full(moves: str) -> str:
    return f"Moves: {', '.join(moves)}"


def full_oracle(prompt: str, k: int) -> str:
    return full(solve(grid_in(prompt)))


def compact_oracle(prompt: str, k: int) -> str:
    return solve(grid_in(prompt))


ORACLES: dict[str, Script] = {"full": full_oracle, "compact": compact_oracle}


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Ends an infinite loop after `seconds` of CPU time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
