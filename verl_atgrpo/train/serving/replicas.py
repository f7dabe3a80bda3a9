"""The replicas of one policy: dead ones are removed, and restarted before the next weight sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.rollout.replica import RolloutReplica

from verl_atgrpo.train.config.schema import SECTION
from verl_atgrpo.train.serving.balancer import actor_id
from verl_atgrpo.train.serving.health import PolicyFailed, dead_replicas, is_dead, last_line, watched
from verl_atgrpo.train.serving.workers import PolicyServers, WeightTarget, check_wiring

logger = logging.getLogger(__name__)

POLL_INTERVAL = 10.0
"""Seconds between two health checks during a weight sync."""
_START_TIMEOUT = 1800.0
"""Seconds that a server may take to restart, which includes reading a large model from disk."""

Processes = list[tuple[int, float]]
"""(process id, creation time), which together identify a process."""


class Replicas:
    """The serving and the dead replicas of one policy.

    verl's weight sync, balancer and list of replicas do not handle dead ones. A replica over several nodes is dead as
    soon as one of its servers is.
    """

    def __init__(
        self,
        policy: str,
        workers: RayWorkerGroup,
        servers: PolicyServers,
        sync: CheckpointEngineManager,
        restarts: int,
    ) -> None:
        """Manages servers that have just started; raises RuntimeError if `workers` would send weights to others."""
        self._policy, self._workers, self._servers, self._sync = policy, workers, servers, sync
        self._allowed = self._restarts_left = restarts
        self._restarted = 0
        self._dead: dict[int, str] = {}
        self._processes: dict[int, list[Processes]] = {}
        self._version = 0
        self._check_wiring()
        if restarts:
            self._remember(self.serving)

    @property
    def serving(self) -> list[RolloutReplica]:
        """The replicas not known to be dead."""
        return [replica for replica in self._servers.get_replicas() if replica.replica_rank not in self._dead]

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of serving replicas and of restarts so far."""
        alive, restarted = float(len(self.serving)), float(self._restarted)
        return {"team/replicas_alive": alive, "team/replicas_restarted": restarted}

    def poll(self) -> None:
        """Removes dead replicas; raises PolicyFailed if none is left and no restart is allowed."""
        reasons = dead_replicas(self._policy, {replica.replica_rank: replica.servers for replica in self.serving})
        for replica in self.serving:
            if replica.replica_rank in reasons:
                self._remove(replica, reasons[replica.replica_rank])
        if not self.serving and not self._restarts_left:
            raise PolicyFailed(
                f"{self._none_left()}, and {SECTION}.restart_servers={self._allowed} allows no further restart"
            )

    def check(self) -> None:
        """Raises PolicyFailed if no replica is left."""
        self.poll()
        if not self.serving:
            raise PolicyFailed(self._none_left())

    def _none_left(self) -> str:
        why = "; ".join(f"server {replica}: {reason}" for replica, reason in sorted(self._dead.items()))
        return f"policy {self._policy!r}: no server is left ({why})"

    def _remove(self, replica: RolloutReplica, reason: str) -> None:
        self._dead[replica.replica_rank] = reason
        self._sync.remove_replicas([replica])
        # A client may have removed it already.
        self._servers.global_load_balancer.remove_servers.remote([replica.server_address])
        left, all_of_them, number = len(self.serving), len(self._servers.get_replicas()), replica.replica_rank
        said = "policy %r: server %d is dead (%s); %d of %d are left"
        logger.warning(said, self._policy, number, reason, left, all_of_them)

    # ------------------------------------------------------------ weights

    def push(self, global_steps: int) -> None:
        """Restarts dead replicas and sends the policy's weights to all.

        One that dies meanwhile is removed, or restarted if it was the last. Raises PolicyFailed if none is left.
        """
        self.poll()
        while True:
            self._restart()
            failures = watched(lambda: self._send(global_steps), self.poll, every=POLL_INTERVAL)
            self.poll()
            for replica, failure in failures.items():
                if replica not in self._dead:
                    raise PolicyFailed(f"policy {self._policy!r}: {failure}")
            if self.serving:
                break
        self._version = global_steps
        self._admit()

    def revive(self) -> bool:
        """Restarts replicas immediately if none is left; returns whether that was the case."""
        self.poll()
        if self.serving:
            return False
        self.push(self._version)
        return True

    def _send(self, global_steps: int) -> dict[int, str]:
        """Sends the weights; returns replica -> error. As verl's manager, but skips dead replicas."""
        answers: list[dict[int, str]] = ray.get(
            self._workers.update_weights(global_steps=global_steps, mode="naive", dead=sorted(self._dead))
        )
        return {replica: failure for answer in answers for replica, failure in answer.items()}

    def _admit(self) -> None:
        """Adds replicas to the balancer that were restarted, or that a client removed although they are alive."""
        balancer = self._servers.global_load_balancer
        known = ray.get(balancer.get_all_servers.remote())
        new = {each.server_address: each.server_handle for each in self.serving if each.server_address not in known}
        if new:
            ray.get(balancer.add_servers.remote(new))

    # ------------------------------------------------------------ restarts

    def _restart(self) -> None:
        """Restarts dead replicas, as many as allowed; they sleep, without weights or requests yet."""
        dead = [replica for replica in self._servers.get_replicas() if replica.replica_rank in self._dead]
        trying = dead[: self._restarts_left]
        if not trying:
            return
        self._restarts_left -= len(trying)
        # vLLM starts only if its whole share of the device is free. `TeamSync` has emptied the caches of other
        # policies, and no training worker allocates memory until the servers sleep again.
        self._workers.empty_cache()
        errors = asyncio.run(_restart_all(trying, self._processes))
        for replica, error in zip(trying, errors, strict=True):
            self._record_restart(replica.replica_rank, error)
        back = [replica for replica in trying if replica.replica_rank not in self._dead]
        if back:
            self._workers.forget_servers([replica.replica_rank for replica in back])
            self._check_wiring()
            self._remember(back)
            self._sync.add_replicas(back)
        self.poll()

    def _record_restart(self, rank: int, error: BaseException | None) -> None:
        left = f"{SECTION}.restart_servers={self._allowed} allows {self._restarts_left} more"
        if error is None:
            del self._dead[rank]
            self._restarted += 1
            logger.warning("policy %r: server %d is started again; %s", self._policy, rank, left)
            return
        if not isinstance(error, ray.exceptions.RayError | asyncio.TimeoutError):
            raise error
        reason = last_line(error) if isinstance(error, ray.exceptions.RayError) else f"not up after {_START_TIMEOUT} s"
        self._dead[rank] = f"its restart failed: {reason}"
        logger.warning("policy %r: server %d does not come up again: %s; %s", self._policy, rank, reason, left)

    def _check_wiring(self) -> None:
        """Checks that the workers send weights to this policy's servers."""
        targets = [target for target in self._targets() if target.replica not in self._dead]
        servers = {replica.replica_rank: list(map(actor_id, replica.servers)) for replica in self.serving}
        check_wiring(self._policy, targets, servers)

    def _targets(self) -> list[WeightTarget]:
        return self._workers.weight_target()  # type: ignore[no-any-return]

    def _remember(self, replicas: list[RolloutReplica]) -> None:
        """Records the engines' processes: those of a killed server stay alive and keep the device's memory."""
        for replica in replicas:
            asked = [server.__ray_call__.remote(_children) for server in replica.servers]
            self._processes[replica.replica_rank] = ray.get(asked)


class StandaloneReplicas(Replicas):
    """Replicas on devices of their own, whose weight sync needs all of them: a dead one ends the run."""

    def poll(self) -> None:
        """Raises PolicyFailed if one of them is dead."""
        dead = dead_replicas(self._policy, {replica.replica_rank: replica.servers for replica in self.serving})
        for replica, reason in dead.items():
            raise PolicyFailed(
                f"policy {self._policy!r}: server {replica} is dead ({reason}), and servers on devices of their own "
                "are not started again"
            )

    def _send(self, global_steps: int) -> dict[int, str]:
        self._sync.update_weights(global_steps)
        return {}

    def _targets(self) -> list[WeightTarget]:
        workers = [worker for replica in self.serving for worker in replica.workers]
        return ray.get([worker.weight_target.remote() for worker in workers])  # type: ignore[no-any-return]


async def _restart_all(
    replicas: Sequence[RolloutReplica], processes: Mapping[int, list[Processes]]
) -> list[BaseException | None]:
    """Restarts replicas concurrently; returns an error or None for each."""
    starts = [asyncio.wait_for(_restart(each, processes[each.replica_rank]), _START_TIMEOUT) for each in replicas]
    return await asyncio.gather(*starts, return_exceptions=True)


async def _restart(replica: RolloutReplica, processes: list[Processes]) -> None:
    """Ends what is left of a replica, and starts its servers on the same workers."""
    await _end(replica)
    for node, engines in enumerate(processes):
        worker = replica.workers[node * replica.gpus_per_replica_node]
        await worker.__ray_call__.remote(_end_processes, engines)
    try:
        await replica.launch_servers()
        await replica.sleep()
    except BaseException:
        await _end(replica)
        raise


async def _end(replica: RolloutReplica) -> None:
    """Ends a replica's servers and waits until their names are free."""
    for server in replica.servers:
        ray.kill(server)
        while not await _is_gone(server):
            await asyncio.sleep(0.1)
    replica.servers.clear()


async def _is_gone(server: ray.actor.ActorHandle) -> bool:
    try:
        await server.__ray_ready__.remote()
    except ray.exceptions.ActorUnavailableError:
        return False  # Ray has not registered its death yet, and keeps the name
    except ray.exceptions.RayError as error:
        if not is_dead(error):
            raise
        return True
    return False


def _children(_: Any) -> Processes:
    """Runs in an actor; returns the processes that it has started."""
    return [(child.pid, child.create_time()) for child in psutil.Process().children(recursive=True)]


def _end_processes(_: Any, processes: Processes) -> None:
    """Runs in an actor; kills those of the processes that are still alive on its node."""
    alive = []
    for pid, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
                alive.append(process)
    psutil.wait_procs(alive, timeout=60)
