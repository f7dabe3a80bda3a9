"""Plan-Path's grids told in words, for small instruct models: short questions, answers of one word.

Two games. `Walk`, without walls: a navigator names a direction, a pacer the number of steps. `WalledWalk`: a navigator
names a direction, a checker says whether that way is free, and a crash ends the episode. No prompt shows a drawing,
which small models cannot read. Navigators are asked first and told then, so that what all their prompts share is a
prefix, which the engine computes once.

The navigators' and the pacer's prompts tell position and goal, and splits differ in the goal: none of validation
occurs in training. The checker's tell neither, so it sees in validation what it has seen in training.
"""

from __future__ import annotations

import asyncio
import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from verl_atgrpo import Environment, Outcome, Score, Split, Team, stable_hash
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.common.options import Turns, WallDensity, option_error, with_options
from verl_atgrpo.environments.common.splits import MOST_DRAWS, part_of
from verl_atgrpo.environments.common.words import Said, read_number, read_word
from verl_atgrpo.environments.common.workflow import chat
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State, team_reward, walk

DIRECTIONS = {"up": "U", "down": "D", "left": "L", "right": "R"}
_ANY, _FREE, _RIGHT_AXIS = 0.05, 0.3, 0.5
_NEAR = 0.35
_SPARE = 2
_BACK = {"up": "down", "down": "up", "left": "right", "right": "left"}
_WORD = re.compile(r"[\W_]*(?:[A-Za-z]+|[0-9]+)[\W_]*")
_VERDICTS = ("wall", "free")
_WHICH_WAY = "Which free way leads to the goal: up, down, left or right? Answer with one word."
Size = Annotated[int, Ge(2), Le(100)]


@dataclass(frozen=True)
class WalledTask(PlanPathTask):
    """A field, whether it is one to train on, and what the checker is asked then."""

    training: bool = False
    practice: tuple[tuple[str, ...], ...] = ()
    """For every turn, the directions in random order if the checker is also asked about the first wall among them.

    Empty tuples for the other turns, and in validation."""


@dataclass(frozen=True)
class Remembered(State):
    """A state with the direction that leads back, and those that the checker has called a wall since the last step."""

    back: str | None = None
    refused: frozenset[str] = frozenset()


class _Told(Environment):
    """A walk told in words, whatever the team."""

    size: int
    wall_density: float = 0.0
    min_distance: int = 1
    """Fewest steps from start to goal."""
    max_distance: int
    """Most steps from start to goal."""
    max_turns: int
    seed: int

    def task(self, split: Split, index: int) -> PlanPathTask:
        """Returns field `index` of `split`; splits are disjoint because they have different goals."""
        rng = random.Random(stable_hash("walk", self.seed, split, index))
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        goals = part_of(cells, split)
        for _ in range(MOST_DRAWS):
            goal = rng.choice(goals)
            walls = frozenset(cell for cell in cells if cell != goal and rng.random() < self.wall_density)
            task = PlanPathTask(self.size, walls, goal, goal)
            near = range(self.min_distance, self.max_distance + 1)
            if starts := [cell for cell in cells if task.distance.get(cell) in near]:
                return replace(task, start=rng.choice(starts))
        raise option_error(
            f"size={self.size}: hardly any field has a start {self.min_distance} to {self.max_distance} steps from "
            "the goal; use a larger size, or less walls"
        )

    def fingerprint(self, task: PlanPathTask) -> str:
        """Returns the drawing of the field."""
        return task.draw(task.start)

    def task_key(self, task: PlanPathTask) -> str:
        """Returns the goal: prompts tell it, with what is around the walker and not the field's size."""
        return str(task.goal)

    async def run(self, task: PlanPathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the walker ends a turn at the goal."""
        initial = state = Remembered(task, task.start, task.distance[task.start])
        turns, crashed = 0, False
        seen: set[Remembered] = set()
        while turns < self.max_turns and not state.solved and not crashed and state not in seen:
            # In training, a prompt that every lost turn repeats would outweigh all others of a step.
            if isinstance(task, WalledTask) and task.training:
                seen.add(state)
            state, crashed = await self._turn(state, turns, team)
            turns += 1
        share = team_reward(initial, state)
        return Outcome(state.solved, share, {"turns": float(turns), "crashed": float(crashed)})

    @abstractmethod
    async def _turn(self, state: Remembered, turn: int, team: Team) -> tuple[Remembered, bool]:
        """Plays a turn, counted from 0; returns the state after it, and whether the walker crashed.

        A turn without answer is lost.
        """


def where_goal_lies(state: State) -> str:
    """Returns where the goal lies, seen from the walker, as a sentence."""
    (row, column), (goal_row, goal_column) = state.position, state.task.goal
    down, right = goal_row - row, goal_column - column
    parts = [
        f"{abs(steps)} {name}{'s' * (abs(steps) > 1)} {after if steps > 0 else before}"
        for steps, name, before, after in (
            (down, "row", "up", "down"),
            (right, "column", "to the left", "to the right"),
        )
        if steps
    ]
    return f"Your goal is {' and '.join(parts)}."


def where_walker_is(state: State) -> str:
    """Returns the walker's row and column, counted from 1, as a sentence."""
    row, column = state.position
    return f"You are at row {row + 1}, column {column + 1}."


def exact_steps(state: State, direction: str) -> int:
    """Returns how many steps in a direction lead to the goal's row or column; 0 if it leads away from it."""
    down, right = MOVES[DIRECTIONS[direction]]
    row, column = state.position
    return max(0, (state.task.goal[0] - row) * down + (state.task.goal[1] - column) * right)


@with_options
class Walk(_Told):
    """A navigator names a direction, a pacer the number of steps; there are no walls."""

    agents: ClassVar[tuple[str, ...]] = ("navigator", "pacer")

    size: Size = 6
    """Rows and columns of the field."""
    max_turns: Turns = 3
    """Most turns; two suffice."""
    seed: int = 0
    """Tasks derive from it."""

    def __post_init__(self) -> None:
        self.max_distance = 2 * self.size  # any field can be crossed in two turns

    async def _turn(self, state: Remembered, turn: int, team: Team) -> tuple[Remembered, bool]:
        lies = f"{where_walker_is(state)} {where_goal_lies(state)}"
        way = await team.navigator.act(
            chat(f"In which direction do you go first: up, down, left or right? Answer with one word. {lies}"),
            partial(self.score_direction, state),
        )
        direction = read_word(way.text, tuple(DIRECTIONS))
        if direction is None:
            return state, False
        pace = await team.pacer.act(
            chat(f"How many steps do you go? Answer with the number only. {lies} You go {direction.value}."),
            partial(self.score_steps, state, direction.value),
        )
        steps = read_number(pace.text)
        return (state if steps is None else self._after(state, direction.value, steps.value)), False

    def _after(self, state: Remembered, direction: str, steps: int) -> Remembered:
        """Returns the state after this many steps; the walker stops at the border, and not at the goal."""
        row, column = (
            min(max(here + change * steps, 0), self.size - 1)
            for here, change in zip(state.position, MOVES[DIRECTIONS[direction]], strict=True)
        )
        return replace(state, position=(row, column))

    def score_direction(self, state: State, reply: str) -> Score:
        """Scores a direction: 1 towards the goal, .05 another one."""
        said = read_word(reply, tuple(DIRECTIONS))
        return Score() if said is None else said.worth(1.0 if exact_steps(state, said.value) else _ANY)

    def score_steps(self, state: State, direction: str, reply: str) -> Score:
        """Scores a number of steps: 1 if exact, up to .35 if near."""
        said = read_number(reply)
        return Score() if said is None else said.worth(self._pace(state, direction, said.value))

    def _pace(self, state: State, direction: str, steps: int) -> float:
        missed = abs(steps - exact_steps(state, direction))
        return 1.0 if missed == 0 else _NEAR * max(0.0, 1 - missed / self.size)


class SingleWalk(Walk):
    """One agent names direction and number of steps in one answer, such as `left 3`."""

    agents: ClassVar[tuple[str, ...]] = ("solo",)

    async def _turn(self, state: Remembered, turn: int, team: Team) -> tuple[Remembered, bool]:
        prompt = chat(
            "In which direction do you go first, up, down, left or right, and how many steps? "
            f"Answer with one word and one number. {where_walker_is(state)} {where_goal_lies(state)}"
        )
        reply = (await team.solo.act(prompt, partial(self.score_both, state))).text
        direction, steps = read_word(reply, tuple(DIRECTIONS)), read_number(reply)
        if direction is None or steps is None:
            return state, False
        return self._after(state, direction.value, steps.value), False

    def score_both(self, state: State, reply: str) -> Score:
        """Scores an answer: half for the direction, half for the number, as in the team."""
        direction, steps = read_word(reply, tuple(DIRECTIONS)), read_number(reply)
        if direction is None or steps is None:
            return Score()
        towards = exact_steps(state, direction.value) > 0
        earned = (1.0 if towards else _ANY) + self._pace(state, direction.value, steps.value) * towards
        words = reply.split()
        alone = len(words) == 2 and all(map(_WORD.fullmatch, words))
        return Said(direction.value, alone).worth(_RIGHT_AXIS * earned)


@with_options
class WalledWalk(_Told):
    """A navigator names a direction, a checker says whether it is free; a crash ends the episode.

    The navigator is told where it is, what is around, and which directions lead to the goal: as words alone, since
    with numbers of rows and columns among them small models hardly tell right directions from wrong ones. The way back
    is not among the free ways, but in a dead end: a walker that has to leave the direct way would return to where it
    came from, again and again. A direction that the checker has called a wall is told to the navigator, so that a lost
    turn changes its question. The checker is told of each direction whether it is a wall or free, the one in question
    last, so that it can copy a right verdict from a fixed place; its question names neither of the two, as it would
    copy that.

    The best of K candidates of a navigator is hardly ever a wall, so a checker would learn that all ways are free. In
    training it is also asked about a wall, while the navigator chooses; what it says then has no effect on the walk.
    An episode of training ends where it was before, as a lost turn would only repeat its questions.
    """

    agents: ClassVar[tuple[str, ...]] = ("navigator", "checker")

    size: Size = 5
    """Rows and columns of the field."""
    wall_density: WallDensity = 0.2
    """Probability of a cell to be a wall."""
    min_distance: Annotated[int, Ge(1), Le(100)] = 3
    """Fewest steps between start and goal."""
    max_turns: Turns = 8
    """Most turns, each one step."""
    wall_questions: Annotated[float, Ge(0), Le(1)] = 1.0
    """Share of the training turns in which the checker is also asked about a wall."""
    seed: int = 0
    """Tasks derive from it."""

    def __post_init__(self) -> None:
        self.max_distance = self.max_turns - _SPARE  # a turn is one step; prompts do not show the whole field
        if self.min_distance > min(self.max_distance, self.size):
            raise option_error(
                f"min_distance={self.min_distance}: at most size={self.size}, and {_SPARE} less than "
                f"max_turns={self.max_turns}"
            )

    def task(self, split: Split, index: int) -> WalledTask:
        """Returns field `index` of `split`, and in training the turns with a question about a wall."""
        task = super().task(split, index)
        rng = random.Random(stable_hash("wall_questions", self.seed, split, index))
        share = self.wall_questions if split == "train" else 0.0
        practice = tuple(
            tuple(rng.sample(tuple(DIRECTIONS), len(DIRECTIONS))) if rng.random() < share else ()
            for _ in range(self.max_turns)
        )
        return WalledTask(task.size, task.walls, task.start, task.goal, split == "train", practice)

    async def _turn(self, state: Remembered, turn: int, team: Team) -> tuple[Remembered, bool]:
        way, _ = await asyncio.gather(
            team.navigator.act(
                chat(f"{_WHICH_WAY} {self.told(state)}"),
                partial(self.score_direction, state),
            ),
            self._practise(state, turn, team),
        )
        direction = read_word(way.text, tuple(DIRECTIONS))
        verdict = None if direction is None else await self._ask_checker(state, direction.value, team)
        if direction is None or verdict is None:
            return state, False
        if verdict == "wall":
            return replace(state, refused=state.refused | {direction.value}), False
        return self._step(state, direction.value)

    async def _practise(self, state: State, turn: int, team: Team) -> None:
        """Asks the checker about a wall, if it is to practise in this turn and there is one."""
        practice = state.task.practice[turn] if isinstance(state.task, WalledTask) and state.task.practice else ()
        if wall := next((name for name in practice if not self._free(state, name)), None):
            await self._ask_checker(state, wall, team)

    def _step(self, state: State, direction: str) -> tuple[Remembered, bool]:
        walked = walk(state, DIRECTIONS[direction])
        end = walked.end
        return Remembered(end.task, end.position, end.closest, _BACK[direction]), not walked.legal

    async def _ask_checker(self, state: State, direction: str, team: Team) -> str | None:
        """Returns what the checker says of a direction, one of `_VERDICTS`, or None if it says neither."""
        ways = ", ".join(f"{name}: {self._verdict(state, name)}" for name in sorted(DIRECTIONS, key=direction.__eq__))
        verdict = await team.checker.act(
            chat(f"What is {direction}? Answer with one word. {ways}."),
            partial(self.score_verdict, state, direction),
        )
        said = read_word(verdict.text, _VERDICTS)
        return None if said is None else said.value

    def told(self, state: Remembered) -> str:
        """Returns where the walker and the goal are, what is around, and which directions lead to the goal."""
        free = [way for way in DIRECTIONS if self._free(state, way)]
        walls = [way for way in DIRECTIONS if way not in free]
        refused = [way for way in DIRECTIONS if way in state.refused]
        ahead = [way for way in free if way != state.back] or free
        row, column = state.task.goal
        # A walker that goes the longer part first comes to the goal more often: where it is level with the goal and a
        # wall is between, it has to leave the direct way.
        steps = {way: exact_steps(state, way) for way in DIRECTIONS}
        towards = sorted((way for way in steps if steps[way] and way not in refused), key=lambda way: -steps[way])
        around = [way for way in ahead if way not in refused] or ahead
        return "".join(
            (
                f"{where_walker_is(state)} The goal is at row {row + 1}, column {column + 1}. ",
                f"Walls: {_listed(walls)}. Free: {_listed(ahead)}. ",
                f"You cannot go {' or '.join(refused)}. " if refused else "",
                f"The goal is {' and '.join(towards)}." if towards else f"The way around is {' and '.join(around)}.",
            )
        )

    def _free(self, state: State, direction: str) -> bool:
        return walk(state, DIRECTIONS[direction]).legal

    def _verdict(self, state: State, direction: str) -> str:
        """Returns the right one of `_VERDICTS`."""
        return "free" if self._free(state, direction) else "wall"

    def score_direction(self, state: State, reply: str) -> Score:
        """Scores a direction: 1 if its step is on a shortest way, .3 if it is free, .05 if not."""
        said = read_word(reply, tuple(DIRECTIONS))
        if said is None:
            return Score()
        walked = walk(state, DIRECTIONS[said.value])
        return said.worth(1.0 if walked.on_shortest_path else _FREE if walked.legal else _ANY)

    def score_verdict(self, state: State, direction: str, reply: str) -> Score:
        """Scores a verdict: 1 if it is right, .05 if not.

        Further words cost nothing: "down: wall" is copied, and trained for the word alone the model says "free".
        """
        said = read_word(reply, _VERDICTS)
        if said is None:
            return Score()
        return Score(local=1.0 if said.value == self._verdict(state, direction) else _ANY)


@with_options
class SingleWalledWalk(WalledWalk):
    """One agent names a direction, and nobody checks it; the tasks are those of the team."""

    agents: ClassVar[tuple[str, ...]] = ("solo",)
    wall_questions: float = field(default=0.0, init=False)

    async def _turn(self, state: Remembered, turn: int, team: Team) -> tuple[Remembered, bool]:
        prompt = chat(f"{_WHICH_WAY} {self.told(state)}")
        reply = await team.solo.act(prompt, partial(self.score_direction, state))
        direction = read_word(reply.text, tuple(DIRECTIONS))
        return (state, False) if direction is None else self._step(state, direction.value)


def _listed(ways: Sequence[str]) -> str:
    return ", ".join(ways) or "none"
