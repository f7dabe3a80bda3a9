"""Sokoban: a team pushes boxes onto targets, turn by turn.

Workflow (`drafting`) and rewards follow AT-GRPO (arXiv 2510.11062, App. A). Three deliberate differences from the
reference code: running out of turns is failure; a box on a target is rewarded once, relative to the most boxes on
targets so far; and avoiding deadlocks is rewarded only if the arrangement of boxes is new in the episode. So at every
decision an answer that solves earns more than any other, and walking about or pushing a box back and forth earns no
more than the .2 of any legal answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any

from annotated_types import Ge, Le

from verl_atgrpo import Outcome, Score, Split, stable_hash
from verl_atgrpo.environments.common.drafting import SingleAgent
from verl_atgrpo.environments.common.moves import MoveGame, Moves, Tool, ask_program, listed_cells
from verl_atgrpo.environments.common.options import Turns, WallDensity, option_error, with_options
from verl_atgrpo.environments.common.splits import draw_for, split_of
from verl_atgrpo.environments.sokoban.board import SokobanTask, State, approach, clear, team_reward, walk
from verl_atgrpo.environments.sokoban.levels import Generator, read_levels


@with_options
class Sokoban(MoveGame[State]):
    """A tool user drafts, the planner decides, the player moves; up to `max_turns` turns."""

    style = "full"
    rules = (
        "You play Sokoban: push every box onto a target. '#' is a wall, '-' is floor, '.' is a target, '$' is a box, "
        "'*' is a box on a target, '@' is the player, '+' is the player on a target. Moves are U (up), D (down), L "
        "(left), R (right). Moving into a box pushes it one square on, unless a wall or another box is there. Boxes "
        "cannot be pulled. A blocked move ends the list of moves."
    )
    program_instruction = ask_program(
        "that pushes every box onto a target",
        "breadth-first search (BFS) over the positions of the player and all boxes, each of them visited once",
    )
    search = "for each push name the square behind the box where the player must stand, and its way there."
    check = "follow the draft move by move; where it does not solve the board, find the pushes that do."

    size: Annotated[int, Ge(5), Le(20)] | None = None
    """Side length of a generated board, walls around it included (6)."""
    boxes: Annotated[int, Ge(1), Le(10)] | None = None
    """Boxes on a generated board (1)."""
    wall_density: WallDensity | None = None
    """Probability of an inner cell to be a wall (0.1)."""
    min_solution: Annotated[int, Ge(1), Le(10_000)] | None = None
    """Least moves that solve a board (1); more than 1 takes a search for each."""
    max_solution: Annotated[int, Ge(1), Le(10_000)] | None = None
    """Most moves that solve a board: of longer solutions the first moves have been made (no bound)."""
    seed: int | None = None
    """Boards derive from it (0)."""
    levels: str | None = None
    """A file of Boxoban levels instead of the generator; excludes all options above."""
    max_turns: Turns = 4
    """Most turns of an episode."""
    max_moves: Moves = 40
    """Most moves in one answer."""
    tool: Tool = "python"
    """`python`: the tool user writes a program that prints moves; `moves`: it drafts them itself."""
    require_isolation: bool = False
    """Refuses machines below level `namespaces` (docs/sandbox.md)."""

    def __post_init__(self) -> None:
        self.check_form("moves")
        names = ("size", "boxes", "wall_density", "min_solution", "max_solution", "seed")
        given: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        self._generator = Generator(**given)
        self._levels: dict[Split, list[SokobanTask]] | None = None
        if self.levels is not None:
            if given:
                named = ", ".join(f"{name}={value!r}" for name, value in given.items())
                raise option_error(
                    f"{named}: no effect with levels={self.levels!r}, which replaces the generator; remove one or the "
                    "other"
                )
            self._levels = {"train": [], "val": []}
            for level in read_levels(self.levels):
                self._levels[split_of(self.task_key(level))].append(level)

    def task(self, split: Split, index: int) -> SokobanTask:
        """Returns board `index` of `split`; splits are disjoint because walls and targets decide the split.

        Raises IndexError beyond the last level of a file.
        """
        if self._levels is not None:
            return self._levels[split][index]
        generator = self._generator
        rng = random.Random(stable_hash("sokoban", generator.seed, split, index))
        task = draw_for(split, lambda: generator.draw(rng), self.task_key)
        if task is None:
            raise generator.too_few(f"the split {split!r}")
        return task

    def num_tasks(self, split: Split) -> int | None:
        """Returns how many levels of the file belong to `split`; None for the generator."""
        return None if self._levels is None else len(self._levels[split])

    def fingerprint(self, task: SokobanTask) -> str:
        """Returns the drawing of the board."""
        return task.drawing

    def task_key(self, task: SokobanTask) -> str:
        """Returns walls and targets: player and boxes move."""
        return task.ground

    def initial(self, task: SokobanTask) -> State:
        return State.initial(task)

    def apply(self, state: State, answer: str) -> State:
        return walk(state, answer).end

    def outcome(self, state: State, turns: int) -> Outcome:
        """Returns the outcome of an episode that ends in `state`: the share of boxes on targets, 1 for success."""
        share = len(state.boxes & state.task.targets) / len(state.boxes)
        return Outcome(state.solved, share, {"turns": float(turns)})

    def score_answer(self, state: State, answer: str) -> Score:
        """Scores a move list: format .1, legal .1, no deadlock .8 if the arrangement of boxes is new."""
        walked = walk(state, answer)
        local = 0.1 + 0.1 * walked.legal + 0.8 * clear(state, walked.end)
        return Score(team=team_reward(state, walked.end), local=local)

    def score_printed(self, state: State, answer: str) -> Score:
        """Scores a printed move list: program .1, its run .1, up to .8 for lowering the potential.

        The last part is the share by which the list lowers the lowest potential so far; the full share solves.
        """
        end = walk(state, answer).end
        return Score(team=team_reward(state, end), local=0.2 + 0.8 * approach(state, end))

    # ------------------------------------------------------------------ prompts

    def shown(self, state: State) -> str:
        """Returns the board with all positions."""
        task, stride = state.task, state.task.stride
        rows, columns = task.drawing.count("\n") + 1, stride - 1

        def listed(cells: Iterable[int]) -> str:
            return listed_cells(divmod(cell, stride) for cell in cells)

        inner = [cell for cell in task.walls if 0 < cell // stride < rows - 1 and 0 < cell % stride < columns - 1]
        return (
            f"{_board(state)}\nSquares are (row, column), counted from (0, 0) at the top left to "
            f"{(rows - 1, columns - 1)}. The player is at {listed([state.player])}, boxes are at "
            f"{listed(state.boxes)}, targets at {listed(task.targets)}, walls inside the border at {listed(inner)}."
        )

    def lead(self, state: State, moves: str) -> str:
        """Returns the board that moves lead to."""
        walked = walk(state, moves)
        end = walked.end
        if end.solved:
            return "They solve the board."
        blocked = "" if walked.legal else ", where the next move is blocked"
        lost = " This is a deadlock: a box can never reach a target." if end.task.deadlocked(end.boxes) else ""
        return f"They lead to this board{blocked}:\n{_board(end)}\n{lost}".rstrip()


@with_options
class SingleSokoban(SingleAgent[State, str], Sokoban):
    """One agent sees the board and moves; up to `max_turns` turns."""

    tool: Tool = field(default="moves", init=False)
    require_isolation: bool = field(default=False, init=False)


def _board(state: State) -> str:
    # Visible floor: tokenizers merge spaces, and models miscount them.
    return state.draw().replace(" ", "-")
