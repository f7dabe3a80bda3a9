"""Plan-Path: parsing of replies and printed lists, including huge, hostile and echoed ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fakes.plan_path_players import CORRIDOR, full
from fakes.scripted_episodes import episode

from verl_atgrpo.environments.common.moves import parse_moves, parse_printed
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.sandbox.runner import Limits


@pytest.mark.parametrize(
    ("reply", "style", "moves"),
    [
        ("Moves: R, D", "full", "RD"),
        ("Moves: RRD", "full", "RRD"),
        ("Moves:R D", "full", "RD"),
        ("First I thought.\nMoves: R, R, D.\n", "full", "RRD"),
        ("Moves: U\nno, better:\nMoves: D", "full", "D"),
        (f"Moves: {', '.join('R' * 9)}", "full", "R" * 9),
        ("RRD", "compact", "RRD"),
        ("  RRD\n", "compact", "RRD"),
        ("R" * 9, "compact", "R" * 9),
    ],
)
def test_parse_moves(reply: str, style: Any, moves: str) -> None:
    assert parse_moves(reply, style, 9) == moves


@pytest.mark.parametrize(
    "reply",
    [
        "",
        " \n",
        "Moves:",
        "Moves: ...",
        "Moves: <letters>",
        "Moves: R, D then U",
        "Moves: R or D",
        "Moves: U (up), D (down), L (left), R (right)",
        "Moves: \uff32",
        "Mov\u0435s: R",
        "Moves: R\u2028D",
        "The Moves: R",
        "Moves: R\x00D",
        "\U0001f600\ud800",
        full("R" * 10),
        "Moves: " + "R" * 10,
        "[__import__('os').getcwd()]",
    ],
)
def test_replies_without_moves(reply: str) -> None:
    assert parse_moves(reply, "full", 9) is None
    assert parse_moves(reply, "compact", 9) is None


@pytest.mark.parametrize(
    "reply",
    [
        *("rrd", "R R", "R,R", "RR.", "R" * 10, "R\nD", "\u0280R", "RX"),
        *("Moves: R", "Moves: r, d", "**R**", "right", "['R']", "\\boxed{R}"),
    ],
)
def test_compact_replies_have_only_letters(reply: str) -> None:
    assert parse_moves(reply, "compact", 9) is None


@pytest.mark.parametrize(
    ("output", "moves"),
    [
        ("RRD", "RRD"),
        ("R, R, D\n", "RRD"),
        ("['R', 'R', 'D']", "RRD"),
        ('["R"]', "R"),
        ("('R', 'D')", "RD"),
        ("searching\nLL\n ['R', 'D'] \n\n", "RD"),
    ],
)
def test_parse_printed(output: str, moves: str) -> None:
    assert parse_printed(output, 9) == moves


@pytest.mark.parametrize(
    "output",
    [
        *("", "\n \n", "no way", "RRD\ndone", "R;D", "[]", "()", "['R'", "['X']", "[1, 2]"),
        *(
            "[['R']]",
            "{'R': 1}",
            "['R', None]",
            "(R, D), (D, R)",
            "[\x00]",
            "['\ud800']",
            "[" * 5000,
            "[" + "-" * 9999 + "1]",
        ),
        *("[" + "1+" * 9999 + "1]", "R" * 10, "['R'" + ", 'R'" * 9 + "]", "['\uff32']"),
        *("[{[]: 1}]", "[{{}}]", "[" + "9" * 400 + "+1j]"),
    ],
)
def test_printed_garbage_is_no_move_list(output: str) -> None:
    assert parse_printed(output, 9) is None


MEGABYTE = 10**6
HUGE = {
    "moves": "R" * MEGABYTE,
    "answer": "Moves: " + "R, " * (MEGABYTE // 3),
    "answer with a flaw at its end": "Moves: " + "R, " * (MEGABYTE // 3) + "x",
    "gap": "Moves: R" + " " * MEGABYTE + "x",
    "commas": "Moves: R" + ", " * (MEGABYTE // 2) + "x",
    "points": "Moves: R" + " ." * (MEGABYTE // 2) + "x",
    "blank answer": "Moves:" + " " * MEGABYTE + "x",
    "answers": "Moves: R\n" * (MEGABYTE // 9) + "Moves: x",
    "openings": "Moves: " * (MEGABYTE // 7),
    "lines": "\n" * MEGABYTE,
    "unicode": "\u00e9\U0001f600" * (MEGABYTE // 2),
    "brackets": "[" * MEGABYTE,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE.keys())
def test_a_megabyte_is_read_quickly(text: str) -> None:
    before = time.process_time()
    parse_moves(text, "full", 40)
    parse_moves(text, "compact", 40)
    parse_printed(text, 40)
    assert time.process_time() - before < 30  # takes .2 s; quadratic time would be hours


def test_the_longest_output_of_a_program_is_read_quickly() -> None:
    # Parsing blocks the worker's event loop and so all its episodes.
    text = f"[{','.join(['1'] * (Limits().output_bytes // 2 - 2))}]"
    before = time.process_time()
    assert parse_printed(text, 40) is None
    assert time.process_time() - before < 5


def test_model_output_is_never_evaluated(tmp_path: Path) -> None:
    """The reference code parses answers with eval()."""
    witness = tmp_path / "touched"
    attack = f"[__import__('os').system('touch {witness}')]"
    for text in (attack, f"Moves: {attack}", f"noise\n{attack}", f"(lambda: {attack})()"):
        assert parse_moves(text, "full", 40) is None
        assert parse_moves(text, "compact", 40) is None
        assert parse_printed(text, 40) is None
    env = PlanPath(size=5, max_turns=1)
    program = f"```python\nprint({attack!r})\n```"
    record = episode(env, CORRIDOR, lambda prompt, k: program, lambda prompt, k: attack)
    assert [decision.candidates[0].reward for decision in record.decisions] == pytest.approx([0.2, 0])
    assert not witness.exists()
