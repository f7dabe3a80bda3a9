"""verl's server replicas on devices of their own, with a worker beside each that takes the trainer's weights."""

from __future__ import annotations

from typing import Any

import ray
import zmq
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout.llm_server import LLMServerManager

from verl_atgrpo.serving.policy_worker import WeightTarget, deciding
from verl_atgrpo.serving.server_link import bound_waiting, too_late
from verl_atgrpo.serving.weight_channel import name_sender


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
