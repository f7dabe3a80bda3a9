"""Asynchronous steps with verl's own replay buffer and data loader: what is submitted, awaited, trained on, kept."""

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
from fakes.fake_trainer import STEEP, Rollout, Team, Unit, tasks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_atgrpo.config.schema import AtGrpoConfig
from verl_atgrpo.trainer import schedule
from verl_atgrpo.trainer.schedule import make_schedule
from verl_atgrpo.trainer.trainer import AtGrpoTrainer


def asynchronous(rollout: Rollout, **changes: Any) -> Team:
    return Team(rollout, Unit("p_a", 2), mode="colocate_async", **changes)


def staleness(team: Team) -> int:
    return max(
        step - 1 - tags["min_global_steps"]
        for step, batch in enumerate(team.units[0].updates, 1)
        for tags in batch.tags
    )


# ------------------------------------------------------------------ what is submitted


@pytest.mark.parametrize(
    ("under_way", "prefetch", "steps_left", "expected"),
    [
        (0, 0.0, 9, 4),  # synchronous
        (0, 1.0, 9, 8),  # the first step, with the warm-up
        (4, 1.0, 9, 4),
        (6, 1.5, 9, 4),
        (0, 1.6, 9, 10),  # whole tasks
        (4, 1.0, 2, 4),
        (4, 1.0, 1, 0),  # nobody would use more
        (0, 2.0, 1, 4),
        (12, 1.0, 9, 0),  # resumed with a smaller warm-up
    ],
)
def test_tasks_are_submitted_as_far_as_they_can_be_used(
    under_way: int, prefetch: float, steps_left: int, expected: int
) -> None:
    assert schedule.tasks_to_submit(under_way, batch=4, prefetch=prefetch, steps_left=steps_left) == expected


@pytest.mark.parametrize("warmup", [0.5, 1, 2])
def test_every_task_submitted_is_trained_on_once_and_none_is_left(rollout: Rollout, warmup: float) -> None:
    rollout.looks = lambda task: 9 * (task % 5 == 0) + task % 2
    team = asynchronous(rollout, warmup=warmup, threshold=4, steps=6, tasks=64)
    metrics = team.run(6)
    assert rollout.dealt == list(range(24))
    trained = tasks_of(team.units[0])
    assert [len(update) for update in trained] == [4] * 6
    assert sorted(chain.from_iterable(trained)) == list(range(24))
    assert rollout.items == {}
    # Something was taken out of turn, and is older for it.
    assert trained[0] != [0, 1, 2, 3]
    assert max(step["team/staleness_max"] for step in metrics) == staleness(team) > 0
    assert max(step["team/candidates_resumed_share"] for step in metrics) > 0


def test_the_recipe_has_verls_asynchronous_buffer_wait(compose: Any) -> None:
    trainer = AtGrpoTrainer.__new__(AtGrpoTrainer)
    for recipe, kind in (
        ("plan_path_cpu", ReplayBuffer),
        ("plan_path_cpu_async", ReplayBufferAsync),
        ("plan_path_cpu_separate", ReplayBufferAsync),
    ):
        trainer.config = compose(recipe)
        trainer.settings = AtGrpoConfig.from_config(trainer.config)
        buffer = trainer._build_replay_buffer()
        assert type(buffer) is kind
    assert (buffer.max_off_policy_strategy, buffer.max_off_policy_threshold) == ("wait", 3)
    assert make_schedule(trainer.settings.mode, trainer.config.trainer).prefetch == 1


def test_the_turn_of_an_epoch_is_no_end(rollout: Rollout) -> None:
    team = asynchronous(rollout, tasks=5, steps=100)
    team.steps_per_epoch, team.config.trainer.total_epochs = 1, 3
    team.run(3)
    assert Counter(rollout.dealt) == {0: 3, 1: 3, 2: 2, 3: 2, 4: 2}
    assert rollout.items == {}


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_no_two_submissions_of_a_step_draw_alike_and_time_decides_nothing(rollout: Rollout, mode: str) -> None:
    seeded = []
    for looks in (0, 3):
        rollout.seeded, rollout.looks = [], lambda task, looks=looks: looks * (task % 2)
        team = Team(rollout, Unit("p_a", 2), mode=mode, warmup=2, threshold=4, tasks=5, steps=100)
        team.steps_per_epoch = 100
        team.run(3)
        die(rollout)
        assert len(set(rollout.seeded)) == len(rollout.seeded) >= 12
        assert any(deal for _, _, deal in rollout.seeded) == (mode != "sync")
        seeded.append(rollout.seeded[:16])
    assert seeded[0] == seeded[1]


# ------------------------------------------------------------------ staleness


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), warmup=st.sampled_from([0.5, 1, 1.5, 2]), slack=st.integers(0, 2))
def test_waiting_bounds_how_old_a_candidate_is(seed: int, warmup: float, slack: int) -> None:
    threshold = 1 + math.ceil(warmup) + slack
    draws = random.Random(seed)
    rollout = Rollout()
    rollout.looks = lambda task: draws.choice((0, 1, 3, 40))
    with pytest.MonkeyPatch.context() as patched:
        for name in ("kv_list", "kv_clear", "kv_batch_put"):
            patched.setattr(tq, name, getattr(rollout, name))
        team = asynchronous(rollout, warmup=warmup, threshold=threshold, tasks=64, steps=10)
        team.run(10)
    assert staleness(team) <= threshold + math.ceil(warmup) - 2
    for step, batch in enumerate(team.units[0].updates, 1):
        assert all(step - tags["global_steps"] + 1 <= threshold + math.ceil(warmup) - 1 for tags in batch.tags)


def test_a_slow_task_is_waited_for_when_it_is_due(rollout: Rollout) -> None:
    rollout.looks = lambda task: 1000 if task == 0 else 0
    team = asynchronous(rollout, threshold=3, tasks=64, steps=9)
    team.run(4)
    when = next(step for step, tasks in enumerate(tasks_of(team.units[0]), 1) if 0 in tasks)
    assert when == 3
    assert staleness(team) == 2


# ------------------------------------------------------------------ failures


def test_a_large_warm_up_is_no_failure(rollout: Rollout) -> None:
    asynchronous(rollout, warmup=3, threshold=4, tasks=64, failures=2).run(3)


def test_what_the_buffer_throws_away_for_its_age_is_no_failure(rollout: Rollout) -> None:
    rollout.looks = lambda task: 4 if task < 8 else 0
    team = asynchronous(rollout, warmup=3, threshold=2, tasks=64, failures=2)
    team.replay_buffer.max_off_policy_strategy = "drop"  # which the checks refuse
    metrics = team.run(5)
    assert sum(step.get("training/off_policy/evicted_samples", 0) for step in metrics) > 2


def test_failed_episodes_are_replaced_and_counted_in_every_mode(rollout: Rollout) -> None:
    for mode in ("sync", "colocate_async"):
        rollout.fails = lambda task: task in (2, 5)
        rollout.dealt, rollout.items = [], {}
        rollout.update_weights(0)
        team = Team(rollout, Unit("p_a", 2), mode=mode, steps=2, tasks=64, failures=2)
        team.run(2)
        assert rollout.dealt == list(range(10))
        assert sorted(chain.from_iterable(tasks_of(team.units[0]))) == [0, 1, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_too_many_failures_end_the_run(rollout: Rollout, mode: str) -> None:
    rollout.fails = lambda task: True
    with pytest.raises(RuntimeError, match=r"episodes of step 1 failed .*at_grpo\.max_failed_episodes=2"):
        Team(rollout, mode=mode, failures=2).run(1)


@pytest.mark.parametrize("deaths", [(1, 0), (1, 1)])
def test_episodes_that_fail_with_all_servers_of_a_policy_do_not_count(
    rollout: Rollout, deaths: tuple[int, ...]
) -> None:
    rollout.fails = lambda task: task < 6  # four at once, and two when the servers are back
    units = Unit("p_a", 2), Unit("p_b", 2, trainable=False)
    units[0].deaths, units[1].deaths = deaths
    Team(rollout, *units, failures=2).run(1)
    assert [unit.deaths < 0 for unit in units] == [True, True], "the second one does not wait for the next failure"


# ------------------------------------------------------------------ group filter


def test_the_filter_plays_more_tasks_and_leaves_as_many_under_way(rollout: Rollout) -> None:
    rollout.rewards = [[[0.0, 0.0]], [STEEP]] * 40
    rollout.looks = lambda task: task % 3
    # Enough tasks for every choice among the finished ones: with 12 a step now and then had only three that teach.
    team = asynchronous(rollout, filters={"min_groups": 4, "max_tasks": 32}, tasks=64, steps=5)
    under_way, tasks = [], []
    for metrics in (team.run(1)[0] for _ in range(5)):
        assert metrics["team/groups_kept"] >= 4
        tasks.append(metrics["team/tasks"])
        under_way.append(len(schedule.unfinished_tasks()))
    assert under_way == [4, 4, 4, 4, 0]
    # Which of the finished tasks a step takes is verl's choice; every other one teaches, and 20 had to.
    assert min(tasks) >= 4
    assert sum(tasks) == len(rollout.dealt) >= 39
    assert rollout.items == {}


# ------------------------------------------------------------------ resuming


def die(rollout: Rollout) -> None:
    """The process and all it had are gone."""
    rollout.items, rollout.dealt, rollout._left = {}, [], {}
    rollout.resume()


def test_a_resumed_run_loses_no_task_and_trains_on_none_twice(rollout: Rollout, tmp_path: Path) -> None:
    rollout.looks = lambda task: 50 * (task % 3 == 0)
    settings: dict[str, Any] = {"warmup": 2, "threshold": 4, "tasks": 64, "steps": 8, "folder": tmp_path}
    team = asynchronous(rollout, **settings)
    team.run(2)
    played = team.play()
    team._save_checkpoint()  # when verl saves: the step's rows are still in the queue
    unfinished = schedule.unfinished_tasks()
    assert len(unfinished) == 8
    folder = str(tmp_path / "global_step_3")
    assert team.saved == [{"trainer": team, "global_step": 3, "checkpoint_dir": folder, "async_save": False}]
    before = list(chain.from_iterable(tasks_of(team.units[0])))
    team.finish(*played)
    team.play()  # is not saved
    die(rollout)

    resumed = asynchronous(rollout, **settings)
    assert resumed.global_steps == 4
    resumed.prepare_step()
    # First those that were under way, in the order of their submission, then new ones.
    assert rollout.dealt == [*unfinished, 20, 21, 22, 23]
    resumed.run(5)
    after = list(chain.from_iterable(tasks_of(resumed.units[0])))
    assert sorted(before + after) == list(range(32))


def test_a_run_may_go_on_in_sync_mode_and_be_saved_before_all_is_dealt_again(rollout: Rollout, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tasks": 64, "steps": 8, "folder": tmp_path}
    team = asynchronous(rollout, warmup=2, threshold=4, **settings)
    team.play()
    team._save_checkpoint()
    unfinished = schedule.unfinished_tasks()
    die(rollout)
    synchronous = Team(rollout, **settings)
    synchronous.play()
    assert rollout.dealt == unfinished[:4]
    synchronous._save_checkpoint()
    die(rollout)
    third = Team(rollout, **settings)
    assert third.global_steps == 3
    third.run(2)
    assert rollout.dealt == [*unfinished[4:], 12, 13, 14, 15]


def test_a_smaller_data_set_is_refused() -> None:
    rows = schedule.replay_unfinished([{"index": 0}], deque([0, 7]))
    next(rows)
    with pytest.raises(ValueError, match=r"names task 7, but there are 1 training tasks: .*resume_mode=disable"):
        next(rows)
