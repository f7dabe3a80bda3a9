"""Compares the rules of verl's keys with the installed verl: none is stale, and each does what it says."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass

from verl_atgrpo import recipes
from verl_atgrpo.train.config.policies import config_of_policy, expand_policies
from verl_atgrpo.train.config.schema import ConfigError
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.config.verl_key_table import KEY_RULES, NEEDED, REFUSED
from verl_atgrpo.train.config.verl_keys import check_key, check_keys, is_known, rule_of
from verl_atgrpo.train.config.view import View, leaves, shown_as, verls_defaults
from verl_atgrpo.train.trainer.dataset import wire

UNLISTED = (
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.actor.optim.grad_clip",
    "actor_rollout_ref.actor.router_replay.mode",
    "actor_rollout_ref.model.target_parameters",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "actor_rollout_ref.rollout.enable_sleep_mode",
    "actor_rollout_ref.rollout.repetition_penalty",
    "algorithm.at_grpo_estimator",
    "algorithm.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights",
    "data.at_grpo",
    "trainer.remove_previous_ckpt_in_save",
)
"""Keys that verl reads (or we write) and does not list, outside of sections with any keys."""
VALID = {
    "actor_rollout_ref.actor.loss_agg_mode": "token-sum",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.rollout.expert_parallel_size": 6,  # 3 x 2, the others' changed values
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 3,
    "actor_rollout_ref.rollout.data_parallel_size": 2,
    "actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker": 3,
}
"""Values that verl's dataclasses accept where most are refused."""
BY_ITSELF = ("model.lora_rank", "optim.warmup_style", ".disaggregation.", ".profiler.", ".qat.")
"""Parts of keys that change others, or of which verl's dataclasses accept few values."""


@functools.cache
def recipe() -> Any:
    return recipes.compose("plan_path_qwen3_1p7b", ["at_grpo.train_tasks=128", "at_grpo.val_tasks=8"])


@functools.cache
def keys() -> tuple[str, ...]:
    return tuple(key for key, _ in leaves(OmegaConf.to_container(recipes.compose("ppo_trainer"), resolve=False)))


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "other"]
    if isinstance(value, dict):
        return {"other": 1}
    return f"{value}_other" if isinstance(value, str) else "other"


# ------------------------------------------------------------------ complete and not stale


def test_the_table_is_of_the_configuration_that_verl_composes() -> None:
    raw = dict(leaves(OmegaConf.to_container(recipes.compose("ppo_trainer"), resolve=False)))
    assert raw.pop("model_engine") == "dp"
    assert raw == verls_defaults()


def test_every_rule_has_a_key_of_verls() -> None:
    listed = {key[:end] for key in keys() for end in (len(key), *(at.start() for at in re.finditer(r"\.", key)))}
    unlisted = [key for key in KEY_RULES if key != "_target_" and key not in listed]
    assert not [key for key in unlisted if not key.startswith(UNLISTED) and not is_known(key.rpartition(".")[0])]
    assert not set(UNLISTED) & listed


# ------------------------------------------------------------------ refusals


def refusal(view: View, key: str, value: Any, **others: Any) -> str | None:
    """Returns the message that refuses a value, with values of other keys, or None."""
    changed = copy.copy(view)
    changed.written = {**view.written, key: value}
    changed.values = {**view.values, **others, key: value}
    try:
        check_key(changed, key)
    except ConfigError as error:
        return str(error)
    return None


def decided(beside: bool) -> Iterator[str]:
    """Yields the keys on whose values a rule decides, also those that verl does not list.

    Either those that have an effect beside another key alone, or the others.
    """
    for key in (*keys(), *(key for key in KEY_RULES if key not in keys() and is_known(key) and "." in key)):
        rule = rule_of(key)
        if rule in (NEEDED if beside else REFUSED):
            yield key


def test_every_other_value_stops_with_one_line_that_helps() -> None:
    view = View(recipe())
    for key in decided(beside=False):
        for value in (other(view.values.get(key)), "other", 7.5):
            message = refusal(view, key, value)
            if message is None:  # another accepted value
                continue
            assert message.startswith(f"{key}={shown_as(value)}"), message
            assert "\n" not in message
            assert re.search(r"\b(set|leave|name|use|remove)\b", message.partition(shown_as(value))[2]), message
        assert message is not None, key


def test_what_works_beside_another_key_is_accepted_there_alone() -> None:
    view, found = View(recipe()), 0
    for key in decided(beside=True):
        value = other(view.values.get(key))
        message = str(refusal(view, key, value))
        if (beside := re.search(r" has no effect beside ([\w.]+)=(\S+): set it to .*, or that to ", message)) is None:
            continue
        found += 1
        words = message.partition("or that to ")[2]
        fitting = {"true": True, "false": False, "one of token, sequence": "token"}.get(words, words)
        fitting = 8 if words.startswith("a whole number") else fitting
        assert refusal(view, key, value, **{beside[1]: fitting}) is None, key
        assert refusal(view, key, view.default(key)) is None, key
        for without in (None, -1, ["x"]):
            assert f"has no effect beside {beside[1]}=" in str(refusal(view, key, value, **{beside[1]: without}))
    assert found > 25


def test_keys_that_verl_does_not_have_are_refused_and_a_users_own_sections_are_not() -> None:
    config = copy.deepcopy(recipe())
    with open_dict(config):
        config.mine = {"learning_rate": 1e-6}
    with pytest.raises(ConfigError, match=r"^mine=\.\.\.: neither verl nor the section at_grpo has such a key"):
        check_keys(View(config))
    with open_dict(config):
        config.actor_rollout_ref.actor.optim.lr = "${mine.learning_rate}"
        check_keys(View(config))
        config.trainer.tst_freq = 10
    with pytest.raises(
        ConfigError, match=r"^trainer\.tst_freq=10: .* no such key.* did you mean trainer\.test_freq\?$"
    ):
        check_keys(View(config))
    policy = copy.deepcopy(recipe())
    with open_dict(policy):
        policy.actor_rollout_ref.rollout.server = {"timeout": 3.0}
    check_keys(View(policy))
    with pytest.raises(ConfigError, match=r"^at_grpo\.policies\.coder\.rollout\.server\.timeout=3\.0: "):
        check_keys(View(policy), "at_grpo.policies.coder")


@pytest.mark.parametrize("name", ["plan_path_qwen3_1p7b", "plan_path_cpu_roles"])
def test_a_configuration_passes_as_well_once_verl_has_resolved_it(name: str) -> None:
    config = recipes.compose(name)
    expand_policies(config, read_section(config))
    with open_dict(config):
        config.transfer_queue.enable = True  # verl's main does
    OmegaConf.resolve(config)
    check_keys(View(config))
    for policy in config.at_grpo.policies or {"shared": None}:
        check_keys(View(config_of_policy(config, policy)), "a policy")


# ------------------------------------------------------------------ what works reaches its place


def changed_everywhere() -> dict[str, Any]:
    """Every key that works -> another value than the recipe's."""
    view = View(recipe())
    found = {}
    for key in keys():
        rule = rule_of(key)
        if (rule is not None and rule.kind is Any) or any(part in key for part in BY_ITSELF):
            continue
        found[key] = VALID.get(key, other(view.values.get(key, {})))
    return found


def test_what_works_reaches_the_policys_workers_and_the_trainer() -> None:
    """Through expansion and wiring to what a policy's unit is made of, and on to verl's dataclasses."""
    changed = changed_everywhere()
    config = copy.deepcopy(recipe())
    with open_dict(config):
        for key, value in changed.items():
            OmegaConf.update(config, key, value, merge=False)
        config.at_grpo.policies = {"coder": {}, "planner": {}}
        config.at_grpo.agents = {"tool_user": "coder", "planner": "planner"}
    settings = read_section(config)
    expand_policies(config, read_section(config))
    wire(config, settings, settings.make_environment())
    job = config_of_policy(config, "planner")
    for key, value in changed.items():
        assert OmegaConf.select(job, key) == value, key
    sections = job.actor_rollout_ref
    placed = {
        "actor_rollout_ref.actor.": omega_conf_to_dataclass(sections.actor),
        "actor_rollout_ref.rollout.": omega_conf_to_dataclass(sections.rollout),
    }
    for beginning, section in placed.items():
        for key in (key for key in changed if key.startswith(beginning)):
            assert reached(section, key.removeprefix(beginning)) == plain(changed[key]), key


def test_what_works_of_the_model_reaches_verls_model(tmp_path: Path) -> None:
    """verl's model dataclass reads its files, so values that name files or modules must exist."""
    from verl_atgrpo.lab.tiny_models.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer([])
    for name in ("model", "other"):
        build_model(tokenizer, 0, hidden=32, layers=1).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    there = {
        "path": str(tmp_path / "model"),
        "tokenizer_path": str(tmp_path / "other"),
        "hf_config_path": str(tmp_path / "other"),
        "external_lib": "colorsys",
        "use_shm": False,  # would copy the model to /dev/shm
        "override_config": {"attn_implementation": "eager", "max_position_embeddings": 512},
    }
    changed = {key.partition(".model.")[2]: value for key, value in changed_everywhere().items() if ".model." in key}
    changed |= there
    config = copy.deepcopy(recipe())
    for key, value in changed.items():
        OmegaConf.update(config, f"actor_rollout_ref.model.{key}", value, merge=False, force_add=True)
    expand_policies(config, read_section(config))
    model = omega_conf_to_dataclass(config_of_policy(config, "shared").actor_rollout_ref.model)
    for key, value in changed.items():
        assert reached(model, key) == plain(value), key
    assert model.tokenizer.chat_template == changed["custom_chat_template"]
    assert model.hf_config.max_position_embeddings == 512
    assert "colorsys" in sys.modules


def reached(section: Any, key: str) -> Any:
    for part in key.split("."):
        section = (
            section[part] if isinstance(section, dict) or OmegaConf.is_config(section) else getattr(section, part)
        )
    return plain(section)


def plain(value: Any) -> Any:
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return list(value) if isinstance(value, tuple) else value
