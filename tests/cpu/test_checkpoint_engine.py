"""The CPU's checkpoint engine: exact weights, bounded memory, and errors when a process dies or hangs."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("verl")
ray = pytest.importorskip("ray")

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from waiting import HANG

from verl_atgrpo.cpu.checkpoint_engine import GlooCheckpointEngine

Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")


def random_weights(seed: int) -> Weights:
    """Weights of several types and odd sizes, which are unaligned without padding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(1000, 7, generator=generator),  # larger than a bucket
        "norm": torch.randn(3, generator=generator).to(torch.bfloat16),
        "head": torch.randn(33, 5, generator=generator),
        "scale": torch.tensor(math.nan),
        "flags": torch.tensor([1, 0, 255], dtype=torch.uint8),
        "layers": torch.randn(40, 40, generator=generator).to(torch.bfloat16),
        "double": torch.randn(11, generator=generator, dtype=torch.float64),
    }


def engines(receivers: int, bucket: int = 4096, timeout: float = HANG) -> list[GlooCheckpointEngine]:
    """A sender, a training worker that does not send, and receivers."""
    kwargs = {"bucket_size": bucket, "timeout": timeout}
    return [
        CheckpointEngineRegistry.new("gloo", is_master=True, **kwargs),
        CheckpointEngineRegistry.new("gloo", is_master=False, **kwargs),
        *(CheckpointEngineRegistry.new("gloo", **kwargs) for _ in range(receivers)),
    ]


def connect(group: list[GlooCheckpointEngine], executor: ThreadPoolExecutor) -> None:
    """Connects as verl's CheckpointEngineManager, with a thread per process."""
    rendezvous = [engine.prepare() for engine in group]
    actors, rollouts = GlooCheckpointEngine.build_topology(2, len(group) - 2, rendezvous)
    arguments = {key: actors[key] + rollouts[key] for key in actors}
    calls = [dict(zip(arguments, values, strict=True)) for values in zip(*arguments.values(), strict=True)]
    assert [call["rank"] for call in calls] == [0, -1, *range(1, len(group) - 1)]
    list(executor.map(lambda engine, call: engine.init_process_group(**call), group, calls))


async def collected(engine: GlooCheckpointEngine) -> Weights:
    # Copies, as the server's adapter: a tensor is valid until the next one.
    return {name: weight.clone() async for name, weight in engine.receive_weights(global_steps=1)}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def transfer(group: list[GlooCheckpointEngine], weights: Weights, executor: ThreadPoolExecutor) -> list[Weights]:
    connect(group, executor)
    walked = iter(weights.items())
    sending = [
        executor.submit(asyncio.run, engine.send_weights(items))
        for engine, items in zip(group[:2], (iter(weights.items()), walked), strict=True)
    ]
    received = list(executor.map(lambda engine: asyncio.run(collected(engine)), group[2:]))
    for done in sending:
        done.result()
    assert next(walked, None) is None  # all training workers gather the weights
    for engine in group:
        engine.finalize()
    return received


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.mark.parametrize("bucket", [pytest.param(256, marks=pytest.mark.slow), 4096, 1 << 20])
def test_every_tensor_arrives_exactly_in_every_sync(bucket: int, executor: ThreadPoolExecutor) -> None:
    group = engines(receivers=2, bucket=bucket)
    for seed in (1, 2):
        weights = random_weights(seed)
        for received in transfer(group, weights, executor):
            assert list(received) == list(weights)
            assert all(same_bits(received[name], weights[name]) for name in weights)


def test_a_process_has_one_bucket_and_none_between_syncs(executor: ThreadPoolExecutor) -> None:
    group = engines(receivers=1)
    connect(group, executor)
    assert [engine.bucket is None or engine.bucket.nbytes for engine in group] == [4096, True, 4096]
    for engine in group:
        engine.finalize()
        assert engine.bucket is None


def test_the_servers_may_change_between_syncs(executor: ThreadPoolExecutor) -> None:
    group, weights = engines(receivers=2), random_weights(3)
    transfer(group, weights, executor)
    newcomer = CheckpointEngineRegistry.new("gloo", bucket_size=4096)
    for received in transfer([*group[:3], newcomer], weights, executor):
        assert all(same_bits(received[name], weights[name]) for name in weights)


def endless() -> Iterator[tuple[str, torch.Tensor]]:
    number = 0
    while True:
        yield f"weight_{number}", torch.ones(500)
        number += 1


def test_a_dead_receiver_ends_the_send(executor: ThreadPoolExecutor) -> None:
    group = engines(receivers=1)
    connect(group, executor)

    async def die() -> None:
        async for _ in group[2].receive_weights():
            group[2].finalize()  # closes its sockets, as the system for a dead process
            return

    executor.submit(asyncio.run, die())
    with pytest.raises(ConnectionError, match="the weight transfer broke off"):
        asyncio.run(group[0].send_weights(endless()))


def test_a_killed_sender_ends_the_receive() -> None:
    sender, _, receiver = engines(receivers=1)
    fork = multiprocessing.get_context("fork")
    pipe, other_end = fork.Pipe()

    def send_until_killed() -> None:
        other_end.send(sender.prepare())
        sender.init_process_group(0, 2, other_end.recv())
        asyncio.run(sender.send_weights(endless()))

    process = fork.Process(target=send_until_killed)

    async def receive() -> None:
        number = 0
        async for _ in receiver.receive_weights():
            number += 1
            if number == 50:
                process.kill()

    process.start()
    try:
        assert pipe.poll(HANG), "the fork did not start"  # threads of this process may have held locks
        rendezvous = pipe.recv()
        pipe.send(rendezvous)
        receiver.init_process_group(1, 2, rendezvous)
        # Immediately, not after the timeout.
        with pytest.raises(ConnectionError, match="the weight transfer broke off"):
            asyncio.run(receive())
    finally:
        process.kill()
        process.join(HANG)
    assert process.exitcode == -signal.SIGKILL


def test_a_hanging_sender_ends_the_receive_after_the_timeout(executor: ThreadPoolExecutor) -> None:
    for timeout in itertools.takewhile(lambda seconds: seconds < HANG, (2.0**number for number in itertools.count())):
        group = engines(receivers=1, timeout=timeout)
        try:
            connect(group, executor)
            break
        except ConnectionError:  # connecting has the same timeout
            continue
    with pytest.raises(ConnectionError, match="the weight transfer broke off"):
        asyncio.run(collected(group[2]))


def test_a_failed_sync_does_not_affect_the_next(executor: ThreadPoolExecutor) -> None:
    group, weights = engines(receivers=1), random_weights(5)
    connect(group, executor)
    group[0].finalize()
    with pytest.raises(ConnectionError):
        asyncio.run(collected(group[2]))  # and it is not finalized
    (received,) = transfer(group, weights, executor)
    assert all(same_bits(received[name], weights[name]) for name in weights)


def test_a_missing_process_ends_the_rendezvous() -> None:
    sender = CheckpointEngineRegistry.new("gloo", bucket_size=64, is_master=True, timeout=1.0)
    with pytest.raises(ConnectionError, match="the weight transfer did not begin"):
        sender.init_process_group(0, 2, sender.prepare())


def test_nothing_is_left_open(executor: ThreadPoolExecutor) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    transfer(engines(receivers=1), random_weights(4), executor)
    before = opened()
    for _ in range(10):
        transfer(engines(receivers=1), random_weights(4), executor)
    assert opened() < before + 5  # other tests may open or close some meanwhile
