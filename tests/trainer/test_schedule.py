"""The order of what a step does to servers and rollout workers, per mode, validation included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.fake_trainer import Rollout, Team

from verl_atgrpo.trainer.policy_unit import PolicyUnit, TeamSync


def test_a_synchronous_step_sleeps_and_wakes(rollout: Rollout) -> None:
    team = Team(rollout)
    team.on_init_end()
    team.run(2)
    assert rollout.calls == ["update", "sleep", "update", "sleep", "update"]
    assert rollout.weights == 2


def test_an_asynchronous_step_holds_first_and_releases_last(rollout: Rollout) -> None:
    team = Team(rollout, mode="colocate_async")
    team.on_init_end()
    batch, metrics = team.play()
    assert rollout.calls == ["update", "pause", "abort", "sleep"]
    team.on_step_end()
    # Validation would come now: the servers answer, and training still waits.
    assert rollout.calls[4:] == ["update", "resume"]
    team._updated = False
    team._compute_metrics(batch, metrics, {}, global_steps=1, epoch=0)
    assert rollout.calls[6:] == ["resume"]


def test_separate_servers_are_interrupted_for_the_transfer_alone(rollout: Rollout) -> None:
    team = Team(rollout, mode="separate_async")
    team.on_init_end()
    batch, metrics = team.play()
    # No word to the servers: they draw while the policies are updated.
    assert rollout.calls == ["update"]
    team.on_step_end()
    assert rollout.calls[1:] == ["pause", "update"]
    team._updated = False
    team._compute_metrics(batch, metrics, {}, global_steps=1, epoch=0)
    assert rollout.calls[3:] == ["resume"]


class Sync:
    """One policy's servers."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def abort_replicas(self) -> None:
        self.calls.append(f"abort {self.name}")

    def resume_generation_replicas(self) -> None:
        self.calls.append(f"resume {self.name}")


@pytest.mark.parametrize("concurrent", [False, True])
def test_every_policys_servers_are_interrupted_and_go_on(concurrent: bool) -> None:
    calls: list[str] = []
    units: Any = []
    for name, trainable in (("coder", True), ("judge", False)):
        unit = PolicyUnit.__new__(PolicyUnit)
        unit.name, unit.trainable, unit.sync = name, trainable, Sync(name, calls)
        unit.replicas = SimpleNamespace(poll=lambda name=name: calls.append(f"poll {name}"))  # type: ignore[assignment]
        units.append(unit)
    team = TeamSync(units, concurrent)
    team.abort_replicas()
    assert sorted(calls) == ["abort coder", "abort judge", "poll coder", "poll judge"]
    for name in ("coder", "judge"):
        assert calls.index(f"poll {name}") < calls.index(f"abort {name}"), "a dead one cannot be asked"
    team.resume_generation_replicas()
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
