"""Servers of their own: what they do not work with, and their keys in other modes, end on the driver."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

verl = pytest.importorskip("verl")

from test_mode_check import check, refusal

from verl_atgrpo import platform_choice, recipes
from verl_atgrpo.config import run_check, separate_check
from verl_atgrpo.config.schema import AtGrpoConfig

RECIPE = "plan_path_cpu_separate"
SECTION = "trainer.v1.separate_async"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.checkpoint_engine"
LORA = "actor_rollout_ref.model.lora"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What can be imported of what verl's engines need."""
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
        f"{SECTION}.num_warmup_batches=0.5 trainer.v1.sampler.max_off_policy_threshold=2",
        f"{ROLLOUT}.nnodes=2 ray_kwargs.ray_init.num_gpus=3",
        f"{ROLLOUT}.n_gpus_per_node=4 {ROLLOUT}.tensor_model_parallel_size=2 ray_kwargs.ray_init.num_gpus=null",
    ],
)
def test_what_works_with_servers_of_their_own_is_accepted(overrides: str, cpu: None) -> None:
    check(RECIPE, *overrides.split())


@pytest.mark.parametrize(
    ("overrides", "beginning", "remedy"),
    [
        ("at_grpo.placement=split", "at_grpo.placement=split", "set it to colocated"),
        (f"{SECTION}.parameter_sync_step=4", f"{SECTION}.parameter_sync_step=4", "set it to 1"),
        (f"{SECTION}.num_warmup_batches=0", f"{SECTION}.num_warmup_batches=0", "above 0"),
        (
            f"{SECTION}.num_warmup_batches=2.5",
            "trainer.v1.sampler.max_off_policy_threshold=3",
            f"at least 4 (1 + {SECTION}.num_warmup_batches)",
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
        (f"{LORA}_adapter_path=here", f"{LORA}_adapter_path=here", "colocate_async"),
        (f"{LORA}.rank=8", f"{LORA}.rank=8", "colocate_async"),
        (f"{ENGINE}.backend=nccl", f"{ENGINE}.backend=nccl", "gloo"),
        (f"{ENGINE}.backend=naive", f"{ENGINE}.backend=naive", "gloo"),
        (
            f"{ENGINE}.custom_backend_module=null",
            f"{ENGINE}.custom_backend_module=null",
            "verl_atgrpo.cpu.checkpoint_engine",
        ),
    ],
)
def test_what_does_not_is_refused(overrides: str, beginning: str, remedy: str, cpu: None) -> None:
    message = refusal(RECIPE, overrides)
    assert message.startswith(beginning)
    assert remedy in message


@pytest.mark.parametrize(
    ("backend", "accepted"),
    [("nccl", True), ("nixl", True), ("naive", False), ("gloo", False), ("delta_sharded", False)],
)
def test_weights_get_to_gpus_by_verls_own_engines(backend: str, accepted: bool, gpu: None) -> None:
    if accepted:
        check(RECIPE, f"{ENGINE}.backend={backend}")
        return
    message = refusal(RECIPE, f"{ENGINE}.backend={backend}")
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
    check(RECIPE, override, f"{own}=null")
    installed.remove(missing)
    message = refusal(RECIPE, f"{override} {own}=null")
    assert message.startswith(
        f"{override}: verl's engine imports {missing}, which is not installed: pip install {package}"
    )
    # A module of one's own may have an engine of that name, and on Ascend HCCL has NCCL's.
    check(RECIPE, override, f"{own}=mine")
    installed.add("torch_npu")
    if backend == "nccl":
        check(RECIPE, override, f"{own}=null")
    else:
        refusal(RECIPE, f"{override} {own}=null")


def test_verl_knows_the_engines_by_these_names_and_imports_what_is_said() -> None:
    """Read from its files: the engines themselves cannot be imported here."""
    folder = Path(verl.__file__).parent / "checkpoint_engine"
    known = {"nccl": "nccl", "nixl": "nixl", "kimi": "kimi_ckpt_engine", "mooncake": "mooncake"}
    for file, backend in known.items():
        text = (folder / f"{file}_checkpoint_engine.py").read_text()
        assert f'register("{backend}")' in text
        for module in separate_check._NEEDED[backend]:
            assert re.search(rf"(?m)^ *(import|from) {module}\b", text), (file, module)


@pytest.mark.parametrize("recipe", ["plan_path_qwen3_1p7b", "plan_path_qwen3_1p7b_roles"])
def test_recipes_for_gpus_take_the_group(recipe: str, tmp_path: Path, gpu: None) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [{recipe}, mode: separate, _self_]\n")
    # A policy's servers share their devices with no others, so each may take most of the memory.
    config = recipes.compose("mine", ["actor_rollout_ref.rollout.gpu_memory_utilization=0.9"], folder=tmp_path)
    run_check._check_policies(config, AtGrpoConfig.from_config(config))
    assert config.actor_rollout_ref.rollout.n_gpus_per_node == config.trainer.n_gpus_per_node


@pytest.mark.parametrize("mode", ["plan_path_cpu", "plan_path_cpu_async"])
@pytest.mark.parametrize(
    ("override", "neutral"),
    [
        ("actor_rollout_ref.hybrid_engine=false", "true"),
        (f"{ROLLOUT}.nnodes=1", "0"),
        (f"{ENGINE}.backend=nccl", "naive"),
        (f"{ENGINE}.custom_backend_module=mine", "null"),
        (f"{SECTION}.parameter_sync_step=1", None),
    ],
)
def test_keys_of_their_own_servers_are_refused_in_other_modes(mode: str, override: str, neutral: Any) -> None:
    message = refusal(mode, override)
    assert message.startswith(f"{override} has no effect with at_grpo.mode=")
    assert (f"set it to {neutral}" if neutral else "remove it") in message
