"""Levels of Sokoban: drawn by pulling boxes, and solved by a breadth-first search."""

from __future__ import annotations

import heapq
import logging
import math
import random
import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from verl_atgrpo.environment import EnvironmentConfigError
from verl_atgrpo.environments.common.options import check_wall_density, check_whole_numbers
from verl_atgrpo.environments.common.splits import MOST_DRAWS
from verl_atgrpo.environments.sokoban.board import Boxes, SokobanTask, paths


def solve(task: SokobanTask, below: float = math.inf) -> str | None:
    """Returns a shortest solution in moves, or None if there is none with fewer than `below`.

    A* over pushes: each costs the walk to it and itself, and at least `potential` of them are left. Time and memory
    grow with the arrangements there are: a 6x6 board takes milliseconds, some of 10x10 with four boxes minutes.
    """
    tie = count()  # equal estimates are taken in the order found: boxes have no order of their own
    queue: list[tuple[float, int, str, int, Boxes]] = []
    best: dict[tuple[int, Boxes], int] = {}

    def offer(moves: str, player: int, boxes: Boxes) -> None:
        estimate = len(moves) + task.potential(boxes)
        if estimate < below and len(moves) < best.get((player, boxes), math.inf) and not task.deadlocked(boxes):
            best[player, boxes] = len(moves)
            heapq.heappush(queue, (estimate, next(tie), moves, player, boxes))

    offer("", task.player, task.boxes)
    while queue:
        _, _, moves, player, boxes = heapq.heappop(queue)
        if boxes == task.targets:
            return moves
        if len(moves) > best[player, boxes]:
            continue
        ways = paths(task, player, boxes)
        for box in sorted(boxes):
            for name, step in task.steps.items():
                if box - step in ways and (to := box + step) not in task.walls and to not in boxes:
                    offer(moves + ways[box - step] + name, box, boxes - {box} | {to})
    return None


logger = logging.getLogger(__name__)

PULLS = 4
"""Pulls of a reverse play, for each box and unit of the board's side: enough to lose its way."""


@dataclass(frozen=True)
class Generator:
    """Draws boards that can be solved, because they are made from solved ones by pulling boxes away."""

    size: int = 6
    boxes: int = 1
    wall_density: float = 0.1
    min_solution: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_numbers(
            size=(self.size, 5), boxes=(self.boxes, 1), min_solution=(self.min_solution, 1), seed=(self.seed, 0)
        )
        check_wall_density(self.wall_density)

    def draw(self, rng: random.Random) -> SokobanTask:
        """Returns a board; every draw comes from `rng`.

        Raises EnvironmentConfigError if `MOST_DRAWS` attempts make none.
        """
        for _ in range(MOST_DRAWS):
            task = self._scrambled(rng)
            if task and (self.min_solution == 1 or solve(task, below=self.min_solution) is None):
                return task
        raise self.too_few("any split")

    def too_few(self, where: str) -> EnvironmentConfigError:
        """Returns the error that says that there are hardly any boards for `where`."""
        return EnvironmentConfigError(
            f"at_grpo.environment.size={self.size}, boxes={self.boxes}, wall_density={self.wall_density}, "
            f"min_solution={self.min_solution}: hardly any board fits {where}; use a larger size, fewer boxes or a "
            "smaller min_solution"
        )

    def _scrambled(self, rng: random.Random) -> SokobanTask | None:
        """Returns the position of a reverse play that is farthest from solved, or None if none has all boxes off."""
        solved = self._solved(rng)
        if solved is None:
            return None
        player, boxes = solved.player, solved.boxes
        farthest = 0.0
        chosen = None
        for _ in range(PULLS * self.size * self.boxes):
            ways = paths(solved, player, boxes)
            pulls = [
                (box, step)
                for box in sorted(boxes)
                for step in solved.steps.values()
                if box + step in ways and box + 2 * step in ways
            ]
            if not pulls:
                break
            box, step = rng.choice(pulls)
            boxes = boxes - {box} | {box + step}
            player = box + 2 * step
            if not boxes & solved.targets and solved.potential(boxes) > farthest:
                farthest, chosen = solved.potential(boxes), (player, boxes)
        if chosen is None:
            return None
        player, boxes = chosen
        inside = paths(solved, player, frozenset())
        drawing = solved.draw(rng.choice(sorted(paths(solved, player, boxes))), boxes)
        # Floor that nobody can come to is drawn as wall: it would only make equal problems look different.
        return SokobanTask(
            "".join("#" if mark == " " and cell not in inside else mark for cell, mark in enumerate(drawing))
        )

    def _solved(self, rng: random.Random) -> SokobanTask | None:
        """Returns a board with every box on a target, or None if the walls leave no room for that."""
        rows = [["#"] * self.size for _ in range(self.size)]
        inner = [(row, column) for row in range(1, self.size - 1) for column in range(1, self.size - 1)]
        free = [cell for cell in inner if rng.random() >= self.wall_density]
        if len(free) <= self.boxes:
            return None
        marks = "*" * self.boxes + "@" + " " * len(free)
        for (row, column), mark in zip(rng.sample(free, len(free)), marks, strict=False):
            rows[row][column] = mark
        return SokobanTask("\n".join(map("".join, rows)))


def read_levels(path: str) -> tuple[SokobanTask, ...]:
    """Returns the boards of a Boxoban file: each a line `; <number>`, then its rows. Equal ones are kept once.

    What is no board that could be played (cut off, not walled in, already solved, a box on a dead square) is left out
    and counted in the log. Format: https://github.com/google-deepmind/boxoban-levels

    Raises:
        EnvironmentConfigError: the file cannot be read or has no board in it.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, TypeError, ValueError) as error:
        raise EnvironmentConfigError(
            f"at_grpo.environment.levels={path!r}: not a readable text file ({error})"
        ) from error
    drawings = [part.strip("\n") for part in re.split(r"(?m)^;.*$", text) if part.strip()]
    levels = [SokobanTask(drawing) for drawing in drawings if _playable(drawing)]
    if not levels:
        raise EnvironmentConfigError(
            f"at_grpo.environment.levels={path!r}: no level in it; each is a line '; <number>', then rows of # .$*@+"
        )
    if len(levels) < len(drawings):
        logger.warning(
            "%s: %d of %d levels cannot be played and are left out", path, len(drawings) - len(levels), len(drawings)
        )
    return tuple(dict.fromkeys(levels))


def _playable(drawing: str) -> bool:
    rows = drawing.split("\n")
    border = {*rows[0], *rows[-1], *(row[:1] for row in rows), *(row[-1:] for row in rows)}
    if border != {"#"} or len(set(map(len, rows))) > 1 or set(drawing) - set("\n# .$*@+"):
        return False
    if sum(map(drawing.count, "@+")) != 1 or drawing.count("$") != sum(map(drawing.count, ".+")):
        return False
    task = SokobanTask(drawing)
    return "$" in drawing and not task.deadlocked(task.boxes)
