"""Sudoku: parsing of replies and printed grids, including huge and hostile ones."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fakes.sudoku_players import (
    PUZZLE,
    RIGHT,
    SOLVED,
    STYLES,
    WIKIPEDIA,
    full,
    rows,
)

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
