"""The table of recipes/README.md: each row is a job that starts; recipes that are gone name one of its rows."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import hydra
from fakes import hub_rows
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from verl_atgrpo import Environment, compat, platform_choice, recipes
from verl_atgrpo.play import data_check
from verl_atgrpo.recipes import gone
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import ConfigError

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from recipe_table import Job, jobs

NEEDED = {"reasoning_gym": "reasoning_gym", "search": "bm25s", "textarena": "textarena"}
"""Environment -> the package behind it, which is not everywhere."""
OF_THE_CPU = (
    "ray_kwargs.ray_init.object_store_memory",
    "actor_rollout_ref.rollout.enable_sleep_mode",
    *(
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.{key}"
        for key in ("worker_extension_cls", "distributed_executor_backend", "kv_cache_memory_bytes", "block_size")
    ),
)
"""Keys that `hardware: cpu` alone sets."""


def refused(job: Job, hardware: str) -> str | None:
    """Returns what the refusal of a job names on hardware that it is not made for; None where it runs."""
    if hardware and job.recipe == "plan_path_cpu_separate":
        return "checkpoint_engine.backend=gloo"
    return "gpus add up to 8" if hardware == "1_gpu" and "+placement=split" in job.overrides else None


def with_small_data(compose: Any, config: Any, job: Job, small: list[str], folder: Path) -> Any:
    """Returns the job's configuration, with small files in the place of data sets."""
    data = hub_rows.overrides(config, folder)
    return compose(str(job), *small, *data) if data else config


_GRADED: dict[tuple[str, str], Any] = {}


def graded_once(check_rows: Callable[..., Any], env: Environment, split: str, rows: Sequence[int]) -> Any:
    """Grades the rows of a data set, which are the same in every recipe, for the first of them."""
    key = type(env).__name__, split
    if key not in _GRADED:
        _GRADED[key] = check_rows(env, split, rows)
    return _GRADED[key]


def test_the_table_has_every_recipe() -> None:
    named = [job.recipe for job in jobs()]
    assert {*named, "at_grpo_trainer"} == {file.stem for file in Path(recipes.__file__).parent.glob("*.yaml")}
    assert len(set(jobs())) == len(named)


@pytest.mark.slow  # half a second each
@pytest.mark.parametrize("hardware", ["", "1_gpu", "8_gpus"])
@pytest.mark.parametrize("job", jobs(), ids=str)
def test_every_job_of_the_table_passes_the_checks_on_any_hardware(
    compose: Any, job: Job, hardware: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = not hardware and "_qwen3_" not in job.recipe
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: on_cpu)
    monkeypatch.setattr(data_check, "check_rows", functools.partial(graded_once, data_check.check_rows))
    small = ["at_grpo.train_tasks=128", "at_grpo.val_tasks=8", *([f"hardware={hardware}"] * bool(hardware))]
    config = compose(str(job), *small)
    if (package := NEEDED.get(config.at_grpo.environment.name)) is not None:
        pytest.importorskip(package)
    config = with_small_data(compose, config, job, small, tmp_path)
    if hardware:
        left = [key for key in OF_THE_CPU if OmegaConf.select(config, key) is not None]
        assert not left and "MALLOC" not in str(config.ray_kwargs), f"settings for the CPU: {left}"
        assert not config.actor_rollout_ref.rollout.enforce_eager
        assert (config.actor_rollout_ref.actor.strategy, config.trainer.device) == ("fsdp2", "cuda")
    refusal = refused(job, hardware)
    with nullcontext() if refusal is None else pytest.raises(ConfigError, match=refusal):
        check_run(config)


# ------------------------------------------------------------------ recipes that are gone


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has imported verl, and left as it was."""
    module = importlib.import_module("hydra._internal.config_repository")
    monkeypatch.setattr(module.ConfigRepository, "load_config", module.ConfigRepository.load_config)
    compat.explain_recipes(module)


def test_what_replaces_a_recipe_is_a_row_of_the_table() -> None:
    assert {*gone.SAME.values()} <= {str(job) for job in jobs()}
    assert not {*gone.SAME, *gone.LIKE} & {job.recipe for job in jobs()}


@pytest.mark.slow  # half a second each
@pytest.mark.parametrize("name", gone.LIKE)
def test_what_is_like_a_recipe_that_is_gone_starts(
    compose: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    recipe, *overrides = gone.LIKE[name].removeprefix("--config-name=").split()
    job, small = Job(recipe, tuple(overrides)), ["at_grpo.train_tasks=128", "at_grpo.val_tasks=8"]
    if (package := NEEDED.get(name.removesuffix("_cpu"))) is not None:
        pytest.importorskip(package)
    check_run(with_small_data(compose, compose(str(job), *small), job, small, tmp_path))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("name", [*gone.SAME, *gone.LIKE])
def test_a_recipe_that_is_gone_is_refused_with_the_command_that_replaces_it(name: str) -> None:
    same = name in gone.SAME
    command = f"--config-name={gone.SAME[name]} trainer.experiment_name={name}" if same else gone.LIKE[name]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        for spelling in (name, f"{name}.yaml"):
            with pytest.raises(CompactHydraException) as caught:
                hydra.compose(spelling)
            message = str(caught.value)
            assert message.startswith(f"verl-atgrpo: the recipe {name} is gone: ") and message.endswith(f" {command}")
            assert "\n" not in message


@pytest.mark.usefixtures("told")
def test_a_recipe_of_ones_own_is_told_of_what_is_gone_and_may_have_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [walk_smollm2_roles, _self_]\n")
    with pytest.raises(
        ValueError, match=r"^the recipe .*mine\.yaml cannot be composed: the recipe walk_smollm2_roles is gone: use "
    ):
        recipes.compose("mine", folder=tmp_path)
    (tmp_path / "walk_smollm2_roles.yaml").write_text("defaults: [walk_smollm2, roles: navigator_pacer, _self_]\n")
    assert len(recipes.compose("mine", folder=tmp_path).at_grpo.policies) == 2
