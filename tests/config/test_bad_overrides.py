"""Values that cannot work: each ends the command before Ray, with one line that has the key and the value."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

pytest.importorskip("verl")

from annotated_types import Ge, Gt, Le, Len, Lt
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from verl_atgrpo import EnvironmentConfigError, kinds, make, platform_choice, recipes
from verl_atgrpo.play.registry import load, registered
from verl_atgrpo.train.config import check, job_rules, machine_rules
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.run_check import check_run, check_run_or_exit
from verl_atgrpo.train.config.schema import ConfigError
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.config.verl_keys import check_keys, check_types, kind_of, rule_of
from verl_atgrpo.train.config.view import View, verls_defaults

QUICK = ("at_grpo.train_tasks=64", "at_grpo.val_tasks=8")
_A, _M, _R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
FREE = ("_target_", "nsight_options", "precision_debugger", "tool_config.npu")
"""Parts of keys without a type: options of tools for other hardware, and verl's own classes."""
OURS = {
    "at_grpo": ("5", "[]"),
    "at_grpo.environment": ("plan_path", "null"),
    "at_grpo.environment.name": ("null", "''", "7", ":", "math:", "nowhere.at.all:Env", "os:sep", "builtins:dict"),
    "at_grpo.agents": ("shared", "null"),
    "at_grpo.candidates": ("-1", "0", "four", "4.0", "5000", "null"),
    "at_grpo.alpha": ("nan", "inf", "-0.5", "high"),
    "at_grpo.seed": ("abc", "0.5"),
    "at_grpo.train_tasks": ("-4", "0", "64.0", "100000000000"),
    "at_grpo.val_tasks": ("-4", "null", "100000000000"),
    "at_grpo.allow_overlap": ("maybe", "1"),
    "at_grpo.request_timeout": ("0", "-1", "inf", "long"),
    "at_grpo.request_retries": ("-1", "1.5"),
    "at_grpo.max_failed_episodes": ("0", "-1"),
    "at_grpo.record.max_megabytes": ("0", "-1"),
    "at_grpo.group_filter": ("true", "5"),
    "at_grpo.estimator": ("null", "5"),
    "at_grpo.environment.size": ("1000000",),
    "+at_grpo.environment.few_shot": ("-1",),
}
"""Key -> values that are refused in `plan_path_cpu`."""
VERLS = {
    "data.max_prompt_length": ("-1", "0", "100000", "abc", "64.5", "null"),
    "data.max_response_length": ("0", "1000", "-1", "true"),
    "data.train_batch_size": ("0", "-1", "abc", "1000000000000"),
    "data.val_batch_size": ("0", "-1"),
    "data.seed": ("-1", "abc"),
    "data.shuffle": ("maybe",),
    "data.dataloader_num_workers": ("-1", "100000"),
    "data": ("null", "5"),
    "trainer": ("null",),
    "trainer.total_training_steps": ("-1", "0", "abc", "1.5"),
    "trainer.total_epochs": ("0", "-1", "null"),
    "trainer.save_freq": ("abc", "-2", "null"),
    "trainer.test_freq": ("abc", "-2"),
    "trainer.n_gpus_per_node": ("-1", "0", "2", "many"),
    "trainer.nnodes": ("0", "-1", "abc", "2"),
    "trainer.device": ("tpu",),
    "trainer.default_local_dir": (
        *("/proc/nope", "/dev/null", "/dev/null/under", "null", "'~/runs'", "s3://bucket/runs", "hdfs://x/runs"),
        "x" * 300,
    ),
    "trainer.rollout_data_dir": ("/proc/nope", "/dev/null"),
    "trainer.validation_data_dir": ("/proc/nope",),
    "trainer.project_name": ("''", "null"),
    "trainer.logger": ("[console,paper]", "5", "null", "[clearml]"),
    "trainer.log_val_generations": ("-1", "some", "null"),
    "trainer.max_actor_ckpt_to_keep": ("0", "-1"),
    "trainer.val_before_train": ("sometimes",),
    f"{_A}.optim.lr": ("-1", "abc", "nan", "5", "null"),
    f"{_A}.optim.weight_decay": ("-0.1",),
    f"{_A}.optim.betas": ("[0.9]", "[0.9,1]", "0.9"),
    f"{_A}.optim.clip_grad": ("0", "-1"),
    f"{_A}.optim.lr_warmup_steps_ratio": ("1.5",),
    f"{_A}.optim.optimizer": ("Adamm",),
    f"{_A}.optim.optimizer_impl": ("no_such_package.optim",),
    f"{_A}.optim.warmup_style": ("linear",),
    f"{_A}.ppo_mini_batch_size": ("0", "-1", "abc"),
    f"{_A}.ppo_epochs": ("0", "-1"),
    f"{_A}.ppo_max_token_len_per_gpu": ("10", "-1", "abc", "null"),
    f"{_A}.clip_ratio_low": ("-0.1",),
    f"{_A}.clip_ratio_c": ("1",),
    f"{_A}.loss_agg_mode": ("mean",),
    f"{_A}.entropy_coeff": ("inf",),
    f"{_A}.use_kl_loss": ("maybe",),
    f"{_A}.fsdp_config.fsdp_size": ("0", "-2"),
    f"{_A}.fsdp_config.model_dtype": ("fp8",),
    f"{_A}.checkpoint.save_contents": ("[model,weights]", "model"),
    f"{_A}.ulysses_sequence_parallel_size": ("0", "2"),
    f"{_M}.path": ("null", "''", "/dev/null"),
    f"{_M}.lora_rank": ("-1", "1000"),
    f"{_M}.trust_remote_code": ("maybe",),
    f"{_R}.max_model_len": ("10", "-1", "abc"),
    f"{_R}.max_num_seqs": ("0", "1000000", "abc"),
    f"{_R}.max_num_batched_tokens": ("0", "100"),
    f"{_R}.temperature": ("-1", "0", "abc", "1000", "null"),
    f"{_R}.val_kwargs.temperature": ("-1", "abc"),
    f"{_R}.val_kwargs.top_p": ("0", "1.5"),
    f"{_R}.val_kwargs.top_k": ("-2", "abc"),
    f"{_R}.val_kwargs.n": ("0",),
    f"{_R}.gpu_memory_utilization": ("0", "1.5", "abc"),
    f"{_R}.tensor_model_parallel_size": ("0", "-1", "abc"),
    f"{_R}.dtype": ("fp32",),
    f"{_R}.agent.num_workers": ("0", "1000000"),
    f"{_R}.enforce_eager": ("maybe",),
    f"{_R}.checkpoint_engine.update_weights_bucket_megabytes": ("0",),
    f"{_R}": ("null",),
    "algorithm.adv_estimator": ("gae", "null"),
    "algorithm.rollout_correction.rollout_is": ("row",),
    "algorithm.rollout_correction.rollout_rs": ("row",),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": ("0", "100000"),
    "transfer_queue.backend.SimpleStorage.total_storage_size": ("-1", "abc"),
    "ray_kwargs.ray_init.num_cpus": ("0", "abc"),
    "ray_kwargs.ray_init.object_store_memory": ("1000",),
    "+ray_kwargs.ray_init.num_cpu": ("4",),
    "+ray_kwargs.ray_init.dashboard": ("false",),
    "+ray_kwargs.ray_init.adress": ("auto",),
    f"{_M}.external_lib": ("no_such_module_at_all", "os.nowhere", "'a b'", "..x", "math/x"),
    f"{_R}.quantization": ("int3", "FP8", "qlora", "awq"),
}
"""Key -> values that are refused in `plan_path_cpu`."""
ENVIRONMENTS = {
    "plan_path": {
        "size": (1_000_000, 101, 1, -1, 0, "abc", 4.5, None, True),
        "wall_density": (2, -0.1, float("nan"), "dense"),
        "min_distance": (0, 1000, "far"),
        "max_distance": (0, 1_000_000, None),
        "max_turns": (0, 1_000_000, "many"),
        "max_moves": (0, 10_000_000),
        "tool": ("bash", None),
        "style": ("terse",),
        "few_shot": (-1, 1000),
        "seed": ("abc", None, 0.5),
        "require_isolation": ("yes", 1),
    },
    "plan_path_single": {"size": (1_000_000,), "max_turns": (0,)},
    "sokoban": {
        "size": (4, 1_000_000),
        "boxes": (0, 1_000_000),
        "wall_density": (0.7,),
        "min_solution": (0, 10**9),
        "max_solution": (0, 10**9),
        "seed": ("one",),
        "levels": (3,),
    },
    "walk": {"size": (1, 101, "wide"), "max_turns": (0,), "seed": (None,)},
    "walk_walls": {"wall_density": (0.7, -0.1), "min_distance": (0, 6), "max_turns": (0,)},
    "number_search": {"numbers": (1, 1001), "starts": (1, 1001), "max_turns": (0, 3)},
    "sudoku": {"size": (1, 16, 1_000_000, True), "clues": (0, 81, "half"), "seed": ("one",)},
    "code": {
        "max_turns": (0,),
        "max_tests": (0, 10**9),
        "cpu_seconds": (0, 10**9, 0.5),
        "memory_mb": (1, 10**9),
        "tester_reward": ("solution",),
        "val_max_tests": (0,),
    },
    "math": {"max_turns": (0, 10**9), "libraries": ("sympy", [5])},
    "math_single": {"max_turns": ("4",)},
    "math_ensemble": {"reasoners": (0, 10**6), "tool_users": (0, 1.5)},
    "math_drafts": {"drafts": (0, 65)},
    "math_judged": {"votes": (1, "many")},
    "math_debate": {"debaters": (1, 10**6), "rounds": (0, True)},
    "pettingzoo": {"max_steps": (0, 10**9), "options": (5,), "team": ("west",), "shared_openings": (1,)},
    "textarena": {"players": (0, 10**6), "illegal_reward": (float("inf"), "low"), "on_illegal": ("stop",)},
    "verifiers": {"config": (5,), "success_reward": (float("nan"),), "max_turns": (0,), "timeout": (0,)},
    "reasoning_gym": {"max_turns": (0, 10**9), "options": ("easy",), "dataset": (None,)},
}
"""Environment -> option -> values that it refuses, before it looks at any other option."""
TABLE = [(key, value) for part in (OURS, VERLS) for key, values in part.items() for value in values]


@functools.cache
def composed(recipe: str) -> tuple[Any, Any]:
    """The recipe, and its values before interpolations are resolved."""
    config = recipes.compose(recipe, QUICK)
    OmegaConf.set_struct(config, False)
    return config, OmegaConf.to_container(config, resolve=False)


@contextlib.contextmanager
def overridden(recipe: str, *overrides: str) -> Iterator[Any]:
    """The recipe with overrides as the command line has them, until they are taken back: both take milliseconds."""
    config, written = composed(recipe)
    parsed = [OverridesParser.create().parse_override(override) for override in overrides]
    keys = [override.key_or_group for override in parsed]
    for key, override in zip(keys, parsed, strict=True):
        OmegaConf.update(config, key, override.value(), merge=False)
    try:
        yield config
    finally:
        for key in keys:
            *sections, name = key.split(".")
            before = functools.reduce(lambda node, part: node[part], sections, written)
            if name in before:
                OmegaConf.update(config, key, before[name], merge=False)
            else:
                del OmegaConf.select(config, ".".join(sections))[name]


def message_of(config: Any) -> str:
    with pytest.raises(SystemExit) as caught:
        check_run_or_exit(config)
    return str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table_has_a_hundred_overrides() -> None:
    assert len(TABLE) == len(set(TABLE)) >= 150


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("key", "value"), TABLE)
def test_a_bad_value_is_refused_with_one_line(key: str, value: str) -> None:
    with overridden("plan_path_cpu", f"{key}={value}") as config:
        message = message_of(config)
    assert message.startswith("verl-atgrpo: ")
    assert "\n" not in message
    assert key.lstrip("+") in message
    plain = value.strip("'")
    shown = {plain, plain.capitalize(), repr(plain), *plain.strip("[]").split(",")}
    assert any(part in message for part in shown | ({"None"} if plain == "null" else set())), message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("environment", "option", "value"),
    [(name, key, value) for name, keys in ENVIRONMENTS.items() for key, values in keys.items() for value in values],
)
def test_a_bad_option_is_refused_with_one_line(environment: str, option: str, value: Any) -> None:
    with pytest.raises(EnvironmentConfigError) as caught:
        make(environment, **{option: value})
    assert str(caught.value).startswith(f"at_grpo.environment.{option}={value!r}: ")
    assert "\n" not in str(caught.value)


def test_every_number_of_every_environment_has_bounds() -> None:
    for name in registered():
        hints = typing.get_type_hints(load(name).__init__, include_extras=True)  # type: ignore[misc]
        for option, hint in hints.items():
            if option != "seed" and ("a whole number" in (text := kinds.words(hint)) or "a number" in text):
                assert hint is kinds.Finite or "at most" in text or "each:" in text, (name, option)


def test_a_search_that_would_not_fit_is_refused() -> None:
    make("sokoban", size=8, boxes=3, min_solution=2, tool="moves")
    with pytest.raises(EnvironmentConfigError, match=r"^at_grpo\.environment\.min_solution=2: .*2,666,496 positions"):
        make("sokoban", size=10, boxes=3, min_solution=2, tool="moves")
    with pytest.raises(EnvironmentConfigError, match=r"^at_grpo\.environment\.max_solution=9: .*or remove it$"):
        make("sokoban", size=10, boxes=3, max_solution=9, tool="moves")
    make("sokoban", size=10, boxes=4, tool="moves")


# ------------------------------------------------------------------ the table of types


def test_every_key_that_works_has_a_type_which_its_default_fits() -> None:
    for key, default in verls_defaults().items():
        rule = rule_of(key)
        if rule is None or rule.kind is Any or any(part in key for part in FREE):
            continue
        assert kind_of(key) is not None, f"{key}: any value is accepted"
        if "${" not in str(default):
            assert kinds.fits(kind_of(key), default), (key, default)
        assert kinds.words(kind_of(key)) not in ("", "anything"), key
    check_types(View(composed("plan_path_qwen3_1p7b")[0]))


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (bool, [True, False], [1, 0, "true", None]),
        (int, [0, -5, 10**30], [True, 1.0, "1", None]),
        (float, [0, 1.5, -2], [float("nan"), float("inf"), True, "1"]),
        (kinds.Count, [1, 10**9], [0, -1, 10**9 + 1, 1.0]),
        (kinds.Weight, [0, 0.5], [-1e-9]),
        (kinds.Share, [0, 1], [1.0001, -0.1]),
        (kinds.Text, ["a", "two\nlines\n"], ["", " ", "\n", None, 5]),
        (typing.Literal["a", "b"], ["a"], [True, "c", None]),
        (kinds.Count | None, [None, 1], [0, "none"]),
        (list[kinds.Count], [[], [1, 2]], [[0], 1, "12", {}]),
        (Annotated[list[int], Len(2, 2)], [[1, 2]], [[1], [1, 2, 3]]),
        (Annotated[float, Gt(0), Lt(1)], [0.5], [0, 1]),
        (Annotated[int, Ge(2), Le(4)], [2, 4], [1, 5]),
        (dict[str, Any], [{}, {"a": 1}], [[], {1: 2}, "a"]),
        (typing.Sequence[str], [["a"], ("a",)], ["a", [1]]),
    ],
)
def test_what_fits_a_type(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not kinds.fits(hint, value)] == []
    assert [value for value in bad if kinds.fits(hint, value)] == []


# ------------------------------------------------------------------ keys that nothing reads


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("candidates", 9, "at_grpo.candidates"),
        ("environment", {"name": "math"}, "at_grpo.environment"),
        ("at-grpo", {"candidates": 9}, "at_grpo"),
        ("AT_GRPO", {"candidates": 9}, "at_grpo"),
        ("atgrpo", {"candidates": 9}, "at_grpo"),
        ("At_Grpo", None, "at_grpo"),
        ("at_grpo.candidates", 9, "at_grpo.candidates"),
        ("at_grpo.candidate", 9, "at_grpo.candidates"),
        ("Candidates", 9, "at_grpo.candidates"),
        ("group-filter", {}, "at_grpo.group_filter"),
        ("trainer.nnodes", 2, "trainer.nnodes"),
        ("trainr", {"nnodes": 2}, "trainer"),
        ("train_batch_size", 9, "data.train_batch_size"),
        ("actor_rollout", {"actor": 1}, "actor_rollout_ref"),
        ("lora_rank", 8, "actor_rollout_ref.model.lora_rank"),
        ("mine", 5, None),
        (5, "mine", None),
    ],
)
def test_a_key_at_the_top_level_that_nothing_reads_is_refused(key: Any, value: Any, meant: str | None) -> None:
    config = copy.deepcopy(composed("plan_path_cpu")[0])
    config[key] = value
    message = message_of(config)
    assert message.startswith(f"verl-atgrpo: {key}=") and "\n" not in message
    assert message.endswith("so it would be ignored; remove it" + (f", or did you mean {meant}?" if meant else ""))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("trainer", "v1.trainer_mode"),
        ("actor_rollout_ref", "actor.optim.lr"),
        ("actor_rollout_ref.actor", "optim.lr"),
        ("at_grpo", "record.max_megabytes"),
        ("data", "reward_fn_key.x"),
    ],
)
def test_a_nested_key_with_a_dot_is_refused(section: str, key: str) -> None:
    config = copy.deepcopy(composed("plan_path_cpu")[0])
    OmegaConf.select(config, section)[key] = 1
    message = message_of(config)
    assert f"{section}.{key}" in message and "\n" not in message


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "named", ["${mine.size}", "${mine}", "x_${mine.size}", "${oc.select:mine.size,4}", "${mine[size]}"]
)
def test_a_section_for_interpolations_is_a_recipes_own(named: str) -> None:
    config = copy.deepcopy(composed("plan_path_cpu")[0])
    config.mine = {"size": 4}
    with pytest.raises(ConfigError, match=r"^mine=\.\.\.: neither verl"):
        check_keys(View(config))
    config.trainer.experiment_name = named
    check_keys(View(config))
    config.trainer.experiment_name = named.replace("mine", "undermine")
    with pytest.raises(ConfigError, match=r"^mine="):
        check_keys(View(config))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor", "actor_rollout_ref.actor"),
        ("rollout", "actor_rollout_ref.rollout"),
        ("model", "actor_rollout_ref.model"),
        ("ref", "actor_rollout_ref.ref"),
        ("temperature", "actor_rollout_ref.rollout.temperature"),
    ],
)
def test_a_part_of_a_key_that_interpolations_name_is_no_section_of_its_own(key: str, meant: str) -> None:
    """verl's have ${oc.select:actor_rollout_ref.actor.strategy}, and `actor.optim.lr` is soon written."""
    config = copy.deepcopy(composed("plan_path_cpu")[0])
    config[key] = {"optim": {"lr": 1e-5}} if key != "temperature" else 0.5
    with pytest.raises(ConfigError, match=rf"^{key}=.*: neither verl .*, or did you mean {re.escape(meant)}\?"):
        check_keys(View(config))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["default_local_dir", "rollout_data_dir", "validation_data_dir", "project_name"])
def test_a_folder_has_no_nul(name: str) -> None:
    config = copy.deepcopy(composed("plan_path_cpu")[0])
    config.trainer[name] = "a\0b"
    with pytest.raises(ConfigError, match=rf"trainer\.{name}=a.*it is no name of a folder \(embedded null"):
        check(machine_rules.of_folders(config))


@pytest.mark.usefixtures("here")
def test_checking_a_folder_leaves_nothing(tmp_path: Path) -> None:
    with overridden("plan_path_cpu", f"trainer.default_local_dir={tmp_path}/a/b/c") as config:
        check(machine_rules.of_folders(config))
    assert not (tmp_path / "a").exists()


# ------------------------------------------------------------------ values that follow from others


@pytest.mark.usefixtures("here")
def test_a_fault_is_named_where_it_was_written() -> None:
    with overridden("plan_path_cpu", "data.max_prompt_length=abc") as config:
        assert message_of(config).startswith("verl-atgrpo: data.max_prompt_length=abc: a whole number")
    with overridden("plan_path_cpu", "trainer.nnodes=${trainer.experiment_name}") as config:
        assert message_of(config).startswith("verl-atgrpo: trainer.nnodes=plan_path_cpu: a whole number")
    with overridden("plan_path_cpu", "trainer.nnodes=${nowhere.at_all}") as config:
        assert message_of(config) == "verl-atgrpo: trainer.nnodes: Interpolation key 'nowhere.at_all' not found"
    with overridden("plan_path_cpu", "at_grpo.policies={mine:{optim:{lr:-1}}}", "at_grpo.agents={all:mine}") as config:
        assert message_of(config).startswith("verl-atgrpo: at_grpo.policies.mine.optim.lr=-1: a number, at lea")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("key", ["data.train_batch_size", "trainer.save_freq", f"{_A}.optim.lr", f"{_R}.temperature"])
def test_a_key_that_has_been_removed_is_refused(key: str) -> None:
    config = copy.deepcopy(composed("plan_path_cpu")[0])
    section, _, name = key.rpartition(".")
    del OmegaConf.select(config, section)[name]
    assert message_of(config).startswith(f"verl-atgrpo: {key} is missing: ")


def test_rejection_needs_a_threshold() -> None:
    correction = "algorithm.rollout_correction"
    with overridden("plan_path_cpu", f"{correction}.rollout_rs=token_k1") as config:
        assert f"{correction}.rollout_rs_threshold=null: rollout_rs=token_k1 needs it" in message_of(config)
    with overridden(
        "plan_path_cpu", f"{correction}.rollout_rs=token_k1", f"{correction}.rollout_rs_threshold='0.5_2.0'"
    ) as config:
        check_run(config)


# ------------------------------------------------------------------ the machine


def test_folders_are_checked_by_writing_and_left_as_they_were(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").touch()
    read_only = here / "read_only"
    read_only.mkdir()

    def refuse(dir: Path) -> Any:
        if dir.is_relative_to(read_only):  # as root, who may make folders there
            raise PermissionError(13, "Permission denied")
        return tempfile_of(dir=dir)

    tempfile_of = machine_rules.tempfile.TemporaryFile
    monkeypatch.setattr(machine_rules.tempfile, "TemporaryFile", refuse)  # root may write anywhere
    config = composed("plan_path_cpu")[0]
    check(machine_rules.of_folders(config))
    assert sorted(path.name for path in here.iterdir()) == ["file", "read_only"]
    for value, why in ((read_only / "deep" / "er", "Permission denied"), (here / "file" / "x", "file is no folder")):
        with (
            overridden("plan_path_cpu", f"trainer.default_local_dir={value}") as config,
            pytest.raises(ConfigError, match=re.escape(f"trainer.default_local_dir={value}: ") + f".*{why}"),
        ):
            check(machine_rules.of_folders(config))
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(read_only / "metrics.jsonl"))
    with pytest.raises(ConfigError, match=r"^trainer\.logger=file with VERL_FILE_LOGGER_PATH=.*metrics\.jsonl: "):
        check(machine_rules.of_folders(composed("plan_path_cpu")[0]))


def test_a_logger_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with overridden("plan_path_cpu", "trainer.logger=[console,wandb]") as config:
        assert "trainer.logger=wandb: its package is not installed: pip install wandb" in message_of(config)


@pytest.mark.parametrize(
    ("override", "lacking", "remedy"),
    [
        (
            "trainer.logger=[console,file]",
            "a tracker that has tables",
            "clearml, trackio, vemlp_wandb to trainer.logger",
        ),
        ("at_grpo.record=null", "records", "at_grpo.record.val_tasks to 1 or more"),
        ("at_grpo.record.val_tasks=0", "records", "at_grpo.record.val_tasks to 1 or more"),
    ],
)
def test_a_table_that_nobody_would_see_is_refused(override: str, lacking: str, remedy: str) -> None:
    asked = ("trainer.log_val_generations=3", "trainer.logger=tensorboard")
    with overridden("plan_path_cpu", *asked, override) as config:
        message = message_of(config)
    assert f"trainer.log_val_generations=3 has no effect without {lacking}: " in message and remedy in message
    with overridden("plan_path_cpu", *asked) as config:
        check(job_rules.of_tables(Job(View(config), read_section(config))))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"architectures": ["Unknown"]}'),
        ("config.json", '{"model_type": "qwen3", "hidden_size": "wide"}'),
        ("tokenizer.json", '{"model": '),
        ("tokenizer_config.json", "null"),
    ],
)
def test_a_corrupt_model_is_refused_by_its_path(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: file == "config.json")  # else folders alone are read
    folder = here / "model"
    shutil.copytree(model, folder)
    with overridden("plan_path_cpu", f"{_M}.path={folder}") as config:
        settings = read_section(config)
        check(machine_rules.of_models(Job(View(config), settings)))
        (folder / file).write_text(text)
        with pytest.raises(ConfigError, match=re.escape(f"{_M}.path={folder}: ")):
            check(machine_rules.of_models(Job(View(config), settings)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from verl_atgrpo.lab.tiny_models.tiny import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = build_tokenizer([])
    build_model(tokenizer, 0, hidden=32, layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_of_the_hub_is_read_on_the_cpu_too(
    compose: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    monkeypatch.chdir(tmp_path)
    config = compose("plan_path_cpu", f"{_M}.path=owner/tiny")
    asked: list[str] = []

    def hub(loads: Any) -> Any:
        return lambda name, **options: asked.append(name) or loads(str(model), **options)

    for cls in (transformers.AutoConfig, transformers.AutoTokenizer):
        monkeypatch.setattr(cls, "from_pretrained", hub(cls.from_pretrained))
    check(machine_rules.of_models(Job(View(config), read_section(config))))
    assert asked.count("owner/tiny") == 2

    def unreachable(name: str, **_: object) -> None:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    message = rf"^{re.escape(_M)}\.path=owner/tiny: .*: We couldn't connect; no folder has this name"
    with pytest.raises(ConfigError, match=message):
        check(machine_rules.of_models(Job(View(config), read_section(config))))


def test_a_model_without_a_number_of_positions_is_refused(
    compose: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, BloomConfig

    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    folder = shutil.copytree(model, tmp_path / "model")
    BloomConfig(vocab_size=len(AutoTokenizer.from_pretrained(folder))).save_pretrained(folder)
    config = compose("plan_path_cpu", f"{_M}.path={folder}")
    with pytest.raises(ConfigError, match=r"model\.path=.*max_position_embeddings, and bloom has none"):
        check(machine_rules.of_models(Job(View(config), read_section(config))))


def test_a_tokenizer_that_this_machine_cannot_load_is_left_to_the_workers(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    def needs_more(name: str, **_: object) -> None:
        raise ImportError("it needs the package sentencepiece")

    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    monkeypatch.setattr(machine_rules, "_of_attention", lambda model: [])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", needs_more)
    config = compose("plan_path_cpu", f"{_M}.path=owner/tiny")
    check(machine_rules.of_models(Job(View(config), read_section(config))))


# ------------------------------------------------------------------ the real command


@pytest.mark.slow
def test_the_command_ends_before_ray_with_one_line(here: Path) -> None:
    override = "algorithm.adv_estimator=gae"  # verl's own check of it ends with a traceback
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", "--config-name=plan_path_cpu", override]
    ended = subprocess.run(
        command, cwd=here, env={**os.environ, "RAY_TMPDIR": str(here / "ray")}, capture_output=True, text=True
    )
    key, value = override.split("=")
    assert ended.returncode == 1
    assert [line for line in ended.stderr.splitlines() if line.startswith("verl-atgrpo: ")][-1:] == [
        ended.stderr.splitlines()[-1]
    ]
    assert f"{key}={value}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "ray init" not in ended.stdout
    assert not (here / "ray").exists()


@pytest.mark.parametrize("kind", [Literal[4, 9], list[Literal[4, 9]]])
def test_a_number_that_equals_a_choice_but_is_of_another_type_is_refused(kind: Any) -> None:
    def as_given(number: float) -> object:
        return [number] if typing.get_origin(kind) is list else number

    assert kinds.fits(kind, as_given(4)) and not kinds.fits(kind, as_given(4.0))
