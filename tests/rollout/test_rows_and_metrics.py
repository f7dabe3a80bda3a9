"""Episodes to rows, rows to mini-batches and metrics; numbers by hand."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from verl_atgrpo import Candidate, Outcome, Score, ScriptedTeam
from verl_atgrpo.play.types import Decision, EpisodeRecord, Generation
from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.rollout.episode_rows import (
    failed_validation_row,
    training_rows,
    untrained_rows,
    validation_rows,
)
from verl_atgrpo.train.rows.row_advantages import rows_with_signal
from verl_atgrpo.train.trainer.metrics import (
    AgentProgress,
    every_episode_failed,
    policy_metrics,
    rollout_metrics,
    step_metrics,
)


def decision(agent: str, turn: int, rewards: Sequence[float], committed: int = 0) -> Decision:
    """A decision whose candidates differ in reward, text and length; the team part is a quarter."""
    candidates = tuple(
        Candidate(
            Generation([7] * (index + 1), [-0.1] * (index + 1), f"{agent}{turn}{index}", truncated=index == 1),
            Score(team=reward / 4, local=3 * reward / 4),
            reward,
        )
        for index, reward in enumerate(rewards)
    )
    return Decision(agent, turn, f"policy_of_{agent}", [1, 2, turn], candidates, committed)


def record(success: bool, reward: float, *decisions: Decision) -> EpisodeRecord:
    return EpisodeRecord(list(decisions), Outcome(success, reward))


SOLVED = record(True, 1.0, decision("tool", 0, [1.0, 0.0]), decision("planner", 0, [2.0, 0.0]))
FAILED = record(
    False,
    0.25,
    decision("tool", 0, [0.5, 0.5]),
    decision("planner", 0, [0.0, 2.0], committed=1),
    decision("planner", 1, [1.0, 1.0]),
)


# ------------------------------------------------------------------ rows


def test_tree_rows() -> None:
    rows = list(training_rows("uid", 3, FAILED, "tree"))
    assert [row.key for row in rows] == [f"uid_3_{index}" for index in range(6)]
    assert [row.reward for row in rows] == [0.5, 0.5, 0.0, 2.0, 1.0, 1.0]
    # Two candidates a decision, one group a decision.
    groups = [row.group for row in rows]
    assert groups[0::2] == groups[1::2]
    assert len(set(groups)) == 3
    assert [row.prompt_ids for row in rows] == [[1, 2, 0]] * 4 + [[1, 2, 1]] * 2
    assert [row.generation.text for row in rows][2:4] == ["planner00", "planner01"]
    assert rows[3].tags == {
        "agent": "planner",
        "turn": 0,
        "scope": "",
        "policy": "policy_of_planner",
        "group": groups[3],
        "candidate": 1,
        "committed": True,
        "reward": 2.0,
        "weight": 0.5,
        "team_reward": 0.5,
        "local_reward": 1.5,
        "truncated": True,
        "temperature": 1.0,
        "resumed": 0,
        "episode": "uid_3",
        "episode_success": False,
        "episode_reward": 0.25,
    }
    assert [row.tags["committed"] for row in rows] == [True, False, False, True, True, False]


def test_tree_groups_are_what_the_estimator_compares() -> None:
    """Groups, as the estimator reads them, are (task, episode, agent, turn): trap 1 merged problems."""
    rows = [
        row
        for uid, session, episode in itertools.product(("1", "11"), (1, 11), (SOLVED, FAILED))
        for row in training_rows(f"{uid}{'ab'[episode is SOLVED]}", session, episode, "tree")
    ]
    members: dict[str, set[Any]] = defaultdict(set)
    for row in rows:
        members[row.group].add((row.tags["episode"], row.tags["agent"], row.tags["turn"]))
    assert len(members) == 4 * (2 + 3)
    assert all(len(decisions) == 1 for decisions in members.values())
    assert set(Counter(row.group for row in rows).values()) == {2}
    assert len({row.key for row in rows}) == len(rows)


@pytest.mark.parametrize("name", ["coder#1", "a b", "1st", "close", "decisions"])
def test_agent_names_that_would_merge_groups_or_hide_attributes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="agents: "):
        ScriptedTeam({name: lambda prompt, index: "R"})


def test_keys_split_as_verl_splits_them() -> None:
    keys = [row.key for row in training_rows("0f3a-77", 2, FAILED, "tree")]
    assert [key.split("_") for key in keys] == [["0f3a-77", "2", str(index)] for index in range(6)]


def test_parallel_rows_share_the_outcome() -> None:
    rows = [*training_rows("uid", 0, SOLVED, "parallel"), *training_rows("uid", 1, FAILED, "parallel")]
    assert [row.reward for row in rows] == [1.0] * 4 + [0.25] * 6
    assert {row.group for row in rows} == {"uid"}
    assert [(row.tags["episode"], row.tags["agent"]) for row in rows] == (
        [("uid_0", "tool")] * 2 + [("uid_0", "planner")] * 2 + [("uid_1", "tool")] * 2 + [("uid_1", "planner")] * 4
    )
    assert [row.key for row in rows] == [f"uid_0_{i}" for i in range(4)] + [f"uid_1_{i}" for i in range(6)]
    assert all(row.tags["reward"] == row.reward and row.tags["group"] == row.group for row in rows)
    assert {row.tags["weight"] for row in rows if row.tags["episode"] == "uid_0"} == {1 / 2}
    # In a mixture, as many episodes of a task together weigh as much as one tree.
    shared = [*training_rows("uid", 0, SOLVED, "parallel", episodes=4)]
    assert {row.tags["weight"] for row in shared} == {1 / 8}
    # The candidate's own parts stay visible.
    assert rows[0].tags["team_reward"] == 0.25
    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    spec = PRESETS["mas_grpo"]
    advantages = team_advantages(rewards, [row.tags for row in rows], spec)
    # Two episodes, each counting once however many rows it has.
    half = 0.5**0.5
    assert advantages.tolist() == pytest.approx([half] * 4 + [-half] * 6, abs=1e-5)


def test_an_episodes_reward_may_be_the_sum_of_its_answers_scores() -> None:
    """What is committed counts: FAILED is .5 + 2 + 1."""
    rows = list(training_rows("uid", 1, FAILED, "parallel", episode_reward="scores"))
    assert [row.reward for row in rows] == [3.5] * 6 == [row.tags["reward"] for row in rows]
    assert {row.tags["episode_reward"] for row in rows} == {0.25}  # what metrics report


def test_a_sum_of_scores_is_the_same_whichever_decision_ended_first() -> None:
    first, middle, last = FAILED.decisions
    decisions = [
        replace(one, candidates=(replace(one.candidates[0], reward=reward),), committed=0)
        for one, reward in zip((first, middle, last), (0.1, 0.2, 0.3), strict=True)
    ]
    sums = {
        next(training_rows("uid", 0, replace(FAILED, decisions=order), "parallel", episode_reward="scores")).reward
        for order in (decisions, decisions[::-1], [decisions[2], decisions[0], decisions[1]])
    }
    assert len(sums) == 1


@pytest.mark.parametrize("scheme", ["tree", "parallel"])
def test_what_is_not_trained_has_rows_of_its_own_beside_the_others(scheme: str) -> None:
    first, draft, last = FAILED.decisions
    drafted = replace(FAILED, decisions=[first, replace(draft, trained=False), last])
    trained, shown = list(training_rows("uid", 0, drafted, scheme)), list(untrained_rows("uid", 0, drafted, scheme))
    # Numbered by their place in the episode, which the records sort by.
    assert [row.key for row in trained] == ["uid_0_0", "uid_0_1", "uid_0_4", "uid_0_5"]
    assert [row.key for row in shown] == ["uid_0_2", "uid_0_3"]
    assert [row.reward for row in shown] == ([0.0, 2.0] if scheme == "tree" else [0.25, 0.25])
    assert [(row.tags["committed"], row.tags["trained"]) for row in shown] == [(False, False), (True, False)]
    assert {"agent", "turn", "scope", "policy", "team_reward", "local_reward", "truncated"} <= shown[0].tags.keys()
    assert not any("trained" in row.tags for row in trained)
    assert list(untrained_rows("uid", 0, FAILED, scheme)) == []


def test_validation_rows_end_with_the_last_decision() -> None:
    rows = list(validation_rows("uid", 1, FAILED))
    assert [row.key for row in rows] == ["uid_1_0", "uid_1_1", "uid_1_2"]
    # verl scores an episode by its last row, so that one must be the last decision, with the outcome.
    assert [row.generation.text for row in rows] == ["tool00", "planner01", "planner10"]
    assert rows[-1].prompt_ids == [1, 2, 1]
    assert rows[-1].tags == {
        "agent": "planner",
        "turn": 1,
        "scope": "",
        "policy": "policy_of_planner",
        "committed": True,
        "reward": 1.0,
        "team_reward": 0.25,
        "local_reward": 0.75,
        "truncated": False,
        "temperature": 1.0,
        "episode_success": False,
        "episode_reward": 0.25,
    }
    assert {row.reward for row in rows} == {0.25}
    assert {row.group for row in rows} == {"uid"}


def test_rows_say_of_their_answer_what_became_of_it() -> None:
    # Interrupted twice and cut off; the second one is neither.
    answers = (Generation([7], [-0.1], "x", truncated=True, resumed=2), Generation([7], [-0.1], "y"))
    candidates = tuple(Candidate(answer, Score(), 0.0) for answer in answers)
    for committed, truncated in ((0, True), (1, False)):
        played = record(True, 1.0, Decision("tool", 0, "p", [1], candidates, committed))
        found = [(row.tags["truncated"], row.tags["resumed"]) for row in training_rows("uid", 0, played, "tree")]
        assert found == [(True, 2), (False, 0)]
        assert [row.tags["truncated"] for row in validation_rows("uid", 0, played)] == [truncated]


def test_a_failed_validation_episode_is_one_row_without_reward() -> None:
    row = failed_validation_row("uid", 2, "coder", token_id=9)
    assert (row.key, row.group, row.reward) == ("uid_2_0", "uid", 0.0)
    assert row.generation.token_ids == [9]
    assert len(row.generation.log_probs) == 1
    assert row.generation.text == ""
    assert row.tags == {"failed": True, "policy": "coder", "episode_success": False, "episode_reward": 0.0}


# ------------------------------------------------------------------ metrics


def tags_of(*episodes: EpisodeRecord, scheme: str = "tree") -> list[dict[str, Any]]:
    """Tags as the worker writes them: one task an episode, in the parallel scheme one task for all."""
    return [
        {**row.tags, "response_len": len(row.generation.token_ids)}
        for number, item in enumerate(episodes)
        for row in training_rows(*(("t", number) if scheme == "parallel" else (f"t{number}", 0)), item, scheme)
    ]


def metrics_of(tags: list[dict[str, Any]], estimator: Any = "at_grpo") -> dict[str, float]:
    return step_metrics(tags, rows_with_signal(tags, resolve_spec(estimator)))


def follow(progress: AgentProgress, tags: list[dict[str, Any]]) -> dict[str, float]:
    return progress.metrics(tags, rows_with_signal(tags, PRESETS["at_grpo"]))


def test_parts_of_a_mixture_have_their_own_ends() -> None:
    parts = {"t0": "walk", "t1": "search"}
    tags = [{**one, "agent": f"{parts[one['group'][:2]]}.{one['agent']}"} for one in tags_of(SOLVED, FAILED)]
    metrics = metrics_of(tags)
    assert (metrics["part/walk/success"], metrics["part/search/success"], metrics["team/success"]) == (1.0, 0.0, 0.5)
    assert metrics["part/walk/episodes"] == 1 and metrics["part/walk/episode_reward"] != metrics["team/episode_reward"]
    assert not any(key.startswith("part/") for key in metrics_of(tags_of(SOLVED, FAILED)))


def test_step_metrics_by_hand() -> None:
    metrics = metrics_of(tags_of(SOLVED, FAILED))
    assert metrics["team/episodes"] == 2
    assert metrics["team/success"] == 0.5
    assert metrics["team/episode_reward"] == 0.625
    assert metrics["team/rows_per_episode"] == 5
    assert metrics["team/zero_variance_groups"] == 2 / 5
    # tool 1, 0, .5, .5; planner 2, 0, 0, 2 in turn 0 and 1, 1 in turn 1
    expected = {
        "tool": (2 / 4, 1 / 2, 4),
        "tool/turn_0": (2 / 4, 1 / 2, 4),
        "planner": (6 / 6, 1 / 3, 6),
        "planner/turn_0": (4 / 4, 0, 4),
        "planner/turn_1": (2 / 2, 1, 2),
    }
    for name, (reward, zero_variance, rows) in expected.items():
        assert metrics[f"agent/{name}/reward"] == pytest.approx(reward)
        assert metrics[f"agent/{name}/team_reward"] == pytest.approx(reward / 4)
        assert metrics[f"agent/{name}/local_reward"] == pytest.approx(3 * reward / 4)
        assert metrics[f"agent/{name}/zero_variance_groups"] == pytest.approx(zero_variance)
        assert metrics[f"agent/{name}/rows"] == rows
        assert metrics[f"agent/{name}/response_length"] == 1.5  # one token and two
        assert metrics[f"agent/{name}/response_clipped"] == 0.5
    # The solved task: mu = 3/4, s^2 = 11/16; sum of (r - mu)^2 of tool 10/16, of planner 34/16.
    # The failed one: mu = 5/6, s^2 = 7/18; tool 4/18, planner 38/18.
    assert metrics["agent/tool/inflation_factor"] == pytest.approx((10 / 11 + 4 / 7) / 4)
    assert metrics["agent/planner/inflation_factor"] == pytest.approx((34 / 11 + 38 / 7) / 6)
    assert "agent/tool/turn_1/reward" not in metrics
    assert all(type(value) in (int, float) for value in metrics.values())


def test_success_counts_episodes_and_not_rows() -> None:
    long = record(False, 0.0, *(decision("solo", turn, [0.0, 1.0]) for turn in range(9)))
    short = record(True, 1.0, decision("solo", 0, [0.0, 1.0]))
    assert metrics_of(tags_of(long, short))["team/success"] == 0.5


def test_inflation_factor_without_spread_is_one() -> None:
    flat = record(True, 1.0, decision("solo", 0, [0.1] * 8))
    metrics = metrics_of(tags_of(flat))
    assert metrics["agent/solo/inflation_factor"] == 1
    assert metrics["team/zero_variance_groups"] == 1


def test_parallel_groups_are_tasks_for_the_zero_variance_share() -> None:
    # Every row of an episode has its outcome; the group is the task, whose episodes differ here.
    assert metrics_of(tags_of(SOLVED, FAILED, scheme="parallel"))["team/zero_variance_groups"] == 0
    assert metrics_of(tags_of(SOLVED, SOLVED, scheme="parallel"))["team/zero_variance_groups"] == 1
    assert metrics_of(tags_of(SOLVED, FAILED, scheme="parallel"))["team/success"] == 0.5


def test_entropy_is_an_agents_mean_over_tokens_of_rows_that_went_through_the_model() -> None:
    tags = tags_of(record(True, 1.0, decision("tool", 0, [1.0, 0.0]), decision("solo", 0, [1.0, 0.0])))
    assert [row["response_len"] for row in tags] == [1, 2, 1, 2]
    tags[0]["entropy"], tags[1]["entropy"] = 0.9, 0.3
    metrics = metrics_of(tags)
    assert metrics["agent/tool/entropy"] == pytest.approx((0.9 + 2 * 0.3) / 3)
    assert "agent/solo/entropy" not in metrics


def played(success: bool, local: list[float], team: list[float] | None = None) -> list[dict[str, Any]]:
    """Tags of one group of the agent `solo` with these scores; its reward is their sum."""
    scores = [Score(team=t, local=score) for score, t in zip(local, team or [0.0] * len(local), strict=True)]
    candidates = tuple(Candidate(Generation([7], [-0.1], ""), score, score.team + score.local) for score in scores)
    return tags_of(record(success, float(success), Decision("solo", 0, "p", [1], candidates, 0)))


def test_candidates_at_the_highest_reward_so_far() -> None:
    progress = AgentProgress()
    share = "agent/solo/highest_reward_share"
    assert follow(progress, played(False, [0.1, 0.5]))[share] == 0.5
    assert follow(progress, played(True, [1.0, 1.0, 0.5, 1.0]))[share] == 0.75
    assert follow(progress, played(False, [0.5, 0.5]))[share] == 0
    assert follow(progress, played(True, [1.0 - 1e-9, 0.5]))[share] == 0.5, "rewards are sums with rounding"


@pytest.mark.parametrize(
    ("group", "stuck"),
    [
        (played(False, [0.05, 0.05]), 1.0),
        (played(True, [0.05, 0.05]), 1.0),  # others made up for it
        (played(False, [0.05, 1.0]), 0.0),
        (played(False, [1.0, 1.0]), 0.0),  # right, and the episode failed for another reason
        (played(True, [1.0, 1.0]), 0.0),
        (played(False, [0.95, 0.95]), 0.0),  # right, in too many words
        (played(False, [0.3, 0.3]), 1.0),
    ],
)
def test_groups_are_stuck_that_are_all_equal_and_wrong(group: list[dict[str, Any]], stuck: float) -> None:
    progress = AgentProgress()
    follow(progress, played(True, [0.05, 1.0]))
    assert follow(progress, group)["agent/solo/stuck_groups"] == stuck


def test_without_local_scores_groups_of_unsolved_episodes_are_stuck() -> None:
    for success, team, stuck in ((False, [0.2, 0.2], 1.0), (True, [1.0, 1.0], 0.0), (False, [0.2, 0.4], 0.0)):
        metrics = follow(AgentProgress(), played(success, [0.0, 0.0], team))
        assert metrics["agent/solo/stuck_groups"] == stuck


def test_a_score_for_the_form_alone_does_not_hide_wrong_answers() -> None:
    progress = AgentProgress()
    follow(progress, played(True, [0.1, 0.1, 0.0], [1.0, 0.0, 0.0]))
    for success, team, stuck in ((False, 0.0, 1.0), (True, 1.0, 0.0)):
        assert follow(progress, played(success, [0.1, 0.1], [team, team]))["agent/solo/stuck_groups"] == stuck


def test_a_warning_names_an_agent_that_has_collapsed(caplog: pytest.LogCaptureFixture) -> None:
    progress = AgentProgress()
    right, wrong = played(True, [1.0, 0.05]), played(False, [0.05, 0.05])
    for group in [right, *[wrong] * 9, right, *[wrong] * 9]:
        follow(progress, group)
    assert not caplog.messages
    for _ in range(5):
        follow(progress, wrong)
    (message,) = caplog.messages
    assert message.startswith("agent 'solo' has collapsed: for 10 steps, in at least 80% of its groups")


def test_rollout_metrics() -> None:
    counts = {"episodes_failed": 3, "failed/timeout": 2, "failed/empty": 1, "candidates": 40, "tokens": 999}
    counts |= {"requests_retried": 2, "requests_resumed": 5, "prompt_tokens": 80, "cached_prompt_tokens": 60}
    assert rollout_metrics(counts) == {
        "rollout/episodes_failed": 3,
        "rollout/candidates": 40,
        "rollout/tokens": 999,
        "rollout/requests_retried": 2,
        "rollout/requests_resumed": 5,
        "rollout/prompt_cached_share": 0.75,
        "rollout/failed/timeout": 2,
        "rollout/failed/empty": 1,
        "rollout/score_errors": 0,
        "rollout/sandbox_restarts": 0,
        "rollout/sandbox_reruns": 0,
        "rollout/tool_calls_parsed": 0,
        "rollout/tool_calls_unparsed": 0,
        "rollout/dialogue_turns": 0,
        "rollout/dialogue_turns_broken": 0,
        "rollout/prompts_shortened": 0,
        "rollout/endpoint_requests_refused": 0,
    }
    assert set(rollout_metrics({}).values()) == {0.0}


def test_a_validation_in_which_every_episode_failed_is_not_a_success_of_zero() -> None:
    accuracy = {"val-core/plan_path/acc/mean@1": 0.0}
    assert every_episode_failed({**accuracy, "val-aux/plan_path/failed/mean@1": 1.0})
    assert not every_episode_failed({**accuracy, "val-aux/plan_path/failed/mean@1": 0.5})
    assert not every_episode_failed(accuracy)
    one_of_two = {"val-aux/code/failed/mean@1": 1.0, "val-aux/math/failed/mean@1": 0.0}
    assert not every_episode_failed({**accuracy, **one_of_two})


def test_one_policys_metrics_keep_verls_names() -> None:
    mine = {"actor/pg_loss": 0.5, "training/rollout_probs_diff_max": 1e-6}
    assert policy_metrics({"shared": mine}) == mine


def test_several_policies_metrics_are_told_apart_and_the_worst_difference_stands_out() -> None:
    metrics = policy_metrics(
        {
            "coder": {"actor/pg_loss": 0.5, "team/rows": 3.0, "training/rollout_probs_diff_max": 1e-6},
            "planner": {"actor/pg_loss": -0.5, "team/rows": 1.0, "training/rollout_probs_diff_max": 2e-6},
            "judge": {"team/rows": 0.0},
        }
    )
    assert metrics == {
        "policy/coder/pg_loss": 0.5,
        "policy/coder/rows": 3.0,
        "policy/coder/training/rollout_probs_diff_max": 1e-6,
        "policy/planner/pg_loss": -0.5,
        "policy/planner/rows": 1.0,
        "policy/planner/training/rollout_probs_diff_max": 2e-6,
        "policy/judge/rows": 0.0,
        "training/rollout_probs_diff_max": 2e-6,
    }
