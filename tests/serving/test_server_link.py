"""A worker with a dead server still takes part in gathering the weights, or the others would wait forever."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import torch
import zmq
from omegaconf import OmegaConf
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

from verl_atgrpo.train.config.policies import ADAPTERS
from verl_atgrpo.train.serving import workers
from verl_atgrpo.train.serving.server import ADAPTER
from verl_atgrpo.train.serving.workers import PolicyWorker, ServerLink, set_socket_timeouts

NAMES = ["embed", "layer", "head"]


class Adapter:
    """A fake of verl's rollout adapter: its server loads `takes` parameters and then fails with `error`."""

    replica_rank = 3

    def __init__(self, takes: int = len(NAMES), error: Exception | None = None) -> None:
        self.takes, self.error = takes, error
        self.calls: list[Any] = []

    async def resume(self, tags: list[str]) -> None:
        self.calls.append(tags)
        if self.error is not None and self.takes == 0:
            raise self.error

    async def update_weights(self, weights: Any, **options: Any) -> None:
        self.calls.append(options)
        for number, (name, _) in enumerate(weights):
            if number == self.takes and self.error is not None:
                raise self.error
            self.calls.append(name)


class Gathering:
    """Parameters that all workers gather together, one after another."""

    def __init__(self) -> None:
        self.gathered: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in NAMES:
            self.gathered.append(name)
            yield name, torch.zeros(2)


def sync(link: ServerLink, gathering: Gathering) -> None:
    """Runs a weight sync as verl's workers."""

    async def run() -> None:
        await link.resume(tags=["weights"])
        await link.update_weights(iter(gathering), global_steps=7)
        await link.resume(tags=["kv_cache"])

    asyncio.run(run())


def test_a_live_server_gets_all_weights() -> None:
    adapter, gathering = Adapter(), Gathering()
    link = ServerLink(adapter, serves=True)
    sync(link, gathering)
    assert adapter.calls == [["weights"], {"global_steps": 7}, *NAMES, ["kv_cache"]]
    assert gathering.gathered == NAMES
    assert link.failure is None


def test_a_dead_server_is_not_called() -> None:
    adapter, gathering = Adapter(), Gathering()
    link = ServerLink(adapter, serves=False)
    sync(link, gathering)
    assert adapter.calls == []
    assert gathering.gathered == NAMES
    assert link.failure is None, "it does not serve"


@pytest.mark.parametrize("takes", [0, 1])
@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (zmq.Again(), "replica 3 did not take the weights within 120.0 s; its log says why"),
        (ray.exceptions.RayError("EngineDeadError: gone"), "replica 3 did not take the weights: RayError: .*gone"),
    ],
)
def test_gathering_continues_if_the_server_dies_meanwhile(takes: int, error: Exception, failure: str) -> None:
    adapter, gathering = Adapter(takes, error), Gathering()
    link = ServerLink(adapter, serves=True)
    sync(link, gathering)
    assert gathering.gathered == NAMES
    assert ["kv_cache"] not in adapter.calls, "a server that failed is not called again"
    assert re.fullmatch(failure, str(link.failure))


def test_an_error_of_the_worker_itself_is_raised() -> None:
    link = ServerLink(Adapter(1, AssertionError("too large to fit in the bucket")), serves=True)
    with pytest.raises(AssertionError, match="too large"):
        sync(link, Gathering())


def test_asynchronous_weights_are_gathered_too() -> None:
    gathered: list[str] = []

    async def weights() -> AsyncIterator[tuple[str, int]]:
        for name in NAMES:
            gathered.append(name)
            yield name, 0

    asyncio.run(ServerLink(Adapter(), serves=False).update_weights(weights()))
    assert gathered == NAMES


@pytest.mark.parametrize(
    ("adapter", "dead", "failures"),
    [
        (Adapter(), [4], {}),
        (Adapter(), [3, 4], {}),
        (Adapter(1, zmq.Again()), [], {3: "replica 3 did not take the weights within 120.0 s; its log says why"}),
    ],
)
def test_a_worker_returns_whether_its_replica_loaded_the_weights(
    adapter: Adapter, dead: list[int], failures: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathering = Gathering()

    async def verls(self: Any, global_steps: int, mode: str) -> None:
        await self.rollout.update_weights(iter(gathering), global_steps=global_steps)

    monkeypatch.setattr(ActorRolloutRefWorker, "update_weights", verls)
    worker = object.__new__(PolicyWorker)
    worker.config = OmegaConf.create({"model": {"lora": {}}})
    worker.rollout = adapter
    assert asyncio.run(worker.update_weights(global_steps=7, mode="naive", dead=dead)) == failures
    assert worker.rollout is adapter
    assert gathering.gathered == NAMES
    assert bool(adapter.calls) == (3 not in dead)
    assert worker.weights_sent() == 3 * 2 * 4


class Engine:
    """A fake of our engine: two adapters that are trained, one that is not, a critic's, and a past self of the
    second."""

    model_config = SimpleNamespace(
        lora={
            ADAPTERS: {
                name: {"trainable": name != "judge", "served": name != "critic"}
                for name in ("judge", "critic", "coder", "planner")
            }
        }
    )

    def __init__(self) -> None:
        self.gathered: list[str] = []
        self.past = {2: ("planner", {"A": torch.full((2,), 5.0)})}

    def adapter_config(self, name: str) -> dict[str, Any]:
        return {"r": {"coder": 4, "planner": 8}[name]}

    def adapter_weights(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        for part in ("A", "B"):
            self.gathered.append(f"{name}.{part}")
            yield part, torch.ones(2)


@pytest.mark.parametrize("dead", [[], [3]])
def test_every_adapter_of_a_shared_base_is_sent_under_its_number(
    dead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[dict[str, Any], dict[str, list[float]]]] = []

    class Server(Adapter):
        async def update_weights(self, weights: Any, **options: Any) -> None:
            received.append((options, {name: tensor.tolist() for name, tensor in weights}))

    async def verls(self: Any, global_steps: int, mode: str) -> None:
        await self.rollout.update_weights(iter(Gathering()), peft_config={"r": 8}, base_sync_done=False)
        # verl sends its only adapter.
        await self.rollout.update_weights(iter(Gathering()), peft_config={"r": 8}, base_sync_done=True, global_steps=7)

    monkeypatch.setattr(ActorRolloutRefWorker, "update_weights", verls)
    worker = object.__new__(PolicyWorker)
    worker.config = OmegaConf.create({"model": {"lora": {ADAPTERS: {"coder": {}}}}})
    worker.actor = SimpleNamespace(engine=Engine())
    worker.rollout = Server()
    asyncio.run(worker.update_weights(global_steps=7, mode="naive", dead=dead))
    # All ranks gather the same tensors in the same order, whether their server lives or not.
    assert worker.actor.engine.gathered == ["coder.A", "coder.B", *(["coder.A", "coder.B", "planner.A", "planner.B"])]
    assert worker.weights_sent() == 3 * 8 + 3 * 2 * 8 + 8
    if dead:
        assert not received
        return
    (base, _), *adapters = received
    assert not base["base_sync_done"] and base["peft_config"] == {"r": 8}
    same = {"base_sync_done": True, "global_steps": 7}
    assert adapters == [
        # That of the policy that is not trained does nothing.
        ({**same, "peft_config": {"r": 4, ADAPTER: 1}}, {"A": [0.0, 0.0], "B": [0.0, 0.0]}),
        ({**same, "peft_config": {"r": 4, ADAPTER: 3}}, {"A": [1.0, 1.0], "B": [1.0, 1.0]}),
        ({**same, "peft_config": {"r": 8, ADAPTER: 4}}, {"A": [1.0, 1.0], "B": [1.0, 1.0]}),
        # A past self in slot 2, after the four; it was kept and is not gathered.
        ({**same, "peft_config": {"r": 8, ADAPTER: 6}}, {"A": [5.0, 5.0]}),
    ]


@pytest.mark.parametrize(("load_format", "has_base"), [("dummy", False), ("auto", True)])
def test_a_restarted_server_is_looked_up_again(load_format: str, has_base: bool) -> None:
    worker = object.__new__(PolicyWorker)
    worker.rollout = SimpleNamespace(replica_rank=3, server_handle="old")
    worker.config = SimpleNamespace(rollout=SimpleNamespace(load_format=load_format))
    worker.base_sync_done = True
    worker.forget_servers([4])
    assert worker.rollout.server_handle == "old"
    worker.forget_servers([3])
    assert worker.rollout.server_handle is None
    # All workers gather the base weights together, so all send them again, or none.
    assert worker.base_sync_done == has_base


@pytest.mark.parametrize("connects", [False, True])
def test_verls_sender_times_out_if_the_server_fails(
    connects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends first, also if the server's engine died before it connected."""
    context = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    monkeypatch.setattr(workers, "BUCKET_TIMEOUT", 0.3)
    set_socket_timeouts()
    handle = f"ipc://{tmp_path}/weights.sock"
    receiver = zmq.Context()
    if connects:
        receiver.socket(zmq.REP).connect(handle)  # and never replies
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    with pytest.raises(zmq.Again):
        asyncio.run(sender.async_send_weights(iter([("embed", torch.zeros(2))])))
    for each in (receiver, context):
        each.destroy(linger=0)
