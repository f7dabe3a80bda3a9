"""The order of a step's calls to servers and rollout workers, by mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.fake_trainer import FakeRollout, FakeTrainer

from verl_atgrpo.train.trainer.policies import TeamSync
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit


def test_a_synchronous_step_sleeps_and_wakes(rollout: FakeRollout) -> None:
    trainer = FakeTrainer(rollout)
    trainer.on_init_end()
    trainer.run(2)
    assert rollout.calls == ["update", "sleep", "update", "sleep", "update"]
    assert rollout.weights == 2


def test_an_asynchronous_step_pauses_first_and_resumes_last(rollout: FakeRollout) -> None:
    trainer = FakeTrainer(rollout, mode="colocate_async")
    trainer.on_init_end()
    batch, metrics = trainer.play()
    assert rollout.calls == ["update", "pause", "abort", "sleep"]
    trainer.on_step_end()
    # A validation would run now: the servers accept requests, and training requests are still paused.
    assert rollout.calls[4:] == ["update", "resume"]
    trainer.end_step(batch, metrics)
    assert rollout.calls[6:] == ["resume"]


def test_separate_servers_pause_for_the_weight_sync_and_a_validation_alone(rollout: FakeRollout) -> None:
    trainer = FakeTrainer(rollout, mode="separate_async")
    trainer.on_init_end()
    batch, metrics = trainer.play()
    # The servers are not called: they continue while the policies are updated.
    assert rollout.calls == ["update"]
    trainer.on_step_end()
    assert rollout.calls[1:] == ["pause", "update"]
    trainer.end_step(batch, metrics)
    assert rollout.calls[3:] == ["resume"]


class Sync:
    """The weight sync of one policy."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def abort_replicas(self) -> None:
        self.calls.append(f"abort {self.name}")

    def resume_generation_replicas(self) -> None:
        self.calls.append(f"resume {self.name}")


@pytest.mark.parametrize("concurrent", [False, True])
def test_every_policys_servers_are_interrupted_and_resumed(concurrent: bool) -> None:
    calls: list[str] = []
    units: Any = []
    for name, trainable in (("coder", True), ("judge", False)):
        unit = PolicyUnit.__new__(PolicyUnit)
        unit.name, unit.trainable, unit.sync = name, trainable, Sync(name, calls)
        unit.replicas = SimpleNamespace(poll=lambda name=name: calls.append(f"poll {name}"))  # type: ignore[assignment]
        units.append(unit)
    trainer = TeamSync(units, concurrent)
    trainer.abort_replicas()
    assert sorted(calls) == ["abort coder", "abort judge", "poll coder", "poll judge"]
    for name in ("coder", "judge"):
        assert calls.index(f"poll {name}") < calls.index(f"abort {name}"), "a dead one must be removed first"
    trainer.resume_generation_replicas()
    assert sorted(calls[4:]) == ["resume coder", "resume judge"]


def test_a_server_that_cannot_be_interrupted_is_named_by_its_policy() -> None:
    ray = pytest.importorskip("ray")

    def dead() -> None:
        raise ray.exceptions.RayActorError()

    unit = PolicyUnit.__new__(PolicyUnit)
    unit.name, unit.sync = "planner", SimpleNamespace(abort_replicas=dead)
    unit.replicas = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="policy 'planner': interrupting its servers failed"):
        TeamSync([unit], concurrent=False).abort_replicas()
