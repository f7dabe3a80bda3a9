"""A solver for Sokoban: what a board takes at least, and the way to do it."""

from __future__ import annotations

import heapq
import math
from itertools import count

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
