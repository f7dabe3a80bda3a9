"""Plan-Path: tasks, and rewards computed by hand."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from fakes.plan_path_players import CORRIDOR, WALLED, cpu_limit, full, full_oracle, grid_in, solve, task_from
from fakes.scripted_episodes import episode, of
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_atgrpo import EnvironmentConfigError, make
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State, team_reward, walk

# ------------------------------------------------------------------ tasks


@pytest.mark.parametrize(
    "options",
    [{}, {"size": 4, "min_distance": 3, "max_distance": 4}, {"size": 5, "wall_density": 0.5, "max_distance": 1}],
)
def test_the_goal_is_within_reach_and_as_far_as_it_should_be(options: dict[str, Any]) -> None:
    env = PlanPath(**options)
    for index in range(150):
        task = env.task("train", index)
        assert task.distance[task.start] == len(solve(env.fingerprint(task)))
        assert env.min_distance <= task.distance[task.start] <= env.max_distance


def test_fingerprint_tells_start_and_goal_and_walls_apart() -> None:
    env = PlanPath(size=3, min_distance=1)
    drawings = ["P.G ... ...", "G.P ... ...", "P#G ... ...", "P.. G.. ..."]
    assert len({env.fingerprint(task_from(drawing)) for drawing in drawings}) == 4
    assert env.fingerprint(task_from(drawings[2])) == drawings[2].replace(" ", "\n")


@pytest.mark.parametrize("min_distance", [1, 2])
def test_an_environment_without_tasks_is_an_error_and_no_endless_search(min_distance: int) -> None:
    """A 2x2 grid without walls has 12 tasks, 4 of them diagonal: none of those 4 may belong to validation."""
    with cpu_limit(60):
        try:
            env = make("plan_path", size=2, wall_density=0.0, min_distance=min_distance)
            assert env.task("val", 0).distance
        except EnvironmentConfigError as error:
            assert re.search("size|wall_density|min_distance", str(error))


def test_few_shot_examples_are_solved_and_never_from_validation() -> None:
    env = PlanPath(size=5, tool="moves", few_shot=4)
    *messages, question = env.draft_prompt(State.initial(CORRIDOR))
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 4]
    validation = {env.fingerprint(env.task("val", index)) for index in range(200)}
    for shown, answer in zip(messages[1::2], messages[2::2], strict=True):
        grid = grid_in(shown["content"])
        assert grid not in validation
        moves = env.parse(answer["content"])
        assert moves is not None
        assert len(moves) == len(solve(grid))
        assert walk(State.initial(task_from(grid)), moves).end.solved
    assert grid_in(question["content"]) == CORRIDOR.draw(CORRIDOR.start)


def test_shortest_is_a_shortest_path() -> None:
    env = PlanPath(size=7, wall_density=0.3)
    for index in range(40):
        task = env.task("train", index)
        moves = task.shortest(task.start, random.Random(index))
        assert len(moves) == len(solve(task.draw(task.start)))
        walked = walk(State.initial(task), moves)
        assert walked.end.solved
        assert walked.legal
        assert walked.on_shortest_path
    assert len(WALLED.shortest(WALLED.start, random.Random(0))) == 8
    assert CORRIDOR.shortest(CORRIDOR.goal, random.Random(0)) == ""


# ------------------------------------------------------------------ walking and rewards


@pytest.mark.parametrize(
    ("task", "moves", "end", "legal", "shortest"),
    [
        (CORRIDOR, "RRRR", (0, 4), True, True),
        (CORRIDOR, "RR", (0, 2), True, True),
        (CORRIDOR, "DR", (1, 1), True, False),
        (CORRIDOR, "RRRRD", (0, 4), True, False),  # stops at the goal
        (CORRIDOR, "RURR", (0, 1), False, False),  # stops at the border
        (CORRIDOR, "L", (0, 0), False, False),
        (WALLED, "R", (0, 0), False, False),  # stops at the wall
        (WALLED, "DRDD", (1, 0), False, False),
        (WALLED, "DDDRRUUU", (0, 2), True, True),
        (CORRIDOR, "", (0, 0), True, False),
    ],
)
def test_walk(task: PlanPathTask, moves: str, end: tuple[int, int], legal: bool, shortest: bool) -> None:
    walked = walk(State.initial(task), moves)
    assert (walked.end.position, walked.legal, walked.on_shortest_path) == (end, legal, shortest)
    assert walked.end.solved == (end == task.goal)


@pytest.mark.parametrize(
    ("moves", "team", "local"),
    [
        ("RRRR", 1, 1),  # format .1 + legal .1 + shortest .8
        ("RR", 2 / 4, 1),
        ("RRL", 1 / 4, 0.2),
        ("D", 0, 0.2),  # away from the goal
        ("U", 0, 0.1),  # into the border
        ("RRRU", 3 / 4, 0.1),
        ("RRRRD", 1, 0.2),
        ("DRRRRU", 1, 0.2),
    ],
)
def test_scores_by_hand(moves: str, team: float, local: float) -> None:
    score = PlanPath(tool="moves").score_answer(State.initial(CORRIDOR), moves)
    assert score.team == pytest.approx(team)
    assert score.local == pytest.approx(local)


def test_progress_is_rewarded_once_relative_to_the_closest_point() -> None:
    there = walk(State.initial(CORRIDOR), "RR").end
    assert team_reward(State.initial(CORRIDOR), there) == 0.5
    back = walk(there, "L").end
    assert team_reward(there, back) == 0
    assert team_reward(back, walk(back, "R").end) == 0  # (0, 2) was rewarded before
    assert team_reward(back, walk(back, "RR").end) == 0.25
    assert team_reward(back, walk(back, "RRR").end) == 1


def test_going_back_and_forth_earns_nothing_after_the_first_visit() -> None:
    """In the reference code stepping back and forth earns more than solving."""
    env = PlanPath(size=5, tool="moves", max_turns=30)

    def bounce(prompt: str, k: int) -> str:
        return full("R" if grid_in(prompt).startswith("P") else "L")

    record = episode(env, CORRIDOR, lambda prompt, k: "-", bounce)
    paid = [decision.candidates[0].score.team for decision in of("planner", record)]
    assert paid == [0.25, *[0.0] * 29]
    solved = episode(env, CORRIDOR, lambda prompt, k: "-", full_oracle)
    assert sum(paid) < sum(decision.candidates[0].score.team for decision in of("planner", solved)) == 1
    assert not record.outcome.success
    assert record.outcome.team_reward == 0 < solved.outcome.team_reward == 1
    # At every decision walking to the goal earns more than the next step back and forth.
    state = State.initial(CORRIDOR)
    for step in "RLRLRL":
        best = env.score_answer(state, solve(CORRIDOR.draw(state.position)))
        assert best.mixed(1.0) > env.score_answer(state, step).mixed(1.0)
        state = walk(state, step).end


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text("UDLR", min_size=1, max_size=6), max_size=25), st.integers(0, 20))
def test_wandering_never_earns_as_much_as_solving(answers: list[str], index: int) -> None:
    task = PlanPath(size=4, wall_density=0.3).task("train", index)
    state, earned = State.initial(task), 0.0
    for moves in answers:
        after = walk(state, moves).end
        if after.solved:
            break
        earned += team_reward(state, after)
        assert after.closest <= state.closest
        state = after
    assert earned <= (task.distance[task.start] - 1) / task.distance[task.start] + 1e-9 < 1


@pytest.mark.parametrize("seed", range(5))
def test_few_shot_examples_differ_in_their_answers(seed: int) -> None:
    """With equal answers in all examples, SmolLM2 copied that answer."""
    options = {"size": 3, "wall_density": 0.1, "max_moves": 1, "tool": "moves", "seed": seed}
    for count, distinct in ((2, 2), (4, 4), (6, 4)):
        env = PlanPath(few_shot=count, **options)  # type: ignore[arg-type]
        prompt = env.draft_prompt(State.initial(env.task("val", 0)))
        answers = [message["content"] for message in prompt if message["role"] == "assistant"]
        assert (len(answers), len(set(answers))) == (count, distinct)
