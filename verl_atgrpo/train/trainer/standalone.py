"""A policy whose servers have devices of their own and sample while it is updated (`mode: separate_async`)."""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from verl.single_controller.ray import RayResourcePool
from verl.trainer.ppo.utils import Role
from verl.utils.config import omega_conf_to_dataclass

from verl_atgrpo.train.config.policy_rules import devices_of
from verl_atgrpo.train.serving.health import PolicyFailed, dead_replicas, naming
from verl_atgrpo.train.serving.replicas import Replicas
from verl_atgrpo.train.serving.workers import TrainerWorker, WeightTarget
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit


class StandaloneReplicas(Replicas):
    """Replicas of one policy on devices of their own.

    Their weight sync needs all of them, so a dead one ends the run.
    """

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
        targets: list[WeightTarget] = ray.get([worker.weight_target.remote() for worker in workers])
        return targets


class StandaloneUnit(PolicyUnit):
    """Trains one policy on the trainer's devices and serves it on others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs
        with open_dict(options):
            # verl looks up the processes of a weight sync by this name, so each policy needs its own.
            given = OmegaConf.select(options, "nccl.group_name") or "at_grpo"
            OmegaConf.update(options, "nccl.group_name", f"{given}-{self.name}")
        self._has_weights = False
        self._restarts = 0

    @property
    def own_server_devices(self) -> int:
        """Number of devices that only serve this policy: all of its servers'."""
        return devices_of(self.config.actor_rollout_ref)

    def place(self, pool: RayResourcePool) -> None:
        """Creates the training workers on the devices of `pool`, which no server shares."""
        roles = [Role.Actor, Role.RefPolicy] if self._own_reference else [Role.Actor]
        self._place(pool, roles, TrainerWorker)

    def actors(self) -> list[ray.actor.ActorHandle]:
        """Returns the training workers, the servers' workers and the load balancer."""
        return [*super().actors(), *(worker for replica in self.replicas.serving for worker in replica.workers)]

    def _start_servers(self) -> None:
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        self._launch(StandaloneReplicas, engine)

    def push_weights(self, global_steps: int) -> None:
        """Interrupts the servers' requests, syncs the weights and resumes the requests.

        A frozen policy's servers get weights only once, and afterwards only the version. Raises PolicyFailed if a
        server is dead or dies meanwhile.
        """
        with naming(self.name, "its weight sync"):
            if self.trainable or not self._has_weights:
                self.replicas.push(global_steps)
                self._has_weights = True
                return
            self.replicas.poll()
            servers = [server for replica in self.replicas.serving for server in replica.servers]
            ray.get([server.set_global_steps.remote(global_steps) for server in servers])
