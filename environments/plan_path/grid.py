"""The grid of Plan-Path: walls, a walker, a goal, and the simulation of moves. Independent of prompts."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import cached_property

from verl_atgrpo.environments.common.moves import MOVES, Cell, moved


@dataclass(frozen=True)
class PlanPathTask:
    """One grid: walls, start and goal. The goal can be reached from the start."""

    size: int
    walls: frozenset[Cell]
    start: Cell
    goal: Cell

    def free(self, cell: Cell) -> bool:
        """Returns whether the walker can enter `cell`."""
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size and cell not in self.walls

    @cached_property
    def distance(self) -> dict[Cell, int]:
        """Steps from every reachable cell to the goal (breadth-first search from the goal)."""
        steps = {self.goal: 0}
        queue = deque([self.goal])
        while queue:
            cell = queue.popleft()
            for move in MOVES:
                neighbour = moved(cell, move)
                if neighbour not in steps and self.free(neighbour):
                    steps[neighbour] = steps[cell] + 1
                    queue.append(neighbour)
        return steps

    def draw(self, position: Cell) -> str:
        """Returns the grid as lines of text: `.` free, `#` wall, `P` walker, `G` goal."""
        marks = {self.goal: "G", position: "P"}
        return "\n".join(
            "".join(
                marks.get((row, column), "#" if (row, column) in self.walls else ".") for column in range(self.size)
            )
            for row in range(self.size)
        )

    def closer(self, position: Cell) -> list[str]:
        """Returns the moves that come one step closer to the goal."""
        steps = self.distance[position] - 1
        return [move for move in MOVES if self.distance.get(moved(position, move)) == steps]

    def shortest(self, position: Cell, rng: random.Random) -> str:
        """Returns the moves of one shortest path from `position` to the goal."""
        moves = ""
        while position != self.goal:
            move = rng.choice(self.closer(position))
            position = moved(position, move)
            moves += move
        return moves


@dataclass(frozen=True)
class State:
    """State of an episode."""

    task: PlanPathTask
    position: Cell
    closest: int
    """Shortest distance to the goal reached so far; only progress beyond it is rewarded."""

    @classmethod
    def initial(cls, task: PlanPathTask) -> State:
        """Returns the state before the first move."""
        return cls(task, task.start, task.distance[task.start])

    @property
    def solved(self) -> bool:
        """Whether the walker is on the goal."""
        return self.position == self.task.goal


@dataclass(frozen=True)
class Walk:
    """Result of a move list."""

    end: State
    legal: bool
    """Whether no move ran into a wall or over the border, where the walker stops."""
    on_shortest_path: bool
    """Whether every move came one step closer to the goal."""


def walk(state: State, moves: str) -> Walk:
    """Simulates `moves` (letters of U, D, L, R) from `state`; stops at the goal or at an illegal move."""
    task, position = state.task, state.position
    closest, legal, shortest = state.closest, True, bool(moves)
    for name in moves:
        if position == task.goal:
            shortest = False
            break
        step = moved(position, name)
        if not task.free(step):
            legal = shortest = False
            break
        shortest = shortest and task.distance[step] < task.distance[position]
        position = step
        closest = min(closest, task.distance[position])
    return Walk(State(task, position, closest), legal, shortest)


def team_reward(before: State, after: State) -> float:
    """Returns 1 at the goal, else the new progress as a share of the whole way (paper, Plan-Path).

    Progress counts from the closest point reached so far, not from the last position: otherwise alternating between
    two cells would earn more than solving.
    """
    if after.solved:
        return 1.0
    whole = before.task.distance[before.task.start]
    return max(0, before.closest - after.task.distance[after.position]) / whole
