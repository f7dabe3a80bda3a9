"""A policy with servers on devices of their own: weight sync, wiring and failures."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
ray = pytest.importorskip("ray")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer, and the worker with it)
import zmq
from omegaconf import OmegaConf
from verl.checkpoint_engine.base import CheckpointEngineWorker

from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.serving import replicas
from verl_atgrpo.train.serving.health import PolicyFailed
from verl_atgrpo.train.serving.replicas import StandaloneReplicas
from verl_atgrpo.train.serving.workers import PolicyServers, ServerWorker, WeightTarget
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, StandaloneUnit


class Call:
    """A method of an actor."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class Server:
    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._actor_id = SimpleNamespace(hex=lambda: self.identity)
        self.version = 0
        self.alive = True
        self.set_global_steps = Call(lambda version: setattr(self, "version", version))
        self.collective_rpc = Call(self._sign)

    def _sign(self, method: str) -> BaseException | None:
        assert method == "check_health"
        return None if self.alive else ray.exceptions.RayActorError()


class Sync:
    """A fake of verl's CheckpointEngineManager."""

    def __init__(self) -> None:
        self.transfers: list[int] = []
        self.error: BaseException | None = None

    def update_weights(self, global_steps: int) -> None:
        if self.error is not None:
            raise self.error
        self.transfers.append(global_steps)


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(results: Any, timeout: float | None = None) -> Any:
        if isinstance(results, BaseException):
            raise results
        return results

    monkeypatch.setattr(ray, "get", get)


def job(name: str = "default", **rollout: Any) -> Any:
    engine = {"engine_kwargs": {"nccl": {"group_name": name}} if name != "default" else {}}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": {"checkpoint_engine": engine, **rollout}}})


SETTINGS = AtGrpoConfig(environment={"name": "none"})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units without a model."""

    def init(self: Any, name: str, job: Any, folder: str, trainable: bool, *_: Any, first_replica: int) -> None:
        self.name, self.config, self.trainable, self.first_replica = name, job, trainable, first_replica

    monkeypatch.setattr(PolicyUnit, "__init__", init)


def unit(name: str = "coder", trainable: bool = True, servers: int = 2, first: int = 4) -> Any:
    made = StandaloneUnit(
        name, job(nnodes=1, n_gpus_per_node=servers), "actor", trainable, SETTINGS, first_replica=first
    )
    numbers = range(first, first + servers)
    channel = "ipc:///tmp/job-replica-{}-rank-0.sock"
    made.sync = Sync()
    made.servers = SimpleNamespace(
        get_replicas=lambda: [
            SimpleNamespace(
                replica_rank=number,
                server_address=str(number),
                servers=[fakes[number]],
                workers=[
                    SimpleNamespace(
                        weight_target=Call(
                            lambda number=number: WeightTarget(number, channel.format(number), f"server {number}")
                        )
                    )
                ],
            )
            for number in numbers
        ],
        global_load_balancer=SimpleNamespace(get_all_servers=Call(lambda: [str(number) for number in numbers])),
    )
    fakes = {number: Server(f"server {number}") for number in numbers}
    made.fakes = fakes
    made.replicas = StandaloneReplicas(name, None, made.servers, made.sync, restarts=0)  # type: ignore[arg-type]
    return made


@pytest.mark.usefixtures("bare")
def test_every_policy_has_its_own_group_name() -> None:
    names = set()
    for policy, given in (("coder", "default"), ("tester", "default"), ("judge", "mine"), ("coder", "mine")):
        made = StandaloneUnit(policy, job(given), "actor", True, SETTINGS, first_replica=0)
        names.add(made.config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nccl.group_name)
    assert names == {"at_grpo-coder", "at_grpo-tester", "mine-judge", "mine-coder"}


@pytest.mark.usefixtures("bare")
def test_devices_of_servers_are_counted() -> None:
    """Devices that only serve are devices of the job."""
    made = unit(servers=3)
    assert made.own_server_devices == 3
    shared = PolicyUnit("coder", job(), "actor", True, SETTINGS, first_replica=0)
    assert shared.own_server_devices == 0


@pytest.mark.usefixtures("bare")
def test_a_trained_policys_weights_are_synced_every_step_and_a_frozen_ones_once() -> None:
    trained, frozen = unit(), unit("judge", trainable=False)
    for step in (3, 4, 5):
        for each in (trained, frozen):
            each.push_weights(step)
    assert trained.sync.transfers == [3, 4, 5]
    assert frozen.sync.transfers == [3]
    # Its version is current: its candidates do not count as stale.
    assert {server.version for server in frozen.fakes.values()} == {5}


@pytest.mark.usefixtures("bare")
def test_wiring_is_checked_at_every_server() -> None:
    crossed = unit()  # raises nothing
    crossed.servers.get_replicas()[1].servers[0].identity = "another job's"
    with pytest.raises(RuntimeError, match="policy 'coder': replica 5 is served by"):
        StandaloneReplicas("coder", None, crossed.servers, crossed.sync, restarts=0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("bare")
def test_a_lost_server_or_worker_is_named_by_its_policy() -> None:
    dead = unit()
    dead.fakes[5].alive = False
    with pytest.raises(PolicyFailed, match=r"policy 'coder': server [45] is dead"):
        dead.push_weights(1)
    broken = unit(trainable=False)
    broken.sync.error = ray.exceptions.RayTaskError("update_weights", "the weight transfer broke off", OSError())
    with pytest.raises(PolicyFailed, match=r"'coder': its weight sync failed: .*broke off"):
        broken.push_weights(1)
    broken.sync.error = None
    broken.push_weights(2)
    assert broken.sync.transfers == [2], "a frozen policy's weights are sent until they have arrived"


@pytest.mark.usefixtures("bare")
def test_a_server_that_dies_during_the_sync_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "POLL_INTERVAL", 0.01)
    never, dying = threading.Event(), unit()

    def wait(global_steps: int) -> None:
        dying.fakes[4].alive = False
        never.wait()

    dying.sync.update_weights = wait
    try:
        with pytest.raises(PolicyFailed, match=r"policy 'coder': server [45] is dead"):
            dying.push_weights(1)
    finally:
        never.set()


def test_a_server_that_does_not_load_the_weights_ends_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(self: Any, global_steps: int | None = None) -> None:
        raise zmq.Again()

    monkeypatch.setattr(CheckpointEngineWorker, "update_weights", silent)
    monkeypatch.setattr(zmq.Context.instance(), "setsockopt", lambda *options: None)
    worker = ServerWorker.__new__(ServerWorker)
    worker.server_adapter = SimpleNamespace(replica_rank=6)
    with pytest.raises(TimeoutError, match="replica 6 did not take the weights"):
        asyncio.run(worker.update_weights(1))


def test_standalone_replicas_have_our_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = {
        "name": "vllm", "nnodes": 1, "n_gpus_per_node": 1, "disaggregation": {"enabled": False},
    }  # fmt: skip
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "model": {}}})
    replica = PolicyServers(config=config, start_rank=7).rollout_replica_class
    made = replica.__new__(replica)
    made.config = made.model_config = SimpleNamespace()
    made.replica_rank = 7
    worker = made.get_ray_class_with_init_args()
    assert issubclass(worker.cls.__ray_metadata__.modified_class, ServerWorker)
    assert worker.kwargs["replica_rank"] == 7
