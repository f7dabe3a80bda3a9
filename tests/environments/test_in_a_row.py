"""Tic-tac-toe and Connect Four: rules by hand, players that look ahead, episodes of both sides, replies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from verl_atgrpo import EnvironmentConfigError, ScriptedTeam, check_environment, make
from verl_atgrpo.environments.in_a_row import Game, InARow, Rules, best_moves, choose, value
from verl_atgrpo.play.environment import play
from verl_atgrpo.play.types import EpisodeRecord

TIC_TAC_TOE, CONNECT = Rules(3, 3, 3, falls=False), Rules(4, 5, 4, falls=True)
Player = Callable[[str], int]


def made(name: str = "tic_tac_toe", **options: Any) -> InARow:
    env = make(name, **options)
    assert isinstance(env, InARow)
    return env


def board_in(prompt: str) -> str:
    """The board of a compact prompt of tic-tac-toe."""
    return "".join(cell if cell in "xo" else "." for cell in "".join(prompt.split("\n")[:3]))


def ahead(depth: int, seed: int = 0) -> Callable[[str, int], str]:
    rng = random.Random(seed)
    return lambda prompt, k: str(1 + choose(TIC_TAC_TOE, board_in(prompt), depth, rng))


def played(env: InARow, task: Game, **scripts: Callable[[str, int], str]) -> EpisodeRecord:
    return asyncio.run(play(env, task, ScriptedTeam(scripts)))


# --- rules


@pytest.mark.parametrize(
    ("rules", "board", "winner"),
    [
        (TIC_TAC_TOE, "xxx.o.o..", "x"),
        (TIC_TAC_TOE, "o.xox.o.x", "o"),
        (TIC_TAC_TOE, "x.o.xo..x", "x"),
        (TIC_TAC_TOE, "xxo.o.o.x", "o"),
        (TIC_TAC_TOE, "xoxxoooxx", ""),
        (TIC_TAC_TOE, "xx.......", ""),
        # Four stones one after the other, but across the edge.
        (CONNECT, "........xxxxooo.....", ""),
        (CONNECT, "...............oooo.", "o"),
        (CONNECT, "x....x....x....x....", "x"),
        (CONNECT, "x.....x.....x.....x.", "x"),
        (CONNECT, "...o...o...o...o....", "o"),
    ],
)
def test_who_has_won(rules: Rules, board: str, winner: str) -> None:
    assert rules.winner(board) == winner
    assert (rules.moves(board) == []) == bool(winner or "." not in board)


def test_stones_fall() -> None:
    board = CONNECT.start()
    for move in (2, 2, 2, 2):
        board = CONNECT.play(board, move)
    assert [board[row * 5 + 2] for row in range(4)] == ["o", "x", "o", "x"]
    assert CONNECT.moves(board) == [0, 1, 3, 4]
    assert CONNECT.turn(board) == "x"


def test_a_player_that_sees_the_end_wins_soon_and_stops_the_other() -> None:
    assert value(TIC_TAC_TOE, TIC_TAC_TOE.start(), 9) == 0
    # x wins at once, rather than in three moves.
    assert best_moves(TIC_TAC_TOE, "xx.oo....", 9) == [2]
    # o must stop the row.
    assert best_moves(TIC_TAC_TOE, "xx..o....", 9) == [2]
    assert best_moves(CONNECT, "..........o....oxxx.", 2) == [4]
    # It looks no further than it says: any move will do.
    assert len(best_moves(TIC_TAC_TOE, "x........", 1)) == 8


def test_random_moves_never_beat_perfect_ones() -> None:
    rng = random.Random(1)
    results = set()
    for game in range(60):
        board = TIC_TAC_TOE.start()
        while TIC_TAC_TOE.moves(board):
            perfect = TIC_TAC_TOE.turn(board) == "xo"[game % 2]
            board = TIC_TAC_TOE.play(board, choose(TIC_TAC_TOE, board, 9 * perfect, rng))
        results.add((game % 2, TIC_TAC_TOE.winner(board)))
    assert results <= {(0, "x"), (0, ""), (1, "o"), (1, "")}
    assert {(0, "x"), (1, "o")} <= results


# --- tasks and episodes


def test_training_is_against_the_other_agent_and_validation_against_programs() -> None:
    env = made(val_games=4, opening=3)
    games = [env.task("train", index) for index in range(200)]
    assert [game.side for game in games[:3]] == ["x", "o", "x"]
    assert {len(game.opening) for game in games} == {0, 1, 2, 3}
    assert {env.opponents(game) for game in games[::2]} == {("o",)}
    validation = [env.task("val", index) for index in range(8)]
    assert [game.opponent for game in validation] == ["random"] * 4 + ["search"] * 4
    assert all(not game.opening and not env.opponents(game) for game in validation)
    assert env.data_sets("val") == {"random": 4, "search": 4}
    assert env.num_tasks("val") == 8
    # Games against a program differ by its random numbers; the same opening, side and opponent is the same game.
    assert len({env.fingerprint(game) for game in validation}) == 8
    same = [Game((4,), "x", "self", seed) for seed in (1, 2)]
    assert env.fingerprint(same[0]) == env.fingerprint(same[1])
    assert env.fingerprint(same[0]) != env.fingerprint(Game((4,), "o", "self", 1))


def test_only_the_side_in_training_is_trained() -> None:
    env = made(style="compact")
    record = played(env, Game((), "o", "self", 0), x=ahead(0), o=ahead(9))
    assert {(one.agent, one.trained) for one in record.decisions} == {("x", False), ("o", True)}
    assert record.decisions[0].agent == "x"


@pytest.mark.parametrize(("side", "reward"), [("x", 1.0), ("o", -1.0)])
def test_the_reward_is_that_of_the_side(side: str, reward: float) -> None:
    env, moves = made(style="compact"), iter("147")
    record = played(
        env, Game((), side, "self", 0), x=lambda prompt, k: next(moves), o=lambda prompt, k: max(board_of(prompt))
    )
    assert (record.outcome.team_reward, record.outcome.success) == (reward, reward > 0)
    assert record.outcome.metrics["win"] == (reward > 0)
    assert record.outcome.metrics["loss"] == (reward < 0)


def board_of(prompt: str) -> list[str]:
    return [cell for cell in prompt if cell.isdigit()]


def test_a_draw_is_no_loss() -> None:
    env = made(style="compact")
    for side in "xo":
        outcome = played(env, Game((), side, "search", 3), x=ahead(9), o=ahead(9)).outcome
        assert (outcome.success, outcome.team_reward, outcome.metrics["draw"]) == (True, 0.0, 1.0)


def test_an_illegal_move_loses_but_the_other_side_makes_another_one() -> None:
    env = made(style="compact")
    nonsense: Callable[[str, int], str] = lambda prompt, k: "10"  # noqa: E731
    lost = played(env, Game((), "x", "self", 0), x=nonsense, o=ahead(9)).outcome
    assert (lost.success, lost.team_reward, lost.metrics["illegal"]) == (False, -1.0, 1.0)
    going_on = [played(env, Game((), "x", "self", seed), x=ahead(9), o=nonsense) for seed in (1, 1, 2, 3, 4)]
    assert all(one.outcome.success and one.outcome.metrics["illegal"] == 0 for one in going_on)
    assert len({len(one.decisions) for one in going_on} | {str(one.outcome) for one in going_on}) > 1
    assert going_on[0].outcome == going_on[1].outcome


def test_a_win_on_the_last_cell_is_no_draw() -> None:
    env, opening = made(style="compact"), (0, 1, 2, 3, 4, 5, 7, 6)
    # xox / oxo / ox. with x to move: the last cell ends the diagonal.
    outcome = played(env, Game(opening, "x", "self", 0), x=lambda prompt, k: "9", o=ahead(0)).outcome
    assert (outcome.team_reward, outcome.metrics["moves"]) == (1.0, 1.0)


# --- prompts and replies


def test_the_prompt_shows_what_is_free() -> None:
    assert made(style="compact").prompt("xo.......") == "xo3\n456\n789\nx"
    full = made().prompt("xo.......")
    assert "as x:" in full
    assert "\nx o 3\n4 5 6\n7 8 9\nFree cells: 3, 4, 5, 6, 7, 8, 9." in full
    falls = made("connect_four", rows=4, columns=5).prompt("x....o....x....o....")
    assert "\n1 2 3 4 5\nFree columns: 2, 3, 4, 5." in falls


@pytest.mark.parametrize(
    ("style", "reply", "move"),
    [
        ("compact", " 3\n", 2),
        ("compact", "3.", None),
        ("compact", "three", None),
        ("compact", "", None),
        ("compact", "٣", None),
        ("compact", "-1", None),
        ("compact", "007", None),
        ("full", "I take the middle.\nMove: 5", 4),
        ("full", "move: **5**", 4),
        ("full", "**Move:** 5", 4),
        ("full", "**Move: 5**", 4),
        ("full", "_Move_: `5`", 4),
        ("full", "Move: [5]", 4),
        ("full", "Move: <5>", 4),
        ("full", "Move: <number of a free cell>", None),
        ("full", "**Moving** 5", None),
        ("full", "Move: 5.", 4),
        ("full", "```\nMove: 5\n```", 4),
        ("full", r"Move: $\boxed{5}$", 4),
        ("full", "Move: column 5", 4),
        ("full", "Move: 5\n```\n6\n```", None),
        ("full", "```", None),
        ("full", "Move: 5\nor Move: 6?", 5),
        ("full", "Move: 5\nThank you", None),
        ("full", "5", None),
    ],
)
def test_replies(style: str, reply: str, move: int | None) -> None:
    assert made(style=style).move_in(reply) == move


@pytest.mark.parametrize("style", ["compact", "full"])
def test_tic_tac_toe_keeps_the_contract(style: str) -> None:
    env = made(style=style)

    def script(depth: int) -> Any:
        def reply(prompt: str, k: int) -> str:
            lines = prompt.replace(" ", "").split("\n")
            board = "".join(lines[:3] if style == "compact" else lines[1:4])
            cells = "".join(cell if cell in "xo" else "." for cell in board)
            move = 1 + choose(env.rules, cells, depth, random.Random(k))
            return str(move) if style == "compact" else f"Move: {move}"

        return lambda task: {"x": reply, "o": reply}

    check_environment("tic_tac_toe", {"style": style}, gold=script(9), tasks=10, episodes=2, bounds=(0, 0), floor=0.0)


def test_connect_four_keeps_the_contract() -> None:
    check_environment("connect_four", {"rows": 4, "columns": 4}, tasks=10, episodes=1, bounds=(0, 0), floor=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opening": 7}, "opening=7"),
        ({"opponent": "perfect"}, "opponent='perfect'"),
        ({"val_games": 0}, "val_games=0"),
        ({"style": "terse"}, "style='terse'"),
        ({"rows": 3}, "rows"),
        ({"seed": None}, "seed=None"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        made(**options)


@pytest.mark.parametrize(
    ("name", "opponent"), [("tic_tac_toe", "search"), ("tic_tac_toe", "self"), ("connect_four", "random")]
)
def test_after_a_long_opening_the_side_in_training_still_moves(name: str, opponent: str) -> None:
    """A player that looks ahead wins at once where it can, so an opening may not leave it that."""
    env = made(name, opening=6, opponent=opponent, style="compact")
    kept = 0
    for index in range(120):
        task = env.task("train", index)
        board = env.rules.after(task.opening)
        if env.rules.turn(board) != task.side:
            kept += 1
            assert not any(env.rules.winner(env.rules.play(board, move)) for move in env.rules.moves(board))
        assert any(
            one.trained for one in played(env, task, x=lambda prompt, k: "1", o=lambda prompt, k: "1").decisions
        )
    assert kept, "not every opening loses a move"
