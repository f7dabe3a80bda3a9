"""Configurations that a mode does not support, or whose keys have no effect in it, are refused on the driver."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

verl = pytest.importorskip("verl")

from fakes.jobs import check_policies
from omegaconf import OmegaConf, open_dict

from verl_atgrpo import platform_choice, recipes
from verl_atgrpo.train.config import check as check_rules
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.policy_rules import REQUIRED_MODULES, ROUNDING
from verl_atgrpo.train.config.run_check import OF_MODES
from verl_atgrpo.train.config.schema import ConfigError
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.config.view import View

CORRECTION = "algorithm.rollout_correction"
WARMUP = "trainer.v1.colocate_async.num_warmup_batches"
THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
STRATEGY = "trainer.v1.sampler.max_off_policy_strategy"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BYPASS = f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is=null"
SEPARATE_RECIPE = "plan_path_cpu_separate"
SEPARATE = "trainer.v1.separate_async"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
LORA = "actor_rollout_ref.model.lora"


@functools.cache
def composed(recipe: str) -> Any:
    name, *groups = recipe.split()
    return recipes.compose(name, groups)


def check(recipe: str, *overrides: str) -> None:
    config = copy.deepcopy(composed(recipe))
    for key, value in OmegaConf.from_dotlist([override.lstrip("+") for override in overrides]).items():
        with open_dict(config):
            config[key] = OmegaConf.merge(config[key], value)
    settings = read_section(config)
    job = Job(View(config), settings)
    check_rules(itertools.chain.from_iterable(rule(job) for rule in OF_MODES))


def refusal(recipe: str, overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(recipe, *overrides.split())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        f"{CORRECTION}.rollout_is=sequence",
        BYPASS,
        f"{WARMUP}=0.5 {THRESHOLD}=2",
        f"{WARMUP}=1.5 {THRESHOLD}=3",
        f"{CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2.0",
        "at_grpo.group_filter.min_groups=8 at_grpo.group_filter.max_tasks=64",
    ],
)
def test_what_asynchronous_training_supports_is_accepted(overrides: str) -> None:
    check("plan_path_cpu +mode=async", *overrides.split())


@pytest.mark.parametrize("recipe", ["plan_path_cpu +mode=async", "plan_path_cpu_separate"])
def test_asynchronous_training_may_branch(recipe: str) -> None:
    check(recipe, "at_grpo.scheme=branch", "at_grpo.branch={at: every}")


@pytest.mark.parametrize(
    ("overrides", "beginning", "remedy"),
    [
        (f"{CORRECTION}.rollout_is=null", f"{CORRECTION}.rollout_is=null", "token or sequence"),
        (f"{CORRECTION}.rollout_is=tokens", f"{CORRECTION}.rollout_is=tokens", "token or sequence"),
        (f"{LOSS}=bypass_mode", f"{LOSS}=bypass_mode ignores", "vanilla"),
        (f"{BYPASS} {LOSS}=gpg", f"{LOSS}=gpg", "rollout_is to token"),
        (f"{STRATEGY}=drop", f"{STRATEGY}=drop discards", "wait"),
        (f"{THRESHOLD}=null", f"{THRESHOLD}=null", "at least 2"),
        (f"{THRESHOLD}=1", f"{THRESHOLD}=1", "at least 2"),
        (f"{THRESHOLD}=2.5", f"{THRESHOLD}=2.5", "at least 2"),
        (f"{WARMUP}=1.5 {THRESHOLD}=2", f"{THRESHOLD}=2", "at least 3"),
        (f"{WARMUP}=0", f"{WARMUP}=0", "at_grpo.mode=sync"),
        (f"{WARMUP}=-1", f"{WARMUP}=-1", "above 0"),
        (f"{WARMUP}=many", f"{WARMUP}=many", "above 0"),
        ("actor_rollout_ref.rollout.full_determinism=true", "actor_rollout_ref.rollout.full_determinism=true", "sync"),
        (
            "actor_rollout_ref.rollout.disaggregation.enabled=true",
            "actor_rollout_ref.rollout.disaggregation.enabled=true",
            "set it to false",
        ),
        # What another mode would read.
        ("trainer.v1.separate_async.parameter_sync_step=2", "trainer.v1.separate_async.parameter_sync_step=2", "sync"),
        (f"at_grpo.mode=sync {THRESHOLD}=8", f"{STRATEGY}=wait has no effect with at_grpo.mode=sync", "remove it"),
    ],
)
def test_what_asynchronous_training_does_not_support_is_refused(overrides: str, beginning: str, remedy: str) -> None:
    message = refusal("plan_path_cpu +mode=async", overrides)
    assert message.startswith(beginning)
    assert remedy in message


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        (f"{WARMUP}=2", f"{WARMUP}=2 has no effect with at_grpo.mode=sync"),
        (f"{THRESHOLD}=3", f"{THRESHOLD}=3 has no effect with at_grpo.mode=sync"),
        (f"+{WARMUP}s=2", f"{WARMUP}s=2 has no effect"),
        ("trainer.v1.separate_async.num_warmup_batches=2", "trainer.v1.separate_async.num_warmup_batches=2"),
    ],
)
def test_asynchronous_keys_are_refused_in_sync_mode(overrides: str, beginning: str) -> None:
    assert refusal("plan_path_cpu", overrides).startswith(beginning)


@pytest.mark.parametrize("recipe", ["plan_path_cpu", "plan_path_cpu +mode=async"])
@pytest.mark.parametrize(
    ("overrides", "beginning", "remedy"),
    [
        (
            f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is=token",
            f"{CORRECTION}.rollout_is=token is ignored",
            "bypass_mode to false",
        ),
        (f"{BYPASS} {CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs=token_k1 is ignored", "null"),
    ],
)
def test_keys_ignored_in_bypass_mode_are_refused_in_every_mode(
    recipe: str, overrides: str, beginning: str, remedy: str
) -> None:
    message = refusal(recipe, overrides)
    assert message.startswith(beginning)
    assert remedy in message


# ---------------------------------------------------------------------- standalone servers


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The importable modules among those that verl's engines need."""
    found = {"cupy", "nixl", "checkpoint_engine", "mooncake"}
    there = importlib.util.find_spec

    def find(name: str, *arguments: Any) -> Any:
        if name in {"cupy", "nixl", "checkpoint_engine", "mooncake", "torch_npu"}:
            return object() if name in found else None
        return there(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return found


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        f"{SEPARATE}.num_warmup_batches=0.5 trainer.v1.sampler.max_off_policy_threshold=2",
        f"{ROLLOUT}.nnodes=2 ray_kwargs.ray_init.num_gpus=3",
        f"{ROLLOUT}.n_gpus_per_node=4 {ROLLOUT}.tensor_model_parallel_size=2 ray_kwargs.ray_init.num_gpus=null",
    ],
)
def test_what_standalone_servers_support_is_accepted(overrides: str, cpu: None) -> None:
    check(SEPARATE_RECIPE, *overrides.split())


@pytest.mark.parametrize(
    ("overrides", "beginning", "remedy"),
    [
        ("at_grpo.placement=split", "at_grpo.placement=split", "set it to colocated"),
        (f"{SEPARATE}.parameter_sync_step=4", f"{SEPARATE}.parameter_sync_step=4", "set it to 1"),
        (f"{SEPARATE}.num_warmup_batches=0", f"{SEPARATE}.num_warmup_batches=0", "above 0"),
        (
            f"{SEPARATE}.num_warmup_batches=2.5",
            "trainer.v1.sampler.max_off_policy_threshold=3",
            f"at least 4 (1 + {SEPARATE}.num_warmup_batches)",
        ),
        ("trainer.v1.colocate_async.num_warmup_batches=2", "trainer.v1.colocate_async.num_warmup_batches=2", "remove"),
        ("algorithm.rollout_correction.rollout_is=null", "algorithm.rollout_correction.rollout_is=null", "token"),
        ("actor_rollout_ref.hybrid_engine=true", "actor_rollout_ref.hybrid_engine=true", "set it to false"),
        (f"{ROLLOUT}.nnodes=0", f"{ROLLOUT}.nnodes=0", "above 0"),
        (f"{ROLLOUT}.n_gpus_per_node=null", f"{ROLLOUT}.n_gpus_per_node=null", "above 0"),
        ("at_grpo.restart_servers=1", "at_grpo.restart_servers=1", "set it to 0"),
        (f"{ROLLOUT}.nnodes=2", "ray_kwargs.ray_init.num_gpus=2", "set it to 3"),
        (
            f"{ROLLOUT}.n_gpus_per_node=3 {ROLLOUT}.tensor_model_parallel_size=2",
            f"{ROLLOUT}.n_gpus_per_node=3: 3 devices",
            "a multiple of the 2",
        ),
        (f"{LORA}_rank=8", f"{LORA}_rank=8", "colocate_async"),
        (f"{ENGINE}.backend=nccl", f"{ENGINE}.backend=nccl", "gloo"),
        (f"{ENGINE}.backend=naive", f"{ENGINE}.backend=naive", "gloo"),
        (
            f"{ENGINE}.custom_backend_module=null",
            f"{ENGINE}.custom_backend_module=null",
            "verl_atgrpo.cpu.checkpoint_engine",
        ),
    ],
)
def test_what_standalone_servers_lack_is_refused(overrides: str, beginning: str, remedy: str, cpu: None) -> None:
    message = refusal(SEPARATE_RECIPE, overrides)
    assert message.startswith(beginning)
    assert remedy in message


@pytest.mark.parametrize(
    ("backend", "accepted"),
    [("nccl", True), ("nixl", True), ("naive", False), ("gloo", False), ("delta_sharded", False)],
)
def test_weights_get_to_gpus_by_verls_own_engines(backend: str, accepted: bool, gpu: None) -> None:
    if accepted:
        check(SEPARATE_RECIPE, f"{ENGINE}.backend={backend}")
        return
    message = refusal(SEPARATE_RECIPE, f"{ENGINE}.backend={backend}")
    assert message.startswith(f"{ENGINE}.backend={backend} ")
    assert "set it to nccl" in message


@pytest.mark.parametrize(
    ("backend", "missing", "package"),
    [
        ("nccl", "cupy", "cupy-cuda12x or cupy-cuda13x"),
        ("nixl", "cupy", "cupy-cuda12x or cupy-cuda13x"),
        ("nixl", "nixl", "nixl"),
        ("kimi_ckpt_engine", "checkpoint_engine", "checkpoint-engine"),
        ("mooncake", "mooncake", "mooncake-transfer-engine"),
    ],
)
def test_an_engine_that_verl_could_not_import_is_refused(
    backend: str, missing: str, package: str, gpu: None, installed: set[str]
) -> None:
    override = f"{ENGINE}.backend={backend}"
    own = f"{ENGINE}.custom_backend_module"
    check(SEPARATE_RECIPE, override, f"{own}=null", f"{ROLLOUT}.dtype=bfloat16")
    for dtype in ("float16", "float32"):
        if backend in ROUNDING:
            message = refusal(SEPARATE_RECIPE, f"{override} {own}=null {ROLLOUT}.dtype={dtype}")
            assert message.startswith(f"{override} rounds all weights to bfloat16") and dtype in message
        else:
            check(SEPARATE_RECIPE, override, f"{own}=null", f"{ROLLOUT}.dtype={dtype}")
    installed.remove(missing)
    message = refusal(SEPARATE_RECIPE, f"{override} {own}=null")
    assert message.startswith(
        f"{override}: verl's engine imports {missing}, which is not installed: pip install {package}"
    )
    # A custom module may have an engine of that name, and on Ascend HCCL has NCCL's.
    check(SEPARATE_RECIPE, override, f"{own}=mine")
    installed.add("torch_npu")
    if backend == "nccl":
        check(SEPARATE_RECIPE, override, f"{own}=null")
    else:
        refusal(SEPARATE_RECIPE, f"{override} {own}=null")


def test_verl_knows_the_engines_by_these_names_and_imports_what_is_said() -> None:
    """Read from its files: the engines themselves cannot be imported here."""
    folder = Path(verl.__file__).parent / "checkpoint_engine"
    known = {"nccl": "nccl", "nixl": "nixl", "kimi": "kimi_ckpt_engine", "mooncake": "mooncake"}
    for file, backend in known.items():
        text = (folder / f"{file}_checkpoint_engine.py").read_text()
        assert f'register("{backend}")' in text
        for module in REQUIRED_MODULES[backend]:
            assert re.search(rf"(?m)^ *(import|from) {module}\b", text), (file, module)
        casts = re.search(r"\.to\((self\.)?rollout_dtype\)", text) is not None
        assert casts == (backend in ROUNDING), file


@pytest.mark.parametrize("groups", ["", "roles: tool_user_planner, placement: colocated, "])
def test_recipes_for_gpus_take_the_group(groups: str, tmp_path: Path, gpu: None) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [plan_path_qwen3_1p7b, {groups}mode: separate, _self_]\n")
    # A policy's servers share their devices with no others, so each may take most of the memory.
    config = recipes.compose("mine", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.9"], folder=tmp_path)
    check_policies(Job(View(config), read_section(config)))
    assert config.actor_rollout_ref.rollout.n_gpus_per_node == config.trainer.n_gpus_per_node


@pytest.mark.parametrize("mode", ["plan_path_cpu", "plan_path_cpu +mode=async"])
@pytest.mark.parametrize(
    ("override", "neutral"),
    [
        ("actor_rollout_ref.hybrid_engine=false", "true"),
        (f"{ROLLOUT}.nnodes=1", "0"),
        (f"{ENGINE}.backend=nccl", "naive"),
        (f"{ENGINE}.custom_backend_module=mine", "null"),
        (f"{SEPARATE}.parameter_sync_step=1", None),
    ],
)
def test_keys_of_standalone_servers_are_refused_in_other_modes(mode: str, override: str, neutral: Any) -> None:
    message = refusal(mode, override)
    assert message.startswith(f"{override} has no effect with at_grpo.mode=")
    assert (f"set it to {neutral}" if neutral else "remove it") in message
