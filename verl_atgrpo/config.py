"""The `at_grpo:` section of a recipe: its keys, its defaults and what is refused.

Everything here runs on the driver before Ray starts, so a mistake costs seconds and one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import contamination, environment
from verl_atgrpo.environment import Environment, Split
from verl_atgrpo.estimator import EstimatorSpec, resolve_spec
from verl_atgrpo.policy_config import SHARED, PolicyConfigError, PolicySettings
from verl_atgrpo.report.settings import RecordSettings
from verl_atgrpo.team import SELECTIONS, Selection, TeamOptions

SECTION = "at_grpo"
SCHEMES = ("tree", "parallel")
PLACEMENTS = ("colocated", "split")


class ConfigError(ValueError):
    """A configuration that cannot work; the message is one line with the key, the value and the remedy."""


@dataclass(frozen=True)
class AtGrpoConfig:
    """The `at_grpo:` section of a recipe."""

    environment: dict[str, Any]
    """`name` (registered, or "module:Class") and the environment's own options."""
    agents: dict[str, str] = field(default_factory=lambda: {"all": SHARED})
    """Agent -> policy. `all: shared` trains one policy for every agent."""
    val_agents: dict[str, str] | None = None
    """Agent -> policy in validation, where it is not the one in training: swapped roles."""
    policies: dict[str, Any] | None = None
    """Policy -> what it changes about `actor_rollout_ref` (see `policy_config`). None: one policy, `shared`."""
    placement: str = "colocated"
    """`colocated`: all policies share all devices, in turns. `split`: each has `gpus` of its own on every node."""
    candidates: int = 4
    """K: candidates at every decision (`tree`), or episodes of every task (`parallel`)."""
    alpha: float = 1.0
    """Weight of the team part in the mixed reward alpha * team + local (`tree`)."""
    scheme: str = "tree"
    """`tree`: AT-GRPO. `parallel`: independent episodes with the shared outcome as everyone's reward."""
    selection: Selection = "greedy"
    """Which candidate is committed (`tree`)."""
    softmax_temperature: float | None = None
    """Temperature of `selection: softmax`, in units of reward."""
    estimator: str | dict[str, Any] = "at_grpo"
    """A preset of `verl_atgrpo.estimator.PRESETS`, or `{preset: ..., <field>: ...}`."""
    seed: int = 0
    """Draws derive from it, with the task, the step, the agent, the turn and the candidate."""
    train_tasks: int = 4096
    """Tasks in an epoch, for environments that generate tasks without end."""
    val_tasks: int = 200
    """Tasks of the validation split, for environments that generate tasks without end."""
    allow_overlap: bool = False
    """Accept validation tasks that also are training tasks, or nearly so by their texts."""
    request_timeout: float = 600.0
    """Seconds after which a candidate that has not come fails its episode."""
    max_failed_episodes: int = 64
    """Replaced episodes in one step after which the run stops: something is wrong with the engine or task."""
    poll_interval: float = 0.2
    """Seconds between two looks of the trainer for finished episodes (verl's own default is 2)."""
    record: dict[str, Any] | None = field(default_factory=lambda: dataclasses.asdict(RecordSettings()))
    """What is written for `verl-atgrpo report` (see `report.settings`); None: nothing."""

    @classmethod
    def from_config(cls, config: DictConfig) -> AtGrpoConfig:
        """Reads the section out of a job's configuration, or out of its `data` part."""
        section = OmegaConf.select(config, SECTION)
        return cls.from_mapping(None if section is None else OmegaConf.to_container(section, resolve=True))  # type: ignore[arg-type]

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any] | None) -> AtGrpoConfig:
        """Reads the section; raises ConfigError for what it does not know or cannot accept."""
        if not section:
            raise ConfigError(f"{SECTION}: the section is missing; trainer.v1.trainer_mode=at_grpo needs it")
        known = [item.name for item in dataclasses.fields(cls)]
        for key in section:
            if key not in known:
                raise ConfigError(f"{SECTION}.{key} is not a known key: use one of {', '.join(known)}")
        if not isinstance(section.get("environment"), Mapping) or "name" not in section["environment"]:
            raise ConfigError(f"{SECTION}.environment needs a name: one of {', '.join(environment.registered())}")
        values: dict[str, Any] = {
            key: dict(value) if isinstance(value, Mapping) else value for key, value in section.items()
        }
        config = cls(**values)
        config._check_values()
        return config

    def _check_values(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(f"{SECTION}.scheme={self.scheme!r}: use one of {', '.join(SCHEMES)}")
        if not isinstance(self.candidates, int) or self.candidates < 2:
            raise ConfigError(
                f"{SECTION}.candidates={self.candidates}: a group estimator compares at least 2 candidates"
            )
        if self.selection not in SELECTIONS:
            raise ConfigError(f"{SECTION}.selection={self.selection!r}: use one of {', '.join(SELECTIONS)}")
        if self.softmax_temperature is not None and self.selection != "softmax":
            raise ConfigError(
                f"{SECTION}.softmax_temperature={self.softmax_temperature} has no effect with "
                f"selection: {self.selection}; remove it or use selection: softmax"
            )
        if self.softmax_temperature is not None and self.softmax_temperature <= 0:
            raise ConfigError(f"{SECTION}.softmax_temperature={self.softmax_temperature}: above 0")
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"{SECTION}.placement={self.placement!r}: use one of {', '.join(PLACEMENTS)}")
        if self.scheme == "parallel":
            for key, default in (("alpha", 1.0), ("selection", "greedy")):
                if getattr(self, key) != default:
                    raise ConfigError(
                        f"{SECTION}.{key}={getattr(self, key)!r} has no effect with scheme: parallel; remove it"
                    )
        for key in ("train_tasks", "val_tasks", "max_failed_episodes", "request_timeout", "poll_interval"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"{SECTION}.{key}={getattr(self, key)}: above 0")
        self._check_estimator()
        self.record_settings()

    def _check_estimator(self) -> None:
        spec = self.spec()
        if self.scheme == "tree":
            if spec.unit == "trajectory":
                raise ConfigError(
                    f"{SECTION}.estimator={spec.name!r} compares whole trajectories: use scheme: parallel, "
                    "or estimator: at_grpo"
                )
            if "agent" in spec.scopes:
                raise ConfigError(
                    f"{SECTION}.estimator={spec.name!r}: the scope agent has no effect with scheme: tree, where "
                    "a group has one agent; use scheme: parallel, or estimator: at_grpo"
                )
        elif spec.unit == "row" and "group" in spec.scopes and len(self.policies or {}) > 1:
            # A policy's update is handed its own agents' rows: the team's mean and std cannot be had from those.
            raise ConfigError(
                f"{SECTION}.estimator={spec.name!r} compares the rows of all agents of a task, but each of several "
                f"policies ({', '.join(self.policies or {})}) sees its own agents' only: use estimator: dr_mas as it "
                "stands (per agent), estimator: mas_grpo, or one policy"
            )

    def spec(self) -> EstimatorSpec:
        """Returns the estimator's specification."""
        try:
            return resolve_spec(self.estimator)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def record_settings(self) -> RecordSettings | None:
        """Returns what is recorded, or None; raises ConfigError for what cannot work."""
        if self.record is None:
            return None
        if not isinstance(self.record, Mapping):
            raise ConfigError(f"{SECTION}.record={self.record!r}: a section with keys of its own, or null")
        try:
            return RecordSettings.from_mapping(self.record)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def make_environment(self) -> Environment:
        """Builds the environment; raises ConfigError for unknown names or options."""
        options = dict(self.environment)
        try:
            return environment.make(options.pop("name"), **options)
        except environment.EnvironmentConfigError as error:
            raise ConfigError(str(error)) from error

    def policies_of(self, env: Environment) -> dict[str, str]:
        """Returns agent -> policy for the environment's agents, with `all` spelt out."""
        mapping = self._mapping(env, "agents", self.agents)
        for policy in self.policy_settings():
            if policy not in mapping.values():
                raise ConfigError(
                    f"{SECTION}.policies.{policy} has no agent: give it one in {SECTION}.agents, or remove it"
                )
        return mapping

    def validation_policies_of(self, env: Environment) -> dict[str, str]:
        """Returns agent -> policy in validation: as in training, but for what `val_agents` says."""
        trained = self.policies_of(env)
        if self.val_agents is None:
            return trained
        inherited = {} if "all" in self.val_agents else trained
        return self._mapping(env, "val_agents", {**inherited, **self.val_agents})

    def _mapping(self, env: Environment, key: str, given: Mapping[str, str]) -> dict[str, str]:
        for agent in given:
            if agent != "all" and agent not in env.agents:
                raise ConfigError(
                    f"{SECTION}.{key}.{agent} is not an agent of {self.environment['name']!r}: "
                    f"it has {', '.join(env.agents)} (or use all)"
                )
        policies = self.policy_settings()
        mapping = {agent: given.get(agent, given.get("all", "")) for agent in env.agents}
        for agent, policy in mapping.items():
            if not policy:
                first = next(iter(policies))
                raise ConfigError(
                    f"{SECTION}.{key} has no policy for {agent!r}: add {agent}: {first}, or all: {first}"
                )
            if policy not in policies:
                raise ConfigError(
                    f"{SECTION}.{key}.{agent}={policy!r} is not a policy of this job: it has {', '.join(policies)} "
                    f"({SECTION}.policies)"
                )
        return mapping

    def policy_settings(self) -> dict[str, PolicySettings]:
        """Returns policy -> settings; raises ConfigError for a block that cannot work."""
        try:
            settings = {
                name: PolicySettings.from_mapping(name, block)
                for name, block in (self.policies or {SHARED: None}).items()
            }
        except PolicyConfigError as error:
            raise ConfigError(str(error)) from error
        if not any(policy.trainable for policy in settings.values()):
            raise ConfigError(f"{SECTION}.policies has no trainable policy: set trainable: true for one of them")
        return settings

    def check_devices(self, available: int) -> None:
        """Raises ConfigError if the policies' devices do not add up to the `available` ones of a node."""
        policies = self.policy_settings()
        for name, policy in policies.items():
            if self.placement == "colocated" and policy.gpus is not None:
                raise ConfigError(
                    f"{SECTION}.policies.{name}.gpus={policy.gpus} has no effect with placement: colocated; remove it"
                )
            if self.placement == "split" and policy.gpus is None:
                raise ConfigError(f"{SECTION}.policies.{name}.gpus is missing: placement: split needs it")
        total = sum(policy.gpus or 0 for policy in policies.values())
        if self.placement == "split" and total != available:
            raise ConfigError(
                f"{SECTION}.policies: gpus add up to {total}, trainer.n_gpus_per_node is {available}; make them equal"
            )

    def team_options(self) -> TeamOptions:
        """Returns what a team needs of this configuration."""
        return TeamOptions(self.candidates, self.alpha, self.selection, self.softmax_temperature or 1.0)

    def split_size(self, env: Environment, split: Split) -> int:
        """Returns how many tasks of `split` the run deals out."""
        wanted = self.train_tasks if split == "train" else self.val_tasks
        available = env.size(split)
        return wanted if available is None else min(wanted, available)


def check_disjoint(config: AtGrpoConfig, env: Environment) -> None:
    """Raises ConfigError if a validation task is also a training task, or nearly so by its text.

    Looks at every task the run can deal out, so it holds for users' environments as well; `contamination.overlaps`
    says what that costs.
    """
    sizes = config.split_size(env, "train"), config.split_size(env, "val")
    for overlap in contamination.overlaps(env, *sizes):
        raise ConfigError(
            f"{SECTION}.environment: {overlap}; make the splits disjoint, or set {SECTION}.allow_overlap=true "
            "to accept it"
        )
