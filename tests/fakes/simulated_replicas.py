"""Replicas and workers of a policy without processes, with verl's balancer and weight sync manager."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_atgrpo.train.serving.workers import WeightTarget


class Ref:
    """A fake ObjectRef: the call runs when its result is fetched."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __await__(self) -> Generator[None, None, Any]:
        return self.call()
        yield


def get(refs: Any, timeout: float | None = None) -> Any:
    """Replaces `ray.get`."""
    return [get(ref) for ref in refs] if isinstance(refs, list) else refs.call()


class Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = lambda *args, **kwargs: Ref(lambda: function(*args, **kwargs))


class EagerActor:
    """A fake actor whose calls run immediately."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Ref:
            answer = getattr(self.target, name)(*args, **kwargs)
            return Ref(lambda: answer)

        return SimpleNamespace(remote=remote)


class Server:
    """An actor with an engine; tests set `actor_lives` and `engine_lives`."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.actor_lives = self.engine_lives = True
        self._actor_id = SimpleNamespace(hex=lambda: identity)
        self.collective_rpc = Method(self._health)
        self.__ray_ready__ = Method(self._ready)
        self.__ray_call__ = Method(lambda function: [(1, 0.5)] if self._ready() is None else None)

    def _ready(self) -> None:
        if not self.actor_lives:
            raise ray.exceptions.RayActorError()

    def _health(self, method: str) -> None:
        assert method == "check_health"
        self._ready()
        if not self.engine_lives:
            raise ray.exceptions.RayError("EngineDeadError: the engine is gone")


class Replica:
    gpus_per_replica_node = 2

    def __init__(self, world: World, rank: int, nodes: int) -> None:
        self.world, self.replica_rank, self.nodes = world, rank, nodes
        self.workers = [
            SimpleNamespace(__ray_call__=Method(lambda end, processes: world.log.append(("end", rank, processes))))
            for _ in range(2 * nodes)
        ]
        self.servers: list[Server] = []
        self.up(0)

    def up(self, time: int) -> None:
        self.servers += [Server(f"{self.replica_rank}.{node}.{time}") for node in range(self.nodes)]
        self.server_handle = self.servers[0]
        self.server_address = f"address-{self.replica_rank}-{time}"

    async def launch_servers(self) -> None:
        assert not self.servers, "the old servers still have their names"
        self.world.log.append(("launch", self.replica_rank))
        self.world.starts += 1
        self.up(self.world.starts)
        if self.world.broken_starts:
            self.world.broken_starts -= 1
            raise ray.exceptions.RayError("CUDA out of memory")

    async def sleep(self) -> None:
        self.world.log.append(("sleep", self.replica_rank))


class World:
    """All collaborators of `Replicas`; `log` has their calls in order."""

    def __init__(self, ranks: Sequence[int] = (4, 5), nodes: int = 1) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.starts = self.broken_starts = 0
        self.while_sending: Callable[[], dict[int, str]] = dict
        self.replicas = [Replica(self, rank, nodes) for rank in ranks]
        self.balancer = GlobalRequestLoadBalancer({each.server_address: each.server_handle for each in self.replicas})
        self.global_load_balancer = EagerActor(self.balancer)
        config: Any = SimpleNamespace(backend="naive", custom_backend_module=None)
        self.sync = CheckpointEngineManager(config, self, list(self.replicas))  # type: ignore[arg-type]

    def get_replicas(self) -> list[Replica]:
        return self.replicas

    def __getitem__(self, rank: int) -> Replica:
        return next(each for each in self.replicas if each.replica_rank == rank)

    @property
    def admitted(self) -> set[str]:
        return set(self.balancer.get_all_servers())

    @property
    def managed(self) -> set[int]:
        return {replica.replica_rank for replica in self.sync.replicas}

    # Interface of the worker group.

    def weight_target(self) -> list[WeightTarget]:
        return [
            WeightTarget(each.replica_rank, f"ipc:///tmp/x-replica-{each.replica_rank}-rank-0.sock", self._known(each))
            for each in self.replicas
        ]

    def _known(self, replica: Replica) -> str:
        """Returns the worker's server, which it looks up only once."""
        self.found: dict[int, str] = getattr(self, "found", {})
        return self.found.setdefault(replica.replica_rank, replica.servers[0].identity if replica.servers else "?")

    def empty_cache(self) -> None:
        self.log.append(("empty",))

    def forget_servers(self, replicas: Sequence[int]) -> None:
        self.log.append(("forget", *replicas))
        for replica in replicas:
            self.found.pop(replica)

    def update_weights(self, global_steps: int, mode: str, dead: Sequence[int]) -> list[Ref]:
        assert mode == "naive"
        self.log.append(
            ("weights", global_steps, *(each.replica_rank for each in self.replicas if each.replica_rank not in dead))
        )
        failures = self.while_sending()
        return [Ref(lambda: failures), Ref(dict)]
