"""Sokoban with a team: rewards, replies, prompts, episodes, options."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.scripted_episodes import check_programs, episode, of, prompt_of
from fakes.sokoban_players import (
    ROOM,
    ROUND_TRIP,
    TWO,
    board,
    board_in,
    earned,
    full,
    in_turn,
    nothing,
    oracle,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo import EnvironmentConfigError, make
from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.sokoban import Sokoban
from verl_atgrpo.environments.sokoban.board import SokobanTask, State, walk
from verl_atgrpo.environments.sokoban.levels import solve

# ------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    ("task", "moves", "team", "local"),
    [
        (ROOM, "RRR", 1, 1),  # format .1, legal .1, clear of deadlocks .8
        (ROOM, "RRRR", 1, 1),
        (ROOM, "R", 0, 1),
        (ROOM, "U", 0, 0.2),  # the boxes did not move
        (ROOM, "UDUDUD", 0, 0.2),
        (ROOM, "RURRDL", 0, 0.2),  # there and back again
        (ROOM, "L", 0, 0.1),
        (ROOM, "URD", 0, 0.2),  # to a wall without a target
        (ROOM, "RDLLL", 0, 0.9),  # into the wall after a fair push
        (TWO, "RR", 1 / 2, 1),
        (TWO, "RRDLLDRR", 1, 1),
        (TWO, "RRR", 0, 0.2),  # past the target into the corner
        (board("@*__", "_$._"), "R", 0, 1),  # off its target: no reward and no penalty
    ],
)
def test_scores_by_hand(task: SokobanTask, moves: str, team: float, local: float) -> None:
    score = Sokoban(tool="moves").score_answer(State.initial(task), moves)
    assert score.team == pytest.approx(team)
    assert score.local == pytest.approx(local)


@pytest.mark.parametrize(
    ("task", "moves", "team", "local"),
    [
        (ROOM, "RRR", 1, 1),
        (ROOM, "R", 0, 0.2 + 0.8 / 3),
        (ROOM, "RR", 0, 0.2 + 0.8 * 2 / 3),
        (ROOM, "U", 0, 0.2),
        (ROOM, "L", 0, 0.2),
        (ROOM, "URD", 0, 0.2),
        (TWO, "RR", 1 / 2, 0.2 + 0.8 * 2 / 4),
    ],
)
def test_scores_of_printed_moves_by_hand(task: SokobanTask, moves: str, team: float, local: float) -> None:
    score = Sokoban().score_printed(State.initial(task), moves)
    assert score.team == pytest.approx(team)
    assert score.local == pytest.approx(local)


def test_progress_is_rewarded_once() -> None:
    env = Sokoban(tool="moves")
    state = State.initial(TWO)
    paid = []
    for moves in ("RR", "DRRUL", "DLLUR", "DRRUL", "DLLUR"):  # on the target, off it, on it again ...
        paid.append((env.score_answer(state, moves), env.score_printed(state, moves)))
        state = walk(state, moves).end
    assert [(round(score.team, 9), round(score.local, 9)) for score, _ in paid] == [(0.5, 1.0), *[(0.0, 0.2)] * 4]
    assert [(score.team, round(score.local, 9)) for _, score in paid] == [(0.5, 0.6), *[(0.0, 0.2)] * 4]
    assert env.score_answer(state, solve(SokobanTask(state.draw()))).mixed(1.0) == pytest.approx(2)


@pytest.mark.parametrize("answers", [["U", "D"], ["L"], ["URRDL"], ROUND_TRIP, ["RURRDL", "U", "D"], ["URD", "U"]])
def test_going_back_and_forth_never_earns_as_much_as_solving(answers: list[str]) -> None:
    """In the reference code stepping back and forth earns more than solving."""
    env = Sokoban(tool="moves")
    idle = episode(env, ROOM, nothing, in_turn(*map(full, answers)))
    solved = episode(env, ROOM, nothing, oracle)
    assert len(idle.decisions) == 8
    assert sum(earned("planner", idle)) < sum(earned("planner", solved)) == pytest.approx(2)
    assert max(earned("planner", idle)[1:]) <= 0.2 + 1e-9  # only the first push was ever new
    assert not idle.outcome.success
    assert idle.outcome.team_reward == 0 < solved.outcome.team_reward == 1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("UDLR", min_size=1, max_size=8), max_size=20), st.integers(0, 15))
def test_solving_earns_more_than_anything_else_at_every_decision(answers: list[str], index: int) -> None:
    env = Sokoban(boxes=2, tool="moves", seed=5)
    task = env.task("train", index)
    state, team, paid = State.initial(task), 0.0, []
    for moves in answers:
        score = env.score_answer(state, moves)
        after = walk(state, moves).end
        if after.solved:
            assert score.mixed(1.0) == pytest.approx(2)
            break
        assert score.mixed(1.0) <= 2 - 1 / 2 + 1e-9
        team += score.team
        if score.local > 0.5:
            paid.append(after.boxes)
        state = after
    assert team <= 1 / 2
    assert len(set(paid)) == len(paid)  # no arrangement of the boxes is rewarded twice
    assert task.boxes not in paid


# ------------------------------------------------------------------ replies and prompts


def test_the_planner_sees_where_the_draft_leads() -> None:
    def planned(moves: str | None, **options: Any) -> str:
        env = Sokoban(**options)
        return env.plan_prompt(State.initial(TWO), Draft("-", moves))[-1]["content"]

    prompt = planned("RR", tool="moves")
    assert board_in(prompt) == TWO
    assert "R, R. They lead to this board:" in prompt
    assert board("__@*_", "_____", "_$_._").drawing.replace(" ", "-") in prompt
    assert "deadlock" not in prompt
    assert "They solve the board." in planned("RRDLLDRR", tool="moves")
    assert "deadlock" in planned("RRR", tool="moves")
    assert "the next move is blocked" in planned("RU", tool="moves")
    assert "no valid moves" in planned(None, tool="moves")


# ------------------------------------------------------------------ episodes


def test_each_turn_starts_from_the_current_board() -> None:
    record = episode(Sokoban(max_turns=4, tool="moves"), ROOM, nothing, in_turn(full("R")))
    asked = [board_in(prompt_of(decision)).drawing.split("\n")[2] for decision in record.decisions]
    assert asked == [row for row in ("#@$  .#", "# @$ .#", "#  @$.#") for _ in range(2)]
    assert record.outcome.success
    assert record.outcome.metrics["turns"] == 3
    assert [decision.candidates[0].score.team for decision in of("planner", record)] == [0, 0, 1]


@pytest.mark.parametrize(("answer", "share"), [("-", 0), (full("D"), 0), (full("RR"), 0.5), (full("RRR"), 0)])
def test_running_out_of_turns_is_failure(answer: str, share: float) -> None:
    """In the reference code running out of turns is success."""
    record = episode(Sokoban(tool="moves", max_turns=1), TWO, nothing, in_turn(answer))
    assert not record.outcome.success
    assert record.outcome.team_reward == share
    record = episode(Sokoban(tool="moves", max_turns=3), TWO, nothing, in_turn(answer))
    assert not record.outcome.success
    assert record.outcome.metrics["turns"] == 3


def test_programs_of_the_tool_user_are_run_and_scored() -> None:
    def program(code: str) -> str:
        return f"Let me see.\nMoves: R\n```python\n{code}\n```\n"

    answers = {
        program("raise ValueError"): (0, 0.1),
        program("print('no idea')"): (0, 0.2),
        "no program": (0, 0),
        program("print(list('U'))"): (0, 0.2),
        program("print(list('R'))"): (0, 0.2 + 0.8 / 3),
        program("print(list('RRR'))"): (1, 1.0),
    }
    told = prompt_of(check_programs(Sokoban(max_turns=1), ROOM, answers, oracle))
    assert "> print(list('RRR'))" in told
    assert "R, R, R. They solve the board." in told


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("options", [{"size": 5, "boxes": 9}, {"size": 5, "min_solution": 60}])
def test_options_without_boards_are_refused_in_time(options: dict[str, Any]) -> None:
    env = make("sokoban", **options)
    with pytest.raises(EnvironmentConfigError, match=r"at_grpo\.environment\.size=5.*hardly any board"):
        env.task("train", 0)


def test_full_prompts_have_all_positions_and_a_method() -> None:
    env, task = Sokoban(), board("@$__.", "__#__")
    program = env.draft_prompt(State.initial(task))[-1]["content"]
    plan = env.plan_prompt(State.initial(task), Draft("-", None))[-1]["content"]
    for prompt in (program, plan):
        where = "player is at (1, 1), boxes are at (1, 2), targets at (1, 5), walls inside the border at (2, 3)."
        assert where in prompt
    assert "breadth-first search" in program and "Think step by step" in plan
