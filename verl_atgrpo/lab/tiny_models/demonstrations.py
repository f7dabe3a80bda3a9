"""Demonstrations for the supervised fine-tuning of tiny models: prompts with answers from known distributions.

One demonstrator per environment. No torch here.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.common.moves import MOVES, Cell, moved
from verl_atgrpo.environments.common.workflow import chat
from verl_atgrpo.environments.in_a_row import InARow, best_moves, random_moves
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.plan_path import grid as path_grid
from verl_atgrpo.environments.sudoku import Sudoku
from verl_atgrpo.environments.sudoku import grid as sudoku_grid
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.messages import Message
from verl_atgrpo.play.registry import make
from verl_atgrpo.play.tools import Tool

END = ""
"""Represents the end of an answer in a distribution."""

Choice = dict[str, float]
"""The demonstrator's distribution over tokens and END at one position of an answer."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt, an answer, and the distributions that its tokens were sampled from."""

    prompt: list[Message]
    answer: Sequence[str]
    """Tokens; in a string every character is a token."""
    choices: list[Choice]
    """Distributions of every token of the answer and of END. Training on distributions instead of sampled tokens takes
    several times fewer examples."""
    tools: Sequence[Tool] = ()
    """What the prompt gives it to call."""


@dataclass(frozen=True)
class Demonstrator:
    """Makes demonstrations for one environment."""

    environment: str
    """Registered name of the environment."""
    options: Mapping[str, Any]
    """Options of the environment, as in the CPU recipe."""
    demonstrate: Callable[[Any, random.Random, float], Demonstration]
    """Returns a demonstration on a random training task; with the given probability relevant tokens are random."""
    response_length: int
    """Tokens of the longest answer, including its end."""
    words: tuple[str, ...] = ()
    """Words of prompts and answers that are one token each, to shorten sequences."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `warm_start.WarmStart` that differ from its defaults."""

    def make_environment(self) -> Environment:
        """Returns the environment."""
        return make(self.environment, **self.options)


DIGITS = "0123456789"


def sure(tokens: Sequence[str]) -> list[Choice]:
    """Returns distributions that always give these tokens."""
    return [{token: 1.0} for token in tokens]


def unsure(text: str, noise: float, *kinds: str) -> list[Choice]:
    """Returns distributions over characters that with probability `noise` give a random one of the same kind.

    A kind is a string of characters that are confused with each other; other characters are certain.
    """
    choices = []
    for char in text:
        likely = next((kind for kind in kinds if char in kind), char)
        choices.append({other: noise / len(likely) + (other == char) * (1 - noise) for other in likely})
    return choices


def write(choices: Sequence[Choice], rng: random.Random) -> tuple[list[str], list[Choice]]:
    """Returns an answer sampled from `choices`, and the distributions including END."""
    answer = [rng.choices(*zip(*choice.items(), strict=True))[0] for choice in choices]
    return answer, [*choices, {END: 1.0}]


# ---------------------------------------------------------------------- any step that leads closer to the goal


def path(
    task: path_grid.PlanPathTask, position: Cell, noise: float, limit: int, rng: random.Random, draft: str = ""
) -> tuple[str, list[Choice]]:
    """Returns at most `limit` moves from `position` and the distributions they were sampled from.

    Moves are uniform over those that lead closer to the goal, or follow `draft` until the first deviation from it;
    with probability `noise` a move is random. The answer ends at the goal.
    """
    moves, choices = "", []
    while len(moves) < limit and (good := task.closer(position)):
        if draft.startswith(moves) and len(draft) > len(moves):
            good = [draft[len(moves)]]
        choices.append({name: noise / len(MOVES) + (name in good) * (1 - noise) / len(good) for name in MOVES})
        names, chances = zip(*choices[-1].items(), strict=True)
        move = rng.choices(names, chances)[0]
        moves += move
        ahead = moved(position, move)
        position = ahead if task.free(ahead) else position
    return moves, [*choices, {END: 1.0}]


def _plan_path(env: PlanPath, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent."""
    task = env.task("train", rng.randrange(1 << 40))
    cells, (row, column) = [cell for cell in task.distance if cell != task.goal], task.goal
    # Detours around walls are hard and rare: half of the demonstrations start with one if possible.
    detours = [cell for cell in cells if task.distance[cell] > abs(cell[0] - row) + abs(cell[1] - column)]
    if detours and rng.random() < 0.5:
        position = rng.choice(detours)
    else:
        position = task.start if rng.random() < 0.7 else rng.choice(cells)
    state = path_grid.State(task, position, task.distance[position])
    if rng.random() < 0.5:
        return Demonstration(env.draft_prompt(state), *path(task, position, noise, env.max_moves, rng))
    # Good and bad drafts, so that the planner learns to use where they lead.
    drafted, _ = path(task, position, 0.3 if rng.random() < 0.5 else 0.0, env.max_moves, rng)
    follow = drafted if path_grid.walk(state, drafted).on_shortest_path else ""
    answer = path(task, position, noise, env.max_moves, rng, follow)
    return Demonstration(env.plan_prompt(state, Draft(drafted, drafted)), *answer)


PLAN_PATH = Demonstrator(
    "plan_path",
    {"size": 4, "wall_density": 0.2, "max_turns": 4, "max_moves": 8, "tool": "moves", "style": "compact"},
    _plan_path,
    response_length=10,
    words=("draft", "plan", "goal", "none"),
)


# ---------------------------------------------------------------------- the whole solved grid


def fill(task: sudoku_grid.SudokuTask, noise: float, rng: random.Random) -> tuple[list[str], list[Choice]]:
    """Returns a full grid, row by row, and the distributions it was sampled from.

    Every digit that is not a given is random with probability `noise`.
    """
    choices: list[Choice] = []
    digits = sudoku_grid.layout(task.size).digits
    for cell, (given, right) in enumerate(zip(task.givens, task.solution, strict=True)):
        if cell and cell % task.size == 0:
            choices += sure("\n")
        choices += sure(given) if given != sudoku_grid.EMPTY else unsure(right, noise, digits)
    return write(choices, rng)


def _sudoku(env: Sudoku, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent, on the initial puzzle or after an answer."""

    def grid(noise: float) -> str:
        return "".join(fill(task, noise, rng)[0]).replace("\n", "")

    task = env.task("train", rng.randrange(1 << 40))
    state = sudoku_grid.State.initial(task)
    if rng.random() < 0.5:
        state = sudoku_grid.enter(state, grid(0.5))
    if rng.random() < 0.5:
        return Demonstration(env.draft_prompt(state), *fill(task, noise, rng))
    # Good and bad drafts, so that the planner learns to use the rules that they break.
    drafted = grid(0.5 if rng.random() < 0.5 else 0.0)
    return Demonstration(env.plan_prompt(state, Draft(drafted, drafted)), *fill(task, noise, rng))


SUDOKU = Demonstrator(
    "sudoku",
    {"size": 4, "clues": 8, "max_turns": 4, "tool": "grid", "style": "compact"},
    _sudoku,
    response_length=20,
    words=("draft", "plan", "goal", "none", "given"),
    training={"clean_steps": 300, "noise": 0.2},
)


# ---------------------------------------------------------------------- the best moves of a game, and other legal ones


def _in_a_row(env: InARow, rng: random.Random, noise: float) -> Demonstration:
    """Returns a position of a random training game with the best moves, or with probability `noise` any legal one."""
    rules, opening = env.rules, env.task("train", rng.randrange(1 << 20)).opening
    board = rules.after(opening)
    board = rules.after([*opening, *random_moves(rules, board, rng.randint(0, len(board) - 1), rng)])
    legal, best = rules.moves(board), best_moves(rules, board, env.depth)
    chances = {str(move + 1): noise / len(legal) + (1 - noise) * (move in best) / len(best) for move in legal}
    return Demonstration(chat(env.prompt(board)), *write([chances], rng))


TIC_TAC_TOE = Demonstrator(
    "tic_tac_toe",
    {"style": "compact", "against": ["random", "search"]},
    _in_a_row,
    response_length=2,
    training={"clean_steps": 600},
)

# Shows which stones win at once, and no plan: the rest is for self-play.
CONNECT_FOUR = replace(TIC_TAC_TOE, environment="connect_four", options={**TIC_TAC_TOE.options, "depth": 1})

DEMONSTRATORS = {one.environment: one for one in (PLAN_PATH, SUDOKU, TIC_TAC_TOE, CONNECT_FOUR)}
"""Environment -> its demonstrator."""


def demonstrator_of(name: str) -> Demonstrator:
    """Returns the demonstrator of an environment of the package, or one by "module:NAME"; raises ValueError."""
    if name in DEMONSTRATORS:
        return DEMONSTRATORS[name]
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"--environment {name}: use one of {', '.join(DEMONSTRATORS)}, or 'module:NAME'")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"--environment {name}: {error}") from error
    if not isinstance(found, Demonstrator):
        raise ValueError(f"--environment {name}: the module {module} has no Demonstrator {attribute}")
    return found
