"""The group filter in a step: which groups teach nothing, how it is topped up, and that nothing is left behind."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("verl")

import transfer_queue as tq
import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)
from torchdata.stateful_dataloader import StatefulDataLoader
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_atgrpo.advantage import at_grpo_advantage
from verl_atgrpo.config import AtGrpoConfig
from verl_atgrpo.environment import Outcome, Score
from verl_atgrpo.group_filter import GroupFilter
from verl_atgrpo.rollout.rows import training_rows
from verl_atgrpo.team import Candidate, Decision, EpisodeRecord, Generation
from verl_atgrpo.trainer.at_grpo import AtGrpoTrainer
from verl_atgrpo.trainer.policy_unit import PolicyUnit
from verl_atgrpo.trainer.step_rows import StepRows, draw, teaching_groups

AT_GRPO = {"at_grpo_estimator": "at_grpo"}
Tags = dict[str, Any]


def row(group: str, reward: float, policy: str = "shared") -> Tags:
    return {"policy": policy, "group": group, "reward": reward}


def episode(team_reward: float, *decisions: tuple[str, int, list[float]]) -> EpisodeRecord:
    """An episode from (agent, turn, candidates' rewards); agent a is played by policy p_a."""
    answer = Generation([7], [-0.1], "x")
    return EpisodeRecord(
        [
            Decision(
                agent, turn, f"p_{agent}", [1], tuple(Candidate(answer, Score(), reward) for reward in rewards), 0
            )
            for agent, turn, rewards in decisions
        ],
        Outcome(team_reward > 0, team_reward),
    )


def tags_of(scheme: str, *episodes: tuple[str, int, EpisodeRecord]) -> list[Tags]:
    return [item.tags for uid, session, record in episodes for item in training_rows(uid, session, record, scheme)]


# ------------------------------------------------------------------ which groups teach


def test_a_group_teaches_if_one_reward_differs() -> None:
    rows = [
        *(row("equal", 0.1) for _ in range(8)),
        *(row("zero", 0.0) for _ in range(4)),
        *(row("signs", reward) for reward in (0.0, -0.0)),
        *(row("one", reward) for reward in (0.0, 0.0, 0.0, 1.0)),
        *(row("near", reward) for reward in (1.0, 1.0 + 1e-6)),
        row("single", 5.0),
    ]
    random.Random(0).shuffle(rows)
    names = {group: teaches for (_, group), teaches in teaching_groups(rows, AT_GRPO).items()}
    expected = {"equal": False, "zero": False, "signs": False, "one": True, "near": True, "single": False}
    assert names == expected
    assert teaching_groups([], AT_GRPO) == {}


def test_tree_groups_are_decisions() -> None:
    lone = episode(1.0, ("a", 0, [1, 1]), ("b", 0, [0, 1]), ("a", 1, [0, 2]))
    teaches = teaching_groups(tags_of("tree", ("t", 0, lone)), AT_GRPO)
    assert teaches == {("p_a", "t.0.a.0"): False, ("p_b", "t.0.b.0"): True, ("p_a", "t.0.a.1"): True}


def test_parallel_groups_are_tasks_and_a_policy_sees_its_own_rows() -> None:
    # Agent b is only asked in the episode that is solved: it has nothing to be compared with.
    solved, failed = episode(1.0, ("a", 0, [0]), ("b", 0, [0])), episode(0.0, ("a", 0, [0]))
    other = episode(1.0, ("a", 0, [0]), ("b", 0, [0]))
    rows = tags_of("parallel", ("t", 0, solved), ("t", 1, failed), ("u", 0, other), ("u", 1, other))
    for estimator in ("mas_grpo", "dr_mas"):
        assert teaching_groups(rows, {"at_grpo_estimator": estimator}) == {
            ("p_a", "t"): True,
            ("p_b", "t"): False,
            ("p_a", "u"): False,
            ("p_b", "u"): False,
        }


def test_an_estimator_that_does_not_centre_keeps_equal_rewards_that_push() -> None:
    rows = [row("half", 0.5), row("half", 0.5), row("none", 0.0), row("none", 0.0), row("single", 0.5)]

    def of(**changes: Any) -> list[str]:
        groups = teaching_groups(rows, {"at_grpo_estimator": {"preset": "at_grpo", **changes}})
        return [group for (_, group), teaches in groups.items() if teaches]

    assert of() == []
    assert of(singleton="raw") == ["single"]
    assert of(center="none", scale="none", singleton="raw") == ["half", "single"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from("ab"), st.sampled_from([0.0, 0.1, 1.0]))),
    st.sampled_from(["at_grpo", "dr_grpo", "rloo", "mas_grpo", "dr_mas"]),
)
def test_dropping_changes_no_advantage(drawn: list[tuple[int, int, str, float]], estimator: str) -> None:
    outcome: dict[tuple[int, int], float] = {}
    rows = [
        row(f"g{group}#{trajectory}@{agent}", outcome.setdefault((group, trajectory), reward))
        for group, trajectory, agent, reward in drawn
    ]
    algorithm = {"at_grpo_estimator": estimator}
    chosen = StepRows(["-"] * len(rows), rows, teaching_groups(rows, algorithm))

    def advantages(some: list[Tags]) -> list[float]:
        rewards = torch.tensor([[tags["reward"]] for tags in some]).reshape(-1, 1)
        uids = np.array([tags["group"] for tags in some], dtype=object)
        return at_grpo_advantage(rewards, torch.ones_like(rewards), algorithm, uids)[0].flatten().tolist()

    before, left = advantages(rows), chosen.left()
    assert not any(itertools.compress(before, [not flag for flag in left]))
    after = advantages(list(itertools.compress(rows, left)))
    assert after == pytest.approx(list(itertools.compress(before, left)), rel=1e-6)


# ------------------------------------------------------------------ topping up


class Rollout:
    """TransferQueue and the rollout behind it: a task's rows are there once it was handed in."""

    def __init__(self, rewards: list[list[list[float]]]) -> None:
        self.rewards = rewards
        self.items: dict[str, Tags] = {}
        self.asked: list[int] = []
        self.cleared: Counter[str] = Counter()

    def submit(self, uids: list[str], global_steps: int, fail: bool = False) -> None:
        for number, uid in enumerate(uids):
            self.items[uid] = {"is_prompt": True, "status": "failure" if fail else "finished"}
            self.items[uid]["global_steps"] = global_steps
            if not fail:
                decisions = [("a", turn, rewards) for turn, rewards in enumerate(self.rewards.pop(0))]
                for item in training_rows(uid, 0, episode(1.0, *decisions), "tree"):
                    self.items[item.key] = {**item.tags, "task": number, "response_len": 1, "seq_len": 2}

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tags]]:
        return {"train": {key: dict(tags) for key, tags in self.items.items()}}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        assert keys, "TransferQueue refuses an empty list"
        for key in keys:
            del self.items[key]
            self.cleared[key] += 1


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Rollout:
    fake = Rollout([])
    monkeypatch.setattr(tq, "kv_list", fake.kv_list)
    monkeypatch.setattr(tq, "kv_clear", fake.kv_clear)
    return fake


class Unit(PolicyUnit):
    """A policy whose update is noted instead of done."""

    def __init__(self, name: str, optimizer_steps: int, trainable: bool = True) -> None:
        self.name, self.trainable, self._optimizer_steps = name, trainable, optimizer_steps
        self.updates: list[KVBatchMeta] = []

    def train(self, batch: KVBatchMeta, global_steps: int, metrics: Any, timing: Any) -> KVBatchMeta:
        self.updates.append(batch)
        timing["update_actor"] = 1.0
        return batch


class Team(AtGrpoTrainer):
    """The trainer with verl's replay buffer and data loader, a rollout that answers at once, and no processes."""

    def __init__(
        self, rollout: Rollout, filters: Any, *units: Unit, tasks: int = 16, fail: tuple[int, ...] = ()
    ) -> None:
        self.rollout, self.fail = rollout, fail
        self.settings = AtGrpoConfig.from_mapping(
            {"environment": {"name": "plan_path"}, "group_filter": filters, "max_failed_episodes": 2}
        )
        data = SimpleNamespace(train_batch_size=4, get=lambda key, default: 1)
        sampling = SimpleNamespace(rollout=SimpleNamespace(temperature=0.5))
        self.config = SimpleNamespace(data=data, actor_rollout_ref=sampling, algorithm=AT_GRPO)  # type: ignore[assignment]
        self.units, self.global_steps = list(units), 3
        self.timing_raw: dict[str, float] = {}
        self.dealt: list[int] = []
        self._replaced, self._counts, self._updated, self._recorder = 0, Counter(), False, None
        self.replay_buffer = ReplayBuffer(
            "sync", None, None, "drop", None, 0.0, self._add_prompts_to_generate, None, 4, 1, 1, True
        )
        self.train_dataloader_it = None
        self.train_dataloader = StatefulDataLoader(
            [{"raw_prompt": [], "index": index} for index in range(tasks)], batch_size=1, collate_fn=_collate
        )
        self.slept = 0

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        assert not self.slept, "the servers have no weights any more"
        uids, indices = list(batch["uid"]), list(batch["index"])
        for uid, index in zip(uids, indices, strict=True):
            self.rollout.submit([uid], self.global_steps, fail=int(index) in self.fail)
        self.dealt += [int(index) for index in indices]
        return len(uids)

    def on_sample_begin(self) -> None:
        self.slept = 0

    def on_sample_end(self) -> None:
        self.slept += 1

    def _collect_report(self) -> None:
        pass

    def _check_servers(self) -> None:
        pass

    @property
    def _at_once(self) -> bool:
        return True

    def play(self) -> tuple[KVBatchMeta, dict[str, Any]]:
        """A step as verl's `fit` does it, up to the clearing."""
        metrics: dict[str, Any] = {}
        self._submit_batch_to_rollout(self._next_train_batch(4))
        return self._step_once(metrics, {}, 4), metrics


def _collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: np.array([item[key] for item in items] + [None], dtype=object)[:-1] for key in items[0]}


FLAT, STEEP = [0.0, 0.0], [0.0, 1.0]


def test_without_a_filter_every_row_is_trained_on(rollout: Rollout) -> None:
    rollout.rewards = [[FLAT]] * 4
    unit = Unit("p_a", 2)
    batch, metrics = Team(rollout, None, unit).play()
    assert len(batch) == len(unit.updates[0]) == 8
    assert "team/groups_dropped" not in metrics
    assert metrics["team/rows"] == 8


def test_dropped_rows_are_cleared_and_counted_and_stay_in_the_figures(rollout: Rollout) -> None:
    rollout.rewards = [[STEEP, FLAT], [FLAT], [FLAT, FLAT], [FLAT, STEEP]]
    unit = Unit("p_a", 2)
    team = Team(rollout, {}, unit)
    batch, metrics = team.play()
    (trained,) = unit.updates
    assert sorted(tags["turn"] for tags in trained.tags) == [0, 0, 1, 1]
    assert trained.extra_info == {"temperature": 0.5}
    # Nothing but the batch that verl itself clears is left.
    assert set(rollout.items) == set(batch.keys) == set(trained.keys)
    assert set(rollout.cleared.values()) == {1}
    assert {name: metrics[f"team/{name}"] for name in ("groups_kept", "groups_dropped", "rows", "rows_dropped")} == {
        "groups_kept": 2,
        "groups_dropped": 5,
        "rows": 4,
        "rows_dropped": 10,
    }
    assert metrics["team/groups_dropped_share"] == metrics["team/rows_dropped_share"] == 5 / 7
    assert metrics["team/tasks"] == 4
    assert "team/groups_missing" not in metrics
    assert len(team._tags) == 14
    assert len({tags["episode"] for tags in team._tags}) == 4


def test_tasks_are_added_until_there_are_enough_groups(rollout: Rollout) -> None:
    # One group in four tasks: two more take 8, of which 4 are played; then two in eight: one more takes 4.
    rollout.rewards = [[STEEP]] + [[FLAT]] * 5 + [[STEEP]] + [[FLAT]] * 2 + [[STEEP]] + [[FLAT]] * 2 + [[STEEP]] * 9
    unit = Unit("p_a", 2)
    team = Team(rollout, {"min_groups": 3, "max_tasks": 16}, unit)
    batch, metrics = team.play()
    assert team.dealt == list(range(12))
    assert (metrics["team/tasks"], metrics["team/groups_kept"], metrics["team/groups_missing"]) == (12, 3, 0)
    assert len(batch) == len(unit.updates[0]) == 6
    assert set(rollout.items) == set(batch.keys)
    assert (team.slept, team._replaced) == (1, 0)
    # A resumed run goes on with the first task that was not dealt.
    state = team.train_dataloader.state_dict()
    resumed = Team(rollout, None, Unit("p_a", 2))
    resumed.train_dataloader.load_state_dict(state)
    resumed.play()
    assert resumed.dealt == [12, 13, 14, 15]


def test_the_bound_ends_the_top_up(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    rollout.rewards = [[STEEP]] + [[FLAT]] * 9
    unit = Unit("p_a", 2)
    _, metrics = Team(rollout, {"min_groups": 3, "max_tasks": 10}, unit).play()
    assert (metrics["team/tasks"], metrics["team/groups_kept"], metrics["team/groups_missing"]) == (10, 1, 2)
    assert len(unit.updates[0]) == 2
    assert "1 groups teach something after 10 tasks, fewer than at_grpo.group_filter.min_groups=3" in caplog.text


def test_failed_episodes_of_a_top_up_are_replaced_and_counted_as_such(rollout: Rollout) -> None:
    rollout.rewards = [[FLAT]] * 4 + [[STEEP]] * 4
    team = Team(rollout, {"min_groups": 1, "max_tasks": 12}, Unit("p_a", 2), fail=(5,))
    _, metrics = team.play()
    assert team.dealt == list(range(9))
    assert (team._replaced, metrics["team/tasks"]) == (1, 8)
    assert metrics["training/rollout_failure/evicted_samples"] == 1
    with pytest.raises(RuntimeError, match=r"3 episodes of step 3 failed .*max_failed_episodes=2"):
        rollout.rewards = [[FLAT]] * 16
        Team(rollout, {"min_groups": 1, "max_tasks": 16}, Unit("p_a", 2), fail=(4, 5, 6)).play()


def test_a_step_in_which_no_policy_is_updated_does_not_end_the_run(rollout: Rollout) -> None:
    rollout.rewards = [[FLAT]] * 4
    unit = Unit("p_a", 2)
    team = Team(rollout, {}, unit)
    batch, metrics = team.play()
    assert unit.updates == []
    assert (metrics["team/rows"], metrics["team/updated"], metrics["team/groups_kept"]) == (0, 0, 0)
    # verl must be given something to clear.
    assert set(batch.keys) == set(rollout.items)
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
    assert not rollout.items
    # No advantages were computed, of which verl's own metrics are.
    for tags in team._tags:
        tags.setdefault("truncated", False)
    team._compute_metrics(batch, metrics, {"gen": 2.0}, global_steps=3, epoch=0)
    assert metrics["team/episodes"] == 4
    assert metrics["team/success"] == 1.0
    assert (metrics["timing_s/gen"], metrics["training/global_step"]) == (2.0, 3)


def test_fewer_rows_than_optimizer_steps_are_no_update(rollout: Rollout, caplog: pytest.LogCaptureFixture) -> None:
    rollout.rewards = [[STEEP]] + [[FLAT]] * 3
    for optimizer_steps, updates in ((2, 1), (3, 0)):
        rollout.rewards, rollout.items = [[STEEP]] + [[FLAT]] * 3, {}
        unit = Unit("p_a", optimizer_steps)
        batch, metrics = Team(rollout, {}, unit).play()
        assert (len(unit.updates), metrics["team/updated"], metrics["team/rows"]) == (updates, updates, 2)
        assert set(batch.keys) == set(rollout.items)
    assert "policy 'p_a' is not updated: it has 2 rows for 3 optimizer steps" in caplog.text


def test_rows_are_in_the_same_order_whatever_episode_ended_first() -> None:
    both = [episode(1.0, ("b", 0, [0, 1]), ("a", 0, [0, 1]), ("a", 1, [0, 1])) for _ in range(2)]
    rows = [
        (item.key, {**item.tags, "task": task})
        # A task's uid is drawn anew in every run.
        for task, uid in ((10, "x"), (9, "z"), (2, "y"))
        for session in (1, 0)
        for item in training_rows(uid, session, both[session], "tree")
    ]

    def order(arrived: list[tuple[str, Tags]]) -> list[str]:
        drawn = StepRows([key for key, _ in arrived], [tags for _, tags in arrived])
        drawn.sort()
        assert [dict(arrived)[key] for key in drawn.keys] == drawn.tags
        return drawn.keys

    first = order(rows)
    # By number, not by name: task 2, 9, 10; episode 0, 1; agent a before b although b was asked first.
    of_episode = [2, 3, 4, 5, 0, 1]
    assert first == [f"{uid}_{session}_{row}" for uid in "yzx" for session in (0, 1) for row in of_episode]
    random.Random(1).shuffle(rows)
    assert order(rows) == first


def test_a_frozen_policys_groups_are_neither_dropped_nor_counted() -> None:
    rows = [
        row("solo", 1.0, "left"),
        *(row("flat", 0.0, policy) for policy in ("left", "judge") for _ in range(2)),
        *(row("steep", reward, policy) for policy in ("left", "judge") for reward in (0.0, 1.0)),
    ]
    batch = KVBatchMeta(keys=[str(number) for number in range(len(rows))], tags=rows, partition_id="train")
    filters = GroupFilter(min_groups=1, max_tasks=9)
    drawn = draw(lambda tasks: (batch, {}), lambda tasks: 1 / 0, 1, filters, {"left"}, AT_GRPO)
    assert drawn.metrics["team/groups_kept"] == 1
    assert (drawn.metrics["team/groups_dropped"], drawn.metrics["team/rows_dropped"]) == (2, 3)
    assert drawn.of({"left"}).keys == ["5", "6"]
    assert drawn.of({"judge"}).keys == ["3", "4", "7", "8"]
    assert drawn.but({"left"}).keys == ["0", "1", "2", "3", "4", "7", "8"]
