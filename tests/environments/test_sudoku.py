"""Sudoku: solver, puzzles, and rewards computed by hand."""

from __future__ import annotations

import random
import re

import pytest
from fakes.scripted_episodes import episode, of
from fakes.sudoku_players import (
    CHANGED,
    CLASH,
    FULL_4X4,
    PUZZLE,
    RIGHT,
    RIGHT_TOO,
    SOLVED,
    STANDING,
    WIKIPEDIA,
    WIKIPEDIA_SOLVED,
    WRONG,
    entries,
    fitting,
    full,
    grid,
    grids_in,
    on_givens,
    oracle,
    partial,
    rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo import EnvironmentConfigError, Score
from verl_atgrpo.environments.common.splits import split_of
from verl_atgrpo.environments.sudoku import Sudoku
from verl_atgrpo.environments.sudoku.grid import State, SudokuTask, enter, progress, renamed, solutions
from verl_atgrpo.environments.sudoku.replies import parse_grid
from verl_atgrpo.play.contamination import overlaps

# ------------------------------------------------------------------ solver


def test_solutions_are_counted() -> None:
    assert len(FULL_4X4) == 288
    assert sorted(solutions(4, "." * 16, limit=1000)) == sorted(FULL_4X4)
    assert len(solutions(4, "." * 16)) == 2  # stops at the second
    assert solutions(4, STANDING) == [SOLVED]
    assert solutions(4, SOLVED) == [SOLVED]
    assert len(solutions(4, grid("1.3. ..1. .14. 4..1"), limit=9)) == 2
    assert solutions(4, grid("123. ...4 .... ....")) == []  # breaks no rule, but row 1 has no cell for its 4
    assert solutions(4, grid("11.. .... .... ....")) == []
    assert solutions(4, grid("1234 3412 2143 4322")) == []


def test_solutions_of_9x9() -> None:
    assert solutions(9, WIKIPEDIA) == [WIKIPEDIA_SOLVED]
    corners = {3 * 9 + 5, 3 * 9 + 8, 4 * 9 + 5, 4 * 9 + 8}  # 1 and 3 can be swapped here
    two = "".join("." if cell in corners else char for cell, char in enumerate(WIKIPEDIA_SOLVED))
    assert len(solutions(9, two, limit=9)) == 2
    assert solutions(9, "55" + "." * 79) == []


@settings(deadline=None, max_examples=100)
@given(
    st.text(".1234", min_size=16, max_size=16)
    | st.permutations(range(16)).map(
        lambda cells: "".join(char if cell in cells[:6] else "." for cell, char in enumerate(SOLVED))
    )
)
def test_solver_agrees_with_brute_force(givens: str) -> None:
    assert sorted(solutions(4, givens, limit=1000)) == sorted(fitting(givens))


# ------------------------------------------------------------------ tasks


@pytest.mark.parametrize("clues", [None, 4, 5, 12])
def test_puzzles_have_one_solution(clues: int | None) -> None:
    env = Sudoku(clues=clues)
    for index in range(100):
        task = env.task("val", index)
        assert fitting(task.givens) == [task.solution]
        assert 16 - task.givens.count(".") == (clues or 8) == 16 - task.holes


@pytest.mark.parametrize("clues", [None, 36, 24])
def test_9x9_puzzles_have_one_solution(clues: int | None) -> None:
    env = Sudoku(size=9, clues=clues)
    for index in range(3):
        task = env.task("train", index)
        assert 81 - task.holes == (clues or 40)
        assert solutions(9, task.givens) == [task.solution]
        assert not task.flaws(task.solution)


@pytest.mark.parametrize("size", [4, 9])
def test_a_relabelled_puzzle_is_the_same(size: int) -> None:
    env = Sudoku(size=size)
    rng = random.Random(5)
    for index in range(4):
        task = env.task("val", index)
        names = str.maketrans("123456789"[:size], "".join(rng.sample("123456789"[:size], size)))
        same = SudokuTask(size, task.givens.translate(names), task.solution.translate(names))
        assert env.fingerprint(same) == env.fingerprint(task)
        assert env.task_key(same) == env.task_key(task)
        assert split_of(env.task_key(same)) == "val"
    assert renamed(grid("1... .... .... ....")) != renamed(grid(".1.. .... .... ...."))
    assert renamed(grid("12.. .... .... ....")) != renamed(grid("11.. .... .... ...."))
    assert renamed(grid("12.. .... .... ....")) == renamed(grid("43.. .... .... ...."))


def test_no_puzzle_is_in_both_splits() -> None:
    """As the recipe deals them; 34 were, when mirrored and rotated puzzles were one."""
    assert not list(overlaps(Sudoku(), 4096, 200))


def test_the_288_solved_grids_are_twelve_and_both_splits_have_some() -> None:
    env = Sudoku()
    grids = solutions(4, "." * 16, limit=1000)
    keys = {env.task_key(SudokuTask(4, full, full)) for full in grids}
    assert (len(grids), len(keys)) == (288, 12)
    assert sorted(map(split_of, keys)) == ["train"] * 7 + ["val"] * 5


def test_an_environment_without_tasks_is_an_error_and_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_atgrpo.environments.common.splits.split_of", lambda fingerprint: "train")
    with pytest.raises(EnvironmentConfigError, match=re.escape("at_grpo.environment.clues=15")):
        Sudoku(clues=15).task("val", 0)


def test_parse_9x9() -> None:
    assert parse_grid(f"Grid:\n{rows(WIKIPEDIA, ' ', 9)}", "full", 9) == WIKIPEDIA
    assert parse_grid(rows(WIKIPEDIA, "", 9), "compact", 9) == WIKIPEDIA
    assert parse_grid(full(RIGHT), "full", 9) is None
    assert parse_grid(f"Grid:\n{rows(WIKIPEDIA, ' ', 9)}", "full", 4) is None


# ------------------------------------------------------------------ rules and rewards


@pytest.mark.parametrize(
    ("answer", "after"),
    [
        (SOLVED, SOLVED),
        (RIGHT, RIGHT),
        (WRONG, WRONG),
        (STANDING, STANDING),
        (CHANGED, STANDING),  # refused as a whole
        ("." + SOLVED[1:], STANDING),  # a given left out is changed
        ("." * 16, STANDING),
        (CLASH, grid("12.. 3412 2143 4321")),  # both 3s of row 1 are left out
        (grid("122. ..12 2..3 .3.1"), STANDING),  # an entry that clashes with a given
        (grid("1233 ..12 2.43 .3.1"), grid("12.. ..12 2.43 .3.1")),
    ],
)
def test_the_grid_after_an_answer(answer: str, after: str) -> None:
    state = enter(State.initial(PUZZLE), answer)
    assert state.grid == after
    assert not PUZZLE.flaws(state.grid)
    assert state.solved == (after == SOLVED)


def test_a_later_answer_corrects_earlier_entries_and_never_a_given() -> None:
    state = enter(State.initial(PUZZLE), WRONG)
    assert enter(state, RIGHT).grid == RIGHT
    assert enter(state, STANDING).grid == STANDING
    assert enter(state, SOLVED).solved
    assert enter(state, CHANGED) == state


@pytest.mark.parametrize(
    ("answer", "flaws"),
    [
        (SOLVED, []),
        (WRONG, []),
        (
            CHANGED[:2] + STANDING[2:],
            ["given at row 1, column 1 is changed", "given at row 1, column 2 is changed", "column 1 repeats 2"],
        ),
        (grid("1233 ..12 2..3 .3.1"), ["row 1 repeats 3", "column 4 repeats 3", "box 2 repeats 3"]),
        (grid("12.. 1.12 2..3 .3.1"), ["row 2 repeats 1", "column 1 repeats 1", "box 1 repeats 1"]),
    ],
)
def test_flaws(answer: str, flaws: list[str]) -> None:
    assert PUZZLE.flaws(answer) == flaws


@pytest.mark.parametrize(
    ("answer", "team", "local"),
    [
        (SOLVED, 1, 1),  # format .1 + legal .1 + progress .8
        (RIGHT, 0, 0.3),  # progress .8 / 8
        (WRONG, 0, 0.2),
        (SOLVED[:14] + "." + SOLVED[15:], 0, 0.1 + 0.1 + 0.7),
        (CLASH, 0, 0.1 + 0.6),  # not legal
        (STANDING, 0, 0.1),
        ("." * 16, 0, 0.1),
        ("1" * 16, 0, 0.1),
        (CHANGED, 0, 0.1),
        ("2" + SOLVED[1:], 0, 0.1),  # complete but for a changed given
        ("." + SOLVED[1:], 0, 0.1),
        (next(text for text in FULL_4X4 if text != SOLVED), 0, 0.1),  # valid, of another puzzle
    ],
)
def test_scores_by_hand(answer: str, team: float, local: float) -> None:
    score = Sudoku(tool="grid").score_answer(State.initial(PUZZLE), answer)
    assert score.team == team
    assert score.local == pytest.approx(local)


@pytest.mark.parametrize(
    ("answer", "team", "local"),
    [
        (SOLVED, 1, 1),  # block .1 + ran .1 + givens .1 + rules .1 + progress .6
        (RIGHT, 0, 0.4 + 0.6 / 8),
        (WRONG, 0, 0.4),
        (CLASH, 0, 0.3 + 0.6 * 6 / 8),
        (STANDING, 0, 0.2),
        (CHANGED, 0, 0.2),
        ("." * 16, 0, 0.2),
        (next(text for text in FULL_4X4 if text != SOLVED), 0, 0.2),
    ],
)
def test_scores_of_printed_grids_by_hand(answer: str, team: float, local: float) -> None:
    score = Sudoku().score_printed(State.initial(PUZZLE), answer)
    assert score.team == team
    assert score.local == pytest.approx(local)


def test_no_full_grid_but_the_solution_is_solved() -> None:
    """The reference code ignores the givens, so any full legal grid is a solution."""
    env, state = Sudoku(tool="grid"), State.initial(PUZZLE)
    for text in FULL_4X4:
        assert env.score_answer(state, text).team == env.score_printed(state, text).team == (text == SOLVED)
        assert env.apply(state, text).solved == (text == SOLVED)


def test_progress_is_rewarded_once_beyond_the_best_grid() -> None:
    start = State.initial(PUZZLE)
    there = enter(start, RIGHT)
    assert progress(start, there) == 1 / 8
    back = enter(there, RIGHT_TOO)
    assert back.grid == RIGHT_TOO
    assert progress(there, back) == 0
    assert progress(back, enter(back, RIGHT)) == 0
    assert progress(back, enter(back, RIGHT[:4] + RIGHT_TOO[4:])) == 1 / 8
    assert progress(back, enter(back, SOLVED)) == 1
    lost = enter(there, WRONG)
    assert lost.correct == 0
    assert progress(there, lost) == progress(lost, enter(lost, RIGHT)) == 0  # rewarded before


def test_going_back_and_forth_earns_no_progress_after_the_first_visit() -> None:
    """In the reference code going back and forth earns more than solving."""
    env = Sudoku(tool="grid", max_turns=30)

    def bounce(prompt: str, k: int) -> str:
        return full(RIGHT_TOO if grids_in(prompt)[0] == RIGHT else RIGHT)

    record = episode(env, PUZZLE, lambda prompt, k: "-", bounce)
    scores = [decision.candidates[0].score for decision in of("planner", record)]
    assert [score.local for score in scores] == pytest.approx([0.3, *[0.2] * 29])  # format and legal alone
    assert {score.team for score in scores} == {0}
    assert not record.outcome.success
    assert record.outcome.team_reward == 0
    solved = episode(env, PUZZLE, lambda prompt, k: "-", oracle({"style": "full"}))
    (best,) = (decision.candidates[0] for decision in of("planner", solved))
    assert best.reward == 2
    assert solved.outcome.team_reward == 1
    assert sum(score.mixed(1.0) for score in scores[: Sudoku().max_turns]) < best.reward
    # At every decision solving earns more than going back and forth.
    state = State.initial(PUZZLE)
    for answer in (RIGHT, RIGHT_TOO) * 3:
        assert env.score_answer(state, SOLVED) == Score(1, 1)
        assert env.score_answer(state, answer).mixed(1.0) < 0.4
        state = env.apply(state, answer)


@settings(deadline=None, max_examples=60)
@given(st.lists(entries | on_givens | partial, max_size=20))
def test_wandering_never_earns_as_much_as_solving(answers: list[str]) -> None:
    env, state, earned = Sudoku(tool="grid"), State.initial(PUZZLE), 0.0
    for answer in answers:
        after = enter(state, answer)
        assert not PUZZLE.flaws(after.grid)
        assert (env.score_answer(state, answer).team == 1) == (answer == SOLVED) == after.solved
        if after.solved:
            break
        assert env.score_answer(state, answer).mixed(1.0) < 1
        earned += progress(state, after)
        state = after
    assert earned <= 7 / 8


# ------------------------------------------------------------------ options
