"""Reads the section `at_grpo`: each key by the schema, then values that do not fit each other."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from verl_atgrpo.files import place_of
from verl_atgrpo.kinds import words
from verl_atgrpo.play.registry import registered
from verl_atgrpo.recipes import gone
from verl_atgrpo.train.config import SECTION, ConfigError, check
from verl_atgrpo.train.config.schema import AtGrpoConfig, CriticSettings, Opponents, PolicySettings, Section
from verl_atgrpo.train.estimators.spec import EstimatorSpec

SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "n", "name", "mode", "val_kwargs", "agent", "trace")
"""Keys of `actor_rollout_ref.rollout` that a policy's block cannot set."""
_OF_LORA = ("lora_rank", "lora_alpha", "target_modules")
"""verl's keys in `model` for which `lora` has its own."""


def read_section(config: DictConfig) -> AtGrpoConfig:
    """Returns the section of a job's configuration, or of its `data` part; raises ConfigError."""
    section = OmegaConf.select(config, SECTION)
    return parse_section(OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section)


def parse_section(section: Any) -> AtGrpoConfig:
    """Returns the settings of a section; raises ConfigError for unknown keys and refused values."""
    if not section:
        raise ConfigError(f"{SECTION}: the section is missing; trainer.v1.trainer_mode=at_grpo needs it")
    if not isinstance(section, Mapping):
        raise ConfigError(f"{SECTION}={section!r}: a section, with {', '.join(AtGrpoConfig.model_fields)}")
    try:
        settings = AtGrpoConfig.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError(_one_line(error, section)) from None
    check(_rules(settings), f"{SECTION}.")
    return settings


def _one_line(error: ValidationError, value: Mapping[str, Any]) -> str:
    """Returns the first error that pydantic found in a value: key, value, and what is accepted."""
    # Unknown keys first: one may be a misspelt required key.
    first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    place = place_of(first["loc"], value)
    key = ".".join([SECTION, *place])
    if first["type"] == "missing":
        place.append(str(first["loc"][-1]))
        return f"{'.'.join([SECTION, *place])} is missing: {words(_annotation_at(AtGrpoConfig, place))}"
    if first["type"] == "extra_forbidden":
        if (line := gone.of_key(key)) is not None:
            return line
        known = _only(_annotation_at(AtGrpoConfig, place[:-1])).model_fields
        return f"{key} is not a known key: use one of {', '.join(known)}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}"
    return f"{key}={first['input']!r}: {words(_annotation_at(AtGrpoConfig, place))}"


def _annotation_at(section: type[Section], place: list[str]) -> Any:
    hint: Any = section
    for part in place:
        hint = _only(hint)
        if isinstance(hint, type) and issubclass(hint, Section):
            hint = hint.model_fields[part].rebuild_annotation()
        else:
            hint = (typing.get_args(hint) or (Any,))[-1]
    return hint


def _only(hint: Any) -> Any:
    """Returns a type without `| None` and `Annotated`."""
    if typing.get_origin(hint) is Annotated:
        return _only(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _only(next(part for part in typing.get_args(hint) if part is not type(None)))
    return hint


def _rules(c: AtGrpoConfig) -> Iterator[str]:
    """Yields the messages of a section, each beginning with the key without `at_grpo`."""
    if not isinstance(name := c.environment.get("name"), str):
        yield f"environment.name={name!r}: one of {', '.join(registered())}, or 'module:Class'"
    for where, one in c.each():
        yield from (f"{where}{message}" for message in _of_scheme(one))
    for name, own in c.spec.parts.items():
        if own.by_task != "none":
            yield f"parts.{name}.estimator.by_task={own.by_task!r} has no effect; set estimator.by_task"
        for agent, spec in own.agents.items():
            yield from _of_estimator(c.of_part(name), spec, f"parts.{name}.estimator.agents.{agent} ({own.name!r})")
    for agent, spec in c.spec.agents.items():
        part = agent.partition(".")[0]
        if part in c.spec.parts:
            yield f"estimator.agents.{agent} has no effect beside parts.{part}.estimator; set it there, or remove it"
        yield from _of_estimator(c.of_part(part), spec, f"estimator.agents.{agent} ({c.spec.name!r})")
    if c.group_filter and c.group_filter.min_groups and not c.group_filter.max_tasks:
        yield (
            f"group_filter.min_groups={c.group_filter.min_groups!r}: a policy that is always right never has them; "
            "bound the tasks of a step with max_tasks"
        )
    if c.group_filter and c.group_filter.max_tasks and not c.group_filter.min_groups:
        most = c.group_filter.max_tasks
        yield f"group_filter.max_tasks={most!r} has no effect without min_groups; set that, or remove it"
    for name, block in c.policy_settings().items():
        yield from _of_block(f"policies.{name}", block)
    if not any(block.trainable for block in c.policy_settings().values()):
        yield "policies has no trainable policy: set trainable: true for one of them"
    if c.opponents is not None:
        yield from _of_opponents(c, c.opponents)
    if c.critic is not None:
        yield from _of_critic(c, c.critic)


def _of_scheme(c: AtGrpoConfig) -> Iterator[str]:
    """Yields the messages of how tasks are played and compared, of the section or of a part."""
    not_here = f" has no effect with scheme: {c.scheme}; remove it"
    for key, weight in (("alpha", c.alpha), ("local_weight", c.local_weight)):
        if c.reward_is_outcome and weight != 1:
            yield f"{key}={weight!r}{not_here}, or use episode_reward: scores or own, or branch.score_weight (branch)"
    if c.scheme != "parallel" and c.episode_reward != "outcome":
        yield f"episode_reward={c.episode_reward!r}{not_here}, every candidate has its own reward"
    if isinstance(c.candidates, dict) and (c.scheme == "parallel" or not c.candidates):
        section = "or for tree and branch a section such as {all: 4, <agent>: 8}"
        yield f"candidates={c.candidates!r}: with scheme: {c.scheme} set one number, {section}"
    if c.scheme != "tree" and c.selection != "greedy":
        yield f"selection={c.selection!r}{not_here}"
    yield from _of_branch(c)
    if c.alpha == c.local_weight == 0:
        yield f"local_weight={c.local_weight!r} beside alpha=0 leaves no reward; set one of them above 0"
    yield from _of_estimator(c, c.spec, f"estimator={c.spec.name!r}")


def _of_branch(c: AtGrpoConfig) -> Iterator[str]:
    branch, places = c.branch, "every, first, random or {<agent>: <n>}"
    if branch is None:
        if c.scheme == "branch":
            yield f"scheme='branch' needs to know where to branch: set branch.at to {places}"
        return
    if c.scheme != "branch":
        yield f"branch.at={branch.at!r} has no effect with scheme: {c.scheme}; remove branch, or use scheme: branch"
    if branch.at == {}:
        yield f"branch.at={branch.at!r} names no decision; set it to {places}"
    if branch.nested and branch.at in ("first", "random"):
        every = "use at: every or {<agent>: <n>, ...}"
        yield f"branch.nested=True has no effect with at: {branch.at}, one branch point; {every}"
    if branch.max_tokens is not None and branch.max_tokens < branch.min_tokens:
        least = branch.min_tokens
        yield f"branch.max_tokens={branch.max_tokens!r} is less than min_tokens={least}: no decision is between"


def _of_opponents(c: AtGrpoConfig, given: Opponents) -> Iterator[str]:
    policies = c.policy_settings()
    if not (given.current or given.past or any(given.others.values())):
        yield "opponents: all weights are 0; give current, past or one of others a weight above 0"
    for name in given.others:
        if not given.others[name]:
            yield f"opponents.others.{name}: a weight of 0 has no effect; remove it"
        if name in ("current", "past"):
            yield f"opponents.others.{name}: taken, metrics name other opponents so; give the policy another name"
        if name not in policies:
            yield f"opponents.others.{name} is not a policy of this job: it has {', '.join(policies)}"
        if policies[name].trainable:
            yield f"opponents.others.{name}: a policy that is trained; use current, or one with trainable: false"
    if not given.past:
        for key in ("policy", "size", "every", "choose"):
            if (value := getattr(given, key)) != type(given).model_fields[key].default:
                yield f"opponents.{key}={value!r} has no effect with past: 0; remove it"
        return
    played = c.self_played
    if played is None or played not in c.learners:
        trained = ", ".join(c.learners)
        yield f"opponents.policy={played!r}: name the policy whose past selves play, one that is trained ({trained})"
    elif policies[played].base is None or policies[played].lora is None:
        yield (
            f"opponents.past={given.past}: past selves are adapters; set policies.{played} to {{base: <a name>, lora: "
            "{rank: 16}}, or past: 0"
        )


_OF_KIND = {"policy": "likelihood", "epochs": "likelihood", "lam": "value", "decay": "value"}


def _of_critic(c: AtGrpoConfig, given: CriticSettings) -> Iterator[str]:
    for key, kind in _OF_KIND.items():
        if kind != given.kind and (value := getattr(given, key)) != type(given).model_fields[key].default:
            yield f"critic.{key}={value!r} has no effect with kind: {given.kind}; remove it"
    if given.kind == "likelihood":
        yield from _of_critics_policy(c, given.policy)
    elif c.prefix_tree is False:
        yield "prefix_tree=False: verl's engine shows a critic no hidden states; use auto"
    if c.group_filter is not None:
        yield "group_filter: beside critic, groups are filtered before it has scored them; set it to null"


def _of_critics_policy(c: AtGrpoConfig, name: str | None) -> Iterator[str]:
    policies = c.policy_settings()
    own = None if name is None else policies.get(name)
    if own is None:
        yield f"critic.policy={name!r} is not a policy of this job: it has {', '.join(policies)}"
        return
    team = [one for one in c.learners if policies[one].lora is not None]
    bases = sorted(base for one in team if (base := policies[one].base) is not None)
    if own.base not in bases or own.lora is None or not own.trainable:
        base = bases[0] if bases else "<a name>"
        yield (
            f"critic.policy={name!r}: a critic is an adapter on the base of a policy that is trained as one; set "
            f"policies.{name} to {{base: {base}, lora: {{rank: 16}}}}, and give the team's the same base"
        )


def _of_block(key: str, block: PolicySettings) -> Iterator[str]:
    for name in SAMPLING:
        if name in block.rollout:
            yield f"{key}.rollout.{name}: the same for every policy of a job; set actor_rollout_ref.rollout.{name}"
    if "optim" in block.actor:
        yield f"{key}.actor.optim: set at_grpo.{key}.optim"
    for name in _OF_LORA:
        if name in block.model and block.lora is not None:
            yield f"{key}.model.{name} has no effect beside at_grpo.{key}.lora: set it there"
    for name in ("lora", "optim", "actor"):
        if not block.trainable and getattr(block, name):
            yield f"{key}.{name} has no effect on a frozen policy: remove it"


def _of_estimator(c: AtGrpoConfig, spec: EstimatorSpec, key: str) -> Iterator[str]:
    parallel = c.scheme == "parallel"
    trained = c.learners
    several = len(trained) > 1
    if not parallel and spec.unit in ("trajectory", "call"):
        what = "compares whole trajectories" if spec.unit == "trajectory" else "aligns the calls of whole episodes"
        yield f"{key} {what}: use scheme: parallel, or estimator: at_grpo"
    if not parallel and spec.step_weight:
        yield (
            f"{key}: step_weight={spec.step_weight} compares equal prompts of different episodes, but with scheme: "
            f"{c.scheme} a group has one prompt; use scheme: parallel, or step_weight: 0"
        )
    if not parallel and spec.discount != 1:
        yield (
            f"{key}: discount={spec.discount} compares decisions with more and less to come, but with scheme: "
            f"{c.scheme} a group is one decision; use scheme: parallel, or discount: 1"
        )
    if not parallel and "agent" in spec.scopes:
        agent = f"the scope agent has no effect with scheme: {c.scheme}, where a group has one agent"
        yield f"{key}: {agent}; use scheme: parallel, or estimator: at_grpo"
    if c.episode_reward == "own" and spec.unit == "trajectory":
        yield (
            f"{key} has one reward for an episode, but with episode_reward: own every row has its own; use estimator: "
            "grpo or dr_mas, or another episode_reward"
        )
    # A policy's update has only its own agents' rows, which do not give the team's mean and std.
    rows = f"each of several policies ({', '.join(trained)}) has only its own agents'"
    if parallel and several and spec.unit != "trajectory" and "group" in spec.scopes:
        yield (
            f"{key} compares the rows of all agents of a task, but {rows}: use estimator: dr_mas as it stands (per "
            "agent), estimator: mas_grpo, or one policy"
        )
    if several and spec.step_weight and spec.step_scope == "group":
        what = "compares all rows with the same prompt, of any agent"
        yield f"{key} {what}, but {rows}: use step_scope: agent, or one policy"
