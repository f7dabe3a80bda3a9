"""The grid of Sudoku: rules, solver, generator, and the effect of an answer. Independent of prompts.

A grid is a text of `size * size` characters, row by row: the digits 1 to `size`, and `.` for an empty cell.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

EMPTY = "."
FEWEST_CLUES = {4: 4, 9: 24}
"""Size -> fewest givens that `generate` reaches in at least half of all full grids; 22 in 9x9 only in 5% of them."""


@dataclass(frozen=True)
class Layout:
    """Rows, columns and boxes of grids of one size; cells are counted row by row from 0."""

    size: int
    digits: str
    units: dict[str, tuple[int, ...]]
    """Name ("row 1", "column 2", "box 3", from the top left) -> its cells."""
    houses: tuple[tuple[int, int, int], ...]
    """Cell -> positions of its row, column and box in `units`."""
    peers: tuple[tuple[int, ...], ...]
    """Cell -> the other cells of its row, column and box."""
    pickers: tuple[Callable[[str], tuple[str, ...]], ...]
    """Unit -> function that returns its characters of a grid."""


@functools.cache
def layout(size: int) -> Layout:
    """Returns the layout of grids of side `size`, a square number of at most 9."""
    box = math.isqrt(size)
    cells = range(size * size)
    houses = tuple((i // size, size + i % size, 2 * size + i // size // box * box + i % size // box) for i in cells)
    names = [f"{kind} {number}" for kind in ("row", "column", "box") for number in range(1, size + 1)]
    units = [tuple(i for i in cells if place in houses[i]) for place in range(3 * size)]
    peers = tuple(tuple(i for i in cells if i != cell and set(houses[i]) & set(houses[cell])) for cell in cells)
    pickers = tuple(operator.itemgetter(*unit) for unit in units)
    return Layout(size, "123456789"[:size], dict(zip(names, units, strict=True)), houses, peers, pickers)


def consistent(size: int, grid: str) -> bool:
    """Returns whether no row, column or box has a digit twice."""
    for pick in layout(size).pickers:
        held = pick(grid)
        if len(set(held)) + max(0, held.count(EMPTY) - 1) != size:
            return False
    return True


def solutions(size: int, grid: str, limit: int = 2, rng: random.Random | None = None) -> list[str]:
    """Returns up to `limit` solutions of `grid`; the search fills the cell with the fewest candidates first.

    Args:
        size: side length.
        grid: the grid to fill; one that breaks a rule has no solution.
        limit: most solutions; 2 is enough to find out whether there is exactly one.
        rng: shuffles the order of the digits, so that an empty grid gets a random solution.
    """
    if not consistent(size, grid):
        return []
    lay = layout(size)
    cells = list(grid)
    empty = [cell for cell, char in enumerate(grid) if char == EMPTY]
    free = [(1 << size) - 1] * (3 * size)  # unit -> the digits still to be placed in it, one bit each
    for cell, char in enumerate(grid):
        if char != EMPTY:
            for unit in lay.houses[cell]:
                free[unit] &= ~(1 << int(char) - 1)
    found: list[str] = []

    def search() -> None:
        if not empty:
            found.append("".join(cells))
            return
        fewest, chosen, candidates = size + 1, 0, 0
        for place, cell in enumerate(empty):
            row, column, box = lay.houses[cell]
            bits = free[row] & free[column] & free[box]
            if (count := bits.bit_count()) < fewest:
                fewest, chosen, candidates = count, place, bits
                if count < 2:
                    break
        cell = empty.pop(chosen)
        digits = [digit for digit in range(size) if candidates >> digit & 1]
        if rng is not None:
            rng.shuffle(digits)
        for digit in digits:
            cells[cell] = lay.digits[digit]
            for unit in lay.houses[cell]:
                free[unit] ^= 1 << digit
            search()
            for unit in lay.houses[cell]:
                free[unit] ^= 1 << digit
            if len(found) >= limit:
                break
        cells[cell] = EMPTY
        empty.insert(chosen, cell)

    search()
    return found


@dataclass(frozen=True)
class SudokuTask:
    """One puzzle with exactly one solution."""

    size: int
    givens: str
    """The grid at the start."""
    solution: str

    @cached_property
    def holes(self) -> int:
        """Number of cells to fill."""
        return self.givens.count(EMPTY)

    def keeps_givens(self, grid: str) -> bool:
        """Returns whether `grid` has every given."""
        return all(given in (EMPTY, char) for given, char in zip(self.givens, grid, strict=True))

    def flaws(self, grid: str) -> list[str]:
        """Returns the rules that `grid` breaks, for example `row 2 repeats 3`; [] if legal."""
        lay = layout(self.size)
        wrong = [
            f"given at row {cell // self.size + 1}, column {cell % self.size + 1} is changed"
            for cell, given in enumerate(self.givens)
            if given not in (EMPTY, grid[cell])
        ]
        for name, cells in lay.units.items():
            held = [grid[cell] for cell in cells]
            wrong += [f"{name} repeats {digit}" for digit in lay.digits if held.count(digit) > 1]
        return wrong


def generate(size: int, clues: int, rng: random.Random) -> SudokuTask | None:
    """Generates a puzzle by removing digits of a random full grid, in random order, while the solution is unique.

    Returns None if `clues` givens cannot be reached: removing any other digit would allow a second solution.
    """
    (solution,) = solutions(size, EMPTY * size * size, 1, rng)
    order = list(range(size * size))
    rng.shuffle(order)
    peers = layout(size).peers
    grid = list(solution)
    left = len(grid)
    for cell in order:
        if left == clues:
            break
        grid[cell] = EMPTY
        # A cell whose peers have all other digits is forced and needs no search; most removed digits are of this kind.
        forced = len({grid[peer] for peer in peers[cell]} - {EMPTY}) == size - 1
        if forced or len(solutions(size, "".join(grid))) == 1:
            left -= 1
        else:
            grid[cell] = solution[cell]
    return SudokuTask(size, "".join(grid), solution) if left == clues else None


def renamed(grid: str) -> str:
    """Returns a grid with its digits renamed in order of appearance: equal for relabelled grids."""
    order = "".join(dict.fromkeys(grid.replace(EMPTY, "")))
    return grid.translate(str.maketrans(order, "123456789"[: len(order)]))


@dataclass(frozen=True)
class State:
    """State of an episode."""

    task: SudokuTask
    grid: str
    """Givens and the team's entries; breaks no rule."""
    best: int = 0
    """Most holes filled correctly so far; only progress beyond it is rewarded."""

    @classmethod
    def initial(cls, task: SudokuTask) -> State:
        """Returns the state before the first turn."""
        return cls(task, task.givens)

    @property
    def solved(self) -> bool:
        """Whether the grid is the solution."""
        return self.grid == self.task.solution

    @property
    def correct(self) -> int:
        """Number of holes filled as in the solution."""
        same: int = sum(map(operator.eq, self.grid, self.task.solution))
        return same - len(self.grid) + self.task.holes


def enter(state: State, grid: str) -> State:
    """Returns the state after the answer `grid`; the resulting grid depends on the rules only, not on the solution.

    A grid that changes a given has no effect. Otherwise its digits replace all earlier entries of the team, so that
    a wrong one can be corrected; entries that conflict with another digit are left out, both of a pair. The resulting
    grid is `grid` itself exactly if it keeps the givens and breaks no rule.
    """
    task = state.task
    if not task.keeps_givens(grid):
        return state
    if not consistent(task.size, grid):
        peers = layout(task.size).peers
        grid = "".join(
            EMPTY if given == EMPTY and any(grid[peer] == char for peer in peers[cell]) else char
            for cell, (char, given) in enumerate(zip(grid, task.givens, strict=True))
        )
    after = State(task, grid)
    return State(task, grid, max(state.best, after.correct))


def progress(before: State, after: State) -> float:
    """Returns the newly correct holes as a share of all, 1 if solved.

    Progress counts relative to the best grid so far, not to the last one: otherwise alternating between two partial
    grids would earn more than solving.
    """
    return 1.0 if after.solved else (after.best - before.best) / before.task.holes
