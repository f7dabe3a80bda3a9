"""Checks how agents answer, `at_grpo.sampling`, against the job, the models' tokenizers and their chat templates."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from jinja2 import Environment, TemplateError, meta
from omegaconf import DictConfig

from verl_atgrpo.config.schema import SECTION, AtGrpoConfig, ConfigError, ValidationAnswers

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
"""What transformers gives a template itself."""


def check_answers(config: DictConfig, settings: AtGrpoConfig, agents: Collection[str]) -> None:
    """Raises ConfigError for an unknown agent, or settings that contradict the job's.

    Args:
        config: the job's configuration.
        settings: its section `at_grpo`.
        agents: the environment's.
    """
    rollout = config.actor_rollout_ref.rollout
    for agent, block in (settings.sampling or {}).items():
        key = f"{SECTION}.sampling.{agent}"
        if agent != "all" and agent not in agents:
            raise ConfigError(
                f"{key} is not an agent of {settings.environment['name']!r}: it has {', '.join(agents)} (or use all)"
            )
        for where, own in ((key, block), (f"{key}.validation", block.validation)):
            most, longest = None if own is None else own.max_response_length, config.data.max_response_length
            if most is not None and most > longest:
                raise ConfigError(
                    f"{where}.max_response_length={most}: more than data.max_response_length={longest}, for which "
                    "servers and micro-batches have room; raise that, or lower this"
                )
        if block.temperature not in (None, 1) and rollout.logprobs_mode != "processed_logprobs":
            raise ConfigError(
                f"actor_rollout_ref.rollout.logprobs_mode={rollout.logprobs_mode}: with {key}.temperature="
                f"{block.temperature} the server's log-probs would not be those that were sampled from, set it to "
                "processed_logprobs"
            )
    temperatures = {settings.answers_of(agent, validate=False).temperature or rollout.temperature for agent in agents}
    if len(temperatures) > 1 and config.actor_rollout_ref.model.use_fused_kernels:
        raise ConfigError(
            f"{SECTION}.sampling: the temperatures of the agents differ, which verl's fused kernels cannot compute; "
            "set actor_rollout_ref.model.use_fused_kernels to false"
        )


def check_chats(settings: AtGrpoConfig, policy: str, tokenizer: Any) -> None:
    """Raises ConfigError if a setting of an agent of `policy` does not come through the policy's tokenizer.

    Args:
        settings: the section `at_grpo`.
        policy: the policy's name.
        tokenizer: of transformers, with a chat template.
    """
    for key, own in _blocks_of(settings, policy):
        check_chat(own, key, f"policy {policy!r}", tokenizer)


def check_chat(own: ValidationAnswers, key: str, policy: str, tokenizer: Any) -> None:
    """Raises ConfigError if one of an agent's settings does not come through a tokenizer.

    Args:
        own: the settings.
        key: theirs, for messages.
        policy: whose tokenizer it is, for messages.
        tokenizer: of transformers, with a chat template.
    """
    for stop in own.stop or ():
        if tokenizer.decode(tokenizer.encode(stop, add_special_tokens=False), skip_special_tokens=True) != stop:
            raise ConfigError(
                f"{key}.stop: {policy} never answers {stop!r}, its tokenizer cuts that or reads it as a special "
                "token; use another text"
            )
    known = _variables(tokenizer.chat_template) if own.chat_template_kwargs else None
    for name in own.chat_template_kwargs or {}:
        if known is not None and name not in known:
            shown = ", ".join(sorted(known - _GIVEN)) or "no others"
            raise ConfigError(
                f"{key}.chat_template_kwargs.{name} has no effect: the chat template of {policy} reads {shown}"
            )
    if own.system is not None:
        _check_system(key, policy, tokenizer, own.system, own.chat_template_kwargs or {})


def _blocks_of(settings: AtGrpoConfig, policy: str) -> Iterator[tuple[str, ValidationAnswers]]:
    """Yields the settings of agents that have a policy in training or validation, with their keys."""
    training = settings.agents
    validation = {**training, **(settings.val_agents or {})}
    for agent in settings.sampling or {}:
        policies = {agents.get(agent, agents.get("all")) for agents in (training, validation)}
        if agent == "all" or policy in policies:
            for validate in (False, True):
                yield f"{SECTION}.sampling.{agent}", settings.answers_of(agent, validate)


def _variables(template: Any) -> set[str] | None:
    """Returns the variables that a chat template reads, or None if they cannot be told."""
    if not isinstance(template, str):  # several templates, by purpose
        return None
    try:
        return meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template))
    except TemplateError:  # a syntax of transformers' own, such as generation blocks
        return None


def _check_system(key: str, policy: str, tokenizer: Any, text: str, arguments: Mapping[str, Any]) -> None:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
    try:
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    except TemplateError as error:
        raise ConfigError(f"{key}.system: the chat template of {policy} refuses it: {error}") from error
    if text.strip() not in shown:
        raise ConfigError(f"{key}.system has no effect: the chat template of {policy} shows no system message")
