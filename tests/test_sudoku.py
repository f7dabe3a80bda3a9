"""Sudoku: the solver, the puzzles dealt out, the rewards worked by hand, hostile replies, and whole episodes."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo.environment import EnvironmentConfigError, Score, make
from verl_atgrpo.environments import drafting
from verl_atgrpo.environments.drafting import Draft
from verl_atgrpo.environments.splits import split_of
from verl_atgrpo.environments.sudoku import Sudoku, parse_grid, parse_printed
from verl_atgrpo.environments.sudoku_grid import State, SudokuTask, canonical, enter, progress, solutions
from verl_atgrpo.sandbox import Limits, extract_python, run_python
from verl_atgrpo.team import Decision, EpisodeRecord, ScriptedTeam, play

Script = Callable[[str, int], str]
STYLES = [{"style": "full", "tool": "grid"}, {"style": "compact", "tool": "grid"}]
ALL_OPTIONS = [*STYLES, {"style": "full", "tool": "python"}]


def all_4x4() -> list[str]:
    """Every full 4x4 grid, by brute force over rows: this file's own check of the rules."""
    rows = list(itertools.permutations("1234"))
    boxes = [[(r, c), (r, c + 1), (r + 1, c), (r + 1, c + 1)] for r in (0, 2) for c in (0, 2)]
    return [
        "".join(map("".join, grid))
        for grid in itertools.product(rows, repeat=4)
        if all(len(set(column)) == 4 for column in zip(*grid, strict=True))
        and all(len({grid[r][c] for r, c in box}) == 4 for box in boxes)
    ]


FULL_4X4 = all_4x4()


def fitting(givens: str) -> list[str]:
    """The full 4x4 grids that keep `givens`."""
    return [full for full in FULL_4X4 if all(a in (".", b) for a, b in zip(givens, full, strict=True))]


def grid(drawing: str) -> str:
    return drawing.replace(" ", "").replace("\n", "")


def rows(text: str, gap: str = "", size: int = 4) -> str:
    return "\n".join(gap.join(text[start : start + size]) for start in range(0, len(text), size))


PUZZLE = SudokuTask(4, grid("12.. ..12 2..3 .3.1"), grid("1234 3412 2143 4321"))
"""Eight holes, so one correct digit is an eighth."""
STANDING, SOLVED = PUZZLE.givens, PUZZLE.solution
RIGHT = grid("123. ..12 2..3 .3.1")
RIGHT_TOO = grid("12.. 3.12 2..3 .3.1")
WRONG = grid("124. ..12 2..3 .3.1")
WRONG_TOO = grid("12.. 4.12 2..3 .3.1")
"""Wrong, but no rule is broken yet."""
CLASH = grid("1233 3412 2143 4321")
"""Two 3s in row 1, and one of them clashes with a given; the other six digits are right."""
CHANGED = grid("2134 3412 2143 4321")
WIKIPEDIA = grid(
    "53..7.... 6..195... .98....6. 8...6...3 4..8.3..1 7...2...6 .6....28. ...419..5 ....8..79",
)
WIKIPEDIA_SOLVED = grid(
    "534678912 672195348 198342567 859761423 426853791 713924856 961537284 287419635 345286179",
)


def full(text: str) -> str:
    return f"Grid:\n{rows(text, ' ')}"


def written(text: str, options: dict[str, Any]) -> str:
    return full(text) if options["style"] == "full" else rows(text)


def grids_in(prompt: str) -> list[str]:
    """All 4x4 grids drawn in a prompt."""
    lines = [line.replace(" ", "").partition(">")[0] for line in prompt.split("\n")]
    marks = "".join("x" if re.fullmatch("[.1-4]{4}", line) else "-" for line in lines)
    return [
        "".join(lines[m.start() + k : m.start() + k + 4])
        for m in re.finditer("x+", marks)
        for k in range(0, len(m.group()), 4)
    ]


def oracle(options: dict[str, Any]) -> Script:
    return lambda prompt, k: written(fitting(grids_in(prompt)[0])[0], options)


def episode(env: Sudoku, task: SudokuTask, tool_user: Script, planner: Script, candidates: int = 1) -> EpisodeRecord:
    team = ScriptedTeam({"tool_user": tool_user, "planner": planner}, candidates=candidates)
    return asyncio.run(play(env, task, team))


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    return [decision for decision in record.decisions if decision.agent == agent]


# ------------------------------------------------------------------ solver


def test_solutions_are_counted() -> None:
    assert len(FULL_4X4) == 288
    assert sorted(solutions(4, "." * 16, limit=1000)) == sorted(FULL_4X4)
    assert len(solutions(4, "." * 16)) == 2  # stops at the second
    assert solutions(4, STANDING) == [SOLVED]
    assert solutions(4, SOLVED) == [SOLVED]
    assert len(solutions(4, grid("1.3. ..1. .14. 4..1"), limit=9)) == 2
    assert solutions(4, grid("123. ...4 .... ....")) == []  # no rule is broken, yet row 1 has no place for its 4
    assert solutions(4, grid("11.. .... .... ....")) == []
    assert solutions(4, grid("1234 3412 2143 4322")) == []


def test_solutions_of_9x9() -> None:
    assert solutions(9, WIKIPEDIA) == [WIKIPEDIA_SOLVED]
    corners = {3 * 9 + 5, 3 * 9 + 8, 4 * 9 + 5, 4 * 9 + 8}  # 1 and 3 may change places here
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


def test_tasks_are_the_same_in_another_process(tmp_path: Path) -> None:
    code = """
import hashlib, sys
from verl_atgrpo.environment import make
digest = hashlib.sha256()
for options, count in (({"seed": 3}, 20), ({"clues": 5}, 20), ({"size": 9}, 2)):
    env = make("sudoku", **options)
    for task in (env.task(split, index) for split in ("train", "val") for index in range(count)):
        digest.update((task.givens + task.solution).encode())
sys.stdout.write(digest.hexdigest())
"""
    for seed in ("0", "12345"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        # A figure that is kept: the puzzles of a seed are the same on every Python.
        assert done.stdout == "1f7f1dfe7f5e169aa57edad90510bc870f9a23e3ec881b5fafbd2e11d69e9288"


def test_tasks_differ_by_index_split_and_seed() -> None:
    env, other = Sudoku(size=9), Sudoku(size=9, seed=1)
    tasks = [env.task(split, index) for split in ("train", "val") for index in range(20)]
    tasks += [other.task("train", index) for index in range(20)]
    assert len({env.fingerprint(task) for task in tasks}) == 60


@pytest.mark.parametrize("clues", [None, 4, 5, 12])
def test_puzzles_have_one_solution_and_splits_are_disjoint(clues: int | None) -> None:
    env, other = Sudoku(clues=clues), Sudoku(clues=clues, seed=99)
    prints: dict[str, set[str]] = {"train": set(), "val": set()}
    for split, seen in prints.items():
        for index in range(100):
            task = env.task(split, index)
            assert fitting(task.givens) == [task.solution]
            assert 16 - task.givens.count(".") == (clues or 8) == 16 - task.holes
            seen.add(env.fingerprint(task))
    assert not prints["train"] & prints["val"]
    # The puzzle alone decides, so splits stay disjoint where the seeds differ or the indices run on.
    assert {split_of(text) for text in prints["val"]} == {"val"}
    assert not {other.fingerprint(other.task("train", index)) for index in range(50)} & prints["val"]


@pytest.mark.parametrize("clues", [None, 36, 24])
def test_9x9_puzzles_have_one_solution(clues: int | None) -> None:
    env = Sudoku(size=9, clues=clues)
    for index in range(3):
        task = env.task("train", index)
        assert 81 - task.holes == (clues or 40)
        assert solutions(9, task.givens) == [task.solution]
        assert not task.flaws(task.solution)


@pytest.mark.parametrize("size", [4, 9])
def test_a_renamed_turned_or_mirrored_puzzle_is_the_same(size: int) -> None:
    env = Sudoku(size=size)
    rng = random.Random(5)
    for index in range(4):
        task = env.task("val", index)
        for _ in range(8):
            names = rng.sample("123456789"[:size], size)
            text = task.givens.translate(str.maketrans("123456789"[:size], "".join(names)))
            lines = [text[start : start + size] for start in range(0, len(text), size)]
            if rng.random() < 0.5:
                lines = lines[::-1]
            for _ in range(rng.randrange(4)):
                lines = ["".join(column) for column in zip(*lines[::-1], strict=True)]
            same = SudokuTask(size, "".join(lines), "")
            assert env.fingerprint(same) == env.fingerprint(task)
            assert split_of(env.fingerprint(same)) == "val"
    assert canonical(4, grid("1... .... .... ....")) != canonical(4, grid(".1.. .... .... ...."))
    assert canonical(4, grid("12.. .... .... ....")) != canonical(4, grid("11.. .... .... ...."))
    assert canonical(4, grid("12.. .... .... ....")) == canonical(4, grid(".... .... ...4 ...3"))


def test_an_environment_without_tasks_says_so_instead_of_searching_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_atgrpo.environments.splits.split_of", lambda fingerprint: "train")
    with pytest.raises(EnvironmentConfigError, match=re.escape("at_grpo.environment.clues=15")):
        Sudoku(clues=15).task("val", 0)


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
def test_what_an_answer_leaves(answer: str, after: str) -> None:
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
            [
                "given at row 1, column 1 is changed",
                "given at row 1, column 2 is changed",
                "column 1 repeats 2",
            ],
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
        (None, 0, 0),
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
def test_scores_by_hand(answer: str | None, team: float, local: float) -> None:
    score = Sudoku(tool="grid").score_answer(State.initial(PUZZLE), answer)
    assert score.team == team
    assert score.local == pytest.approx(local)


@pytest.mark.parametrize(
    ("answer", "team", "local"),
    [
        (SOLVED, 1, 1),  # block .1 + ran .1 + givens .4 + rules .4
        (RIGHT, 0, 1),
        (WRONG, 0, 1),
        (CLASH, 0, 0.6),
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
    """Trap 5: the reference ignores the givens, so any full grid by the rules was a solution."""
    env, state = Sudoku(tool="grid"), State.initial(PUZZLE)
    for text in FULL_4X4:
        assert env.score_answer(state, text).team == env.score_printed(state, text).team == (text == SOLVED)
        assert env.apply(state, text).solved == (text == SOLVED)


def test_progress_is_paid_once_beyond_the_best_grid() -> None:
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
    assert progress(there, lost) == progress(lost, enter(lost, RIGHT)) == 0  # it was paid before


def test_bouncing_earns_no_progress_after_the_first_visit() -> None:
    """Trap 4: going back and forth must not pay more than solving."""
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
    # At every decision of the way solving is worth more than the next bounce.
    state = State.initial(PUZZLE)
    for answer in (RIGHT, RIGHT_TOO) * 3:
        assert env.score_answer(state, SOLVED) == Score(1, 1)
        assert env.score_answer(state, answer).mixed(1.0) < 0.4
        state = env.apply(state, answer)


entries = st.lists(st.sampled_from(".1234"), min_size=16, max_size=16).map("".join)
partial = st.lists(st.booleans(), min_size=16, max_size=16).map(
    lambda kept: "".join(b if keep else a for a, b, keep in zip(STANDING, SOLVED, kept, strict=True))
)
on_givens = entries.map(lambda text: "".join(a if a != "." else b for a, b in zip(STANDING, text, strict=True)))


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


# ------------------------------------------------------------------ replies


@pytest.mark.parametrize(
    ("reply", "style"),
    [
        (full(RIGHT), "full"),
        (f"Grid:\n{rows(RIGHT)}", "full"),
        (f"I thought.\nGrid: \r\n{rows(RIGHT, ' ')}\r\nThat is it.", "full"),
        (f"{full(SOLVED)}\nno, better:\n{full(RIGHT)}", "full"),
        (full(RIGHT.replace(".", "0")), "full"),
        (rows(RIGHT), "compact"),
        (f"\n{rows(RIGHT, ' ')}\n", "compact"),
    ],
)
def test_parse_grid(reply: str, style: Any) -> None:
    assert parse_grid(reply, style, 4) == RIGHT


def test_parse_9x9() -> None:
    assert parse_grid(f"Grid:\n{rows(WIKIPEDIA, ' ', 9)}", "full", 9) == WIKIPEDIA
    assert parse_grid(rows(WIKIPEDIA, "", 9), "compact", 9) == WIKIPEDIA
    assert parse_grid(full(RIGHT), "full", 9) is None
    assert parse_grid(f"Grid:\n{rows(WIKIPEDIA, ' ', 9)}", "full", 4) is None


GARBAGE = [
    *("", " \n", "Grid:", "Grid:\n", "Grid: ...", "Grid:\n....", "12", "\n" * 9, "\x00", "\U0001f600\ud800"),
    full(RIGHT)[:-4],
    full(RIGHT).replace("Grid", "grid"),
    f"The {full(RIGHT)}",
    full(RIGHT).replace("\n", "\n\n"),
    full(RIGHT).replace("\n", "\u2028"),
    full(RIGHT).replace("1", "\uff11"),
    full(RIGHT).replace("1", "\u0661"),
    full(RIGHT).replace("1", "5"),
    full(RIGHT).replace("1", "x"),
    full(RIGHT).replace("1", "-1"),
    f"{full(SOLVED)}\nGrid:\n1 2",
    f"Grid:\n{SOLVED}",
    "[__import__('os').getcwd()]",
]


@pytest.mark.parametrize("reply", GARBAGE)
def test_garbage_earns_nothing(reply: str) -> None:
    for options in STYLES:
        assert Sudoku(**options).score_reply(State.initial(PUZZLE), reply) == Score()


@pytest.mark.parametrize("reply", [f"so\n{rows(RIGHT)}", f"{rows(RIGHT)}\n....", f"{rows(RIGHT)}>", full(RIGHT)])
def test_compact_replies_are_nothing_but_rows(reply: str) -> None:
    assert parse_grid(reply, "compact", 4) is None


@pytest.mark.parametrize(
    "output",
    [
        rows(RIGHT),
        f"searching\n\n{rows(RIGHT, ' ')}\n\n",
        rows(RIGHT, ", ").replace(".", "0"),
        "\n".join(str(list(map(int, row))) for row in rows(RIGHT.replace(".", "0")).split()),
        rows(RIGHT, "\t"),
    ],
)
def test_parse_printed(output: str) -> None:
    assert parse_printed(output, 4) == RIGHT


@pytest.mark.parametrize("output", [*GARBAGE[:10], f"{rows(RIGHT)}\ndone", rows(RIGHT)[:-5], rows(RIGHT, ";")])
def test_printed_garbage_is_no_grid(output: str) -> None:
    assert parse_printed(output, 4) is None


MEGABYTE = 10**6
HUGE = {
    "digits": "1" * MEGABYTE,
    "answer": "Grid:\n" + "1 2 3 4\n" * (MEGABYTE // 8),
    "long row": "Grid:\n" + "1" + " " * MEGABYTE + "234",
    "marks": "Grid:\n" * (MEGABYTE // 6),
    "mark and blanks": "Grid:" + " " * MEGABYTE + "x",
    "lines": "\n" * MEGABYTE,
    "blank lines": " \n" * (MEGABYTE // 2) + "x",
    "unicode": "\u00e9\U0001f600" * (MEGABYTE // 2),
    "brackets": "[" * MEGABYTE,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE.keys())
def test_a_megabyte_is_read_quickly_and_earns_next_to_nothing(text: str) -> None:
    before = time.process_time()
    for options in STYLES:
        assert Sudoku(**options).score_reply(State.initial(PUZZLE), text).mixed(1.0) <= 0.1
    parse_printed(text, 4)
    assert time.process_time() - before < 1.5


almost = st.text(".01234 \n", max_size=40)
replies = st.one_of(
    st.text(), almost, almost.map("Grid:\n{}".format), (entries | on_givens).map(full), on_givens.map(rows)
)
STATES = [
    functools.reduce(enter, answers, State.initial(PUZZLE)) for answers in ([], [RIGHT], [WRONG], [RIGHT, CLASH])
]


@settings(deadline=None, max_examples=100)
@given(replies, st.sampled_from(STYLES), st.sampled_from(STATES))
def test_any_reply_gets_a_finite_score_and_leaves_the_state_alone(
    reply: str, options: dict[str, Any], state: State
) -> None:
    env = Sudoku(**options)
    before = copy.deepcopy(state)
    answer = env.parse(reply)
    assert answer is None or re.fullmatch("[.1-4]{16}", answer)
    score = env.score_reply(state, reply)
    assert math.isfinite(score.mixed(1.0))
    assert score.team in (0, 1)
    assert 0 <= score.local <= 1 + 1e-9
    assert (answer is None) == (score == Score())
    assert state == before
    assert env.score_reply(state, reply) == score
    parse_printed(reply, 4)


def test_the_order_of_scoring_does_not_matter() -> None:
    env = Sudoku(tool="grid")
    answers = [RIGHT, WRONG, SOLVED, None, CLASH, CHANGED, STANDING]
    for state in STATES:
        forward = [env.score_answer(state, answer) for answer in answers]
        assert [env.score_answer(state, answer) for answer in reversed(answers)] == forward[::-1]


# ------------------------------------------------------------------ prompts


def prompts(env: Sudoku, state: State, *drafts: str | None) -> list[list[str]]:
    asked = [env.draft_prompt(state)]
    for draft in drafts:
        text = "no idea" if draft is None else f"```python\nprint({rows(draft)!r})\n```"
        asked.append(env.plan_prompt(state, Draft(text, draft, rows(draft or ""), True)))
    return [[message["content"] for message in prompt] for prompt in asked]


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_echoing_a_prompt_earns_nothing(options: dict[str, Any]) -> None:
    """Trap 5: the example grid in the reference's prompt was a valid answer."""
    env = Sudoku(**options)
    for state in STATES:
        assert extract_python(env.draft_prompt(state)[-1]["content"]) is None
        for contents in prompts(env, state, None, SOLVED, RIGHT, WRONG, CLASH, CHANGED):
            for text in ("\n".join(contents), *contents, contents[-1].splitlines()[-1]):
                assert env.score_reply(state, text) == Score()


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_echoing_the_grids_of_a_prompt_earns_the_format_at_most(options: dict[str, Any]) -> None:
    env = Sudoku(**options)
    for state in STATES:
        for contents in prompts(env, state, None, STANDING, state.grid):
            lines = "\n".join(contents).split("\n")
            seen = 0
            for start in range(len(lines) - 3):
                text = "\n".join(lines[start : start + 4])
                for reply in (text, f"Grid:\n{text}"):
                    score = env.score_reply(state, reply)
                    assert score.team == 0
                    assert score.local in (0, 0.1)
                    seen += score.local > 0
                printed = env.parse_printed(text)
                assert printed is None or env.score_printed(state, printed) == Score(0, 0.2)
            assert seen  # the grid as it stands was among them


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_a_team_of_parrots_earns_nothing(options: dict[str, Any]) -> None:
    env = Sudoku(max_turns=2, **options)
    record = episode(env, PUZZLE, lambda prompt, k: prompt, lambda prompt, k: prompt)
    assert [decision.candidates[0].reward for decision in record.decisions] == [0] * 4
    assert not record.outcome.success
    assert record.outcome.team_reward == 0


@pytest.mark.parametrize("options", ALL_OPTIONS)
def test_feedback_follows_from_the_rules_alone(options: dict[str, Any]) -> None:
    """Two drafts that break no rule are told the same, whether right or wrong: the solution stays hidden."""
    env = Sudoku(**options)
    for state in STATES:
        told = set()
        for draft in (RIGHT, RIGHT_TOO, WRONG, WRONG_TOO):
            (question,) = [contents[-1].replace("\n> ", "\n") for contents in prompts(env, state, draft)[1:]]
            for drawn in (rows(draft), rows(draft, " "), repr(rows(draft))):
                question = question.replace(drawn, "<draft>")
            told.add(question)
        # Where the draft is the grid as it stands, that grid is replaced as well.
        assert (
            len({text.replace(rows(state.grid), "<draft>").replace(rows(state.grid, " "), "<draft>") for text in told})
            == 1
        )


def test_nothing_shown_depends_on_the_solution() -> None:
    """A team that is told of another solution sees the same prompts and grids up to solving."""
    other = SudokuTask(4, STANDING, SOLVED[::-1])
    env = Sudoku(tool="grid")
    mine, theirs = State.initial(PUZZLE), State.initial(other)
    for answer in (RIGHT, WRONG, CLASH, CHANGED, RIGHT_TOO):
        assert prompts(env, mine, answer, CLASH) == prompts(env, theirs, answer, CLASH)
        mine, theirs = enter(mine, answer), enter(theirs, answer)
        assert mine.grid == theirs.grid


@pytest.mark.parametrize("options", STYLES)
def test_the_planner_sees_the_draft_and_what_the_rules_say(options: dict[str, Any]) -> None:
    env = Sudoku(max_turns=1, **options)
    compact = options["style"] == "compact"
    for draft, verdict, short in (
        (SOLVED, "is complete and consistent.", ">goal"),
        (WRONG, "breaks no rule; cells left empty: 7.", ">7"),
        (CLASH, "is wrong: row 1 repeats 3; column 4 repeats 3; box 2 repeats 3.", ">r13#"),
        (
            "2" + SOLVED[1:],
            "is wrong: given at row 1, column 1 is changed; row 1 repeats 2; column 1 repeats 2; and more.",
            ">g11#",
        ),
    ):
        record = episode(env, PUZZLE, lambda prompt, k, draft=draft: written(draft, options), lambda prompt, k: "-")
        asked = prompt_of(of("planner", record)[0])
        assert grids_in(asked) == [STANDING, draft]
        assert short in asked if compact else verdict in asked
    record = episode(env, PUZZLE, lambda prompt, k: "?", lambda prompt, k: "-")
    assert (">none" if compact else "no valid grid") in prompt_of(of("planner", record)[0])


# ------------------------------------------------------------------ episodes


@pytest.mark.parametrize("options", STYLES)
def test_the_prompt_shows_the_current_grid_and_the_givens(options: dict[str, Any]) -> None:
    """Trap 4: the reference prompt shows the start, not the current state."""
    answers = {STANDING: WRONG, WRONG: RIGHT, RIGHT: CLASH}
    env = Sudoku(max_turns=4, **options)
    record = episode(
        env,
        PUZZLE,
        lambda prompt, k: "-",
        lambda prompt, k: written(answers.get(grids_in(prompt)[0], SOLVED), options),
    )
    after_clash = grid("12.. 3412 2143 4321")
    shown = [[STANDING], [WRONG, STANDING], [RIGHT, STANDING], [after_clash, STANDING]]
    for agent in ("tool_user", "planner"):
        assert [grids_in(prompt_of(decision)) for decision in of(agent, record)] == shown
    assert record.outcome.success
    assert [decision.candidates[0].reward for decision in of("planner", record)] == pytest.approx([0.2, 0.3, 0.6, 2])


@pytest.mark.parametrize("options", STYLES)
def test_a_scripted_oracle_solves_every_task(options: dict[str, Any]) -> None:
    env = Sudoku(**options)
    for index in range(10):
        record = episode(env, env.task("val", index), lambda prompt, k: "-", oracle(options))
        assert record.outcome.success
        assert record.outcome.team_reward == 1
        assert record.outcome.metrics == {"turns": 1, "correct": 1}
        assert [decision.candidates[0].reward for decision in record.decisions] == pytest.approx([0, 2])


def test_running_out_of_turns_is_not_success() -> None:
    env = Sudoku(tool="grid", max_turns=3)
    almost_solved = SOLVED[:2] + "." + SOLVED[3:]
    for answer, share in (("-", 0), (full(WRONG), 0), (full(almost_solved), 7 / 8), (full(CHANGED), 0)):
        record = episode(env, PUZZLE, lambda prompt, k: "-", lambda prompt, k, answer=answer: answer)
        assert len(record.decisions) == 6
        assert not record.outcome.success
        assert record.outcome.team_reward == 0
        assert record.outcome.metrics == {"turns": 3, "correct": share}


def test_solving_on_the_last_turn_is_success() -> None:
    steps = [RIGHT, RIGHT[:4] + SOLVED[4:8] + RIGHT[8:], SOLVED]
    env = Sudoku(tool="grid", max_turns=3)
    following = dict(zip([STANDING, *steps], steps, strict=False))
    record = episode(env, PUZZLE, lambda prompt, k: "-", lambda prompt, k: full(following[grids_in(prompt)[0]]))
    assert record.outcome.success
    assert record.outcome.metrics["turns"] == 3
    assert [decision.candidates[0].reward for decision in of("planner", record)] == pytest.approx([0.3, 0.4, 2])


def test_the_best_candidate_is_written_down() -> None:
    env = Sudoku(tool="grid", max_turns=1)
    plans = [full(WRONG), full(SOLVED), full(RIGHT), "-"]
    record = episode(env, PUZZLE, lambda prompt, k: "-", lambda prompt, k: plans[k], candidates=4)
    (plan,) = of("planner", record)
    assert [candidate.reward for candidate in plan.candidates] == pytest.approx([0.2, 2, 0.3, 0])
    assert plan.committed == 1
    assert record.outcome.success


@pytest.mark.parametrize("options", STYLES)
def test_the_single_agent_is_asked_what_the_team_is_asked(options: dict[str, Any]) -> None:
    """The comparison is fair only with the same prompts, feedback, calls and turns."""

    def answer(prompt: str, k: int) -> str:
        return written(RIGHT_TOO if grids_in(prompt)[0] == RIGHT else RIGHT, options)

    team = Sudoku(max_turns=3, **options)
    single = make("sudoku_single", max_turns=3, **options)
    record = episode(team, PUZZLE, answer, answer)
    alone = asyncio.run(play(single, PUZZLE, ScriptedTeam({"solo": answer})))
    assert [decision.prompt_ids for decision in alone.decisions] == [
        decision.prompt_ids for decision in record.decisions
    ]
    assert [decision.turn for decision in alone.decisions] == list(range(6))
    assert alone.outcome == record.outcome
    assert single.agents == ("solo",)
    assert single.task("val", 3) == team.task("val", 3)


def test_programs_of_the_tool_user_are_run_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = functools.partial(run_python, limits=Limits(cpu_seconds=1, wall_seconds=2.0))
    monkeypatch.setattr(drafting, "run_python", quick)

    def program(code: str) -> str:
        return f"Let me see.\n```python\n{code}\n```\n"

    def printing(text: str) -> str:
        return program(f"print({rows(text)!r}, flush=True)")

    answers = {
        program(f"print({rows(SOLVED)!r}, flush=True)\nwhile True: pass"): (0, 0.1),  # timed out, though it printed
        program("raise SystemExit(1)"): (0, 0.1),
        program("print('no idea')"): (0, 0.2),
        "no program": (0, 0),
        full(SOLVED): (0, 0),
        printing(STANDING): (0, 0.2),
        printing(CLASH): (0, 0.6),
        printing(RIGHT): (0, 1.0),
        program(f"print('found')\nfor row in {rows(SOLVED)!r}.split(): print(*row)"): (1, 1.0),
    }
    texts = list(answers)
    record = episode(
        Sudoku(max_turns=1), PUZZLE, lambda prompt, k: texts[k], lambda prompt, k: full(SOLVED), candidates=len(texts)
    )
    draft, plan = record.decisions
    teams, locals_ = zip(*answers.values(), strict=True)
    assert [candidate.score.team for candidate in draft.candidates] == pytest.approx(teams)
    assert [candidate.score.local for candidate in draft.candidates] == pytest.approx(locals_)
    assert draft.committed == len(texts) - 1
    told = prompt_of(plan).replace("\n> ", "\n")  # what the tool user says is quoted
    assert texts[-1] in told
    assert f"found\n{rows(SOLVED, ' ')}" in told
    assert "This draft is complete and consistent." in told
    assert record.outcome.success


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 6}, "size=6"),
        ({"size": "9"}, "size='9'"),
        ({"size": 4.0}, "size=4.0"),
        ({"size": [4]}, "size=[4]"),
        ({"clues": 3}, "clues=3"),
        ({"clues": 16}, "clues=16"),
        ({"clues": 17, "size": 9}, "clues=17"),
        ({"clues": 81, "size": 9}, "clues=81"),
        ({"clues": 8, "size": 9}, "clues=8"),
        ({"clues": True}, "clues=True"),
        ({"clues": "many"}, "clues='many'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_turns": 1.5}, "max_turns=1.5"),
        ({"tool": "moves"}, "tool='moves'"),
        ({"style": "terse"}, "style='terse'"),
        ({"style": "compact"}, "style=compact"),
        ({"holes": 8}, "holes is not an option"),
    ],
)
def test_option_errors_name_key_and_value(options: dict[str, Any], named: str) -> None:
    for name in ("sudoku", "sudoku_single"):
        with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
            make(name, **options)
        assert "\n" not in str(caught.value)
