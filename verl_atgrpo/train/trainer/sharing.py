"""A policy that shares its base model with another one and is an adapter on it (`at_grpo.policies.<name>.base`)."""

from __future__ import annotations

from omegaconf import DictConfig
from verl.single_controller.ray import RayWorkerGroup

from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.estimators.spec import EstimatorSpec
from verl_atgrpo.train.serving.client import DecisionClient
from verl_atgrpo.train.serving.replicas import Replicas
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit


class SharingUnit(PolicyUnit):
    """Trains an adapter on the workers of another policy, whose servers serve it, too.

    What concerns workers and servers as a whole (place, start, sleep, weight sync, interruption, restart) is only
    called on the other policy, its `host`.
    """

    def __init__(
        self,
        name: str,
        job: DictConfig,
        folder: str,
        trainable: bool,
        host: PolicyUnit,
        settings: AtGrpoConfig,
        spec: EstimatorSpec,
    ) -> None:
        """As `PolicyUnit`, with the policy `host` that has the workers and servers of the base."""
        super().__init__(name, job, folder, trainable, host.first_replica, settings, spec)
        self._host = host

    @property
    def host(self) -> PolicyUnit:
        """The policy that has the workers and servers."""
        return self._host

    @property
    def actor_rollout_wg(self) -> RayWorkerGroup:  # type: ignore[override]
        """The workers of the base."""
        return self.host.actor_rollout_wg

    @property
    def ref_policy_wg(self) -> RayWorkerGroup:  # type: ignore[override]
        """The same workers: the reference is the base without an adapter."""
        return self.host.actor_rollout_wg

    @property
    def replicas(self) -> Replicas:  # type: ignore[override]
        """The replicas of the base."""
        return self.host.replicas

    def empty_cache(self) -> None:
        """Frees the cache of the base's workers, which this policy's update has filled."""
        self.host.empty_cache()

    def client(self) -> DecisionClient:
        """Returns the client of the base's servers; requests name the adapter."""
        return self.host.client()
