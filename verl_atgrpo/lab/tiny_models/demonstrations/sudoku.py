"""Demonstrations for Sudoku: the whole solved grid."""

from __future__ import annotations

import random

from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.sudoku import Sudoku
from verl_atgrpo.environments.sudoku.grid import EMPTY, State, SudokuTask, enter, layout
from verl_atgrpo.lab.tiny_models.demonstrations.demonstrator import (
    Choice,
    Demonstration,
    Demonstrator,
    sure,
    unsure,
    write,
)


def fill(task: SudokuTask, noise: float, rng: random.Random) -> tuple[list[str], list[Choice]]:
    """Returns a full grid, row by row, and the distributions it was sampled from.

    Every digit that is not a given is random with probability `noise`.
    """
    choices: list[Choice] = []
    for cell, (given, right) in enumerate(zip(task.givens, task.solution, strict=True)):
        if cell and cell % task.size == 0:
            choices += sure("\n")
        choices += sure(given) if given != EMPTY else unsure(right, noise, layout(task.size).digits)
    return write(choices, rng)


def demonstrate(env: Sudoku, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent, on the initial puzzle or after an answer."""

    def grid(noise: float) -> str:
        return "".join(fill(task, noise, rng)[0]).replace("\n", "")

    task = env.task("train", rng.randrange(1 << 40))
    state = State.initial(task)
    if rng.random() < 0.5:
        state = enter(state, grid(0.5))
    if rng.random() < 0.5:
        return Demonstration(env.draft_prompt(state), *fill(task, noise, rng))
    # Good and bad drafts, so that the planner learns to use the rules that they break.
    drafted = grid(0.5 if rng.random() < 0.5 else 0.0)
    return Demonstration(env.plan_prompt(state, Draft(drafted, drafted)), *fill(task, noise, rng))


SUDOKU = Demonstrator(
    "sudoku",
    {"size": 4, "clues": 8, "max_turns": 4, "tool": "grid", "style": "compact"},
    demonstrate,
    response_length=20,
    words=("draft", "plan", "goal", "none", "given"),
    training={"clean_steps": 300, "noise": 0.2},
)
