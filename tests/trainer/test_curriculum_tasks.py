"""The trainer submits the tasks that a curriculum chooses, tells it how they went, and resumes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.fake_trainer import FakeRollout, FakeTrainer

from verl_atgrpo import make
from verl_atgrpo.play.curriculum import Curriculum, LevelOrder
from verl_atgrpo.play.task_order import HalfSolvedFirst


def order(**options: Any) -> LevelOrder:
    given = {"window": 4, "review": 0, **options}
    made = make("curriculum", of={"name": "walk"}, levels=[{"size": 3}, {"size": 4}, {"size": 5}], **given)
    assert isinstance(made, Curriculum)
    return LevelOrder(made, 48)


@pytest.mark.parametrize(("mode", "ahead", "levels"), [("sync", 4, [1, 2, 2]), ("colocate_async", 8, [1, 1, 2])])
def test_solved_tasks_lead_to_harder_ones(rollout: FakeRollout, mode: str, ahead: int, levels: list[int]) -> None:
    """Every episode of the fake is solved; asynchronously eight tasks are submitted before the first has ended."""
    trainer = FakeTrainer(rollout, levels=order(), mode=mode, tasks=48, warmup=1)
    steps = trainer.run(3)
    assert [step["curriculum/level"] for step in steps] == levels
    assert rollout.submitted[:ahead] == [3 * number for number in range(ahead)]
    assert rollout.submitted[ahead : ahead + 4] == [1, 4, 7, 10]


def test_a_resumed_order_by_success_knows_which_tasks_failed_in_the_saved_step(
    rollout: FakeRollout, tmp_path: Path
) -> None:
    failing = {int(HalfSolvedFirst(48, 0)._new[place]) for place in (2, 9)}
    rollout.fails = lambda task: task in failing
    trainer = FakeTrainer(rollout, levels=HalfSolvedFirst(48, 0), tasks=48, folder=tmp_path, failures=1000)
    trainer.run(1)
    trainer.run_and_save()
    before = len(rollout.submitted)
    trainer.run(6)
    whole = list(rollout.submitted)
    assert failing & {*whole[:before]}
    del rollout.submitted[before:]
    FakeTrainer(rollout, levels=HalfSolvedFirst(48, 0), tasks=48, folder=tmp_path, failures=1000).run(6)
    assert rollout.submitted == whole


def test_a_resumed_run_plays_what_the_interrupted_one_would_have(rollout: FakeRollout, tmp_path: Path) -> None:
    trainer = FakeTrainer(rollout, levels=order(review=0.25), tasks=48, folder=tmp_path)
    trainer.run(1)
    trainer.run_and_save()
    trainer.run(2)
    whole = list(rollout.submitted)
    del rollout.submitted[8:]
    resumed = FakeTrainer(rollout, levels=order(review=0.25), tasks=48, folder=tmp_path)
    resumed.run(2)
    assert rollout.submitted == whole
    with pytest.raises(ValueError, match=r"^at_grpo\.environment\.levels: the checkpoint has 3 levels, the recipe 2;"):
        made = make("curriculum", of={"name": "walk"}, levels=[{"size": 3}, {"size": 4}])
        assert isinstance(made, Curriculum)
        FakeTrainer(rollout, levels=LevelOrder(made, 48), tasks=48, folder=tmp_path)
    with pytest.raises(
        ValueError, match=r"^at_grpo\.environment\.name=plan_path: tasks of .*global_step_2 were in an"
    ):
        FakeTrainer(rollout, tasks=48, folder=tmp_path)
