"""Sokoban: boards, moves, deadlocks, solver, levels of files."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from fakes.sokoban_players import BOXOBAN, ROOM, TWO, Position, board, distances, moved
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo import EnvironmentConfigError
from verl_atgrpo.environments.common.splits import split_of
from verl_atgrpo.environments.sokoban import Sokoban
from verl_atgrpo.environments.sokoban.board import SokobanTask, State, walk
from verl_atgrpo.environments.sokoban.levels import read_levels, solve

# ------------------------------------------------------------------ moves


@pytest.mark.parametrize(
    ("task", "moves", "after", "legal"),
    [
        (ROOM, "R", board("_____", "_@$_.", "_____"), True),
        (ROOM, "RRR", board("_____", "___@*", "_____"), True),
        (ROOM, "RRRLLUD", board("_____", "___@*", "_____"), True),  # stops when solved
        (ROOM, "L", ROOM, False),
        (ROOM, "UURR", board("@____", "_$__.", "_____"), False),  # stops at the wall
        (ROOM, "URRR", board("___@_", "_$__.", "_____"), True),
        (ROOM, "URD", board("_____", "_@__.", "_$___"), True),
        (ROOM, "URDD", board("_____", "_@__.", "_$___"), False),  # the wall is behind the box
        (board("_____", "@$$_.", "____."), "R", board("_____", "@$$_.", "____."), False),  # two boxes in a row
        (board("@$.$."), "RR", board("_@*$."), False),
        (board("@._$_", "_$_._"), "R", board("_+_$_", "_$_._"), True),
        (board("@*__", "_$._"), "R", board("_+$_", "_$._"), True),
        (ROOM, "", ROOM, True),
    ],
)
def test_moves_and_pushes(task: SokobanTask, moves: str, after: SokobanTask, legal: bool) -> None:
    walked = walk(State.initial(task), moves)
    assert walked.end.draw() == after.drawing
    assert walked.legal == legal
    assert walked.end.solved == ("$" not in after.drawing)


@settings(deadline=None, max_examples=60)
@given(st.text("UDLR", max_size=30), st.integers(0, 30))
def test_moves_follow_the_rules_on_any_board(moves: str, index: int) -> None:
    task = Sokoban(boxes=3).task("train", index)
    position: Position | None = (task.player, task.boxes)
    last = (task.player, task.boxes)
    for name in moves:
        if last[1] == task.targets:
            break
        position = moved(task, last, name)
        if position is None:
            break
        last = position
    walked = walk(State.initial(task), moves)
    assert (walked.end.player, walked.end.boxes) == last
    assert walked.legal == (position is not None)


# ------------------------------------------------------------------ deadlocks and the solver


@pytest.mark.parametrize(
    ("task", "dead"),
    [
        (ROOM, False),
        (board("$____", "@___.", "_____"), True),  # a corner
        (board("__$__", "@___.", "_____"), True),  # along a wall without a target
        (board("__$_.", "@____", "_____"), False),  # along a wall with one
        (board("_____", "@$$__", "_$*__", "____.", "_..__"), True),  # a square of boxes, one on its target
        (board("_____", "@**__", "_**__", "_____", "_$__."), False),  # a square of boxes that are all on targets
        (board("_____", "_#$__", "@_$#_", "_____", "..___"), False),  # a box may leave
        (board("_____", "_#$__", "@#$__", "_____", "..___"), True),
    ],
)
def test_deadlocks_by_hand(task: SokobanTask, dead: bool) -> None:
    assert task.deadlocked(task.boxes) == dead
    if dead:
        assert solve(task) is None


@pytest.mark.parametrize(
    ("options", "tasks"),
    [({"size": 5, "boxes": 2}, 25), ({"boxes": 2, "wall_density": 0.3}, 25), ({"boxes": 3, "wall_density": 0.3}, 4)],
)
def test_deadlocks_and_bounds_are_sound_in_all_reachable_positions(options: dict[str, Any], tasks: int) -> None:
    """Checks all positions of many boards: no solvable one counts as a deadlock."""
    env = Sokoban(**options)
    flagged = lost = 0
    for index in range(tasks):
        task = env.task("train", index)
        left = distances(task)
        solution = solve(task)
        assert solution is not None
        assert len(solution) == left[task.player, task.boxes]
        for (_, boxes), steps in left.items():
            lost += steps == math.inf
            flagged += task.deadlocked(boxes)
            assert task.potential(boxes) <= steps
            if task.deadlocked(boxes):
                assert steps == math.inf
            assert (task.potential(boxes) == 0) == (boxes == task.targets)
    assert flagged > lost / 2  # and it detects some


@pytest.mark.parametrize(
    ("task", "length"),
    [
        (ROOM, 3),
        (TWO, 8),
        (board("@$."), 1),
        (board("_.##", "__##", "*@__", "__$_", "__##"), 33),  # the first of David W. Skinner's Microban
        (board("_____", "$@__.", "_____"), None),  # against the wall on the far side
        (board("@#$.", "_#__", "_#__"), None),  # cannot be reached
    ],
)
def test_solver_on_boards_of_known_length(task: SokobanTask, length: int | None) -> None:
    solution = solve(task)
    assert (None if solution is None else len(solution)) == length
    if solution is not None and length is not None:
        walked = walk(State.initial(task), solution)
        assert walked.end.solved
        assert walked.legal
        assert solve(task, below=length) is None
        assert solve(task, below=length + 1) == solution


# ------------------------------------------------------------------ boards


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 5},
        {"boxes": 2},
        {"boxes": 3, "wall_density": 0.3},
        {"size": 8, "boxes": 2, "wall_density": 0.0},
        {"min_solution": 12},
        {"boxes": 2, "min_solution": 14},
    ],
)
def test_generated_boards_can_be_solved(options: dict[str, Any]) -> None:
    env = Sokoban(**options)
    size, boxes = options.get("size", 6), options.get("boxes", 1)
    for index in range(12):
        task = env.task("val", index)
        assert [len(row) for row in task.drawing.split("\n")] == [size] * size
        assert len(task.boxes) == len(task.targets) == boxes
        assert not task.boxes & task.targets
        solution = solve(task)
        assert solution is not None
        assert len(solution) >= options.get("min_solution", 1)
        assert walk(State.initial(task), solution).end.solved
        assert task.draw(task.player, task.boxes) == task.drawing


@pytest.mark.parametrize(
    ("options", "lengths"),
    [({"max_solution": 3}, {1, 2, 3}), ({"boxes": 2, "min_solution": 5, "max_solution": 6}, {5, 6})],
)
def test_bounded_solutions_have_every_length_between_the_bounds(options: dict[str, Any], lengths: set[int]) -> None:
    env = Sokoban(**options)
    tasks = [env.task("train", index) for index in range(60)]
    assert {len(solve(task) or "") for task in tasks} == lengths
    assert {split_of(env.task_key(task)) for task in tasks} == {"train"}


def test_generated_boards_have_no_end_and_few_are_equal() -> None:
    env = Sokoban()
    assert env.num_tasks("train") is None
    assert len({env.fingerprint(env.task("train", index)) for index in range(300)}) > 240


def level_file(folder: Path, *levels: str) -> str:
    path = folder / "levels.txt"
    path.write_text("\n".join(f"; {number}\n{level}\n" for number, level in enumerate(levels)))
    return str(path)


@pytest.mark.skipif(not BOXOBAN.exists(), reason=f"the Boxoban levels are not at {BOXOBAN}")
def test_boxoban_levels_are_read_unchanged() -> None:
    levels = read_levels(str(BOXOBAN))
    assert len(levels) == 513  # of 514: the last one is incomplete
    text = BOXOBAN.read_text()
    for number, task in enumerate(levels):
        assert f"; {number}\n{task.draw(task.player, task.boxes)}\n" in text
        assert State.initial(task).draw() == task.drawing
        assert len(task.boxes) == len(task.targets) == 4
        assert task.stride == 11
    env = Sokoban(levels=str(BOXOBAN))
    sizes = {split: env.num_tasks(split) for split in ("train", "val")}
    assert sizes["train"] + sizes["val"] == 513
    assert 40 < sizes["val"] < 90
    tasks = [env.task(split, index) for split, size in sizes.items() for index in range(size)]
    assert len(set(map(env.fingerprint, tasks))) == 513
    dealt = list(map(env.task_key, tasks))
    assert {split_of(text) for text in dealt[: sizes["train"]]} == {"train"}
    assert {split_of(text) for text in dealt[sizes["train"] :]} == {"val"}
    with pytest.raises(IndexError):
        env.task("val", sizes["val"])


def test_invalid_levels_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = [
        ROOM.drawing.replace("@", " "),
        ROOM.drawing.replace(" ", "@"),
        ROOM.drawing.replace(".", " "),
        ROOM.drawing.replace(" ", "x", 1),
        ROOM.drawing[:-3],
        ROOM.drawing.replace("#\n", " \n"),
        board("_@_*_").drawing,  # solved
        board("$____", "@___.", "_____").drawing,  # a box in a corner
        "#",
    ]
    with caplog.at_level(logging.WARNING):
        levels = read_levels(level_file(tmp_path, ROOM.drawing, *broken, TWO.drawing, ROOM.drawing))
    assert levels == (ROOM, TWO)
    assert f"{len(broken)} of {len(broken) + 3} levels" in caplog.text
    with pytest.raises(EnvironmentConfigError, match=r"at_grpo\.environment\.levels=.*no level in it"):
        read_levels(level_file(tmp_path, *broken))
