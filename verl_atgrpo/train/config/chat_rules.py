"""Rules of how agents answer, and of what a critic reads, with the models' tokenizers and their chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import meta
from omegaconf import DictConfig

from verl_atgrpo.play.curriculum import Curriculum
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import tasks_of
from verl_atgrpo.play.mixture import Mixture
from verl_atgrpo.play.types import names_of, part_of
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config.schema import SECTION, AtGrpoConfig, ConfigError, SamplingSettings

_SENTINELS = ("one prompt", "another prompt")
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"}
"""What transformers gives a template itself."""
_LOOKED_AT = 64
"""Training tasks whose hindsight is looked at before the start."""


def answering(settings: AtGrpoConfig, environment: Environment) -> dict[str, set[str]]:
    """Returns agent -> the policies that may answer for it, in training, validation or as an opponent."""
    training, validation = settings.policies_of(environment), settings.validation_policies_of(environment)
    parts = environment.parts if isinstance(environment, Mixture) else {}
    found = {agent: {validation[agent]} for agent in environment.agents}
    for agent in found:
        if not parts or parts[part_of(agent)].weight:
            found[agent].add(training[agent])
    if settings.opponents is not None:
        for agent in found:
            found[agent] |= {*settings.opponents.others} if _may_oppose(environment, agent) else set()
    return found


def _may_oppose(environment: Environment, agent: str) -> bool:
    """Returns whether an agent is of an environment that may have opponents, such as a mixture's part."""
    if isinstance(environment, Mixture):
        return _may_oppose(environment.parts[part_of(agent)].environment, agent)
    if isinstance(environment, Curriculum):
        return _may_oppose(environment.levels[-1], agent)
    return type(environment).opponents is not Environment.opponents


def of_chats(settings: AtGrpoConfig, answering: Mapping[str, set[str]], policy: str, tokenizer: Any) -> Iterator[str]:
    """Settings of the agents for which `policy` answers that do not come through its tokenizer."""
    for key in settings.sampling or {}:
        if any(policy in policies and key in ("all", *names_of(agent)) for agent, policies in answering.items()):
            for validate in (False, True):
                own = settings.sampling_of(key, validate)
                yield from of_chat(own, f"{SECTION}.sampling.{key}", f"policy {policy!r}", tokenizer)


def of_chat(own: SamplingSettings, key: str, policy: str, tokenizer: Any) -> Iterator[str]:
    """Settings of an agent that do not come through a tokenizer with a chat template.

    `key` (of the settings) and `policy` (whose tokenizer it is) are for messages.
    """
    given, template_key = own.chat_template_kwargs or {}, f"{key}.chat_template_kwargs"
    for stop in own.stop or ():
        if tokenizer.decode(tokenizer.encode(stop, add_special_tokens=False), skip_special_tokens=True) != stop:
            why = "its tokenizer cuts that or reads it as a special token"
            yield f"{key}.stop: {policy} never answers {stop!r}, {why}; use another text"
    yield from _of_reading(given, template_key, {policy: tokenizer})
    yield from _of_rendering(given, template_key, policy, tokenizer)
    if own.system is None:
        return
    messages = [{"role": "system", "content": own.system}, {"role": "user", "content": "?"}]
    try:
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
    except jinja2.TemplateError as error:
        yield f"{key}.system: the chat template of {policy} refuses it: {error}"
        return
    if own.system.strip() not in shown:
        yield f"{key}.system has no effect: the chat template of {policy} shows no system message"


def _of_reading(given: Mapping[str, Any], key: str, tokenizers: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that no chat template reads; `tokenizers` are by policy, as messages say."""
    if not given:
        return
    read = [_variables(tokenizer.chat_template) for tokenizer in tokenizers.values()]
    known = {name for names in read if names is not None for name in names}
    for name in given:
        if None not in read and name not in known:
            shown = ", ".join(sorted(known - _GIVEN)) or "no others"
            yield f"{key}.{name} has no effect: the chat template of {', '.join(tokenizers)} reads {shown}; remove it"


def of_template_arguments(data: DictConfig, tokenizers: Mapping[str, Any]) -> Iterator[str]:
    """Arguments for every policy's chat template that none reads, or with which one cannot show a prompt."""
    key, given = "data.apply_chat_template_kwargs", dict(data.get("apply_chat_template_kwargs") or {})
    yield from _of_reading(given, key, tokenizers)
    for policy, tokenizer in tokenizers.items():
        yield from _of_rendering(given, key, policy, tokenizer)


def _of_rendering(given: Mapping[str, Any], key: str, policy: str, tokenizer: Any) -> Iterator[str]:
    """A policy that is not shown what a user's message says."""
    chat = Chat(tokenizer, given)
    shown = f"{key}={dict(given)}" if given else f"the chat template of {policy}"
    remedy = "remove it" if given else "set its model.custom_chat_template"
    prompts = [[{"role": "user", "content": text}] for text in _SENTINELS]
    try:
        ids = list(map(chat.encode, prompts))
        texts = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **given)
            for prompt in prompts
        ]
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"{shown}: {policy} cannot be given a prompt, {why}; {remedy}") from error
    if not all(isinstance(one, list) and one for one in ids) or texts[0] == texts[1]:
        yield f"{shown}: {policy} is shown the same for every prompt; {remedy}"


def _variables(template: Any) -> set[str] | None:
    """Returns the variables that a chat template reads, or None if they cannot be told."""
    if not isinstance(template, str):  # several templates, by purpose
        return None
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        return meta.find_undeclared_variables(parsed)
    except jinja2.TemplateError:  # a syntax of transformers' own, such as generation blocks
        return None


def hindsight_ids(tokenizer: Any, hindsight: str) -> list[int]:
    """Returns the ids of what an environment says of a task in hindsight, as they stand before a critic's prompt."""
    return list(tokenizer.encode(f"{hindsight}\n", add_special_tokens=False)) if hindsight else []


def hindsights(settings: AtGrpoConfig, environment: Environment) -> list[str]:
    """Returns what an environment says in hindsight of its first training tasks; nothing if no critic reads it."""
    if settings.critic is None or not settings.critic.hindsight:
        return []
    size = tasks_of(environment, "train")
    tasks = range(_LOOKED_AT if size is None else min(size, _LOOKED_AT))
    return [environment.hindsight(environment.task("train", index)) for index in tasks]


def of_hindsight(texts: Iterable[str], tokenizer: Any, data: DictConfig) -> Iterator[str]:
    """What an environment says in hindsight that takes more than half of the room for a prompt."""
    for text in texts:
        if 2 * (tokens := len(hindsight_ids(tokenizer, text))) > data.max_prompt_length:
            yield (
                f"at_grpo.critic: Environment.hindsight says {tokens} tokens of a task, which with the prompt have to "
                f"fit into data.max_prompt_length={data.max_prompt_length}, and may take half of it; say less, or "
                "raise that"
            )
