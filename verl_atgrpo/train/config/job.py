"""A job as its rules see it: its configuration, its settings, its environment and its policies, each derived once."""

from __future__ import annotations

import functools
from typing import Any

from omegaconf import OmegaConf

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import check_first_tasks
from verl_atgrpo.play.mixture import Mixture
from verl_atgrpo.play.types import names_of, part_of
from verl_atgrpo.train.config.policies import unresolved_job
from verl_atgrpo.train.config.schema import SECTION, AtGrpoConfig, PolicySettings
from verl_atgrpo.train.config.view import ACTOR, Place, View

SEPARATE = "separate_async"


def longest_row(data: Any) -> tuple[int, str]:
    """Returns the tokens of a job's longest row, and words for a message, from its section `data` (or its lengths)."""
    row = int(data.max_prompt_length + data.max_response_length)
    return row, (
        f"data.max_prompt_length={data.max_prompt_length} and data.max_response_length={data.max_response_length} "
        f"make rows of up to {row} tokens"
    )


class Job:
    """A team's job. What is expensive is made when a rule first asks for it."""

    def __init__(self, view: View, settings: AtGrpoConfig) -> None:
        """Needs the configuration, whose keys have been checked, and its section `at_grpo`."""
        self.view = view
        self.settings = settings
        self.config = view.config
        self.data: Any = self.config.get("data")
        self.trainer: Any = self.config.get("trainer")
        self.rollout: Any = OmegaConf.select(self.config, f"{ACTOR}.rollout")
        self.name = settings.environment["name"]
        """The environment's name in the recipe."""
        self.policies = {name: Policy(self, name, block) for name, block in settings.policy_settings().items()}

    @functools.cached_property
    def env(self) -> Environment:
        """The environment; raises ConfigError or EnvironmentConfigError if it cannot be made or makes no tasks."""
        env = self.settings.make_environment()
        check_first_tasks(env, self.name)
        return env

    @property
    def known(self) -> str:
        """The environment's agents, for messages."""
        return ", ".join(self.env.agents)

    @functools.cached_property
    def named(self) -> tuple[str, ...]:
        """What a key may name instead of an agent: the agents, and the parts of a mixture."""
        return tuple(dict.fromkeys(name for agent in self.env.agents for name in names_of(agent)))

    @functools.cached_property
    def agents(self) -> dict[str, str]:
        """Agent -> its policy in training."""
        return self.settings.policies_of(self.env)

    @property
    def validation_agents(self) -> dict[str, str]:
        """The same in validation."""
        return self.settings.validation_policies_of(self.env)

    def is_trained(self, agent: str) -> bool:
        """Returns whether an agent's policy is trained."""
        return self.policies[self.agents[agent]].settings.trainable

    def plays_in_training(self, agent: str) -> bool:
        """Returns whether an agent plays in training: it does not in a part of a mixture that is only validated."""
        return not isinstance(self.env, Mixture) or part_of(agent) in self.parts

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a mixture's parts that are trained on."""
        parts = self.env.parts.values() if isinstance(self.env, Mixture) else ()
        return tuple(part.name for part in parts if part.weight)

    @property
    def steps_of_epochs(self) -> int:
        """The number of training steps of all epochs, which a run cannot exceed."""
        return int(self.tasks // self.data.train_batch_size * self.trainer.total_epochs)

    @property
    def steps(self) -> int:
        """The number of training steps of the run."""
        given: int | None = self.trainer.total_training_steps
        return self.steps_of_epochs if given is None else given

    @functools.cached_property
    def tasks(self) -> int:
        """The number of training tasks of the run."""
        return self.settings.split_size(self.env, "train")


class Policy:
    """A policy of a job, with its own `actor_rollout_ref`."""

    def __init__(self, job: Job, name: str, settings: PolicySettings) -> None:
        """Needs its job, its name and its block of `at_grpo.policies`."""
        self.job = job
        self.name = name
        self.settings = settings
        self.key = f"{SECTION}.policies.{name}" if job.settings.policies else ACTOR
        """The section that messages name for its keys."""

    @functools.cached_property
    def view(self) -> View:
        """The job with the policy's own `actor_rollout_ref`; raises ConfigError for a key that verl's has not."""
        if not self.job.settings.policies:
            return self.job.view
        return View(unresolved_job(self.job.config, self.name, self.settings))

    def key_of(self, key: str) -> str:
        """Returns one of its keys below `actor_rollout_ref` as a recipe sets it."""
        return Place(self.view, f"{ACTOR}.{key}", self.key).name

    @property
    def section(self) -> Any:
        """Its `actor_rollout_ref`, whose parts follow."""
        return self.view.config.actor_rollout_ref

    actor = property(lambda self: self.section.actor)
    model = property(lambda self: self.section.model)
    rollout = property(lambda self: self.section.rollout)
