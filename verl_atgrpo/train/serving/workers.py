"""verl's workers that send weights and its replicas, for several policies per job: weight sockets, dead servers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
import zmq
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.device import get_device_name
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.utils import ensure_async_iterator

from verl_atgrpo.train.config.policies import ADAPTERS
from verl_atgrpo.train.engine.worker import TrainerWorker
from verl_atgrpo.train.serving.balancer import actor_id
from verl_atgrpo.train.serving.decision_server import DecisionServer
from verl_atgrpo.train.serving.health import last_line
from verl_atgrpo.train.serving.server import ADAPTER, name_sender

Lora = tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]]
"""An adapter's configuration with its number, and its weights by name."""


BUCKET_TIMEOUT = 120.0
"""Seconds that a server may take to load one bucket of weights."""


def set_socket_timeouts() -> None:
    """Sets timeouts for ZeroMQ sockets opened from now on, including that of verl's weight sender.

    A server that fails never replies, or never connects, and the sender would wait forever.
    """
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        zmq.Context.instance().setsockopt(option, int(BUCKET_TIMEOUT * 1000))


def _too_late(replica: int) -> str:
    return f"replica {replica} did not take the weights within {BUCKET_TIMEOUT} s; its log says why"


class ServerLink:
    """Wraps verl's rollout adapter for one weight sync.

    Gathering a parameter is a collective operation of all workers. If a worker stopped because its server is dead, the
    others would wait forever; instead it continues to gather, and discards the weights.
    """

    def __init__(self, adapter: Any, serves: bool, loras: Callable[[], Iterator[Lora]] | None = None) -> None:
        """Sends weights to the server of verl's rollout adapter, or discards them if that does not live.

        `loras` makes all adapters of a shared base, which are sent where verl sends its only one.
        """
        self._adapter = adapter
        self._open = serves
        self._loras = loras
        self.bytes = 0
        """Of the tensors that were sent or discarded; verl's engines yield them one by one, in an iterator."""
        self.failure: str | None = None
        """Why the server did not load the weights; None if it did, or does not serve."""

    async def resume(self, tags: list[str]) -> None:
        """Wakes the parts of the server named by `tags`."""
        if self._open:
            await self._attempt(self._adapter.resume(tags=tags))

    async def update_weights(self, weights: Any, **options: Any) -> None:
        """Sends `weights`, an iterator of (name, tensor), or all adapters in their place; always exhausts them."""
        if self._loras is None or not options.get("base_sync_done"):
            await self._send(weights, options)
            return
        for config, own in self._loras():
            await self._send(own, {**options, "peft_config": config})

    async def _send(self, weights: Any, options: Mapping[str, Any]) -> None:
        counted = weights if hasattr(weights, "__aiter__") else self._counted(weights)
        if self._open:
            await self._attempt(self._adapter.update_weights(counted, **options))
        if not self._open:
            async for _ in ensure_async_iterator(counted):
                pass

    def _counted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.bytes += tensor.nbytes
            yield name, tensor

    async def _attempt(self, call: Coroutine[Any, Any, Any]) -> None:
        replica = self._adapter.replica_rank
        try:
            await call
        except zmq.Again:
            self._open = False
            self.failure = _too_late(replica)
        except ray.exceptions.RayError as error:
            self._open = False
            self.failure = f"replica {replica} did not take the weights: {last_line(error)}"


class PolicyWorker(TrainerWorker):
    """A training worker of one policy that sends its weights to the policy's servers."""

    rollout: Any
    _sent = 0

    def __init__(self, *args: Any, first_replica: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first_replica = first_replica

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Builds the engines, then points the rollout adapter to this job's and policy's replica."""
        super().init_model()
        name_sender(self.rollout, self._first_replica)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(
        self, global_steps: int | None = None, mode: str = "auto", dead: Sequence[int] = ()
    ) -> dict[int, str]:
        """Sends the weights to this worker's replica, unless that is one of the `dead` ones; gathers them in any case.

        Returns replica number -> error if the replica did not load them.
        """
        set_socket_timeouts()
        adapter = self.rollout
        link = ServerLink(adapter, adapter.replica_rank not in dead, self._loras if self._shares else None)
        self.rollout = link
        try:
            await super().update_weights(global_steps=global_steps, mode=mode)
        finally:
            self.rollout = adapter
        self._sent = link.bytes
        return {} if link.failure is None else {adapter.replica_rank: link.failure}

    def _loras(self) -> Iterator[Lora]:
        """Yields what the servers of a shared base get: every adapter, or zeros for a policy that is not trained.

        Then come past selves. No server has a critic's.
        """
        engine = self.actor.engine
        adapters = engine.model_config.lora[ADAPTERS]
        trained = [name for name, settings in adapters.items() if settings["trainable"] and settings["served"]]
        for number, (name, settings) in enumerate(adapters.items(), 1):
            if not settings["served"]:
                continue
            source = name if settings["trainable"] else trained[0]
            weights = engine.adapter_weights(source)
            if not settings["trainable"]:
                weights = ((key, torch.zeros_like(tensor)) for key, tensor in weights)
            yield {**engine.adapter_config(source), ADAPTER: number}, weights
        for slot, (name, kept) in sorted(engine.past.items()):
            moved = ((key, tensor.to(get_device_name())) for key, tensor in kept.items())
            yield {**engine.adapter_config(name), ADAPTER: len(adapters) + slot}, moved

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def weights_sent(self) -> int:
        """Returns how many bytes the last weight sync sent."""
        return self._sent

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def forget_servers(self, replicas: Sequence[int]) -> None:
        """Has the next weight sync look up the servers of `replicas`, which were restarted."""
        if self.rollout.replica_rank in replicas:
            self.rollout.server_handle = None
        # With LoRA verl sends the base weights only once, and a server restarted with dummy weights needs them again.
        # All workers gather them together, so all reset the flag.
        self.base_sync_done = "dummy" not in self.config.rollout.load_format

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def weight_target(self) -> WeightTarget:
        """Returns where this worker sends its weights; call it after the servers have started."""
        return WeightTarget.of(self.rollout)


@dataclass(frozen=True)
class WeightTarget:
    """Where a worker sends its weights, as found by verl's rollout adapter."""

    replica: int
    channel: str
    """The weight socket."""
    server: str | None
    """Actor id of the server that is called to receive them; None on ranks that do not call it."""

    @classmethod
    def of(cls, adapter: Any) -> WeightTarget:
        """Returns the target of verl's rollout adapter, whose server must have started."""
        server = actor_id(adapter.server_handle) if adapter._ensure_server_handle() else None
        return cls(adapter.replica_rank, adapter.zmq_handle, server)


def check_wiring(policy: str, targets: Sequence[WeightTarget], servers: Mapping[int, Sequence[str]]) -> None:
    """Raises RuntimeError unless a policy's workers send to its servers (number -> actor ids), and to all of them."""
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
    if unreached := sorted(set(servers) - {target.replica for target in targets}):
        raise RuntimeError(f"policy {policy!r}: no worker pushes weights to replicas {unreached}")


class ServerWorker(CheckpointEngineWorker):  # type: ignore[misc]
    """Receives the trainer's weights for a standalone server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_sender(self.server_adapter)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> None:
        """Sends the received weights to the server; raises TimeoutError if it does not load them."""
        set_socket_timeouts()
        try:
            await super().update_weights(global_steps=global_steps)
        except zmq.Again as error:
            raise TimeoutError(_too_late(self.server_adapter.replica_rank)) from error

    def weight_target(self) -> WeightTarget:
        """Returns where this worker sends the weights; call it after the servers have started."""
        return WeightTarget.of(self.server_adapter)


def replica_class(base: type, first_replica: int) -> type:
    """Returns verl's replica class `base` with our server and, where the servers have own devices, our worker.

    Replica numbers start at `first_replica`, while the ranks of their workers start at 0.
    """

    class PolicyReplica(base):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not hasattr(self, "server_class"):
                raise RuntimeError(f"verl's {base.__name__} has no server_class any more")
            self.server_class = ray.remote(DecisionServer)  # also for restarts

        async def init_hybrid(self, worker_group: Any) -> None:
            self.rollout_mode = RolloutMode.HYBRID
            first = self.world_size * (self.replica_rank - first_replica)
            self.workers = worker_group.workers[first : first + self.world_size]
            await self.launch_servers()

        def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
            worker = super().get_ray_class_with_init_args()
            worker.cls = ray.remote(ServerWorker)
            return worker

    return PolicyReplica


class PolicyServers(LLMServerManager):  # type: ignore[misc]
    """The servers of one policy, on the devices of its workers or on their own, and their load balancer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        base: type = self.rollout_replica_class  # type: ignore[has-type]
        self.rollout_replica_class = replica_class(base, self.start_rank)
