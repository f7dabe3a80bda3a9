"""Plan-Path: parsing of replies and printed lists, including huge, hostile and echoed ones."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.drafting_episodes import episode
from fakes.plan_path_players import CORRIDOR, STYLES, WALLED, full, solve
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo.environment import Score
from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.common.moves import parse_moves, parse_printed
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.plan_path.grid import State, walk
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


def states_on_the_way() -> list[State]:
    state = State.initial(WALLED)
    return [state, walk(state, "DD").end, walk(state, "DDDRR").end, walk(state, "DDDRRUUL").end]


@pytest.mark.parametrize("options", [*STYLES, {"style": "full", "tool": "python"}])
def test_echoing_a_prompt_earns_nothing(options: dict[str, Any]) -> None:
    env = PlanPath(size=5, **options)
    for state in states_on_the_way():
        solution = solve(WALLED.draw(state.position))
        drafts = [Draft("no idea", None)]
        for moves in (solution, solution[:-1], "L", "U" * 3):
            program = f"Moves: R\n```python\nprint({list(moves)})\n```\nMoves: {', '.join(moves)}"
            drafts.append(Draft(program, moves, str(list(moves)), True))
        prompts = [env.draft_prompt(state), *(env.plan_prompt(state, draft) for draft in drafts)]
        for prompt in prompts:
            contents = [message["content"] for message in prompt]
            for text in ("\n".join(contents), *contents, contents[-1].splitlines()[-1]):
                assert env.score_answer(state, env.parse(text)) == Score(0, 0)


@pytest.mark.parametrize("options", [*STYLES, {"style": "full", "tool": "python"}])
def test_a_team_of_parrots_earns_nothing(options: dict[str, Any]) -> None:
    env = PlanPath(size=5, max_turns=2, **options)
    record = episode(env, WALLED, lambda prompt, k: prompt, lambda prompt, k: prompt)
    assert [decision.candidates[0].reward for decision in record.decisions] == [0] * 4
    assert not record.outcome.success
    assert record.outcome.team_reward == 0


almost = st.text("UDLR, .", max_size=30)
replies = st.one_of(st.text(), almost, almost.map("Moves: {}".format), almost.map("so\nMoves: {}\n".format))


@settings(deadline=None, max_examples=100)
@given(replies, st.sampled_from(["full", "compact"]), st.sampled_from(states_on_the_way()))
def test_any_reply_gets_a_finite_score_and_leaves_the_state_unchanged(reply: str, style: Any, state: State) -> None:
    env = PlanPath(size=5, style=style, tool="moves")
    before = copy.deepcopy(state)
    moves = env.parse(reply)
    assert moves is None or set(moves) <= set("UDLR")
    assert moves is None or 1 <= len(moves) <= env.max_moves
    score = env.score_answer(state, moves)
    assert math.isfinite(score.mixed(1.0))
    assert 0 <= score.team <= 1
    assert 0 <= score.local <= 1 + 1e-9
    assert (moves is None) == (score == Score())
    assert state == before
    assert state.task.distance == before.task.distance
    assert env.score_answer(state, moves) == score
    printed = parse_printed(reply, env.max_moves)
    assert printed is None or set(printed) <= set("UDLR")


def test_the_order_of_scoring_does_not_matter() -> None:
    env = PlanPath(size=5, tool="moves")
    state = walk(State.initial(WALLED), "DD").end
    answers = ["DRRUUU", "D", "U", "L", None, "DRR"]
    forward = [env.score_answer(state, moves) for moves in answers]
    assert [env.score_answer(state, moves) for moves in reversed(answers)] == forward[::-1]
