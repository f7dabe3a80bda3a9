"""M-GRPO (arXiv 2511.13288): the sub-agent calls of every episode aligned to D without copying rows, by hand."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from fakes.advantage_rows import estimate, ids, tensor
from fakes.scripted_policy import Workflow, run, team_of
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo import Outcome, Score, Team
from verl_atgrpo.train.estimators.advantages import group_advantages, team_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.estimators.spec import EstimatorSpec
from verl_atgrpo.train.rollout.episode_rows import training_rows


def m_grpo(calls: int, **options: Any) -> dict[str, Any]:
    return {"at_grpo_estimator": {"preset": "m_grpo", "main_agent": "main", "sub_calls": calls, **options}}


# Task q, four episodes with outcomes 1, 0, 1, 0. In the third, the searcher was not called.
UIDS = [
    *("q#0@main~2", "q#0@searcher~1", "q#0@main~0"),
    *("q#1@main~3", "q#1@searcher~2", "q#1@searcher~1", "q#1@searcher~0"),
    "q#2@main~0",
    *("q#3@searcher~2", "q#3@searcher~1", "q#3@main~0"),
]
REWARDS = [1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
# Main agent, A = (R - mu) / sigma over the K episodes: 1, 0, 1, 0: mean 1/2, population std 1/2.
MAIN = 0.5 / 0.500001
# Searcher with D = 2, over the aligned calls: 1, 1 (one call, twice), 0, 0 (three calls, the last dropped), 0, 0: mean
# 1/3, population variance (2 * 4/9 + 4 * 1/9) / 6 = 2/9, std .4714045. With D = 3 there are three of each: the same.
HIGH, LOW = (2 / 3) / 0.4714055, (-1 / 3) / 0.4714055


def test_calls_are_aligned_to_two() -> None:
    expected = [MAIN, 2 * HIGH, MAIN, -MAIN, LOW, LOW, 0, MAIN, LOW, LOW, -MAIN]
    assert estimate(UIDS, REWARDS, m_grpo(2)) == pytest.approx(expected, abs=1e-6)


def test_calls_are_aligned_to_three() -> None:
    # One call thrice; three calls once each; of two calls the first twice.
    expected = [MAIN, 3 * HIGH, MAIN, -MAIN, LOW, LOW, LOW, MAIN, 2 * LOW, LOW, -MAIN]
    assert estimate(UIDS, REWARDS, m_grpo(3)) == pytest.approx(expected, abs=1e-6)


def test_one_call_an_episode_is_the_first() -> None:
    # 1, 0, 0: the same mean and variance once more.
    expected = [MAIN, HIGH, MAIN, -MAIN, LOW, 0, 0, MAIN, LOW, 0, -MAIN]
    assert estimate(UIDS, REWARDS, m_grpo(1)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [7, 2, 5, 0, 3, 6, 1, 4]])
def test_the_first_of_calls_made_at_once_are_those_of_the_first_turns(order: list[int]) -> None:
    """Updates deal rows in another order than that in which filter and metrics see them."""
    calls = [("searcher", 2, 1), ("searcher", 1, 1), ("searcher", 0, 1), ("main", 0, 0)]
    rows = [
        {"group": "q", "episode": episode, "agent": agent, "turn": turn, "left": left}
        for episode in "uv"
        for agent, turn, left in calls
    ]
    rewards = tensor(1, 1, 1, 1, 0, 0, 0, 0)
    spec = resolve_spec({"preset": "m_grpo", "main_agent": "main", "sub_calls": 2, "eps": 0})
    result = team_advantages(rewards[order], [rows[row] for row in order], spec).tolist()
    assert dict(zip(order, result, strict=True)) == dict(enumerate([0, 1, 1, 1, 0, -1, -1, -1]))


def test_calls_with_scores_of_their_own_from_the_team_to_the_advantages() -> None:
    """As in the paper: a call earns the episode's outcome and its own score, the main agent the outcome alone."""

    def episode(outcome: float, score: float) -> Workflow:
        async def workflow(team: Team) -> Outcome:
            asked = await team.left.act("what is asked?")
            call = await team.right.act(asked.text)
            said = await team.left.act(f"answer with {call.text}")
            for reply in (asked, said):
                await team.settle(reply, lambda text: Score(team=outcome))
            await team.settle(call, lambda text: Score(team=outcome, local=score))
            return Outcome(outcome == 1, outcome)

        return workflow

    spec = resolve_spec({"preset": "m_grpo", "main_agent": "left", "sub_calls": 1})
    rows = []
    for session, (outcome, score) in enumerate(((1, 0.5), (0, 0.2))):
        record = run(episode(outcome, score), team_of(scheme="parallel")[0])
        rows += list(training_rows("q", session, record, "parallel", spec.needs, "own"))
    rewards = [row.reward for row in rows]
    assert [(row.tags["agent"], row.reward) for row in rows] == [
        *(("left", 1), ("right", 1.5), ("left", 1)),
        *(("left", 0), ("right", 0.2), ("left", 0)),
    ]
    found = team_advantages(tensor(*rewards), [row.tags for row in rows], spec)
    # Calls: 1.5 and .2, mean .85, population std .65.
    sub = 0.65 / 0.650001
    assert found.tolist() == pytest.approx([MAIN, sub, MAIN, -MAIN, -sub, -MAIN], abs=1e-6)


def test_calls_are_taken_in_the_order_of_decisions_whatever_the_order_of_rows() -> None:
    order = [6, 9, 2, 5, 0, 10, 8, 1, 4, 7, 3]
    expected = estimate(UIDS, REWARDS, m_grpo(2))
    result = estimate([UIDS[row] for row in order], [REWARDS[row] for row in order], m_grpo(2))
    assert result == pytest.approx([expected[row] for row in order], abs=1e-12)


def test_tasks_and_sub_agents_have_statistics_of_their_own() -> None:
    # Task p: main 2, 6; coder 2, 6 with D = 3: deviations -2, 2, population std 2, times three.
    uids = ["p#0@main~1", "p#0@coder~0", "p#1@main~1", "p#1@coder~0"]
    mixed = estimate([*UIDS, *uids], [*REWARDS, 2, 2, 6, 6], m_grpo(3))
    assert mixed[:11] == estimate(UIDS, REWARDS, m_grpo(3))
    assert mixed[11:] == pytest.approx([-1, -3, 1, 3], abs=1e-5)


@pytest.mark.parametrize("value", [0.1, 0.7, -3.3, 1e8 + 0.1])
@pytest.mark.parametrize("calls", [1, 2, 3, 7])
def test_equal_outcomes_give_exactly_zero(value: float, calls: int) -> None:
    assert estimate(UIDS, [value] * 11, m_grpo(calls)) == [0] * 11


def test_what_is_dropped_enters_no_statistic() -> None:
    # Where calls are rewarded one by one: of .1, .1, 9 and .1, .1 with D = 2 the 9 is dropped, and no spread is left.
    uids = [f"q#0@searcher~{left}" for left in (2, 1, 0)] + ["q#1@searcher~1", "q#1@searcher~0"]
    assert estimate(uids, [0.1, 0.1, 9, 0.1, 0.1], m_grpo(2)) == [0] * 5
    assert estimate(uids, [0.1, 0.1, -9, 0.1, 0.1], m_grpo(2)) == [0] * 5
    assert estimate(uids, [0, 0, 1e15, 1, 1], m_grpo(2)) == pytest.approx([-1, -1, 0, 1, 1], abs=1e-5)


def test_calls_of_one_episode_alone_are_not_compared() -> None:
    assert estimate(UIDS[:3], REWARDS[:3], m_grpo(1)) == [0, 0, 0]
    assert estimate(UIDS[:3], REWARDS[:3], m_grpo(3)) == [0, 0, 0]


def test_trap_8_padding_copied_before_the_statistics() -> None:
    clean = estimate(UIDS, REWARDS, m_grpo(2))
    for uid in ("pad7f", UIDS[1]):  # verl's padding, and a masked copy of a real row
        padded = estimate([*UIDS, uid], [*REWARDS, 1], m_grpo(2), mask=[1] * 11 + [0])
        assert padded == [*clean, 0]
    # Left unmasked, a copy changes how often the calls count.
    assert estimate([*UIDS, UIDS[4]], [*REWARDS, 0], m_grpo(2))[:11] != clean


def test_a_policy_with_the_sub_agents_alone_computes_the_same() -> None:
    everybody = estimate(UIDS, REWARDS, m_grpo(2))
    for agent in ("main", "searcher"):
        rows = [row for row, uid in enumerate(UIDS) if agent in uid]
        alone = estimate([UIDS[row] for row in rows], [REWARDS[row] for row in rows], m_grpo(2))
        assert alone == [everybody[row] for row in rows]


def test_scale_and_centre_may_be_changed() -> None:
    # Without a scale the distances from 1/2 and 1/3 stay; with ddof 1 the variances are 1/3 and (12/9) / 5.
    raw = [0.5, 2 * 2 / 3, 0.5, -0.5, -1 / 3, -1 / 3, 0, 0.5, -1 / 3, -1 / 3, -0.5]
    assert estimate(UIDS, REWARDS, m_grpo(2, scale="none")) == pytest.approx(raw, abs=1e-12)
    main, searcher = 0.5773503, 0.5163978
    scaled = [value / (main if "main" in uid else searcher) for value, uid in zip(raw, UIDS, strict=True)]
    assert estimate(UIDS, REWARDS, m_grpo(2, ddof=1, eps=0)) == pytest.approx(scaled, abs=1e-6)


def test_sub_agents_may_be_called_differently_often() -> None:
    # The coder (2 and 6, once each) is aligned to 1, the searcher to 2.
    uids, rewards = [*UIDS, "q#0@coder~4", "q#1@coder~4"], [*REWARDS, 2, 6]
    result = estimate(uids, rewards, m_grpo(2, agents={"coder": {"sub_calls": 1}}))
    assert result == pytest.approx([*estimate(UIDS, REWARDS, m_grpo(2)), -1, 1], abs=1e-6)


def test_the_main_agents_episode_has_one_outcome() -> None:
    with pytest.raises(ValueError, match=r"^units: the main agent's rows of trajectory 0 have different rewards"):
        estimate(UIDS[:3], [1, 1, 0], m_grpo(2))


def test_an_incomplete_preset_computes_nothing() -> None:
    columns = {name: ids(0) for name in ("units", "agents", "turns", "left")}
    with pytest.raises(ValueError, match="'m_grpo' has no sub_calls"):
        group_advantages(tensor(1), ids(0), PRESETS["m_grpo"], mains=torch.tensor([True]), **columns)


# --- against rows that are copied indeed


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[int, int, int, float, int]]:
    """Rows (task, episode, agent, reward, decisions left), agent 0 being the main one; in any order."""
    rows = []
    for episode in range(draw(st.integers(1, 5))):
        task, outcome = draw(st.integers(0, 1)), draw(st.sampled_from([0.0, 0.1, 1.0]))
        agents = draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
        rewards = [outcome if agent == 0 else draw(st.sampled_from([0.0, 0.3, 1.0])) for agent in agents]
        pairs = enumerate(zip(agents, rewards, strict=True))
        rows += [(task, episode, agent, reward, len(agents) - 1 - t) for t, (agent, reward) in pairs]
    return draw(st.permutations(rows))


def copied(rows: list[Any], calls: int) -> list[int]:
    """Which rows are trained on, and how often: D a call list, cyclic or cut, and the main agent's first."""
    positions = []
    for episode, agent in {(row[1], row[2]) for row in rows}:
        mine = [position for position, row in enumerate(rows) if (row[1], row[2]) == (episode, agent)]
        mine.sort(key=lambda position: -rows[position][4])
        positions += mine[:1] if agent == 0 else [mine[number % len(mine)] for number in range(calls)]
    return positions


@given(episodes(), st.integers(1, 4), st.sampled_from([0, 1]))
def test_equals_grpo_on_copied_rows(rows: list[Any], calls: int, ddof: int) -> None:
    copies = copied(rows, calls)
    expected = []
    for position, (task, _, agent, reward, _) in enumerate(rows):
        group = [rows[copy][3] for copy in copies if (rows[copy][0], rows[copy][2]) == (task, agent)]
        spread = (statistics.stdev if ddof else statistics.pstdev)(group) if len(set(group)) > 1 else 0
        centred = reward - statistics.fmean(group) if len(group) > 1 else 0
        once = centred / (spread + 1e-6) if spread else centred
        # A main agent's decisions share the episode's advantage; a call's counts as often as it was copied.
        expected.append(once if agent == 0 else once * copies.count(position))
    spec: EstimatorSpec = resolve_spec({"preset": "m_grpo", "main_agent": "main", "sub_calls": calls, "ddof": ddof})
    task, episode, agent, reward, left = zip(*rows, strict=True)
    others = {
        "units": ids(*episode),
        "agents": ids(*agent),
        "left": ids(*left),
        "turns": ids(*[0] * len(left)),
        "mains": ids(*agent) == 0,
    }
    result = group_advantages(tensor(*reward), ids(*task), spec, **others)
    torch.testing.assert_close(result, tensor(*expected), rtol=1e-7, atol=1e-7)
