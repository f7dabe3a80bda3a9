"""Boards and scripted players of Sokoban, and an independent oracle of its distances."""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from pathlib import Path

from fakes.scripted_episodes import Script, of

from verl_atgrpo.environments.sokoban.board import SokobanTask
from verl_atgrpo.environments.sokoban.levels import solve
from verl_atgrpo.play.types import EpisodeRecord

Position = tuple[int, frozenset[int]]
"""Player and boxes."""
BOXOBAN = Path("/work/shared/data/boxoban_medium.txt")


def board(*rows: str) -> SokobanTask:
    """The board with these inner rows (`_` is floor), walled in."""
    border = "#" * (len(rows[0]) + 2)
    return SokobanTask("\n".join([border, *(f"#{row}#" for row in rows), border]).replace("_", " "))


ROOM = board("_____", "@$__.", "_____")
"""One box, three pushes to the right."""
TWO = board("@$_._", "_____", "_$_._")
"""Two boxes, two pushes to the right each."""
ROUND_TRIP = ["R", "URRDL", "ULLDR", "URRDL", "ULLDR"]
"""In ROOM: a push to the right, then back, and so on."""


def full(moves: str) -> str:
    return f"Moves: {', '.join(moves)}"


def board_in(prompt: str) -> SokobanTask:
    """The first board in a prompt, which the question is about."""
    found = re.search(r"(?m)(?:^[-#.$*@+]{5,}$\n?)+", prompt)
    assert found
    return SokobanTask(found[0].strip().replace("-", " "))


def oracle(prompt: str, k: int) -> str:
    return full(solve(board_in(prompt)) or "U")


def nothing(prompt: str, k: int) -> str:
    return "-"


def in_turn(*answers: str) -> Script:
    """A script that returns these replies one after the other."""
    left = itertools.cycle(answers)
    return lambda prompt, k: next(left)


def earned(agent: str, record: EpisodeRecord) -> list[float]:
    return [decision.candidates[decision.committed].reward for decision in of(agent, record)]


def moved(task: SokobanTask, position: Position, name: str) -> Position | None:
    """The state after a move, by the rules alone; None if it is blocked."""
    player, boxes = position
    row = task.drawing.index("\n") + 1
    step = {"U": -row, "D": row, "L": -1, "R": 1}[name]
    ahead, beyond = player + step, player + 2 * step
    if task.drawing[ahead] == "#":
        return None
    if ahead not in boxes:
        return ahead, boxes
    return None if beyond in boxes or task.drawing[beyond] == "#" else (ahead, boxes - {ahead} | {beyond})


def distances(task: SokobanTask) -> dict[Position, float]:
    """Moves to a solution from every reachable position (infinite: none), by exhaustive search."""
    start = (task.player, task.boxes)
    before: dict[Position, list[Position]] = {start: []}
    queue = deque([start])
    while queue:
        position = queue.popleft()
        for name in "UDLR":
            after = moved(task, position, name)
            if after is not None:
                if after not in before:
                    before[after] = []
                    queue.append(after)
                before[after].append(position)
    queue = deque(position for position in before if position[1] == task.targets)
    steps: dict[Position, float] = dict.fromkeys(queue, 0)
    while queue:
        position = queue.popleft()
        for earlier in before[position]:
            if earlier not in steps:
                steps[earlier] = steps[position] + 1
                queue.append(earlier)
    return {position: steps.get(position, math.inf) for position in before}
