"""The board of Sokoban: simulation of moves, deadlocks, rewards of progress. Independent of prompts."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property

from verl_atgrpo.environments.common.moves import MOVES

Boxes = frozenset[int]
"""The cells with a box on them."""
Position = tuple[int, Boxes]
"""Cells of the player and the boxes."""


@dataclass(frozen=True)
class SokobanTask:
    """One board in the usual notation, with walls along its whole border.

    `#` wall, space floor, `.` target, `$` box, `*` box on a target, `@` player, `+` player on a target. A cell is
    the index of its character in the drawing, so the cell below is one line's length (line break included) away.
    """

    drawing: str

    @cached_property
    def ground(self) -> str:
        """The drawing without the player and the boxes."""
        return self.drawing.translate(_CLEARED)

    def _where(self, marks: str) -> frozenset[int]:
        return frozenset(cell for cell, mark in enumerate(self.drawing) if mark in marks)

    @cached_property
    def stride(self) -> int:
        """Cells from one row to the next."""
        return self.drawing.index("\n") + 1

    @cached_property
    def steps(self) -> dict[str, int]:
        """Move -> the number it adds to a cell's index."""
        return {name: row * self.stride + column for name, (row, column) in MOVES.items()}

    @cached_property
    def walls(self) -> frozenset[int]:
        """The cells that neither the player nor a box can enter."""
        return self._where("#")

    @cached_property
    def targets(self) -> Boxes:
        """The cells to push the boxes onto, as many as there are boxes."""
        return self._where(".*+")

    @cached_property
    def boxes(self) -> Boxes:
        """Initial cells of the boxes."""
        return self._where("$*")

    @cached_property
    def player(self) -> int:
        """Initial cell of the player."""
        (cell,) = self._where("@+")
        return cell

    @cached_property
    def pushes(self) -> dict[int, int]:
        """Cell -> fewest pushes from it to any target for a single box on the board.

        Computed by breadth-first search that pulls boxes away from the targets. Missing cells are dead squares: from
        there no box can be pushed to a target, wherever the other boxes are.
        """
        pushes = dict.fromkeys(sorted(self.targets), 0)
        queue = deque(pushes)
        while queue:
            cell = queue.popleft()
            for step in self.steps.values():
                before = cell - step
                if before not in pushes and before not in self.walls and before - step not in self.walls:
                    pushes[before] = pushes[cell] + 1
                    queue.append(before)
        return pushes

    def potential(self, boxes: Boxes) -> float:
        """Returns a lower bound on the remaining pushes: the sum over boxes to their nearest target; 0 only if solved.

        It is infinite if a box is on a dead square.
        """
        return sum(self.pushes.get(box, math.inf) for box in boxes)

    def deadlocked(self, boxes: Boxes) -> bool:
        """Returns whether a deadlock is detected; never true if there is a solution.

        Two kinds are detected: a box on a dead square, and a box off target in a 2x2 square of walls and boxes, none
        of which can ever move again.
        """
        walls, stride = self.walls, self.stride
        for box in boxes:
            if box not in self.pushes:
                return True
            if box in self.targets:
                continue
            for down in (-stride, stride):
                if (below := box + down) in walls or below in boxes:
                    for right in (-1, 1):
                        beside, corner = box + right, below + right
                        if (beside in walls or beside in boxes) and (corner in walls or corner in boxes):
                            return True
        return False

    def draw(self, player: int, boxes: Boxes) -> str:
        """Returns the board with the player and the boxes at the given cells, in the notation of `drawing`."""
        marks = list(self.ground)
        for box in boxes:
            marks[box] = "*" if box in self.targets else "$"
        marks[player] = "+" if player in self.targets else "@"
        return "".join(marks)


_CLEARED = str.maketrans("@$+*", "  ..")


def paths(task: SokobanTask, player: int, boxes: Boxes) -> dict[int, str]:
    """Returns cell -> shortest moves, for the cells that the player can reach without a push."""
    ways = {player: ""}
    queue = deque([player])
    while queue:
        cell = queue.popleft()
        for name, step in task.steps.items():
            ahead = cell + step
            if ahead not in ways and ahead not in task.walls and ahead not in boxes:
                ways[ahead] = ways[cell] + name
                queue.append(ahead)
    return ways


@dataclass(frozen=True)
class State:
    """State of an episode, with the progress that has already been rewarded."""

    task: SokobanTask
    player: int
    boxes: Boxes
    placed: int
    """Most boxes on targets after any answer."""
    lowest: float
    """Lowest potential after any answer."""
    seen: frozenset[Boxes]
    """All arrangements of the boxes so far."""

    @classmethod
    def initial(cls, task: SokobanTask) -> State:
        """Returns the state before the first move."""
        boxes = task.boxes
        return cls(task, task.player, boxes, len(boxes & task.targets), task.potential(boxes), frozenset([boxes]))

    @property
    def solved(self) -> bool:
        """Whether every box is on a target."""
        return self.boxes == self.task.targets

    def draw(self) -> str:
        """Returns the drawing of the board."""
        return self.task.draw(self.player, self.boxes)


@dataclass(frozen=True)
class Walk:
    """Result of a move list."""

    end: State
    legal: bool
    """Whether no move ran into a wall or a blocked box, where the player stops."""


def moved(task: SokobanTask, player: int, boxes: Boxes, move: str) -> Position:
    """Returns the position after a move; where a wall or a blocked box is ahead, it changes nothing."""
    step = task.steps[move]
    ahead = player + step
    if ahead not in boxes:
        return player if ahead in task.walls else ahead, boxes
    beyond = ahead + step
    if beyond in task.walls or beyond in boxes:
        return player, boxes
    return ahead, boxes - {ahead} | {beyond}


def walk(state: State, moves: str) -> Walk:
    """Simulates `moves` (letters of U, D, L, R) from `state`; stops when solved or at an illegal move."""
    task, player, boxes = state.task, state.player, state.boxes
    passed = []
    legal = True
    for name in moves:
        if boxes == task.targets:
            break
        before = player
        player, boxes = moved(task, player, boxes, name)
        if player == before:
            legal = False
            break
        passed.append(boxes)
    placed = max(state.placed, len(boxes & task.targets))
    lowest = min(state.lowest, task.potential(boxes))
    return Walk(State(task, player, boxes, placed, lowest, state.seen.union(passed)), legal)


def team_reward(before: State, after: State) -> float:
    """Returns 1 when solved, else the boxes newly on targets as a share of all (paper, Sokoban).

    Counted relative to the most boxes on targets after any answer, so returning a box to a target earns nothing.
    """
    return 1.0 if after.solved else (after.placed - before.placed) / len(before.boxes)


def clear(before: State, after: State) -> bool:
    """Returns whether an answer leads to an arrangement of boxes that is new and no deadlock.

    An answer that pushes nothing, undoes a push or repeats one leads to an earlier arrangement.
    """
    return after.boxes not in before.seen and not after.task.deadlocked(after.boxes)


def approach(before: State, after: State) -> float:
    """Returns the share by which an answer lowers the lowest potential so far: 1 when solved, 0 for no progress."""
    return (before.lowest - after.lowest) / before.lowest
