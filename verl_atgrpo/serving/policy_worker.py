"""verl's actor worker, server replica and server manager for one policy among several.

verl empties torch's cache of free blocks before a worker wakes its own server. With several policies on the same
devices every other policy's trainer would keep its own, the peak of its last update, out of everybody's reach; so here
workers empty their caches when they are told to.

verl names servers and their weight channels by replica number, counted from 0 in every worker group: with
two groups, the second one's weights would silently go to the first one's servers. Here every policy has
numbers of its own, from `first_replica` on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode

from verl_atgrpo.serving.balancer import actor_id
from verl_atgrpo.serving.rendezvous import MeetingWorker
from verl_atgrpo.serving.server_link import ServerLink, bound_waiting
from verl_atgrpo.serving.weight_channel import name_sender


class TrainerWorker(MeetingWorker):
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
