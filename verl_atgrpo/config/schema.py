"""The `at_grpo:` section of a recipe: its keys, its defaults and what is refused.

Everything here runs on the driver before Ray starts, so a mistake costs seconds and one line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import contamination, environment
from verl_atgrpo.config.group_filter import GroupFilter, GroupFilterError
from verl_atgrpo.config.policies import SHARED, PolicyConfigError, PolicySettings
from verl_atgrpo.environment import Environment, Split
from verl_atgrpo.estimators.spec import EstimatorSpec, resolve_spec
from verl_atgrpo.report.records import RecordSettings
from verl_atgrpo.team import SELECTIONS, Selection, TeamOptions

SECTION = "at_grpo"
SCHEMES = ("tree", "parallel")
PLACEMENTS = ("colocated", "split")
MODES = ("sync", "colocate_async", "separate_async")


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
    mode: str = "sync"
    """`sync`: a step plays its tasks to their end, then updates. `colocate_async`: it updates once enough tasks have
    ended, and the others go on with the new weights. `separate_async`: servers have devices of their own and draw
    during the update, too (see docs/async.md)."""
    candidates: int = 4
    """K: candidates at every decision (`tree`), or episodes of every task (`parallel`)."""
    alpha: float = 1.0
    """Weight of the team part in the mixed reward alpha * team + local_weight * local (`tree`)."""
    local_weight: float = 1.0
    """Weight of the local part (`tree`): 1 as in the paper; 0 leaves the team part alone."""
    scheme: str = "tree"
    """`tree`: AT-GRPO. `parallel`: independent episodes with the shared outcome as everyone's reward."""
    selection: Selection = "greedy"
    """Which candidate is committed (`tree`)."""
    softmax_temperature: float | None = None
    """Temperature of `selection: softmax`, in units of reward."""
    estimator: str | dict[str, Any] = "at_grpo"
    """A preset of `verl_atgrpo.estimators.spec.PRESETS`, or `{preset: ..., <field>: ..., agents: {<agent>: ...}}`, or
    `{name: ..., <field>: ...}`; see docs/estimators.md."""
    group_filter: dict[str, Any] | None = None
    """Drops comparison groups that teach nothing: `{}`, or `{min_groups: ..., max_tasks: ...}` to play more tasks in
    their place (see `verl_atgrpo.config.group_filter`)."""
    seed: int = 0
    """Draws derive from it, with the task, the step, the agent, the turn and the candidate."""
    train_tasks: int = 4096
    """Tasks in an epoch, for environments that generate tasks without end."""
    val_tasks: int = 200
    """Tasks of the validation split, for environments that generate tasks without end."""
    allow_overlap: bool = False
    """Accept validation tasks that also are training tasks, or nearly so by their texts."""
    request_timeout: float = 600.0
    """Seconds that a server has for a candidate, or for what remains of one that was interrupted."""
    request_retries: int = 2
    """How often a candidate that timed out, or whose server died, is tried at another one before its episode fails."""
    max_failed_episodes: int = 64
    """Failed episodes in one step after which the run stops: something is wrong with the engine or task."""
    restart_servers: int = 3
    """How often servers of one policy that died are started again in a run, before the next weight sync; 0: never."""
    poll_interval: float = 0.2
    """Seconds between two looks of the trainer for finished episodes (verl's own default is 2); more where a look
    takes long (2.7 s with 100,000 rows in the queue): four times what the last one took."""
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
        if self.mode not in MODES:
            raise ConfigError(f"{SECTION}.mode={self.mode!r}: use one of {', '.join(MODES)}")
        if self.scheme == "parallel":
            for key, default in (("alpha", 1.0), ("local_weight", 1.0), ("selection", "greedy")):
                if getattr(self, key) != default:
                    raise ConfigError(
                        f"{SECTION}.{key}={getattr(self, key)!r} has no effect with scheme: parallel; remove it"
                    )
        for key in ("alpha", "local_weight"):
            weight = getattr(self, key)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
                raise ConfigError(f"{SECTION}.{key}={weight!r}: a finite number, at least 0")
        if self.alpha == self.local_weight == 0:
            raise ConfigError(f"{SECTION}.local_weight=0 beside alpha=0 leaves no reward; set one of them above 0")
        for key in ("train_tasks", "val_tasks", "max_failed_episodes", "request_timeout", "poll_interval"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"{SECTION}.{key}={getattr(self, key)}: above 0")
        for key in ("request_retries", "restart_servers"):
            if type(getattr(self, key)) is not int or getattr(self, key) < 0:
                raise ConfigError(f"{SECTION}.{key}={getattr(self, key)!r}: a whole number, at least 0")
        self.filter()
        self._check_estimator()
        self.record_settings()

    def _check_estimator(self) -> None:
        spec = self.spec()
        self._check_part_of_estimator(spec, f"{SECTION}.estimator={spec.name!r}")
        for agent, own in spec.agents.items():
            self._check_part_of_estimator(own, f"{SECTION}.estimator.agents.{agent} ({spec.name!r})")

    def _check_part_of_estimator(self, spec: EstimatorSpec, key: str) -> None:
        if self.scheme == "tree":
            if spec.unit == "trajectory":
                raise ConfigError(f"{key} compares whole trajectories: use scheme: parallel, or estimator: at_grpo")
            if spec.unit == "call":
                raise ConfigError(
                    f"{key} aligns the calls of whole episodes: use scheme: parallel, or estimator: at_grpo"
                )
            if spec.step_weight:
                raise ConfigError(
                    f"{key}: step_weight={spec.step_weight} looks for equal prompts in different episodes, but with "
                    "scheme: tree a group has one prompt; use scheme: parallel, or step_weight: 0"
                )
            if "agent" in spec.scopes:
                raise ConfigError(
                    f"{key}: the scope agent has no effect with scheme: tree, where a group has one agent; use "
                    "scheme: parallel, or estimator: at_grpo"
                )
            return
        if len(self.policies or {}) < 2:
            return
        # A policy's update is handed its own agents' rows: the team's mean and std cannot be had from those.
        sees = f"each of several policies ({', '.join(self.policies or {})}) sees its own agents' only"
        if spec.unit != "trajectory" and "group" in spec.scopes:
            raise ConfigError(
                f"{key} compares the rows of all agents of a task, but {sees}: use estimator: dr_mas as it stands "
                "(per agent), estimator: mas_grpo, or one policy"
            )
        if spec.step_weight and spec.step_scope == "group":
            raise ConfigError(
                f"{key} compares all rows with the same prompt, whoever answers, but {sees}: use step_scope: agent, "
                "or one policy"
            )

    def check_estimator_agents(self, env: Environment) -> None:
        """Raises ConfigError if the estimator names agents that the environment has not."""
        spec = self.spec()
        key = f"{SECTION}.estimator"
        known = f"an agent of {self.environment['name']!r}: it has {', '.join(env.agents)}"
        for agent in spec.agents:
            if agent not in env.agents:
                raise ConfigError(f"{key}.agents.{agent} is not {known}")
        if spec.main_agent is None:
            return
        if spec.main_agent not in env.agents:
            raise ConfigError(f"{key}.main_agent={spec.main_agent!r} is not {known}")
        if len(env.agents) == 1:
            raise ConfigError(
                f"{key}.sub_calls={spec.sub_calls} has no effect: {spec.main_agent!r} is the only agent of "
                f"{self.environment['name']!r}; use estimator: mas_grpo"
            )

    def spec(self) -> EstimatorSpec:
        """Returns the estimator's specification."""
        try:
            return resolve_spec(self.estimator)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def filter(self) -> GroupFilter | None:
        """Returns the group filter's settings; raises ConfigError for a block that cannot work."""
        try:
            return GroupFilter.from_mapping(self.group_filter)
        except GroupFilterError as error:
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
        return TeamOptions(
            candidates=self.candidates,
            alpha=self.alpha,
            local_weight=self.local_weight,
            selection=self.selection,
            softmax_temperature=self.softmax_temperature or 1.0,
        )

    @property
    def training_episodes(self) -> int:
        """Episodes of a task in training."""
        return self.candidates if self.scheme == "parallel" else 1

    def check_tasks(self, env: Environment, train_batch_size: int) -> None:
        """Raises ConfigError if there are too few training tasks for what a step plays."""
        tasks, group_filter = self.split_size(env, "train"), self.filter()
        if tasks < train_batch_size:
            raise ConfigError(
                f"{SECTION}.train_tasks={self.train_tasks}: less than data.train_batch_size={train_batch_size}"
            )
        try:
            if group_filter is not None:
                group_filter.check_tasks(train_batch_size, tasks)
        except GroupFilterError as error:
            raise ConfigError(str(error)) from error

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
