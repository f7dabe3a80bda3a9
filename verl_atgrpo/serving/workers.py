"""verl's workers and replicas for one policy among several: ports, weight channels, caches, dead servers."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import zmq
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.utils import ensure_async_iterator

from verl_atgrpo.serving.client import actor_id
from verl_atgrpo.serving.health import last_line
from verl_atgrpo.serving.server import name_sender


def reserve_port() -> TCPStore:
    """Opens the store of a process group at a port of the system's choice; to be kept until the group is made.

    In the process of rank 0. torch takes a store that this process has open at `MASTER_PORT` for its own, because both
    are `multi_tenant`.
    """
    return TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def use_port(port: int) -> None:
    """Makes this process look for its group at `port`."""
    os.environ["MASTER_PORT"] = str(port)


class PortWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker, which can choose the port of its process group itself."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)  # type: ignore[untyped-decorator]
    def reserve_port(self) -> int:
        """Returns the port at which the first process listens from now on."""
        self._store = reserve_port()
        return int(self._store.port)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def use_port(self, port: int) -> None:
        """Makes every process look for its group at `port`."""
        use_port(port)


def reserve_master_port(workers: RayWorkerGroup) -> None:
    """Gives the processes of a worker group a port of their own; to be called before their models are loaded."""
    workers.use_port(workers.reserve_port())


ANSWER = 120.0
"""Seconds that a server may take for one bucket of weights."""


def bound_waiting() -> None:
    """Bounds how long sockets that are opened from now on wait, verl's sender's among them.

    A server that fails on its side never answers, or never even connects, and the sender would wait for ever.
    """
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        zmq.Context.instance().setsockopt(option, int(ANSWER * 1000))


def too_late(replica: int) -> str:
    """Returns what is said of a replica whose server did not answer the sender in time."""
    return f"replica {replica} did not take the weights within {ANSWER} s; its log says why"


class ServerLink:
    """Stands in for verl's rollout adapter during one weight sync.

    All workers gather a parameter together, whoever it is for. A worker that stopped because its own server is dead
    would leave the others waiting, so it takes its part in the rest, and sends none of it.
    """

    def __init__(self, adapter: Any, serves: bool) -> None:
        """Leads to the server of `adapter`, or, if that does not serve, to nowhere."""
        self._adapter = adapter
        self._open = serves
        self.failure: str | None = None
        """Why the server did not take the weights, if it was expected to."""

    @property
    def sleep_level(self) -> int:
        """How deep the server sleeps; verl sets it for adapters."""
        level: int = self._adapter.sleep_level
        return level

    @sleep_level.setter
    def sleep_level(self, level: int) -> None:
        self._adapter.sleep_level = level

    async def resume(self, tags: list[str]) -> None:
        """Wakes that part of the server."""
        if self._open:
            await self._attempt(self._adapter.resume(tags=tags))

    async def update_weights(self, weights: Any, **options: Any) -> None:
        """Sends `weights`, an iterator of (name, tensor); takes all of them out of it in any case."""
        if self._open:
            await self._attempt(self._adapter.update_weights(weights, **options))
        if not self._open:
            async for _ in ensure_async_iterator(weights):
                pass

    async def _attempt(self, call: Coroutine[Any, Any, Any]) -> None:
        replica = self._adapter.replica_rank
        try:
            await call
        except zmq.Again:
            self._open = False
            self.failure = too_late(replica)
        except ray.exceptions.RayError as error:
            self._open = False
            self.failure = f"replica {replica} did not take the weights: {last_line(error)}"


class TrainerWorker(PortWorker):
    """Trains one policy."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def empty_cache(self) -> None:
        """Gives the device memory back that torch keeps for later: to other processes it is taken."""
        aggressive_empty_cache(force_sync=True)


class PolicyWorker(TrainerWorker):
    """Trains one policy and pushes its weights to that policy's own servers."""

    rollout: Any

    def __init__(self, *args: Any, first_replica: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_replica = first_replica

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Builds the engines, then names the replica that this worker's rollout adapter talks to: this job's, by the
        policy's numbers."""
        super().init_model()
        adapter = self.rollout
        name_sender(adapter)
        counted, renumbered = adapter.replica_rank, adapter.replica_rank + self._first_replica
        adapter.replica_rank = renumbered
        channel = adapter.zmq_handle.replace(f"-replica-{counted}-", f"-replica-{renumbered}-")
        if self._first_replica and channel == adapter.zmq_handle:
            raise RuntimeError(f"verl's weight channel {channel!r} does not name the replica any more")
        adapter.zmq_handle = channel

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(
        self, global_steps: int | None = None, mode: str = "auto", dead: Sequence[int] = ()
    ) -> dict[int, str]:
        """Pushes the weights to this worker's replica, unless it is one of the `dead` ones.

        Returns the replica's number and what went wrong, if it did not take them: then this worker has gathered all
        weights nevertheless, as the others need it to.
        """
        bound_waiting()
        adapter = self.rollout
        link = ServerLink(adapter, serves=adapter.replica_rank not in dead)
        self.rollout = link
        try:
            await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            self.rollout = adapter
        return {} if link.failure is None else {adapter.replica_rank: link.failure}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def forget_servers(self, replicas: Sequence[int]) -> None:
        """Looks up the servers of `replicas` anew for the next weight sync: they were started again."""
        if self.rollout.replica_rank in replicas:
            self.rollout.server_handle = None
        # A new server with dummy weights needs those below an adapter, too, which verl sends once; all workers gather
        # them together.
        self.base_sync_done = "dummy" not in self.config.rollout.load_format

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def weight_target(self) -> WeightTarget:
        """Returns where this worker will push its weights to; to be asked once the servers are up."""
        return WeightTarget.of(self.rollout)


@dataclass(frozen=True)
class WeightTarget:
    """Where a worker pushes its weights to, as verl's rollout adapter found it."""

    replica: int
    channel: str
    """The socket that the weights go through."""
    server: str | None
    """Identity of the server that is told to receive them; None on ranks that leave that to another."""

    @classmethod
    def of(cls, adapter: Any) -> WeightTarget:
        """Returns the target of verl's rollout adapter, whose server must be up."""
        server = actor_id(adapter.server_handle) if adapter._ensure_server_handle() else None
        return cls(adapter.replica_rank, adapter.zmq_handle, server)


def check_wiring(policy: str, targets: Sequence[WeightTarget], servers: Mapping[int, Sequence[str]]) -> None:
    """Raises RuntimeError unless workers push weights to their own policy's servers, and reach all of them.

    Args:
        policy: the policy's name.
        targets: where its workers push to.
        servers: number of a replica -> identities of its server processes.
    """
    for target in targets:
        own = servers.get(target.replica)
        if own is None:
            raise RuntimeError(
                f"policy {policy!r}: a worker pushes its weights to replica {target.replica}, "
                f"but the policy's servers are {sorted(servers)}"
            )
        if f"-replica-{target.replica}-" not in target.channel:
            raise RuntimeError(f"policy {policy!r}: channel {target.channel!r} is not replica {target.replica}'s")
        if target.server is not None and target.server not in own:
            raise RuntimeError(
                f"policy {policy!r}: replica {target.replica} is served by {sorted(own)}, but a worker would push "
                f"its weights to {target.server}, another policy's or another job's server"
            )
    unreached = sorted(set(servers) - {target.replica for target in targets})
    if unreached:
        raise RuntimeError(f"policy {policy!r}: no worker pushes weights to replicas {unreached}")


def deciding(base: type) -> type:
    """Returns verl's replica class with our server in it, also when it is started again."""
    from verl_atgrpo.serving.decision_server import DecisionServer

    class DecidingReplica(base):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not hasattr(self, "server_class"):
                raise RuntimeError(f"verl's {base.__name__} has no server_class any more")
            self.server_class = ray.remote(DecisionServer)

    return DecidingReplica


def _replica_class(base: type, first_replica: int) -> type:
    class PolicyReplica(deciding(base)):  # type: ignore[misc]
        """A server over workers that are counted from 0, while replicas count from `first_replica`."""

        async def init_hybrid(self, worker_group: Any) -> None:
            self.rollout_mode = RolloutMode.HYBRID
            first = self.world_size * (self.replica_rank - first_replica)
            self.workers = worker_group.workers[first : first + self.world_size]
            await self.launch_servers()

    return PolicyReplica


class PolicyServers(LLMServerManager):  # type: ignore[misc]
    """The servers of one policy and their load balancer."""

    def __init__(self, *args: Any, start_rank: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, start_rank=start_rank, **kwargs)
        base: type = self.rollout_replica_class  # type: ignore[has-type]
        self.rollout_replica_class = _replica_class(base, start_rank)


class ServerWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """Sits beside a standalone server, takes the trainer's weights and hands them to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_sender(self.server_adapter)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> None:
        """Hands on the weights; raises TimeoutError if the server does not take them."""
        bound_waiting()
        try:
            await super().update_weights(global_steps=global_steps)
        except zmq.Again as error:
            raise TimeoutError(too_late(self.server_adapter.replica_rank)) from error

    def weight_target(self) -> WeightTarget:
        """Returns where this worker will hand the weights to; to be asked once the servers are up."""
        return WeightTarget.of(self.server_adapter)


class StandaloneServers(LLMServerManager):  # type: ignore[misc]
    """The servers of one policy on devices of their own, and their load balancer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        base: type = self.rollout_replica_class  # type: ignore[has-type]

        class StandaloneReplica(deciding(base)):  # type: ignore[misc]
            def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
                """verl's, with our worker."""
                worker = super().get_ray_class_with_init_args()
                worker.cls = ray.remote(ServerWorker)
                return worker

        self.rollout_replica_class = StandaloneReplica
