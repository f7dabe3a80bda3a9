"""Checks of a job's configuration on the driver, before Ray starts."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import compat, platform_choice
from verl_atgrpo.config.answer_check import check_answers
from verl_atgrpo.config.cpu_memory import return_large_blocks
from verl_atgrpo.config.key_check import View, check_keys, check_present, check_types, shown_as
from verl_atgrpo.config.machine_check import check_folders, check_loggers, check_models, check_ray
from verl_atgrpo.config.policies import expand_policies
from verl_atgrpo.config.policy_check import check_policies
from verl_atgrpo.config.schema import MODES, SECTION, AtGrpoConfig, ConfigError
from verl_atgrpo.estimators.choice import follows_verls_switch, resolve_spec
from verl_atgrpo.play import contamination, data_check
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import check_first_tasks
from verl_atgrpo.play.types import EnvironmentConfigError, Split
from verl_atgrpo.play.user_code import asking

logger = logging.getLogger(__name__)

MODE = "at_grpo"
ESTIMATOR = "at_grpo"
_TRACERS = ("mlflow", "weave", "trackio")


def check_run_or_exit(config: DictConfig, **_: Any) -> None:
    """Exits with one line if the checks refuse the configuration; else expands the policies of a team's job."""
    try:
        settings = check_run(config)
        if settings is not None:
            expand_policies(config, settings)
            check_models(config, settings)
            if platform_choice.wants_cpu():
                return_large_blocks(config, settings)
    except (ConfigError, EnvironmentConfigError, compat.CompatError) as error:
        logger.debug("refused", exc_info=error)  # VERL_LOGGING_LEVEL=DEBUG shows an environment's traceback
        raise SystemExit(f"verl-atgrpo: {' '.join(str(error).split())}") from None


def check_run(config: DictConfig) -> AtGrpoConfig | None:
    """Returns the parsed section of a job with trainer mode at_grpo, None of any other.

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
        settings = AtGrpoConfig.from_config(config)
        _check_team_job(view, settings)
        return settings
    if section is not None:
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode} ignores the section {SECTION}: set trainer.v1.trainer_mode={MODE} and "
            f"choose with {SECTION}.mode, one of {', '.join(MODES)}"
        )
    _check_plain_job(config)
    return None


def _check_plain_job(config: DictConfig) -> None:
    if config.actor_rollout_ref.rollout.n < 2:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={config.actor_rollout_ref.rollout.n}: algorithm.adv_estimator={ESTIMATOR} "
            "compares the answers to one prompt, so it needs at least 2"
        )
    choice = OmegaConf.select(config, "algorithm.at_grpo_estimator")
    try:
        spec = resolve_spec(ESTIMATOR if choice is None else choice)
    except ValueError as error:
        raise ConfigError(f"algorithm.at_grpo_estimator: {error}") from error
    _check_verls_switch(config, "algorithm.at_grpo_estimator", ESTIMATOR if choice is None else choice)
    if spec.needs:
        raise ConfigError(
            f"algorithm.at_grpo_estimator={spec.name!r} compares episodes, agents or prompts, which only rows of "
            f"a team tell apart: set trainer.v1.trainer_mode={MODE}, or use one of at_grpo, grpo, dr_grpo, rloo"
        )


def _check_verls_switch(config: DictConfig, key: str, choice: str | Mapping[str, Any]) -> None:
    if not config.algorithm.norm_adv_by_std_in_grpo and not follows_verls_switch(choice):
        raise ConfigError(
            "algorithm.norm_adv_by_std_in_grpo=false takes the scale off the presets at_grpo and grpo as they stand, "
            f"not off {key}={choice}: set it to true, and scale: none in the estimator"
        )


def _check_team_job(view: View, settings: AtGrpoConfig) -> None:
    config = view.config
    check_keys(view)
    check_present(view)
    check_loggers(config)
    check_folders(config)
    check_ray(config)
    rollout = config.actor_rollout_ref.rollout
    check_trace(rollout.trace)
    _check_verls_switch(config, f"{SECTION}.estimator", settings.estimator)
    check_sampling(rollout)
    _check_resume(config.trainer)
    environment = settings.make_environment()
    check_first_tasks(environment, settings.environment["name"])
    settings.validation_policies_of(environment)
    check_agents(settings, environment)
    check_branch_points(settings, environment, config.data.max_prompt_length)
    check_answers(config, settings, environment)
    if not config.trainer.val_only:
        check_schemes(settings, environment)
    check_devices(settings, config.trainer.n_gpus_per_node)
    check_policies(view, settings)
    check_tasks(settings, environment, config.data.train_batch_size)
    _check_steps(config, settings.split_size(environment, "train"))
    _check_storage(config, settings)
    if not settings.allow_overlap:
        check_disjoint(settings, environment)
    check_rows(settings, environment)


def check_agents(settings: AtGrpoConfig, env: Environment) -> None:
    """Raises ConfigError if the estimator, `branch.at` or `candidates` names an unknown agent, or the last lacks one.

    Also for `sub_calls` of an estimator whose main agent is the only one.
    """
    spec, own, name = settings.spec, settings.candidates, settings.environment["name"]
    points = settings.branch.at if settings.branch is not None else None
    known = ", ".join(env.agents)
    for key, named in (("estimator.agents", spec.agents), ("branch.at", points), ("candidates", own)):
        for agent in named if isinstance(named, Mapping) else ():
            if agent not in env.agents and (key, agent) != ("candidates", "all"):
                raise ConfigError(f"{SECTION}.{key}.{agent} is not an agent of {name!r}: it has {known}")
    policies, policy_of = settings.policy_settings(), settings.policies_of(env)
    for agent in spec.agents:
        if not policies[policy_of[agent]].trainable:
            raise ConfigError(
                f"{SECTION}.estimator.agents.{agent} has no effect: its policy {policy_of[agent]!r} is frozen; "
                "remove it"
            )
    if isinstance(own, dict) and isinstance(points, Mapping):
        for agent in own:
            if agent not in points and agent != "all":
                raise ConfigError(
                    f"{SECTION}.candidates.{agent} has no effect: episodes do not branch at its decisions; add it to "
                    f"{SECTION}.branch.at, or remove it"
                )
    if spec.main_agent is not None:
        if spec.main_agent not in env.agents:
            raise ConfigError(
                f"{SECTION}.estimator.main_agent={spec.main_agent!r} is not an agent of {name!r}: it has {known}"
            )
        if len(env.agents) == 1:
            raise ConfigError(
                f"{SECTION}.estimator.sub_calls={spec.sub_calls} has no effect: {spec.main_agent!r} is the only agent "
                f"of {name!r}; use estimator: mas_grpo"
            )
    if isinstance(own, dict) and "all" not in own and (missing := [agent for agent in env.agents if agent not in own]):
        raise ConfigError(f"{SECTION}.candidates has no number for {missing[0]!r}: add {missing[0]}: 4, or all: 4")


def check_branch_points(settings: AtGrpoConfig, env: Environment, longest: int) -> None:
    """Raises ConfigError if no episode can branch where `at_grpo.branch` says.

    Args:
        settings: the section.
        env: the environment.
        longest: tokens of the longest prompt, `data.max_prompt_length`.
    """
    branch = settings.branch
    if branch is None:
        return
    if branch.min_tokens > longest:
        raise ConfigError(
            f"{SECTION}.branch.min_tokens={branch.min_tokens}: no prompt has as many tokens with "
            f"data.max_prompt_length={longest}; lower it"
        )
    policies, assigned = settings.policy_settings(), settings.policies_of(env)
    for agent in branch.at if isinstance(branch.at, Mapping) else ():
        if not policies[assigned[agent]].trainable:
            raise ConfigError(
                f"{SECTION}.branch.at.{agent}: the policy {assigned[agent]!r} is not trained, so its decisions are no "
                "branch points; remove it, or name an agent that is trained"
            )


def check_schemes(settings: AtGrpoConfig, env: Environment) -> None:
    """Raises ConfigError if the scheme gives an agent whose policy is trained no reward of its own."""
    # Own rewards of parallel episodes are scores, as in a tree.
    own, name, policies = settings.episode_reward == "own", settings.environment["name"], settings.policy_settings()
    rewards = "tree" if own else settings.scheme
    for agent, policy in settings.policies_of(env).items():
        accepted = env.schemes.get(agent)
        if accepted is None or rewards in accepted or not policies[policy].trainable:
            continue
        others = " or ".join(accepted)
        if own:
            raise ConfigError(
                f"{SECTION}.episode_reward=own has no reward for {agent!r} of {name!r}: set it to outcome with "
                f"scheme: {others}, or give {agent} a policy with trainable: false"
            )
        raise ConfigError(
            f"{SECTION}.scheme={settings.scheme} has no reward for {agent!r} of {name!r}: set it to {others}, or give "
            f"{agent} a policy with trainable: false"
        )


def check_devices(settings: AtGrpoConfig, available: int) -> None:
    """Raises ConfigError unless the policies' devices add up to the `available` ones of a node."""
    policies = settings.policy_settings()
    for name, policy in policies.items():
        if settings.placement == "colocated" and policy.gpus is not None:
            raise ConfigError(
                f"{SECTION}.policies.{name}.gpus={policy.gpus} has no effect with placement: colocated; remove it"
            )
        if settings.placement == "split" and policy.gpus is None:
            raise ConfigError(f"{SECTION}.policies.{name}.gpus is missing: placement: split needs it")
    total = sum(policies[host].gpus or 0 for host in settings.bases())
    if settings.placement == "split" and total != available:
        raise ConfigError(
            f"{SECTION}.policies: gpus add up to {total}, trainer.n_gpus_per_node is {available}; make them equal"
        )


def check_tasks(settings: AtGrpoConfig, env: Environment, train_batch_size: int) -> None:
    """Raises ConfigError if there are fewer training tasks than a step plays, or none to validate on."""
    tasks = settings.split_size(env, "train")
    if tasks < train_batch_size:
        if tasks == settings.train_tasks:
            raise ConfigError(f"{SECTION}.train_tasks={tasks}: less than data.train_batch_size={train_batch_size}")
        raise ConfigError(
            f"data.train_batch_size={train_batch_size}: {settings.environment['name']!r} has only {tasks} training "
            "tasks; lower it (and actor.ppo_mini_batch_size)"
        )
    if not settings.split_size(env, "val"):
        raise ConfigError(f"{SECTION}.environment.name={settings.environment['name']!r} has no validation tasks")
    most = settings.group_filter.max_tasks if settings.group_filter else None
    key = f"{SECTION}.group_filter.max_tasks={most}"
    if most is not None and most <= train_batch_size:
        raise ConfigError(
            f"{key}: the step plays data.train_batch_size={train_batch_size} tasks anyway; set it higher, or remove "
            "it with min_groups"
        )
    if most is not None and most > tasks:
        raise ConfigError(
            f"{key}: there are {tasks} training tasks, and one played twice in a step gives the same rows twice; "
            f"lower it, or raise {SECTION}.train_tasks"
        )


def _check_steps(config: DictConfig, tasks: int) -> None:
    """Raises ConfigError if the epochs end before `total_training_steps`: the last step would not be one to save."""
    trainer, batch = config.trainer, config.data.train_batch_size
    steps = tasks // batch * trainer.total_epochs
    if trainer.total_training_steps is not None and trainer.total_training_steps > steps and not trainer.val_only:
        raise ConfigError(
            f"trainer.total_training_steps={trainer.total_training_steps}: {trainer.total_epochs} epochs of {tasks} "
            f"tasks, data.train_batch_size={batch} a step, are {steps} steps; raise trainer.total_epochs, or lower it"
        )


def check_disjoint(settings: AtGrpoConfig, env: Environment) -> None:
    """Raises ConfigError if a validation task is also a training task, or a near duplicate of one by its text.

    Makes every task of the run; `contamination.overlaps` documents the cost.
    """
    sizes = settings.split_size(env, "train"), settings.split_size(env, "val")
    with asking(settings.environment["name"], "making its tasks"):
        overlap = next(contamination.overlaps(env, *sizes), None)
    if overlap is not None:
        raise ConfigError(
            f"{SECTION}.environment: {overlap}; make the splits disjoint, or set {SECTION}.allow_overlap=true "
            "to accept it"
        )


def check_rows(settings: AtGrpoConfig, env: Environment) -> None:
    """Grades a sample of rows of data, logs what it shows, and raises ConfigError if too many are bad."""
    if not data_check.has_rows(env):
        return
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        with asking(settings.environment["name"], "grading its rows"):
            check = data_check.check_rows(env, split, data_check.sample(env, split, settings.split_size(env, split)))
        logger.log(logging.WARNING if check.defects else logging.INFO, "%s.environment: %s", SECTION, check)
        if check.share > settings.max_bad_rows:
            index = next(iter(check.defects))
            raise ConfigError(
                f"{SECTION}.environment.{split}: {check}, such as row {index}; see all with verl-atgrpo data check, "
                f"leave them out, or raise {SECTION}.max_bad_rows={settings.max_bad_rows}"
            )


def check_sampling(rollout: DictConfig) -> None:
    """Raises ConfigError for sampling that verl's V1 rollout ignores, or that makes log-probs and samples disagree."""
    key, validation = "actor_rollout_ref.rollout", rollout.val_kwargs
    if not validation.do_sample and validation.temperature:
        raise ConfigError(
            f"{key}.val_kwargs.do_sample=false has no effect beside temperature={validation.temperature}: set "
            f"{key}.val_kwargs.temperature to 0 for greedy answers, or do_sample to true"
        )
    if rollout.temperature != 1 and rollout.logprobs_mode != "processed_logprobs":
        raise ConfigError(
            f"{key}.logprobs_mode={rollout.logprobs_mode}: with temperature={rollout.temperature} the server's "
            "log-probs would not be those that were sampled from, set it to processed_logprobs"
        )


def _check_resume(trainer: DictConfig) -> None:
    if trainer.val_only and not trainer.val_before_train:
        raise ConfigError(
            "trainer.val_only=true has no effect beside trainer.val_before_train=false: set that to true"
        )
    if trainer.resume_mode == "resume_path":
        folder = Path(str(trainer.resume_from_path))
        if not re.fullmatch(r"global_step_\d+", folder.name) or not folder.is_dir():
            raise ConfigError(
                f"trainer.resume_from_path={trainer.resume_from_path}: name a checkpoint's folder, "
                "<trainer.default_local_dir>/global_step_<n>"
            )


def _check_storage(config: DictConfig, settings: AtGrpoConfig) -> None:
    """Raises ConfigError if TransferQueue cannot hold a step with one decision per episode.

    Episodes may take more decisions, whose number is not known here: a run stops at the first row that does not fit.
    """
    key = "transfer_queue.backend.SimpleStorage.total_storage_size"
    size = OmegaConf.select(config, key)
    group_filter = settings.group_filter
    tasks = (group_filter.max_tasks if group_filter else None) or config.data.train_batch_size
    k = settings.fewest_candidates
    rows = tasks * k
    if OmegaConf.select(config, "transfer_queue.backend.storage_backend") == "SimpleStorage" and (size or rows) < rows:
        raise ConfigError(
            f"{key}={size}: a step makes at least {rows} rows, {tasks} tasks x {k} candidates x "
            "decisions of an episode: set it to a few times what all decisions make, or to null for no limit"
        )


def check_trace(trace: DictConfig) -> None:
    """Raises ConfigError for a trace backend that does not exist or is not installed, or options without one."""
    key = "actor_rollout_ref.rollout.trace"
    if trace.backend is None:
        for option in ("token2text", "max_samples_per_step_per_worker"):
            if trace.get(option):
                raise ConfigError(
                    f"{key}.{option}={trace[option]} has no effect without {key}.backend: "
                    f"set that to one of {', '.join(_TRACERS)}"
                )
    elif trace.backend not in _TRACERS:
        raise ConfigError(f"{key}.backend={trace.backend}: use one of {', '.join(_TRACERS)}, or null")
    elif importlib.util.find_spec(trace.backend) is None:
        raise ConfigError(f"{key}.backend={trace.backend}: it is not installed, pip install {trace.backend}")
