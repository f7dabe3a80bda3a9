"""Compares the table of verl's keys with the installed verl: complete, not stale, and correct as far as testable."""

from __future__ import annotations

import ast
import copy
import functools
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import verl
from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass

import verl_atgrpo
from verl_atgrpo import recipes
from verl_atgrpo.config.key_check import (
    View,
    check_key,
    check_keys,
    leaves,
    pattern_of,
    row_of,
    rows,
    shown_as,
    verls_defaults,
)
from verl_atgrpo.config.key_table import Default, Like, Row
from verl_atgrpo.config.kinds import fits, words
from verl_atgrpo.config.policies import expand_policies, job_of
from verl_atgrpo.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.trainer.dataset import wire

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


def keys_of(row: Row, pattern: str) -> list[str]:
    """The keys of verl's that this pattern decides on; for one that verl does not list, a key that fits it."""
    if row.added:
        return [pattern.replace(".**", ".x")]
    return [key for key in keys() if pattern_of(key) == pattern]


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


def test_every_key_has_one_row_and_every_row_a_key() -> None:
    deciding = {key: pattern_of(key) for key in keys()}
    assert [key for key, pattern in deciding.items() if pattern is None] == []
    for pattern, row in rows().items():
        assert row.added == (pattern not in deciding.values()), pattern
        assert row.status != "works" or row.reader, pattern


def source_of(reader: str) -> str:
    """The text of `module:name`, found without an import: of classes, those they derive from in the module, too."""
    module, _, name = reader.partition(":")
    root = {"verl": verl, "verl_atgrpo": verl_atgrpo}.get(module.partition(".")[0])
    folders = [Path(str(root.__file__)).parents[1]] if root else [Path(entry) for entry in sys.path]
    found = (folder / f"{module.replace('.', '/')}.py" for folder in folders)
    packages = (folder / module.replace(".", "/") / "__init__.py" for folder in folders)
    text = next(path for path in (*found, *packages) if path.is_file()).read_text()
    if not name:
        return text
    node = next(node for node in ast.parse(text).body if getattr(node, "name", None) == name)
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines)


@functools.cache
def cached_source(reader: str) -> str:
    return source_of(reader)


@pytest.mark.parametrize("pattern", [pattern for pattern, row in rows().items() if row.status == "works"])
def test_what_works_is_named_where_it_is_said_to_be_read(pattern: str) -> None:
    name = pattern.removesuffix(".**").rpartition(".")[2]
    assert name in cached_source(rows()[pattern].reader), rows()[pattern].reader


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


def refused() -> Iterator[tuple[str, Row, str]]:
    for pattern, row in rows().items():
        if row.status == "refused":
            yield from ((pattern, row, key) for key in keys_of(row, pattern))


def test_every_other_value_of_a_refused_key_stops_with_one_line_that_helps() -> None:
    view = View(recipe())
    for pattern, row, key in refused():
        accepted = [view.default(key) if isinstance(value, Default) else value for value in row.values]
        if any(isinstance(value, Like) for value in accepted):
            accepted = [value for value in accepted if not isinstance(value, Like)]
        value = other(accepted[0] if accepted else view.values.get(key))
        if value in accepted or (row.pattern == "val_kwargs.do_sample" and isinstance(value, bool)):
            value = "other"
        message = refusal(view, key, value)
        assert message is not None, (pattern, key, value)
        assert message.startswith(f"{key}={shown_as(value)}"), message
        assert "\n" not in message
        assert row.remedy in message
        assert row.remedy or any(shown_as(one) in message for one in accepted), message


def test_what_is_accepted_is_accepted() -> None:
    view = View(recipe())
    for _, row, key in refused():
        for value in row.values:
            if isinstance(value, Like | Default):
                continue
            assert refusal(view, key, value) is None, (key, value)


def test_what_works_is_accepted_beside_what_it_counts_with_and_refused_beside_anything_else() -> None:
    view = View(recipe())
    for pattern, row in rows().items():
        for key in keys_of(row, pattern) if row.status == "works" else ():
            value = other(view.values.get(key))
            if row.beside is None:
                assert refusal(view, key, value) is None, key
                continue
            companion, kind = row.beside
            fitting = next(one for one in (*typing.get_args(kind), 8, "x") if fits(kind, one))
            assert refusal(view, key, value, **{companion: fitting}) is None, key
            for without in (None, -1, ["x"]):
                message = refusal(view, key, value, **{companion: without})
                assert f"has no effect beside {companion}={shown_as(without)}: " in str(message)
                assert str(message).endswith(f"or that to {words(kind)}")


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
    expand_policies(config, AtGrpoConfig.from_config(config))
    with open_dict(config):
        config.transfer_queue.enable = True  # verl's main does
    OmegaConf.resolve(config)
    check_keys(View(config))
    for policy in config.at_grpo.policies or {"shared": None}:
        check_keys(View(job_of(config, policy)), "a policy")


# ------------------------------------------------------------------ what works reaches its place


def changed_everywhere() -> dict[str, Any]:
    """Every key that works -> another value than the recipe's."""
    view = View(recipe())
    found = {}
    for key in keys():
        row = row_of(key)
        if row is None or row.status != "works" or any(part in key for part in (*BY_ITSELF, "._target_")):
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
    settings = AtGrpoConfig.from_config(config)
    expand_policies(config, AtGrpoConfig.from_config(config))
    wire(config, settings, settings.make_environment())
    job = job_of(config, "planner")
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
    from verl_atgrpo.tiny_models.tiny import build_model, build_tokenizer

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
    expand_policies(config, AtGrpoConfig.from_config(config))
    model = omega_conf_to_dataclass(job_of(config, "shared").actor_rollout_ref.model)
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
