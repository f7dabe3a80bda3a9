"""What a training worker asks of its device in a step: counted with verl's engine and weight sync, a tiny model."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from fakes.fsdp_rows import batch, join, make, save_model, some_rows, spawn

pytestmark = pytest.mark.slow

COUNTED = ("empty_cache", "synchronize", "ipc_collect")
SERVER = "server"


class Calls:
    """Counts calls of the device and of the garbage collector; those of the server's thread as "server <name>"."""

    def __init__(self, device: Any) -> None:
        self.counts: Counter[str] = Counter()
        for name in COUNTED:
            setattr(device, name, partial(self._count, name))
        gc.collect = partial(self._count, "collect")  # type: ignore[assignment]

    def _count(self, name: str, *_: Any) -> int:
        of_server = threading.current_thread().name == SERVER
        self.counts[f"{SERVER} {name}" if of_server else name] += 1
        return 0

    def of(self, action: Callable[[], Any]) -> dict[str, int]:
        """Returns the calls in `action`."""
        self.counts.clear()
        action()
        return dict(self.counts)


class Adapter:
    """verl's rollout adapter with a server in a thread, which receives weights as vLLM's workers do."""

    replica_rank = 0

    def __init__(self, channel: str, calls: Calls) -> None:
        self._channel, self._calls = channel, calls
        self.received: dict[str, torch.Tensor] = {}
        self.awake: list[tuple[str, int]] = []
        """Parts of the server that were woken, and how often the trainer's cache was emptied before."""

    async def resume(self, tags: list[str]) -> None:
        self.awake.append((*tags, self._calls.counts["empty_cache"]))  # type: ignore[arg-type]

    async def update_weights(self, weights: Any, **_: Any) -> None:
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
            BucketedWeightReceiver,
            BucketedWeightSender,
        )

        def receive() -> None:
            receiver = BucketedWeightReceiver(self._channel, torch.device("cpu"), use_shm=True)
            receiver.receive_weights(
                lambda part, is_last: self.received.update((name, tensor.clone()) for name, tensor in part)
            )

        server = threading.Thread(target=receive, name=SERVER)
        server.start()
        await BucketedWeightSender(self._channel, bucket_size_mb=16, use_shm=True).async_send_weights(weights)
        server.join()


def _worker(engine: Any, section: Any, config: Any, adapter: Adapter) -> Any:
    """Returns our worker, around verl's of this engine."""
    from verl.utils.flops_counter import FlopsCounter
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    from verl_atgrpo.train.serving.workers import PolicyWorker

    trainer = TrainingWorker.__new__(TrainingWorker)
    trainer.engine, trainer.engine_config, trainer.device_name = engine, section.engine, "cpu"
    trainer.model_config, trainer.profiler = {"use_remove_padding": False}, DistProfiler(rank=0)
    trainer.flops_counter = FlopsCounter(engine.module.config)
    trainer.loss_fn = partial(ppo_loss, config=section)
    worker = PolicyWorker.__new__(PolicyWorker)
    worker.config, worker.role, worker.enable_routing_replay = config, "actor_rollout", False
    worker.profiler, worker.actor, worker.rollout = DistProfiler(rank=0), trainer, adapter
    worker.layered_summon, worker.peft_merge, worker.base_sync_done = False, False, True
    return worker


def _in_cycles(action: Callable[[], Any], collect: Callable[[], int]) -> list[torch.Size]:
    """Returns the shapes of the tensors that `action` leaves to the garbage collector."""
    collect()
    gc.disable()
    action()
    gc.set_debug(gc.DEBUG_SAVEALL)
    collect()
    gc.set_debug(0)
    gc.enable()
    left = [each.shape for each in gc.garbage if isinstance(each, torch.Tensor)]
    gc.garbage.clear()
    return left


def _leave_one() -> None:
    cycle: list[Any] = [torch.ones(3)]
    cycle.append(cycle)


def _step(rank: int, ranks: int, port: int, model: str, channel: str) -> None:
    """Runs a step's calls of the worker in a process of its own, and checks what they do with the device."""
    join(rank, ranks, port)
    from verl.utils.device import get_torch_device

    from verl_atgrpo import recipes
    from verl_atgrpo.train.engine.prefix_tree.engine import TreeEngine

    config = recipes.compose(
        "plan_path_cpu",
        [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.free_cache_engine=true"],
    ).actor_rollout_ref
    engine, section = make(TreeEngine, config)
    collect, calls = gc.collect, Calls(get_torch_device())
    adapter = Adapter(channel, calls)
    worker = _worker(engine, section, config, adapter)
    rows = partial(batch, some_rows(rank), rank, ranks)
    update = {"mini_batch_size": len(some_rows(rank)) // 2, "epochs": 1, "seed": 1}

    def train() -> None:
        # Nothing is emptied or collected. What arrives at the servers is read from settled weights, before and after.
        assert calls.of(lambda: worker.compute_log_prob(rows(compute_loss=False))) == {}
        assert calls.of(lambda: worker.update_actor(rows(**update))) == {"synchronize": 2}

    assert _in_cycles(_leave_one, collect) == [(3,)]
    for _ in range(2):  # the first step makes the optimizer's state
        assert _in_cycles(train, collect) == [], "memory that only a collection frees"
        assert calls.of(worker.empty_cache) == {"empty_cache": 1}
        adapter.awake.clear()
        sync = calls.of(lambda: asyncio.run(worker.update_weights(global_steps=1, mode="naive")))
        # verl's: before the server wakes, of the transfer's buffer, and before the server takes its cache.
        assert sync == {"empty_cache": 3, "synchronize": 2, "server synchronize": 2, "server empty_cache": 1}
        assert adapter.awake == [("weights", 1), ("kv_cache", 3)]
        assert adapter.received.keys() >= dict(engine.module.named_parameters()).keys()
    torch.distributed.destroy_process_group()


def test_a_step_collects_no_garbage_and_empties_caches_only_for_the_server(tmp_path: Path) -> None:
    spawn(_step, 1, str(save_model(tmp_path)), f"ipc://{tmp_path}/weights.sock")
