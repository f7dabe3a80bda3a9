"""Simulated GPUs shared by the training workers and servers of several policies; logs memory use in order.

Workers, weight sync and everything above are real. Fake are `torch.cuda` as verl accesses it, verl's engine, its
rollout adapter and its servers.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ray
import torch
import zmq
from fakes.simulated_replicas import Ref, Replica, Server, World, get
from omegaconf import OmegaConf
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.serving.workers import PolicyServers, PolicyWorker
from verl_atgrpo.train.trainer import policy_unit
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit

_RUNNING: contextvars.ContextVar[Worker] = contextvars.ContextVar("worker")
"""The worker whose process the code runs in."""


class Device:
    """A GPU; `log` has entries "<action> <policy>", none for emptying an empty cache."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.cached: set[Worker] = set()
        """Workers with unused memory in torch's cache."""
        self.awake: set[str] = set()
        self.refused: list[str] = []
        """Allocations that would have failed because of other workers' caches."""

    def note(self, what: str, policy: str) -> None:
        self.log.append(f"{what} {policy}")

    def allocate(self, what: str, policy: str, besides: Worker | None = None) -> None:
        """Logs an action for which no worker, except `besides`, may have memory cached."""
        self.note(what, policy)
        if holders := self.cached - {besides}:
            self.refused.append(f"{what} {policy}: {', '.join(sorted(each.policy for each in holders))}")


# ------------------------------------------------------------------ torch.cuda


class _Cuda:
    """`torch.cuda` of the current process; in bytes."""

    def is_available(self) -> bool:
        return True

    def memory_allocated(self) -> int:
        return 1 << 30

    def memory_reserved(self) -> int:
        return (1 << 30) + self._is_cached() * (20 << 30)

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 80 << 30

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None:
        if self._is_cached():
            worker = _RUNNING.get()
            worker.device.cached.remove(worker)
            worker.device.note("empty", worker.policy)

    @staticmethod
    def _is_cached() -> bool:
        worker = _RUNNING.get()
        return worker in worker.device.cached


_PLATFORM = SimpleNamespace(
    device_name="cuda", device_module=_Cuda(), set_allocator_settings=lambda settings: None
)  # fmt: skip

# ------------------------------------------------------------------ trainers


class _Trainer:
    """verl's training engine and its worker: every action leaves memory in the cache."""

    is_param_offload_enabled = False
    optimizer = SimpleNamespace(param_groups=[])
    lr_scheduler = SimpleNamespace(base_lrs=[], lr_lambdas=[])

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.engine = self

    def use(self, what: str) -> None:
        """Runs an action that needs the whole device."""
        worker = self._worker
        assert not worker.device.awake, f"{what} {worker.policy} beside {worker.device.awake}"
        worker.device.allocate(what, worker.policy, besides=worker)
        worker.device.cached.add(worker)

    def save_checkpoint(self, *_: Any) -> None:
        self._keep("save")

    def load_checkpoint(self, *_: Any) -> None:
        self._keep("load")

    def _keep(self, what: str) -> None:
        """Runs an action that needs little memory."""
        self._worker.device.note(what, self._worker.policy)
        self._worker.device.cached.add(self._worker)

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return iter([("weight", torch.zeros(1))]), None


class _Adapter:
    """verl's rollout adapter: the first worker of a replica calls its server."""

    def __init__(self, worker: Worker, replica: DeviceReplica, leads: bool) -> None:
        self._worker, self._replica, self._leads = worker, replica, leads
        self.replica_rank = replica.replica_rank
        self.zmq_handle = f"ipc:///tmp/x-replica-{self.replica_rank}-rank-0.sock"
        self.server_handle: Server | None = None

    def _ensure_server_handle(self) -> bool:
        if self._leads and self.server_handle is None:
            self.server_handle = self._replica.servers[0]
        return self._leads

    async def resume(self, tags: list[str]) -> None:
        if self._leads and tags == ["weights"]:
            self._replica.wake()

    async def update_weights(self, weights: Any, **_: Any) -> None:
        assert list(weights)


class Worker(PolicyWorker):
    """A policy's training process."""

    barrier: threading.Barrier

    def __init__(self, policy: str, device: Device) -> None:
        self.policy, self.device = policy, device
        self.role, self.layered_summon, self.peft_merge, self.base_sync_done = "actor_rollout", False, False, False
        self.config = OmegaConf.create({"rollout": {"name": "vllm", "free_cache_engine": True, "load_format": "auto"}})
        self.actor = _Trainer(self)

    __hash__ = object.__hash__


class Workers:
    """A policy's worker group; as verl's, it calls only registered methods of its workers."""

    def __init__(self, workers: Sequence[Worker], serve: Callable[[], World]) -> None:
        self.workers = workers
        self.serve = serve
        barrier = threading.Barrier(len(workers))
        for worker in workers:
            worker.barrier = barrier
        self._dispatch_info = {"actor": list(range(len(workers)))}
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        registered = getattr(getattr(Worker, name), MAGIC_ATTR)
        assert registered["dispatch_mode"] == Dispatch.ONE_TO_ALL, name

        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            done = asyncio.run(self._call(name, args, kwargs))
            return done if registered["blocking"] else [Ref(lambda one=one: one) for one in done]

        return call

    async def _call(self, name: str, args: Any, kwargs: Any) -> list[Any]:
        async def one(worker: Worker) -> Any:
            _RUNNING.set(worker)
            done = getattr(worker, name)(*args, **kwargs)
            return await done if asyncio.iscoroutine(done) else done

        return list(await asyncio.gather(*map(one, self.workers)))

    # Called with rows.

    def compute_log_prob(self, batch: Any) -> Any:
        for worker in self.workers:
            worker.actor.use("log-probs")
        return batch

    def update_actor(self, batch: Any) -> Any:
        for worker in self.workers:
            worker.actor.use("update")
        return {"metrics": {"loss": [0.0], "mfu": [0.0]}}

    # Called at the start.

    def reserve_port(self) -> int:
        return 1

    def use_port(self, port: int) -> None: ...

    def tree_refusal(self) -> list[str | None]:
        return ["simulated"] * len(self.workers)

    def init_model(self) -> None:
        """Leaves no cache, as verl's."""
        for worker in self.workers:
            worker.device.allocate("init", worker.policy)


# ------------------------------------------------------------------ servers


class DeviceReplica(Replica):
    """A server on all devices of its policy."""

    policy: str
    devices: Sequence[Device]

    def place(self, policy: str, devices: Sequence[Device]) -> None:
        self.policy, self.devices = policy, devices
        self.start()

    def start(self) -> None:
        """Allocates the server's share of the device, as `wake`."""
        for device in self.devices:
            device.allocate("start", self.policy)
            device.awake.add(self.policy)

    def wake(self) -> None:
        for device in self.devices:
            device.allocate("wake", self.policy)
            device.awake.add(self.policy)

    async def launch_servers(self) -> None:
        await super().launch_servers()
        self.start()

    async def sleep(self) -> None:
        for device in self.devices:
            device.note("sleep", self.policy)
            device.awake.remove(self.policy)

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def resume_generation(self) -> None: ...


SETTINGS = AtGrpoConfig(environment={"name": "none"}, restart_servers=9, prefix_tree=False)


class Unit(PolicyUnit):
    """A policy with one worker per simulated device and one server on all."""

    def __init__(self, name: str, job: Any, number: int, trainable: bool, devices: Sequence[Device]) -> None:
        super().__init__(name, job, f"policies/{name}", trainable, SETTINGS, first_replica=number)
        self._devices = devices

    def place(self, pool: Any) -> None:
        workers = [Worker(self.name, device) for device in self._devices]
        self.actor_rollout_wg = self.ref_policy_wg = Workers(workers, self._serve)
        self._pool = pool

    def _serve(self) -> World:
        self.world = World(ranks=())
        self.world.replicas = [DeviceReplica(self.world, self.first_replica, nodes=1)]
        (replica,) = self.world.replicas
        replica.place(self.name, self._devices)
        for number, worker in enumerate(self.actor_rollout_wg.workers):
            worker.rollout = _Adapter(worker, replica, leads=number == 0)
        return self.world

    def die(self) -> None:
        """Kills the policy's engine, which frees its memory."""
        (replica,) = self.world.replicas
        replica.servers[0].engine_lives = False
        for device in self._devices:
            device.awake.remove(self.name)


def _dataclass(section: Any) -> SimpleNamespace:
    """Stands in for what verl makes of `actor_rollout_ref.model` and of `rollout.checkpoint_engine`."""
    if "path" not in section:
        return SimpleNamespace(backend="naive", custom_backend_module=None)
    return SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template="{{ messages }}", eos_token_id=0),
        hf_config=SimpleNamespace(max_position_embeddings=1 << 20),
    )


def _no_collection(*_: Any) -> None:
    raise AssertionError("garbage is collected in a step, half a second in a training worker")


@contextmanager
def simulated() -> Iterator[None]:
    """Patches verl and Ray for simulated devices and servers.

    All patches are applied here, before threads start: units that start concurrently would restore each other's
    patches.
    """

    def kill(server: Server) -> None:
        server.actor_lives = False

    with (
        mock.patch("verl.utils.device.get_platform", lambda: _PLATFORM),
        mock.patch.object(gc, "collect", _no_collection),
        mock.patch.object(torch.distributed, "barrier", lambda: _RUNNING.get().barrier.wait()),
        mock.patch.object(policy_unit, "omega_conf_to_dataclass", _dataclass),
        mock.patch.object(policy_unit, "balancer_class", lambda rollout: None),
        mock.patch.object(PolicyServers, "create", lambda worker_group, **_: worker_group.serve()),
        mock.patch.object(ray, "get", get),
        mock.patch.object(ray, "kill", kill),
        mock.patch.object(zmq.Context, "setsockopt", lambda *_: None),  # would affect the whole process
    ):
        yield
