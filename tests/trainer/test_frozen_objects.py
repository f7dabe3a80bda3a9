"""After the first step no process's garbage collector scans what the start has made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from fakes.fake_trainer import FLAT, STEEP, FakeRollout, FakeTrainer, FakeUnit

from verl_atgrpo import compat
from verl_atgrpo.train.rows import queue
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, StandaloneUnit


class Actor:
    """A handle of Ray's, which notes what runs in its process."""

    def __init__(self, name: str, ran: list[tuple[str, Any]]) -> None:
        self.__ray_call__ = SimpleNamespace(remote=lambda function: ran.append((name, function)))


def test_all_processes_freeze_once_when_the_first_step_has_been_trained(
    rollout: FakeRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, Any]] = []
    driver: list[str] = []

    def freeze() -> None:
        driver.append("driver")

    monkeypatch.setattr(compat, "freeze_startup_objects", freeze)
    monkeypatch.setattr(queue, "actors", lambda: [Actor("queue", ran)])
    units = [FakeUnit("p_a", 2), FakeUnit("p_b", 2, trainable=False)]
    for unit in units:
        monkeypatch.setattr(unit, "actors", lambda unit=unit: [Actor(unit.name, ran)])
    trainer = FakeTrainer(rollout, *units, filters={})
    trainer._gc_frozen = False
    rollout.rewards = [[FLAT]] * 4 + [[STEEP]] * 8
    trainer.run(1)
    assert not units[0].updates and not ran, "nothing has been trained yet"
    for _ in range(2):
        trainer.run(1)
        assert ran == [(name, freeze) for name in ("queue", "p_a", "p_b")]
        assert driver == ["driver"]


def test_the_actors_are_the_queues_the_workers_and_the_balancer(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [
        ("TransferQueueController", "transfer_queue"),
        ("TransferQueueStorageUnit#0", ""),
        ("vllm_server_0_0", ""),
    ]
    monkeypatch.setattr(
        ray.util,
        "list_named_actors",
        lambda all_namespaces: [{"name": name, "namespace": space} for name, space in named],
    )
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: (name, namespace))
    assert queue.actors() == named[:2]

    for kind, more in ((PolicyUnit, []), (StandaloneUnit, ["server worker"])):
        unit: Any = kind.__new__(kind)
        unit.actor_rollout_wg = SimpleNamespace(workers=["worker 0", "worker 1"])
        unit.servers = SimpleNamespace(global_load_balancer="balancer")
        unit.replicas = SimpleNamespace(serving=[SimpleNamespace(workers=["server worker"])])
        assert unit.actors() == ["worker 0", "worker 1", "balancer", *more]
