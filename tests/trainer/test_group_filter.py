"""The group filter in a step: which groups have signal, how a step is topped up, and that no row is left behind."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

from fakes.fake_trainer import AT_GRPO, FLAT, STEEP, FakeRollout, FakeTrainer, FakeUnit, Tags, episode
from transfer_queue import KVBatchMeta

from verl_atgrpo.play.types import EpisodeRecord
from verl_atgrpo.train.config.schema import GroupFilter, RecordSettings
from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.rollout.episode_rows import training_rows
from verl_atgrpo.train.rows.step_rows import StepRows, groups_with_signal, sample_rows


def row(group: str, reward: float, policy: str = "shared") -> Tags:
    return {"policy": policy, "group": group, "reward": reward}


def tags_of(scheme: str, *episodes: tuple[str, int, EpisodeRecord]) -> list[Tags]:
    return [item.tags for uid, session, record in episodes for item in training_rows(uid, session, record, scheme)]


# ------------------------------------------------------------------ which groups have a signal


def test_a_group_has_a_signal_if_one_reward_differs() -> None:
    rows = [
        *(row("equal", 0.1) for _ in range(8)),
        *(row("zero", 0.0) for _ in range(4)),
        *(row("signs", reward) for reward in (0.0, -0.0)),
        *(row("one", reward) for reward in (0.0, 0.0, 0.0, 1.0)),
        *(row("near", reward) for reward in (1.0, 1.0 + 1e-6)),
        row("single", 5.0),
    ]
    random.Random(0).shuffle(rows)
    names = {group: signal for (_, group), signal in groups_with_signal(rows, AT_GRPO).items()}
    expected = {"equal": False, "zero": False, "signs": False, "one": True, "near": True, "single": False}
    assert names == expected
    assert groups_with_signal([], AT_GRPO) == {}


def test_tree_groups_are_decisions() -> None:
    lone = episode(1.0, ("a", 0, [1, 1]), ("b", 0, [0, 1]), ("a", 1, [0, 2]))
    signal = groups_with_signal(tags_of("tree", ("t", 0, lone)), AT_GRPO)
    assert signal == {("p_a", "t.0.a.0"): False, ("p_b", "t.0.b.0"): True, ("p_a", "t.0.a.1"): True}


def test_parallel_groups_are_tasks_and_a_policy_sees_its_own_rows() -> None:
    # Agent b only acts in the solved episode, so its row has no other to be compared with.
    solved, failed = episode(1.0, ("a", 0, [0]), ("b", 0, [0])), episode(0.0, ("a", 0, [0]))
    other = episode(1.0, ("a", 0, [0]), ("b", 0, [0]))
    rows = tags_of("parallel", ("t", 0, solved), ("t", 1, failed), ("u", 0, other), ("u", 1, other))
    for estimator in ("mas_grpo", "dr_mas"):
        assert groups_with_signal(rows, resolve_spec(estimator)) == {
            ("p_a", "t"): True,
            ("p_b", "t"): False,
            ("p_a", "u"): False,
            ("p_b", "u"): False,
        }


def test_an_estimator_that_does_not_centre_keeps_equal_nonzero_rewards() -> None:
    rows = [row("half", 0.5), row("half", 0.5), row("none", 0.0), row("none", 0.0), row("single", 0.5)]

    def of(**changes: Any) -> list[str]:
        groups = groups_with_signal(rows, resolve_spec({"preset": "at_grpo", **changes}))
        return [group for (_, group), signal in groups.items() if signal]

    assert of() == []
    assert of(singleton="raw") == ["single"]
    assert of(center="none", scale="none", singleton="raw") == ["half", "single"]


def test_a_group_has_a_signal_in_any_order_of_its_rows() -> None:
    # One of the three rewards is the mean, so its advantage is 0.
    for rewards in itertools.permutations([1.0, 0.0, 0.5]):
        assert groups_with_signal([row("g", reward) for reward in rewards], AT_GRPO) == {("shared", "g"): True}


def test_negative_advantages_are_a_signal() -> None:
    uncentred = resolve_spec({"preset": "at_grpo", "center": "none", "scale": "none"})
    assert groups_with_signal([row("g", -1.0), row("g", -1.0)], uncentred) == {("shared", "g"): True}


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from("ab"), st.sampled_from([0.0, 0.1, 1.0]))),
    st.sampled_from(["at_grpo", "dr_grpo", "rloo", "mas_grpo", "dr_mas"]),
)
def test_dropping_changes_no_advantage(sampled: list[tuple[int, int, str, float]], estimator: str) -> None:
    outcome: dict[tuple[int, int], float] = {}
    rows = [
        {
            **row(f"g{group}", outcome.setdefault((group, trajectory), reward)),
            "agent": agent,
            "episode": f"g{group}_{trajectory}",
            "candidate": 0,
        }
        for group, trajectory, agent, reward in sampled
    ]
    spec = resolve_spec(estimator)
    chosen = StepRows(["-"] * len(rows), rows, groups_with_signal(rows, spec))

    def advantages(some: list[Tags]) -> list[float]:
        rewards = torch.tensor([tags["reward"] for tags in some])
        return team_advantages(rewards, some, spec).tolist()

    before, left = advantages(rows), chosen.kept()
    assert not any(itertools.compress(before, [not flag for flag in left]))
    after = advantages(list(itertools.compress(rows, left)))
    assert after == pytest.approx(list(itertools.compress(before, left)), rel=1e-6)


# ------------------------------------------------------------------ topping up


def test_without_a_filter_every_row_is_trained_on(rollout: FakeRollout) -> None:
    rollout.rewards = [[FLAT]] * 4
    unit = FakeUnit("p_a", 2)
    batch, metrics = FakeTrainer(rollout, unit).play()
    assert len(batch) == len(unit.updates[0]) == 8
    assert "team/groups_dropped" not in metrics
    assert metrics["team/rows"] == 8


def test_dropped_rows_are_removed_and_counted_and_stay_in_the_metrics(rollout: FakeRollout) -> None:
    rollout.rewards = [[STEEP, FLAT], [FLAT], [FLAT, FLAT], [FLAT, STEEP]]
    unit = FakeUnit("p_a", 2)
    trainer = FakeTrainer(rollout, unit, filters={})
    batch, metrics = trainer.play()
    (trained,) = unit.updates
    assert sorted(tags["turn"] for tags in trained.tags) == [0, 0, 1, 1]
    # Only the batch that verl removes is left in the queue.
    assert set(rollout.items) == set(batch.keys) == set(trained.keys)
    assert set(rollout.cleared.values()) == {1}
    assert {name: metrics[f"team/{name}"] for name in ("groups_kept", "groups_dropped", "rows", "rows_dropped")} == {
        "groups_kept": 2,
        "groups_dropped": 5,
        "rows": 4,
        "rows_dropped": 10,
    }
    assert metrics["team/groups_dropped_share"] == metrics["team/rows_dropped_share"] == 5 / 7
    assert metrics["team/tokens_dropped_share"] == pytest.approx(5 / 7)
    assert metrics["team/tasks"] == 4
    assert "team/groups_missing" not in metrics
    trainer.finish(batch, metrics)
    assert (metrics["team/episodes"], metrics["team/rows_per_episode"]) == (4, 14 / 4)


def test_tasks_are_added_until_there_are_enough_groups(rollout: FakeRollout) -> None:
    # One group in four tasks: two more take 8, of which 4 are played; then two in eight: one more takes 4.
    rollout.rewards = [[STEEP]] + [[FLAT]] * 5 + [[STEEP]] + [[FLAT]] * 2 + [[STEEP]] + [[FLAT]] * 2 + [[STEEP]] * 9
    unit = FakeUnit("p_a", 2)
    trainer = FakeTrainer(rollout, unit, filters={"min_groups": 3, "max_tasks": 16})
    batch, metrics = trainer.play()
    assert rollout.submitted == list(range(12))
    assert (metrics["team/tasks"], metrics["team/groups_kept"], metrics["team/groups_missing"]) == (12, 3, 0)
    assert len(batch) == len(unit.updates[0]) == 6
    assert set(rollout.items) == set(batch.keys)
    assert rollout.calls == ["sleep"]
    # A resumed run continues with the first task that was not submitted.
    state = trainer.train_dataloader.state_dict()
    resumed = FakeTrainer(rollout)
    resumed.train_dataloader.load_state_dict(state)
    rollout.update_weights(1)
    resumed.play()
    assert rollout.submitted[12:] == [12, 13, 14, 15]


def test_the_bound_ends_the_top_up(rollout: FakeRollout, caplog: pytest.LogCaptureFixture) -> None:
    rollout.rewards = [[STEEP]] + [[FLAT]] * 9
    unit = FakeUnit("p_a", 2)
    _, metrics = FakeTrainer(rollout, unit, filters={"min_groups": 3, "max_tasks": 10}).play()
    assert (metrics["team/tasks"], metrics["team/groups_kept"], metrics["team/groups_missing"]) == (10, 1, 2)
    assert len(unit.updates[0]) == 2
    assert "1 groups have a signal after 10 tasks, fewer than at_grpo.group_filter.min_groups=3" in caplog.text


def test_failed_episodes_of_a_top_up_are_replaced_and_counted_as_such(rollout: FakeRollout) -> None:
    rollout.rewards = [[FLAT]] * 4 + [[STEEP]] * 4
    rollout.fails = lambda task: task == 5
    _, metrics = FakeTrainer(rollout, filters={"min_groups": 1, "max_tasks": 12}).play()
    assert rollout.submitted == list(range(9))
    assert metrics["team/tasks"] == 8
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    rollout.rewards = [[FLAT]] * 16
    rollout.fails = lambda task: task in (4, 5, 6)
    rollout.update_weights(1)
    with pytest.raises(RuntimeError, match=r"3 episodes of step 1 failed .*max_failed_episodes=2"):
        FakeTrainer(rollout, filters={"min_groups": 1, "max_tasks": 16}).play()


def test_a_step_in_which_no_policy_is_updated_does_not_end_the_run(rollout: FakeRollout) -> None:
    rollout.rewards = [[FLAT]] * 4
    unit = FakeUnit("p_a", 2)
    trainer = FakeTrainer(rollout, unit, filters={})
    batch, metrics = trainer.play()
    assert unit.updates == []
    assert (metrics["team/rows"], metrics["team/updated"], metrics["team/groups_kept"]) == (0, 0, 0)
    # verl needs rows to remove.
    assert set(batch.keys) == set(rollout.items)
    # verl's metrics are of advantages, of which there are none.
    trainer.finish(batch, metrics)
    assert not rollout.items
    assert metrics["team/episodes"] == 4
    assert metrics["team/success"] == 1.0
    assert (metrics["timing_s/gen"], metrics["training/global_step"]) == (2.0, 1)


def test_fewer_rows_than_optimizer_steps_are_no_update(rollout: FakeRollout, caplog: pytest.LogCaptureFixture) -> None:
    rollout.rewards = [[STEEP]] + [[FLAT]] * 3
    for optimizer_steps, updates in ((2, 1), (3, 0)):
        rollout.rewards, rollout.items = [[STEEP]] + [[FLAT]] * 3, {}
        rollout.update_weights(0)
        unit = FakeUnit("p_a", optimizer_steps)
        batch, metrics = FakeTrainer(rollout, unit, filters={}).play()
        assert (len(unit.updates), metrics["team/updated"], metrics["team/rows"]) == (updates, updates, 2)
        assert set(batch.keys) == set(rollout.items)
    assert "policy 'p_a' is not updated: it has 2 rows for 3 optimizer steps" in caplog.text


def test_rows_are_in_the_same_order_whatever_episode_ended_first() -> None:
    both = [episode(1.0, ("b", 0, [0, 1]), ("a", 0, [0, 1]), ("a", 1, [0, 1])) for _ in range(2)]
    rows = [
        (item.key, {**item.tags, "task": task, "global_steps": 1, "submission": 0})
        # A task's uid is random in every run.
        for task, uid in ((10, "x"), (9, "z"), (2, "y"))
        for session in (1, 0)
        for item in training_rows(uid, session, both[session], "tree")
    ]

    def order(arrived: list[tuple[str, Tags]]) -> list[str]:
        sampled = StepRows([key for key, _ in arrived], [tags for _, tags in arrived])
        sampled.sort()
        assert [dict(arrived)[key] for key in sampled.keys] == sampled.tags
        return sampled.keys

    first = order(rows)
    # By number, not by name: task 2, 9, 10; episode 0, 1; agent a before b, although b acted first.
    of_episode = [2, 3, 4, 5, 0, 1]
    assert first == [f"{uid}_{session}_{row}" for uid in "yzx" for session in (0, 1) for row in of_episode]
    random.Random(1).shuffle(rows)
    assert order(rows) == first
    # The scores of two agents that act at the same time ask the same judge.
    judged = [(f"x_0_{number}", {**rows[0][1], "scope": scope}) for number, scope in enumerate(("a.0.0/", "b.0.0/"))]
    assert order(judged) == order(judged[::-1]) == ["x_0_0", "x_0_1"]


@pytest.mark.parametrize("filters", [None, {}])
def test_decisions_that_are_not_trained_are_recorded_and_removed_and_nothing_else(
    rollout: FakeRollout, filters: Any
) -> None:
    metrics, kept, recorded = [], [], []
    for drafts in (0, 3):
        unit = FakeUnit("p_a", 1)
        rollout.drafts = drafts
        rollout.rewards = [[STEEP, FLAT] for _ in range(4)]
        trainer = FakeTrainer(rollout, unit, filters=filters)
        trainer.settings = trainer.settings.model_copy(update={"record": RecordSettings(train_tasks=2)})
        note: list[tuple[list[str], int]] = []
        trainer.recorder = SimpleNamespace(  # type: ignore[assignment]
            record=lambda step, batch, note=note: note.append(
                (batch.keys, sum("advantage" in tags for tags in batch.tags))
            ),
            take_seconds=lambda: 0.0,
        )
        batch, of_step = trainer.play()
        assert set(rollout.items) == set(batch.keys), "what is not trained has left the queue"
        (update,) = unit.updates
        kept.append([(tags["group"], tags["candidate"]) for tags in update.tags])
        trainer.finish(batch, of_step)
        metrics.append(of_step)
        recorded += note
    assert len(kept[0]) == len(kept[1])
    assert metrics[0] == metrics[1]
    (before, _), (after, trained) = recorded
    assert len(after) == len(before) + 2 * 3, "the drafts of the two tasks that are recorded"
    assert trained == len(kept[1])


def test_a_task_that_is_there_twice_is_two_tasks() -> None:
    played = episode(1.0, ("a", 0, [0, 1]), ("a", 1, [0, 1]))
    rows = [
        (item.key, {**item.tags, "task": task, "global_steps": step, "submission": earlier})
        for uid, task, step, earlier in (("u", 3, 2, 1), ("x", 4, 1, 0), ("z", 3, 1, 0), ("w", 3, 2, 0))
        for item in training_rows(uid, 0, played, "tree")
    ]
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        sampled = StepRows([key for key, _ in rows], [tags for _, tags in rows])
        sampled.sort()
        # By the step of submission; if a new epoch begins within a step, by which was first. Names are random.
        assert sampled.keys == [f"{uid}_0_{index}" for uid in "zwux" for index in range(4)]


def test_a_frozen_policys_groups_are_neither_dropped_nor_counted() -> None:
    rows = [
        row("solo", 1.0, "left"),
        *(row("flat", 0.0, policy) for policy in ("left", "judge") for _ in range(2)),
        *(row("steep", reward, policy) for policy in ("left", "judge") for reward in (0.0, 1.0)),
    ]
    batch = KVBatchMeta(keys=[str(number) for number in range(len(rows))], tags=rows, partition_id="train")
    filters = GroupFilter(min_groups=1, max_tasks=9)
    sampled = sample_rows(lambda tasks: (batch, {}), lambda tasks: 1 / 0, 1, filters, {"left"}, AT_GRPO)
    assert sampled.metrics["team/groups_kept"] == 1
    assert (sampled.metrics["team/groups_dropped"], sampled.metrics["team/rows_dropped"]) == (2, 3)
    assert sampled.metrics["team/rows_dropped_share"] == 3 / 5
    assert sampled.rows_for({"left"}).keys == ["5", "6"]
    assert sampled.rows_for({"judge"}).keys == ["3", "4", "7", "8"]
    assert sampled.rows_for({"left"}, others=True).keys == ["0", "1", "2", "3", "4", "7", "8"]


def test_verls_metrics_of_the_wait_are_added_up() -> None:
    steps = iter([[("flat", 0.0), ("flat", 0.0)], [("steep", 0.0), ("steep", 1.0)], [("last", 0.0), ("last", 1.0)]])

    def sample(tasks: int) -> tuple[KVBatchMeta, dict[str, float]]:
        rows = [row(group, reward) for group, reward in next(steps)]
        keys = [f"{tags['group']} {number}" for number, tags in enumerate(rows)]
        return KVBatchMeta(keys=keys, tags=rows, partition_id="train"), {"waited": tasks}

    added: list[int] = []
    sampled = sample_rows(sample, added.append, 2, GroupFilter(min_groups=1, max_tasks=9), {"shared"}, AT_GRPO)
    assert sampled.metrics["waited"] == sampled.metrics["team/tasks"] == 2 + sum(added) > 2
    assert sample_rows(sample, added.append, 2, None, {"shared"}, AT_GRPO).metrics == {"waited": 2}


def test_without_a_trained_policy_no_group_is_dropped_and_with_more_groups_than_needed_none_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [row("flat", 0.0, "judge"), row("steep", 0.0, "left"), row("steep", 1.0, "left")]
    batch = KVBatchMeta(keys=["0", "1", "2"], tags=rows, partition_id="train")
    for trainable, kept in (({"nobody"}, 0), ({"left"}, 1)):
        filters = GroupFilter(max_tasks=1)
        sampled = sample_rows(lambda tasks: (batch, {}), lambda tasks: None, 1, filters, trainable, AT_GRPO)
        assert (sampled.metrics["team/groups_kept"], sampled.metrics["team/groups_dropped_share"]) == (kept, 0.0)
    more = [row(f"steep {number}", reward, "left") for number in range(3) for reward in (0.0, 1.0)]
    batch = KVBatchMeta(keys=[str(number) for number in range(6)], tags=more, partition_id="train")
    sampled = sample_rows(
        lambda tasks: (batch, {}), lambda tasks: 1 / 0, 1, GroupFilter(min_groups=2, max_tasks=9), {"left"}, AT_GRPO
    )
    assert (sampled.metrics["team/groups_kept"], sampled.metrics["team/groups_missing"]) == (3, 0)
    assert not caplog.records
