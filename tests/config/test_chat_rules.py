"""How agents answer: which settings come before which, and those that have no effect or cannot work."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
pytest.importorskip("transformers")

from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.chat_rules import answering, of_chats, of_template_arguments
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.section import parse_section

QUICK = ("at_grpo.train_tasks=128", "at_grpo.val_tasks=8")
THINKS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
USERS = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)
RAW = "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"
NO_SYSTEM = "{% for message in messages if message.role != 'system' %}{{ message.content }}{% endfor %}"


def settings(sampling: dict[str, Any], **others: Any) -> AtGrpoConfig:
    return parse_section({"environment": {"name": "plan_path"}, "sampling": sampling, **others})


def check_chats(made: AtGrpoConfig, policy: str, tokenizer: Any) -> None:
    check(of_chats(made, answering(made, made.make_environment()), policy, tokenizer))


def test_an_agents_own_settings_come_before_those_of_all_and_validations_last() -> None:
    made = settings(
        {
            "all": {"temperature": 0.7, "stop": ["END"], "validation": {"temperature": 0.0, "top_p": 0.9}},
            "tool_user": {"temperature": 1.2, "max_response_length": 64, "validation": {"max_response_length": 32}},
        }
    )

    def answers(agent: str, validate: bool) -> dict[str, Any]:
        return made.sampling_of(agent, validate).model_dump(exclude_none=True)

    assert answers("planner", False) == {"temperature": 0.7, "stop": ["END"]}
    assert answers("tool_user", False) == {"temperature": 1.2, "stop": ["END"], "max_response_length": 64}
    # The temperature of training is not that of validation.
    assert answers("planner", True) == {"temperature": 0.0, "top_p": 0.9, "stop": ["END"]}
    assert answers("tool_user", True) == {"temperature": 0.0, "top_p": 0.9, "stop": ["END"], "max_response_length": 32}
    # An agent's own come before those of all, also those for validation; template arguments are merged.
    made = settings(
        {
            "all": {
                "chat_template_kwargs": {"thinking": False, "a": 1},
                "validation": {"max_response_length": 512, "chat_template_kwargs": {"a": 2}},
            },
            "tool_user": {
                "max_response_length": 64,
                "chat_template_kwargs": {"b": 3},
                "validation": {"chat_template_kwargs": {"thinking": True}},
            },
        }
    )
    assert answers("planner", True)["max_response_length"] == 512
    assert answers("tool_user", True)["max_response_length"] == 64
    assert answers("tool_user", False)["chat_template_kwargs"] == {"thinking": False, "a": 1, "b": 3}
    assert answers("tool_user", True)["chat_template_kwargs"] == {"thinking": True, "a": 2, "b": 3}
    assert settings({}).sampling_of("tool_user", False).model_dump(exclude_none=True) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("tool_user: {temperature: 0}", "at_grpo.sampling.tool_user.temperature=0: .*above 0"),
        ("tool_user: {top_p: 0.9}", "at_grpo.sampling.tool_user.top_p is not a known key"),  # would bias log-probs
        ("tool_user: {stop: ['']}", "at_grpo.sampling.tool_user.stop.*: a text that is not empty"),
        ("tool_user: {max_response_length: 0}", "at_grpo.sampling.tool_user.max_response_length=0"),
        (
            "toll: {temperature: 1.2}",
            "at_grpo.sampling.toll is not an agent of 'plan_path': it has tool_user, planner",
        ),
        (
            "tool_user: {max_response_length: 4096}",
            "at_grpo.sampling.tool_user.max_response_length=4096: more than data.max_response_length=2048",
        ),
        (
            "all: {validation: {max_response_length: 4096}}",
            "at_grpo.sampling.all.validation.max_response_length=4096: more",
        ),
        (
            "tool_user: {temperature: 0.5}",
            "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs: with at_grpo.sampling its agents answer at 0.5, 1",
        ),
    ],
)
def test_settings_that_cannot_work(compose: Any, given: str, message: str) -> None:
    config = compose("plan_path_qwen3_1p7b", *QUICK, f"at_grpo.sampling={{{given}}}", RAW)
    with pytest.raises(ConfigError, match=message):
        check_run(config)


def test_temperatures_that_differ_are_not_for_fused_kernels(compose: Any) -> None:
    fused = "actor_rollout_ref.model.use_fused_kernels=true"
    given = ("plan_path_qwen3_1p7b", *QUICK, fused)
    check_run(compose(*given, "at_grpo.sampling={all: {temperature: 0.5}}"))
    check_run(compose(*given, "at_grpo.sampling={tool_user: {validation: {temperature: 0.5}}}"))
    warm = "at_grpo.sampling={tool_user: {temperature: 0.5}}"
    with pytest.raises(ConfigError, match=r"use_fused_kernels=true: .* one temperature, and .* have 0\.5, 1"):
        check_run(compose(*given, warm))
    # Between policies they may differ, and a policy's own section counts.
    roles = ("~at_grpo.agents", "+at_grpo.agents={tool_user: a, planner: b}")
    check_run(compose(*given, *roles, "at_grpo.policies={a: {}, b: {}}", warm))
    own = "at_grpo.policies={a: {rollout: {logprobs_mode: raw_logprobs}}, b: {}}"
    with pytest.raises(ConfigError, match=r"policies\.a\.rollout\.logprobs_mode=raw_logprobs"):
        check_run(compose(*given, *roles, own, warm))


def test_an_argument_that_no_template_reads_is_refused() -> None:
    """Or a misspelt enable_thinking leaves thinking on for a whole run."""
    plain, thinks = build_tokenizer(()), build_tokenizer(())
    thinks.chat_template = THINKS
    data = OmegaConf.create({"apply_chat_template_kwargs": {"enable_thinking": False}})
    check(of_template_arguments(data, {"policy 'a'": thinks, "policy 'b'": plain}))
    with pytest.raises(
        ConfigError, match=r"apply_chat_template_kwargs\.enable_thinking has no effect: .* policy 'b' reads"
    ):
        check(of_template_arguments(data, {"policy 'b'": plain}))
    check(of_template_arguments(OmegaConf.create({"apply_chat_template_kwargs": None}), {"policy 'b'": plain}))


ALIKE = "{{ bos_token }}{% for m in messages %}<u>{% endfor %}"
STRICT = "{% if enable_thinking and not tools %}{{ raise_exception('no tools') }}{% endif %}" + THINKS


@pytest.mark.parametrize(
    ("template", "given", "told"),
    [
        (THINKS, {"tokenize": False}, "tokenize has no effect: .*; remove it"),
        (f"{THINKS}{{{{ tokenize }}}}", {"tokenize": False}, "cannot be given a prompt, TypeError: .*; remove it"),
        (f"{THINKS}{{{{ tools }}}}", {"tools": 5}, "cannot be given a prompt, .*; remove it"),
        (THINKS, {"messages": []}, "cannot be given a prompt, .*; remove it|shown the same.*; remove it"),
        (STRICT, {"enable_thinking": True}, "cannot be given a prompt, .*no tools; remove it"),
        (THINKS + "{{ documents[0].text }}", {"documents": []}, "cannot be given a prompt, .*; remove it"),
        (ALIKE, {}, "the chat template of policy 'p': .*; set its model.custom_chat_template"),
        ("nothing", {}, "the chat template of policy 'p': .*; set its model.custom_chat_template"),
        ("{% for m in messages %}", {}, "cannot be given a prompt, .*custom_chat_template"),
        ("{{ messages[1].content }}", {}, "cannot be given a prompt, .*custom_chat_template"),
        (THINKS, {}, None),
        (THINKS, {"enable_thinking": False}, None),
    ],
)
def test_a_prompt_is_rendered_with_the_arguments_of_the_run(template: str, given: Any, told: str | None) -> None:
    tokenizer = build_tokenizer(["a", "b"])
    tokenizer.chat_template = template
    data = OmegaConf.create({"apply_chat_template_kwargs": given})
    if told is None:
        check(of_template_arguments(data, {"policy 'p'": tokenizer}))
        return
    with pytest.raises(ConfigError, match=told) as caught:
        check(of_template_arguments(data, {"policy 'p'": tokenizer}))
    assert "data.apply_chat_template_kwargs" in str(caught.value) or not given


def test_the_policy_of_all_in_validation_reads_every_setting() -> None:
    """`val_agents: {all: ...}` comes before what training assigns."""
    tokenizer = build_tokenizer(())
    tokenizer.chat_template = THINKS
    made = settings(
        {"tool_user": {"stop": ["<|end|>"]}},
        policies={"p": {}, "q": {}},
        agents={"tool_user": "p", "planner": "q"},
        val_agents={"all": "q"},
    )
    with pytest.raises(ConfigError, match="policy 'q'"):
        check_chats(made, "q", tokenizer)


@pytest.mark.parametrize(
    ("template", "given", "message"),
    [
        (THINKS, {"chat_template_kwargs": {"enable_thinking": False}, "system": "Be brief.", "stop": ["\nEND"]}, None),
        (THINKS, {"chat_template_kwargs": {"thinking": False}}, "thinking has no effect: .* reads enable_thinking"),
        (THINKS, {"stop": ["<|end|>"]}, r"tool_user\.stop: policy 'p' never answers '<\|end\|>'"),
        (THINKS, {"stop": ["ä"]}, r"tool_user\.stop: policy 'p' never answers 'ä'"),
        (THINKS, {"validation": {"stop": ["<|end|>"]}}, "never answers"),
        (USERS, {"system": "Be brief."}, "the chat template of policy 'p' refuses it: no system"),
        (NO_SYSTEM, {"system": "Be brief."}, "system has no effect"),
    ],
)
def test_settings_that_do_not_come_through_a_policys_tokenizer(
    template: str, given: dict[str, Any], message: str | None
) -> None:
    tokenizer = build_tokenizer(())
    tokenizer.chat_template = template
    made = settings({"tool_user": given}, policies={"p": {}, "q": {}}, agents={"tool_user": "p", "planner": "q"})
    check_chats(made, "q", tokenizer)  # the planner's
    if message is None:
        check_chats(made, "p", tokenizer)
        return
    with pytest.raises(ConfigError, match=message):
        check_chats(made, "p", tokenizer)
    everyone = settings({"all": given}, policies={"p": {}, "q": {}}, agents={"tool_user": "p", "planner": "q"})
    with pytest.raises(ConfigError, match="policy 'q'"):
        check_chats(everyone, "q", tokenizer)


MIXED = {
    "name": "mixture",
    "parts": {"walk": {}, "duel": {"name": "tic_tac_toe"}, "levels": {"name": "walk", "weight": 0}},
}


@pytest.mark.parametrize(
    ("agents", "key"),
    [
        ({"all": "p", "walk": "q"}, "walk.navigator"),
        ({"all": "p", "walk.navigator": "q", "walk.pacer": "q"}, "walk"),
        ({"duel": "p", "levels": "p", "walk": "q"}, "walk.pacer"),
        ({"duel": "p", "walk": "p", "levels": "p"}, "levels"),
    ],
)
def test_a_parts_settings_come_through_the_tokenizers_of_those_who_answer(agents: dict[str, str], key: str) -> None:
    """`p` shows no system message and reads no arguments; it does not answer for the walk."""
    plain, thinks = build_tokenizer(()), build_tokenizer(())
    plain.chat_template, thinks.chat_template = NO_SYSTEM, THINKS
    # `levels` plays in validation alone.
    given = {"environment": MIXED, "policies": {"p": {}, "q": {}}, "agents": agents, "val_agents": {"levels": "q"}}
    made = settings({key: {"system": "Be brief.", "chat_template_kwargs": {"enable_thinking": False}}}, **given)
    check_chats(made, "p", plain)
    check_chats(made, "q", thinks)
    with pytest.raises(ConfigError, match=rf"sampling\.{key}\.system has no effect"):
        check_chats(settings({key: {"system": "Be brief."}}, **given), "q", plain)
    with pytest.raises(ConfigError, match=rf"sampling\.{key}\.chat_template_kwargs\.thinks has no effect"):
        check_chats(settings({key: {"chat_template_kwargs": {"thinks": False}}}, **given), "q", thinks)


@pytest.mark.parametrize(
    ("environment", "key", "told"),
    [
        ({"name": "tic_tac_toe"}, "x", True),
        ({"name": "tic_tac_toe"}, "all", True),
        (MIXED, "duel.o", True),
        (MIXED, "duel", True),
        (MIXED, "walk", False),
        ({"name": "mixture", "parts": {"walk": {}, "hard": {"name": "number_search"}}}, "all", False),
    ],
)
def test_an_opponents_policy_reads_what_it_is_asked_too(environment: dict[str, Any], key: str, told: bool) -> None:
    """A policy of `opponents.others` answers in games alone."""
    tokenizer = build_tokenizer(())
    tokenizer.chat_template = USERS
    made = settings(
        {key: {"system": "Be brief."}},
        environment=environment,
        policies={"p": {}, "teacher": {"trainable": False}},
        agents={"all": "p"},
        opponents={"past": 0, "others": {"teacher": 1}},
    )
    with (
        pytest.raises(ConfigError, match="the chat template of policy 'teacher' refuses it") if told else nullcontext()
    ):
        check_chats(made, "teacher", tokenizer)
