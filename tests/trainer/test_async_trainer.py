"""Asynchronous steps with verl's replay buffer and data loader: which tasks are submitted, trained on and saved."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import transfer_queue as tq
from fakes.fake_trainer import STEEP, FakeRollout, FakeTrainer, FakeUnit, tasks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.rows.queue import unfinished_tasks
from verl_atgrpo.train.trainer import checkpoints, schedule
from verl_atgrpo.train.trainer.schedule import make_schedule
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer


def asynchronous(rollout: FakeRollout, **changes: Any) -> FakeTrainer:
    return FakeTrainer(rollout, FakeUnit("p_a", 2), mode="colocate_async", **changes)


def staleness(trainer: FakeTrainer) -> int:
    return max(
        step - 1 - tags["min_global_steps"]
        for step, batch in enumerate(trainer.units[0].updates, 1)
        for tags in batch.tags
    )


# ------------------------------------------------------------------ what is submitted


@pytest.mark.parametrize(
    ("in_flight", "prefetch", "steps_left", "expected"),
    [
        (0, 0.0, 9, 4),  # synchronous
        (0, 1.0, 9, 8),  # the first step, with the warm-up
        (4, 1.0, 9, 4),
        (6, 1.5, 9, 4),
        (0, 1.6, 9, 10),  # whole tasks
        (4, 1.0, 2, 4),
        (4, 1.0, 1, 0),  # no step would use more
        (0, 2.0, 1, 4),
        (12, 1.0, 9, 0),  # resumed with a smaller warm-up
    ],
)
def test_tasks_are_submitted_as_far_as_they_can_be_used(
    in_flight: int, prefetch: float, steps_left: int, expected: int
) -> None:
    assert schedule.tasks_to_submit(in_flight, batch=4, prefetch=prefetch, steps_left=steps_left) == expected


@pytest.mark.parametrize("warmup", [0.5, 1, 2])
def test_every_task_submitted_is_trained_on_once_and_none_is_left(rollout: FakeRollout, warmup: float) -> None:
    rollout.polls = lambda task: 9 * (task % 5 == 0) + task % 2
    trainer = asynchronous(rollout, warmup=warmup, threshold=4, steps=6, tasks=64)
    metrics = trainer.run(6)
    assert rollout.submitted == list(range(24))
    trained = tasks_of(trainer.units[0])
    assert [len(update) for update in trained] == [4] * 6
    assert sorted(chain.from_iterable(trained)) == list(range(24))
    assert rollout.items == {}
    # Tasks were trained on out of order, and are older.
    assert trained[0] != [0, 1, 2, 3]
    assert max(step["team/staleness_max"] for step in metrics) == staleness(trainer) > 0
    assert max(step["team/candidates_resumed_share"] for step in metrics) > 0


def test_the_recipe_has_verls_asynchronous_buffer_wait(compose: Any) -> None:
    trainer = AtGrpoTrainer.__new__(AtGrpoTrainer)
    for recipe, kind in (
        ("plan_path_cpu", ReplayBuffer),
        ("plan_path_cpu +mode=async", ReplayBufferAsync),
        ("plan_path_cpu_separate", ReplayBufferAsync),
    ):
        trainer.config = compose(recipe)
        trainer.settings = read_section(trainer.config)
        buffer = trainer._build_replay_buffer()
        assert type(buffer) is kind
    assert (buffer.max_off_policy_strategy, buffer.max_off_policy_threshold) == ("wait", 3)
    assert make_schedule(trainer.settings.mode, trainer.config.trainer).prefetch == 1


def test_training_continues_into_the_next_epoch(rollout: FakeRollout) -> None:
    trainer = asynchronous(rollout, tasks=5, steps=100)
    trainer.steps_per_epoch, trainer.config.trainer.total_epochs = 1, 3
    trainer.run(3)
    assert Counter(rollout.submitted) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}
    assert rollout.items == {}


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_submissions_of_a_step_have_different_seeds_independent_of_timing(rollout: FakeRollout, mode: str) -> None:
    seeds = []
    for polls in (0, 3):
        rollout.seeds, rollout.polls = [], lambda task, polls=polls: polls * (task % 2)
        trainer = FakeTrainer(rollout, FakeUnit("p_a", 2), mode=mode, warmup=2, threshold=4, tasks=5, steps=100)
        trainer.steps_per_epoch = 100
        trainer.run(3)
        rollout.crash()
        assert len(set(rollout.seeds)) == len(rollout.seeds) >= 12
        assert any(count for _, _, count in rollout.seeds) == (mode != "sync")
        seeds.append(rollout.seeds[:16])
    assert seeds[0] == seeds[1]


# ------------------------------------------------------------------ staleness


@pytest.mark.slow
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), warmup=st.sampled_from([0.5, 1, 1.5, 2]), slack=st.integers(0, 2))
def test_waiting_bounds_staleness(seed: int, warmup: float, slack: int) -> None:
    threshold = 1 + math.ceil(warmup) + slack
    random_source = random.Random(seed)
    rollout = FakeRollout()
    rollout.polls = lambda task: random_source.choice((0, 1, 3, 40))
    with pytest.MonkeyPatch.context() as patched:
        for name in ("kv_list", "kv_clear", "kv_batch_put"):
            patched.setattr(tq, name, getattr(rollout, name))
        trainer = asynchronous(rollout, warmup=warmup, threshold=threshold, tasks=64, steps=10)
        trainer.run(10)
    assert staleness(trainer) <= threshold + math.ceil(warmup) - 2
    for step, batch in enumerate(trainer.units[0].updates, 1):
        assert all(step - tags["global_steps"] + 1 <= threshold + math.ceil(warmup) - 1 for tags in batch.tags)


def test_a_slow_task_is_waited_for_when_it_is_due(rollout: FakeRollout) -> None:
    rollout.polls = lambda task: 1000 if task == 0 else 0
    trainer = asynchronous(rollout, threshold=3, tasks=64, steps=9)
    trainer.run(4)
    when = next(step for step, tasks in enumerate(tasks_of(trainer.units[0]), 1) if 0 in tasks)
    assert when == 3
    assert staleness(trainer) == 2


# ------------------------------------------------------------------ failures


def test_a_large_warm_up_is_no_failure(rollout: FakeRollout) -> None:
    asynchronous(rollout, warmup=3, threshold=4, tasks=64, failures=2).run(3)


def test_what_the_buffer_evicts_as_stale_is_no_failure(rollout: FakeRollout) -> None:
    rollout.polls = lambda task: 4 if task < 8 else 0
    trainer = asynchronous(rollout, warmup=3, threshold=2, tasks=64, failures=2)
    trainer.replay_buffer.max_off_policy_strategy = "drop"  # which the checks refuse
    metrics = trainer.run(5)
    assert sum(step.get("training/off_policy/evicted_samples", 0) for step in metrics) > 2


def test_failed_episodes_are_replaced_and_counted_in_every_mode(rollout: FakeRollout) -> None:
    for mode in ("sync", "colocate_async"):
        rollout.fails = lambda task: task in (2, 5)
        rollout.submitted, rollout.items = [], {}
        rollout.update_weights(0)
        trainer = FakeTrainer(rollout, FakeUnit("p_a", 2), mode=mode, steps=2, tasks=64, failures=2)
        trainer.run(2)
        assert rollout.submitted == list(range(10))
        assert sorted(chain.from_iterable(tasks_of(trainer.units[0]))) == [0, 1, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_too_many_failures_end_the_run(rollout: FakeRollout, mode: str) -> None:
    rollout.fails = lambda task: True
    with pytest.raises(RuntimeError, match=r"episodes of step 1 failed .*at_grpo\.max_failed_episodes=2"):
        FakeTrainer(rollout, mode=mode, failures=2).run(1)


@pytest.mark.parametrize("deaths", [(1, 0), (1, 1)])
def test_episodes_that_fail_with_all_servers_of_a_policy_do_not_count(
    rollout: FakeRollout, deaths: tuple[int, ...]
) -> None:
    rollout.fails = lambda task: task < 6  # four in the first poll, and two after the restart
    units = FakeUnit("p_a", 2), FakeUnit("p_b", 2, trainable=False)
    units[0].deaths, units[1].deaths = deaths
    FakeTrainer(rollout, *units, failures=2).run(1)
    assert [unit.deaths < 0 for unit in units] == [True, True], "the second does not wait for another failure"


# ------------------------------------------------------------------ group filter


def test_the_filter_plays_more_tasks_and_leaves_as_many_in_flight(rollout: FakeRollout) -> None:
    rollout.rewards = [[[0.0, 0.0]], [STEEP]] * 40
    rollout.polls = lambda task: task % 3
    # With 32 tasks there are enough groups with signal, whichever finished tasks verl samples; 12 are sometimes too
    # few.
    trainer = asynchronous(rollout, filters={"min_groups": 4, "max_tasks": 32}, tasks=64, steps=5)
    in_flight, tasks = [], []
    for metrics in (trainer.run(1)[0] for _ in range(5)):
        assert metrics["team/groups_kept"] >= 4
        tasks.append(metrics["team/tasks"])
        in_flight.append(len(unfinished_tasks()))
    assert in_flight == [4, 4, 4, 4, 0]
    # verl chooses among finished tasks; every other one has a group with signal, and 20 groups were needed.
    assert min(tasks) >= 4
    assert sum(tasks) == len(rollout.submitted) >= 39
    assert rollout.items == {}


# ------------------------------------------------------------------ resuming


def test_a_resumed_run_loses_no_task_and_trains_on_none_twice(rollout: FakeRollout, tmp_path: Path) -> None:
    rollout.polls = lambda task: 50 * (task % 3 == 0)
    settings: dict[str, Any] = {"warmup": 2, "threshold": 4, "tasks": 64, "steps": 8, "folder": tmp_path}
    trainer = asynchronous(rollout, **settings)
    trainer.run(2)
    played = trainer.play()
    trainer.save()  # when verl saves: the step's rows are still in the queue
    unfinished = unfinished_tasks()
    assert len(unfinished) == 8
    folder = str(tmp_path / "global_step_3")
    assert trainer.saved == [{"trainer": trainer, "global_step": 3, "checkpoint_dir": folder, "async_save": False}]
    before = list(chain.from_iterable(tasks_of(trainer.units[0])))
    trainer.finish(*played)
    trainer.play()  # is not saved
    rollout.crash()

    resumed = asynchronous(rollout, **settings)
    assert resumed.global_steps == 4
    resumed.prepare_step()
    # First those that were in flight, in the order of their submission, then new ones.
    assert rollout.submitted == [*unfinished, 20, 21, 22, 23]
    resumed.run(5)
    after = list(chain.from_iterable(tasks_of(resumed.units[0])))
    assert sorted(before + after) == list(range(32))


def test_a_run_may_resume_in_sync_mode_and_be_saved_before_the_replay_ends(
    rollout: FakeRollout, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"tasks": 64, "steps": 8, "folder": tmp_path}
    trainer = asynchronous(rollout, warmup=2, threshold=4, **settings)
    trainer.play()
    trainer.save()
    unfinished = unfinished_tasks()
    rollout.crash()
    synchronous = FakeTrainer(rollout, **settings)
    synchronous.play()
    assert rollout.submitted == unfinished[:4]
    synchronous.save()
    rollout.crash()
    third = FakeTrainer(rollout, **settings)
    assert third.global_steps == 3
    third.run(2)
    assert rollout.submitted == [*unfinished[4:], 12, 13, 14, 15]


def test_a_smaller_data_set_is_refused() -> None:
    rows = checkpoints.replay_unfinished([{"index": 0}], deque([0, 7]))
    next(rows)
    with pytest.raises(ValueError, match=r"names task 7, but there are 1 training tasks: .*resume_mode=disable"):
        next(rows)


@pytest.mark.parametrize("tasks", [12, 30])
def test_other_tasks_than_those_of_the_checkpoint_are_played_from_the_first(
    rollout: FakeRollout, tmp_path: Path, tasks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A place in another order means nothing, and may be none: torchdata would only find out when it is asked."""
    trainer = FakeTrainer(rollout, tasks=20, folder=tmp_path)
    trainer.run(3)
    trainer.run_and_save()
    assert rollout.submitted == list(range(16))
    del rollout.submitted[:]
    FakeTrainer(rollout, tasks=tasks, folder=tmp_path).run(1)
    assert rollout.submitted == [0, 1, 2, 3]
    assert f"training tasks={tasks} (was 20), data.shuffle=False (was False)" in caplog.text
    FakeTrainer(rollout, tasks=20, folder=tmp_path).run(1)
    assert rollout.submitted[4:] == [16, 17, 18, 19]


@pytest.mark.parametrize("tasks", [12, 30])
def test_tasks_in_flight_of_other_data_are_forgotten(rollout: FakeRollout, tmp_path: Path, tasks: int) -> None:
    settings: dict[str, Any] = {"warmup": 2, "threshold": 4, "steps": 8, "folder": tmp_path}
    trainer = asynchronous(rollout, tasks=20, **settings)
    trainer.play()
    trainer.save()
    assert unfinished_tasks()
    rollout.crash()
    asynchronous(rollout, tasks=tasks, **settings).prepare_step()
    assert rollout.submitted[:8] == [*range(8)]
