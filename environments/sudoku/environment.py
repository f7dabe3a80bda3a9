"""Sudoku: a team fills a grid with digits, turn by turn.

Workflow (`drafting`) and rewards follow AT-GRPO (arXiv 2510.11062, App. A). Unlike in the reference code, every puzzle
has exactly one solution that includes the givens, training and validation share no solved grid under any names of its
digits, and no prompt contains a grid that parses as an answer.
"""

from __future__ import annotations

import math
import random
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from verl_atgrpo import Outcome, Score, Split, stable_hash
from verl_atgrpo.environments.common.drafting import DraftingGame, SingleAgent
from verl_atgrpo.environments.common.options import Turns, option_error, with_options
from verl_atgrpo.environments.common.splits import draw_for
from verl_atgrpo.environments.common.workflow import Style
from verl_atgrpo.environments.sudoku.grid import (
    EMPTY,
    FEWEST_CLUES,
    State,
    SudokuTask,
    enter,
    generate,
    progress,
    renamed,
)
from verl_atgrpo.environments.sudoku.replies import parse_grid, parse_printed

Tool = Literal["python", "grid"]


@with_options
class Sudoku(DraftingGame[State, str]):
    """A tool user drafts, the planner fills the grid; up to `max_turns` turns.

    An answer is the whole grid, with empty cells; `grid.enter` applies it to the current one.
    """

    size: Literal[4, 9] = 4
    """Side length of the grid."""
    clues: Annotated[int, Ge(4), Le(80)] | None = None
    """Filled cells at the start; null: half of them, rounded down."""
    max_turns: Turns = 4
    """Most turns of an episode."""
    tool: Tool = "python"
    """`python`: the tool user writes a program that prints a grid; `grid`: it drafts one itself."""
    style: Style = "full"
    """`full` prompts explain the task; `compact` ones are for tiny models trained on them."""
    seed: int = 0
    """Tasks derive from it."""
    require_isolation: bool = False
    """Refuses machines below level `namespaces` (docs/sandbox.md)."""

    def __post_init__(self) -> None:
        size = self.size
        self._clues = size * size // 2 if self.clues is None else self.clues
        if not FEWEST_CLUES[size] <= self._clues < size * size:
            raise option_error(
                f"clues={self._clues}: a whole number, at least {FEWEST_CLUES[size]} and at most {size * size - 1} "
                f"for size={size}, which leaves one hole"
            )
        self.check_form("grid")
        box = math.isqrt(size)
        self.rules = (
            f"You fill a Sudoku of {size} rows and {size} columns; '.' is an empty cell. Every row, every column and "
            f"every {box}x{box} box must hold each digit from 1 to {size} once. The given digits must stay."
        )
        self.program_instruction = (
            "Write one ```python block. The program knows nothing but what you write into it; it must fill the empty "
            "cells by backtracking (try each digit that the rules allow in the first empty cell, then go on with the "
            "next one, and take it back where none fits), not have them written down, and must print the solved grid "
            f"as its last {size} lines, one row a line, for example by print(*row) for each row."
        )

    def task(self, split: Split, index: int) -> SudokuTask:
        """Returns puzzle `index` of `split`; splits are disjoint because the solved grid decides the split."""
        rng = random.Random(stable_hash("sudoku", self.seed, split, index))
        task = draw_for(split, lambda: self._draw_task(rng), self.task_key)
        if task is None:
            raise option_error(
                f"clues={self._clues}: hardly any puzzle of size={self.size} is left for the split {split!r}; use "
                "fewer clues"
            )
        return task

    def _draw_task(self, rng: random.Random) -> SudokuTask:
        while True:  # ends soon: see FEWEST_CLUES
            task = generate(self.size, self._clues, rng)
            if task is not None:
                return task

    def fingerprint(self, task: SudokuTask) -> str:
        """Returns the givens, normalised so that relabelled puzzles are equal; rotated and mirrored ones differ."""
        return renamed(task.givens)

    def task_key(self, task: SudokuTask) -> str:
        """Returns the solved grid, normalised so that relabelled ones are equal.

        Rotated and mirrored grids stay different: 4 x 4 has twelve grids like this, but only five if they were equal,
        too few to generalise from.
        """
        return renamed(task.solution)

    def hindsight(self, task: SudokuTask) -> str:
        """Returns the solved grid."""
        return task.solution

    def initial(self, task: SudokuTask) -> State:
        return State.initial(task)

    def apply(self, state: State, answer: str) -> State:
        return enter(state, answer)

    def outcome(self, state: State, turns: int) -> Outcome:
        """Returns the outcome of an episode that ends in `state`: 1 if solved, else 0 (paper, Sudoku)."""
        return Outcome(
            state.solved, float(state.solved), {"turns": float(turns), "correct": state.correct / state.task.holes}
        )

    def score_answer(self, state: State, answer: str) -> Score:
        """Scores a grid: format .1, legal .1, progress .8 (paper, Sudoku reasoner).

        A legal grid keeps the givens, breaks no rule and has a digit that the current grid lacks: the unchanged puzzle
        earns only the format part.
        """
        after = enter(state, answer)
        legal = after.grid == answer and _writes(state, answer)
        return Score(team=float(after.solved), local=0.1 + 0.1 * legal + 0.8 * progress(state, after))

    def score_printed(self, state: State, answer: str) -> Score:
        """Scores a printed grid: program .1, its run .1, the givens .1, the rules .1, progress .6.

        A constant grid and the unchanged puzzle earn only the first two: the rules count only if the givens are kept,
        and both only with a digit that the current grid lacks. The paper gives .8 for givens and rules, so one legal
        digit earns as much as a solution.
        """
        after = enter(state, answer)
        writes = _writes(state, answer) and state.task.keeps_givens(answer)
        shape = writes * (0.2 if after.grid == answer else 0.1)
        return Score(team=float(after.solved), local=0.2 + shape + 0.6 * progress(state, after))

    def parse(self, reply: str) -> str | None:
        return parse_grid(reply, self.style, self.size)

    def parse_printed(self, output: str) -> str | None:
        return parse_printed(output, self.size)

    # ------------------------------------------------------------------ prompts

    def shown(self, state: State) -> str:
        """Returns the current grid, with the givens if the team has entries, which may be wrong."""
        compact = self.style == "compact"
        shown = f"{'' if compact else 'The grid now is'}\n{self._drawn(state.grid)}"
        if state.grid != state.task.givens:
            label = "given" if compact else "of which these digits are given, all others may be wrong:"
            shown += f"\n{label}\n{self._drawn(state.task.givens)}"
        if compact:
            return shown
        cells = [cell for cell, char in enumerate(state.grid) if char == EMPTY]
        listed = ", ".join(f"({cell // self.size + 1}, {cell % self.size + 1})" for cell in cells)
        return f"{shown}\nEmpty cells, as (row, column) counted from 1 at the top left: {listed or 'none'}."

    def effect(self, state: State, draft: str | None) -> str:
        """Returns the drafted grid and the rules that it breaks, without using the solution."""
        compact = self.style == "compact"
        if draft is None:
            return "draft\n>none" if compact else "A tool user drafted no valid grid."
        flaws, holes = state.task.flaws(draft), draft.count(EMPTY)
        if compact:
            # "row 2 repeats 3" is r23#
            broken = f"{flaws[0][0]}{''.join(filter(str.isdigit, flaws[0]))}#" if flaws else ""
            return f"draft\n{self._drawn(draft)}>{broken or holes or 'goal'}"
        if flaws:
            verdict = f"is wrong: {'; '.join(flaws[:3])}{'; and more' if len(flaws) > 3 else ''}"
        else:
            verdict = f"breaks no rule; cells left empty: {holes}" if holes else "is complete and consistent"
        return f"A tool user drafted:\n{self._drawn(draft)}\nThis draft {verdict}."

    def ask(self, draft: str | None = None) -> str:
        """Returns the instruction to answer with a grid."""
        return (
            "Think step by step: for each empty cell find the digits that its row, its column and its box leave. Then "
            f"end with the whole grid: a line 'Grid:', right below it {self.size} rows of {self.size} digits, "
            "with '.' for a cell that you leave empty."
        )

    def _drawn(self, grid: str) -> str:
        # Spaced, because tokenizers merge several points into one token, which loses the columns.
        gap = "" if self.style == "compact" else " "
        return "\n".join(gap.join(grid[start : start + self.size]) for start in range(0, len(grid), self.size))


@with_options
class SingleSudoku(SingleAgent[State, str], Sudoku):
    """One agent sees the grid and fills it; up to `max_turns` turns."""

    tool: Tool = field(default="grid", init=False)
    require_isolation: bool = field(default=False, init=False)


def _writes(state: State, grid: str) -> bool:
    return any(char not in (EMPTY, old) for char, old in zip(grid, state.grid, strict=True))
