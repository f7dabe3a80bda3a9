"""Checks of a job's configuration on the driver, before Ray starts."""

from __future__ import annotations

import itertools
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_atgrpo import compat, platform_choice
from verl_atgrpo.play.types import EnvironmentConfigError
from verl_atgrpo.train.config import check, job_rules, policy_rules
from verl_atgrpo.train.config.job import Job, Policy
from verl_atgrpo.train.config.machine_rules import of_folders, of_models, return_large_blocks
from verl_atgrpo.train.config.policies import expand_policies
from verl_atgrpo.train.config.schema import COMMAND, MODES, SECTION, ConfigError
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.config.verl_keys import check_keys, check_types
from verl_atgrpo.train.config.view import ACTOR, View, shown_as
from verl_atgrpo.train.estimators.choice import resolve_spec

logger = logging.getLogger(__name__)

MODE = "at_grpo"
ESTIMATOR = "at_grpo"
_SECRET = re.compile(
    r"(?i)api_?key|password|secret|credential|(?<![a-z])(token|variables|env_vars)(?![a-z_])",
)
"""In the name of a key; `variables` are those of other programs, of which many have secrets."""
_PASSWORD = re.compile(r"://[^/\s]*@")
"""In an address."""


def check_run_or_exit(config: DictConfig) -> Job | None:
    """Exits with one line if the checks refuse the configuration; else expands the policies of a team's job.

    Returns the job, or None of a job that is no team's.
    """
    try:
        job = check_run(config)
        if job is not None:
            expand_policies(config, job.settings)
            with open_dict(config):
                config[COMMAND] = typed_command(sys.orig_argv)
            check(of_models(job))
            if platform_choice.wants_cpu():
                return_large_blocks(config, job.settings)
        return job
    except (ConfigError, EnvironmentConfigError, compat.CompatError) as error:
        logger.debug("refused", exc_info=error)  # VERL_LOGGING_LEVEL=DEBUG shows an environment's traceback
        raise SystemExit(f"verl-atgrpo: {' '.join(str(error).split())}") from None


def typed_command(words: Sequence[str]) -> str:
    """Returns a command as one would type it, without the values of keys that name a secret: a model card has it."""
    shown = ["python"]
    for word in words[1:]:
        key, equals, value = word.partition("=")
        # A plain value, such as `token` of rollout_is, names no key.
        named = _SECRET.search(word if {*"{[?' "} & {*value} else key)
        hidden = equals and (named or _PASSWORD.search(value))
        shown.append(f"{key}=..." if hidden else word)
    return shlex.join(shown)


def without_secrets(section: Any) -> Any:
    """Returns what records and model cards may have of the section: values of keys that name a secret are left out."""
    if isinstance(section, dict):
        return {key: "..." if _SECRET.search(str(key)) else without_secrets(one) for key, one in section.items()}
    if isinstance(section, list):
        return [without_secrets(one) for one in section]
    return "..." if isinstance(section, str) and _PASSWORD.search(section) else section


def check_run(config: DictConfig) -> Job | None:
    """Returns the job if its trainer mode is at_grpo, None for any other.

    Jobs that use neither the section, the mode nor the estimator are not checked. Makes the environment, which may
    read its data sets. Raises ConfigError or CompatError if the job cannot work.
    """
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode")
    section = OmegaConf.select(config, SECTION)
    estimator = OmegaConf.select(config, "algorithm.adv_estimator")
    if mode != MODE and section is None and estimator != ESTIMATOR:
        return None
    compat.check_distributions(str(OmegaConf.select(config, "actor_rollout_ref.rollout.name")))
    view = View(config)
    if section is not None:
        check_types(view)
    use_v1 = OmegaConf.select(config, "trainer.use_v1")
    if use_v1 is not True:
        raise ConfigError(f"trainer.use_v1={shown_as(use_v1)}: the legacy trainer is not supported, set it to true")
    if mode == MODE:
        job = Job(view, read_section(config))
        check_job(job)
        return job
    if section is not None:
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode} ignores the section {SECTION}: set trainer.v1.trainer_mode={MODE} and "
            f"choose with {SECTION}.mode, one of {', '.join(MODES)}"
        )
    check(_of_a_plain_job(config))
    return None


def _of_a_plain_job(config: DictConfig) -> Iterator[str]:
    """Estimators for a job of verl's trainer, whose rows are answers to one prompt."""
    if config.actor_rollout_ref.rollout.n < 2:
        yield (
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n}: algorithm.adv_estimator={ESTIMATOR} "
            "compares the answers to one prompt, so it needs at least 2"
        )
    key, choice = "algorithm.at_grpo_estimator", OmegaConf.select(config, "algorithm.at_grpo_estimator")
    choice = ESTIMATOR if choice is None else choice
    try:
        spec = resolve_spec(choice)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not config.algorithm.norm_adv_by_std_in_grpo:
        yield f"algorithm.norm_adv_by_std_in_grpo=false: set it to true, and {key}=dr_grpo, or scale: none in it"
    if spec.needs:
        yield (
            f"{key}={spec.name!r} compares episodes, agents or prompts, which only rows of a team tell apart: set "
            f"trainer.v1.trainer_mode={MODE}, or use one of at_grpo, grpo, dr_grpo, rloo"
        )


Rule = Callable[[Job], Iterator[str]]


def _each(rule: Callable[[Policy], Iterator[str]]) -> Rule:
    """Returns the rule of a job that is this one of each policy."""
    return lambda job: itertools.chain.from_iterable(map(rule, job.policies.values()))


OF_MODES: tuple[Rule, ...] = (
    *(policy_rules.of_modes, _each(policy_rules.of_a_policys_mode)),
    *(policy_rules.of_gpu_memory, policy_rules.of_rays_devices),
)
_OF_EACH = (
    *(policy_rules.of_servers, policy_rules.of_training, policy_rules.of_losses, policy_rules.of_room),
    *(policy_rules.of_batches, policy_rules.of_tool_calls, policy_rules.of_trees, policy_rules.of_adapters),
    policy_rules.of_checkpoints,
)
OF_POLICIES: tuple[Rule, ...] = (policy_rules.of_devices, policy_rules.of_bases, *map(_each, _OF_EACH), *OF_MODES)
JOB_RULES: tuple[Rule, ...] = (
    *(job_rules.of_loggers, job_rules.of_tables, lambda job: of_folders(job.config)),
    *(job_rules.of_ray, job_rules.of_traces),
    *(job_rules.of_sampling, job_rules.of_the_start, *OF_POLICIES),
    # The environment is made here.
    *(job_rules.of_assignments, job_rules.of_agents, job_rules.of_parts, job_rules.of_critic),
    *(job_rules.of_branch_points, job_rules.of_agent_sampling, _each(policy_rules.of_temperatures)),
    *(job_rules.of_schemes, job_rules.of_opponents, job_rules.of_tasks, job_rules.of_parts_validated),
    job_rules.of_steps,
    # Tasks are made from here on, and solutions are run.
    *(job_rules.of_overlap, job_rules.of_bad_rows),
)
"""All rules of a team's job whose keys are verl's and have values of their types, in order, cheap ones first."""


def check_job(job: Job) -> None:
    """Raises ConfigError if a rule refuses something of a team's job."""
    check_keys(job.view)
    check_keys_of_policies(job)
    check(itertools.chain.from_iterable(rule(job) for rule in JOB_RULES))


def check_keys_of_policies(job: Job) -> None:
    """Raises ConfigError for a value of a policy's keys that verl's rules refuse."""
    if job.settings.policies:  # first, as what every policy inherits is to be named by its own key
        check_types(job.view, ACTOR)
        check_keys(job.view, ACTOR)
    for policy in job.policies.values():
        if job.settings.policies:
            check_types(policy.view, policy.key)
        check_keys(policy.view, policy.key)
