"""Plan-Path: a team leads a walker through a grid with walls to a goal, turn by turn.

Workflow (`drafting`) and rewards follow AT-GRPO (arXiv 2510.11062, App. A). Two deliberate differences from the
reference code: progress is rewarded once (relative to the closest point reached so far, so stepping back and forth
earns nothing), and the prompt shows the current position, not the start.
"""

from __future__ import annotations

import random
from dataclasses import field
from typing import Annotated

from annotated_types import Ge, Le

from verl_atgrpo import EnvironmentConfigError, Message, Outcome, Score, Split, stable_hash
from verl_atgrpo.environments.common.drafting import SingleAgent
from verl_atgrpo.environments.common.moves import MoveGame, Moves, Tool, ask_program, listed_cells
from verl_atgrpo.environments.common.options import Turns, WallDensity, option_error, with_options
from verl_atgrpo.environments.common.splits import MOST_DRAWS, draw_for
from verl_atgrpo.environments.common.workflow import Style, chat
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State, team_reward, walk

_SHOT_DRAWS = 50
"""Additional grids that are generated to find examples with different answers."""


@with_options
class PlanPath(MoveGame[State]):
    """A tool user drafts, the planner decides, the walker moves; up to `max_turns` turns."""

    rules = (
        "You guide a walker over a grid. '.' is free, '#' is a wall, 'P' is the walker, 'G' is the goal. "
        "Moves are U (up), D (down), L (left), R (right). The walker stops at a wall and at the border."
    )
    program_instruction = ask_program("from P to G", "breadth-first search (BFS) over the cells, from P")
    search = "name the cell that each move leads to, and go around walls."
    check = "follow the draft cell by cell, and where it fails find another way."

    size: Annotated[int, Ge(2), Le(100)] = 10
    """Side length of the grid."""
    wall_density: WallDensity = 0.2
    """Probability of a cell to be a wall."""
    min_distance: Annotated[int, Ge(1), Le(100)] = 1
    """Fewest steps between start and goal."""
    max_distance: Annotated[int, Ge(1), Le(10_000)] = 10_000
    """Most steps between them."""
    max_turns: Turns = 4
    """Most turns of an episode."""
    max_moves: Moves = 40
    """Most moves in one answer."""
    tool: Tool = "python"
    """`python`: the tool user writes a program that prints moves; `moves`: it drafts them itself."""
    style: Style = "full"
    """`full` prompts explain the task; `compact` ones are for tiny models trained on them."""
    few_shot: Annotated[int, Ge(0), Le(32)] = 0
    """Solved examples shown before the question (`style: full`, `tool: moves`)."""
    seed: int = 0
    """Tasks derive from it."""
    require_isolation: bool = False
    """Refuses machines below level `namespaces` (docs/sandbox.md)."""

    def __post_init__(self) -> None:
        if self.min_distance > self.size:
            raise option_error(f"min_distance={self.min_distance}: between 1 and size={self.size}")
        if self.max_distance < self.min_distance:
            raise option_error(f"max_distance={self.max_distance} is below min_distance={self.min_distance}")
        self.check_form("moves")
        if self.few_shot:
            if (self.style, self.tool) != ("full", "moves"):
                raise option_error(f"few_shot={self.few_shot} goes with style: full, tool: moves")
            self.search = self.check = ""  # examples answer without reasoning
            self.examples = self._solved_examples(self.few_shot)

    def task(self, split: Split, index: int) -> PlanPathTask:
        """Returns grid `index` of `split`; splits are disjoint because walls and goal decide the split."""
        rng = random.Random(stable_hash("plan_path", self.seed, split, index))
        task = draw_for(split, lambda: self._draw_task(rng), self.task_key)
        if task is None:
            raise self._too_few_grids(f"the split {split!r}")
        return task

    def _draw_task(self, rng: random.Random) -> PlanPathTask:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        for _ in range(MOST_DRAWS):
            walls = frozenset(cell for cell in cells if rng.random() < self.wall_density)
            free = [cell for cell in cells if cell not in walls]
            if len(free) < 2:
                continue
            start, goal = rng.sample(free, 2)
            task = PlanPathTask(self.size, walls, start, goal)
            if self.min_distance <= task.distance.get(start, 0) <= self.max_distance:
                return task
        raise self._too_few_grids("any split")

    def _too_few_grids(self, where: str) -> EnvironmentConfigError:
        return option_error(
            f"size={self.size}, wall_density={self.wall_density}, min_distance={self.min_distance}, "
            f"max_distance={self.max_distance}: hardly any grid fits {where}; use a larger size, a smaller "
            "min_distance or a larger max_distance"
        )

    def fingerprint(self, task: PlanPathTask) -> str:
        """Returns the drawing of the grid."""
        return task.draw(task.start)

    def task_key(self, task: PlanPathTask) -> str:
        """Returns walls and goal: the walker can reach any position."""
        return task.draw(task.goal)

    def hindsight(self, task: PlanPathTask) -> str:
        """Returns the moves of a shortest path from the start."""
        return task.shortest(task.start, random.Random(0))

    def initial(self, task: PlanPathTask) -> State:
        return State.initial(task)

    def apply(self, state: State, answer: str) -> State:
        return walk(state, answer).end

    def outcome(self, state: State, turns: int) -> Outcome:
        """Returns the outcome of an episode that ends in `state`: the share of the way done, 1 at the goal."""
        share = team_reward(State.initial(state.task), state)
        return Outcome(state.solved, share, {"turns": float(turns)})

    def score_answer(self, state: State, answer: str) -> Score:
        """Scores a move list: format .1, legal .1, on a shortest path .8 (paper, Plan-Path planner)."""
        walked = walk(state, answer)
        local = 0.1 + 0.1 * walked.legal + 0.8 * walked.on_shortest_path
        return Score(team=team_reward(state, walked.end), local=local)

    def score_printed(self, state: State, answer: str) -> Score:
        """Scores a printed move list: program .1, its run .1, a list .2, the share of the way .6.

        The paper gives .8 for any list, so a made-up one earns as much as the result of a search.
        """
        team = team_reward(state, walk(state, answer).end)
        return Score(team=team, local=0.4 + 0.6 * team)

    # ------------------------------------------------------------------ prompts

    def shown(self, state: State) -> str:
        """Returns the grid with all positions; only the grid if there are few-shot examples."""
        task = state.task
        grid = task.draw(state.position)
        if self.style == "compact":
            # A tiny model learns to compare positions long before it learns to search.
            return f"{''.join(map(str, (*state.position, *task.goal)))}\n{grid}"
        if self.examples:
            return grid
        return (
            f"{grid}\nCells are (row, column), counted from (0, 0) at the top left to {(task.size - 1,) * 2}. P is at "
            f"{state.position}, G is at {task.goal}, walls are at {listed_cells(task.walls)}. "
            "U takes 1 off the row, D adds 1 to it, L takes 1 off the column, R adds 1 to it."
        )

    def lead(self, state: State, moves: str) -> str:
        """Returns the cell that moves lead to, and whether a wall stops them there."""
        walked = walk(state, moves)
        row, column = walked.end.position
        if self.style == "compact":
            return "goal" if walked.end.solved else f"{row}{column}" if walked.legal else f"{row}{column}#"
        where = "to the goal" if walked.end.solved else f"to row {row}, column {column}"
        return f"They lead {where}{'' if walked.legal else ', where the next move hits a wall'}."

    def _solved_examples(self, count: int) -> list[Message]:
        """Returns solved grids with different answers, as far as there are that many.

        If all examples have the same answer, models copy it.
        """
        shots: list[tuple[str, str]] = []
        spare: list[tuple[str, str]] = []
        for number in range(_SHOT_DRAWS + count):
            # Negative indices are never used for tasks, so examples are in neither split.
            task = self.task("train", -1 - number)
            moves = task.shortest(task.start, random.Random(stable_hash("shot", number)))[: self.max_moves]
            new = moves not in (answer for _, answer in shots)
            (shots if new else spare).append((task.draw(task.start), moves))
            if len(shots) == count:
                break
        messages: list[Message] = []
        for grid, answer in (shots + spare)[:count]:
            messages += chat(f"{grid}\n{self.ask()}")
            messages.append({"role": "assistant", "content": f"Moves: {', '.join(answer)}"})
        return messages


@with_options
class SinglePlanPath(SingleAgent[State, str], PlanPath):
    """One agent sees the grid and moves; up to `max_turns` turns."""

    tool: Tool = field(default="moves", init=False)
    require_isolation: bool = field(default=False, init=False)
