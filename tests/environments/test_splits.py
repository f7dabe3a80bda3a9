"""Validation tasks are unseen: none of their boards is in training, and no episode reaches their first prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from verl_atgrpo import Environment, Message, Split, check_environment, make
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.common.splits import split_of
from verl_atgrpo.environments.plan_path import environment as plan_path
from verl_atgrpo.environments.sokoban import environment as sokoban
from verl_atgrpo.environments.sokoban.board import SokobanTask
from verl_atgrpo.environments.sudoku.grid import EMPTY, SudokuTask
from verl_atgrpo.play.testing import EnvironmentContractError

TRAIN, VAL, TURNS = 4096, 200, 4
SPLITS: tuple[Split, ...] = ("train", "val")
GAMES = {
    # Of the CPU recipes: on small boards random play soon reaches a validation task.
    "plan_path": {"size": 4, "wall_density": 0.2, "tool": "moves", "style": "compact"},
    "sokoban": {"size": 6, "boxes": 1, "wall_density": 0.1, "tool": "moves"},
    "sudoku": {"size": 4, "clues": 8, "tool": "grid", "style": "compact"},
}


def random_answer(task: Any, rng: random.Random) -> str:
    """Returns moves, or a grid with correct, wrong and empty cells."""
    if not isinstance(task, SudokuTask):
        return "".join(rng.choices(list(MOVES), k=rng.randint(1, 8)))
    cells = zip(task.givens, task.solution, strict=True)
    return "".join(given if given != EMPTY else rng.choice((EMPTY, digit)) for given, digit in cells)


def prompts_of_random_play(env: Any, task: Any, rng: random.Random) -> set[str]:
    """Returns the prompts of the states that random answers reach, including the first one."""
    state, shown = env.initial(task), set()
    for _ in range(TURNS):
        if state.solved:
            break
        shown.add(text_of(env.answer_prompt(state)))
        state = env.apply(state, random_answer(task, rng))
    return shown


def text_of(prompt: list[Message]) -> str:
    return json.dumps(prompt)


def seen_in_training(env: Any) -> tuple[int, int]:
    """Returns how many validation tasks share a key with training, and how many first prompts random play reaches."""
    val = [env.task("val", index) for index in range(VAL)]
    keys, prompts = set(), set()
    for index in range(TRAIN):
        task = env.task("train", index)
        keys.add(env.task_key(task))
        prompts |= prompts_of_random_play(env, task, random.Random(index))
    return (
        sum(env.task_key(task) in keys for task in val),
        sum(text_of(env.answer_prompt(env.initial(task))) in prompts for task in val),
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plan_path", GAMES["plan_path"]),
        *(pytest.param(name, GAMES[name], marks=pytest.mark.slow) for name in ("sokoban", "sudoku")),
        # Of the GPU recipes.
        pytest.param("plan_path", {"size": 10, "wall_density": 0.2, "max_moves": 60}, marks=pytest.mark.slow),
        pytest.param("sokoban", {"size": 6, "boxes": 1, "max_moves": 60}, marks=pytest.mark.slow),
    ],
)
def test_no_validation_board_is_in_training_or_reached_in_episodes(name: str, options: dict[str, Any]) -> None:
    assert seen_in_training(make(name, **options)) == (0, 0)


@pytest.mark.parametrize(
    ("name", "options"), [("plan_path", {}), ("sokoban", {"size": 8, "boxes": 2}), ("sudoku", {"size": 9})]
)
def test_tasks_differ_by_index_split_and_seed(name: str, options: dict[str, Any]) -> None:
    env, other = make(name, **options), make(name, **options, seed=1)
    tasks = [env.task(split, index) for split in SPLITS for index in range(20)]
    tasks += [other.task("train", index) for index in range(20)]
    assert len(set(map(env.fingerprint, tasks))) == 60


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(
            ("plan_path", options)
            for options in ({}, {"size": 4, "min_distance": 3}, {"size": 5, "wall_density": 0.5})
        ),
        ("sokoban", {}),
        *(("sudoku", {"clues": clues}) for clues in (None, 4, 5, 12)),
    ],
)
def test_splits_are_disjoint_and_decided_by_the_key(name: str, options: dict[str, Any]) -> None:
    """So they are disjoint for all seeds and indices."""
    env, other = make(name, **options), make(name, **options, seed=99)
    keys = {split: {env.task_key(env.task(split, index)) for index in range(300)} for split in SPLITS}
    for split, those in keys.items():
        assert set(map(split_of, those)) == {split}
    drawn = {other.task_key(other.task("train", index)) for index in range(100)}
    assert not drawn & keys["val"] and (name == "sudoku" or drawn - keys["train"])


def test_a_key_is_what_no_move_changes() -> None:
    rng = random.Random(1)
    for name in ("plan_path", "sokoban"):
        env: Any = make(name, **GAMES[name])
        for index in range(50):
            task = env.task("val", index)
            state = env.initial(task)
            for _ in range(TURNS):
                if state.solved:
                    break
                state = env.apply(state, random_answer(task, rng))
            assert env.task_key(standing(state)) == env.task_key(task)
            moved = drawn(state) != drawn(env.initial(task))
            assert (env.fingerprint(standing(state)) != env.fingerprint(task)) is moved


def standing(state: Any) -> Any:
    """Returns the task that starts in a state."""
    if isinstance(state, plan_path.State):
        task = state.task
        return type(task)(task.size, task.walls, state.position, task.goal)
    assert isinstance(state, sokoban.State)
    return type(state.task)(state.draw())


def drawn(state: Any) -> str:
    return str(state.task.draw(state.position) if isinstance(state, plan_path.State) else state.draw())


def legal(task: Any) -> dict[str, Callable[[str, int], str]]:
    """Returns random answers in the form of the game's prompts that depend on the prompt alone."""

    def script(prompt: str, k: int) -> str:
        answer = random_answer(task, random.Random(f"{prompt} {k}"))
        return f"Moves: {answer}" if isinstance(task, SokobanTask) else answer

    return dict.fromkeys(("tool_user", "planner"), script)


class ByDrawing(plan_path.PlanPath):
    """Plan-Path with an unsuitable key, which includes the walker's position."""

    def task_key(self, task: Any) -> str:
        return self.fingerprint(task)


class ByDrawnBoard(sokoban.Sokoban):
    """Sokoban with an unsuitable key, the whole board."""

    def task_key(self, task: Any) -> str:
        return self.fingerprint(task)


@pytest.mark.parametrize(("name", "broken"), [("plan_path", ByDrawing), ("sokoban", ByDrawnBoard)])
def test_the_check_of_environments_finds_validation_prompts_in_training_play(
    name: str, broken: type[Environment]
) -> None:
    with pytest.raises(EnvironmentContractError, match=r"splits: .* first prompt of task \(val, \d+\)"):
        check_environment(
            lambda **options: broken(**options), GAMES[name], legal=legal, plays=200, tasks=5, episodes=0
        )


@pytest.mark.parametrize("name", GAMES)
def test_the_check_of_environments_passes_these_games(name: str) -> None:
    check_environment(name, GAMES[name], legal=legal, plays=50, tasks=5, episodes=1)
