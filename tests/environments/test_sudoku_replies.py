"""Sudoku: parsing of replies and printed grids, including huge and hostile ones."""

from __future__ import annotations

import copy
import math
import re
import time
from typing import Any

import pytest
from fakes.sudoku_players import (
    CHANGED,
    CLASH,
    PUZZLE,
    RIGHT,
    SOLVED,
    STANDING,
    STATES,
    STYLES,
    WIKIPEDIA,
    WRONG,
    entries,
    full,
    on_givens,
    rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo.environment import Score
from verl_atgrpo.environments.sudoku.environment import Sudoku, parse_grid, parse_printed
from verl_atgrpo.environments.sudoku.grid import State


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
    full(RIGHT).replace("Grid", "grid").replace(":", ""),
    f"The {full(RIGHT)}",
    full(RIGHT) + "\n1 2 3 4",
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
def test_compact_replies_have_only_rows(reply: str) -> None:
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
    assert time.process_time() - before < 30  # takes .2 s; quadratic time would be hours


almost = st.text(".01234 \n", max_size=40)
replies = st.one_of(
    st.text(), almost, almost.map("Grid:\n{}".format), (entries | on_givens).map(full), on_givens.map(rows)
)


@settings(deadline=None, max_examples=100)
@given(replies, st.sampled_from(STYLES), st.sampled_from(STATES))
def test_any_reply_gets_a_finite_score_and_leaves_the_state_unchanged(
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
