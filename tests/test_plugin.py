"""The plugin in verl's process: what is registered, when it is imported, and how it fails."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_atgrpo import cpu, plugin


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Another test may have imported verl here, and with it set CPU mode's variables.
    inherited = {name: value for name, value in os.environ.items() if name not in cpu.ENVIRONMENT}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_estimator_and_trainer_are_registered_lazily_and_a_torch_without_cuda_runs_on_the_cpu() -> None:
    import torch

    # A CUDA build on a machine without a device is no CPU machine (below).
    chosen = {"VERL_PLATFORM": "cpu"} if torch.version.cuda else {}
    result = run(
        "from verl.plugin.platform import get_platform; assert get_platform().device_name == 'cpu'\n"
        "import sys, verl\n"
        "assert 'verl_atgrpo.plugin' in sys.modules\n"
        "assert 'verl_atgrpo.train.trainer.trainer' not in sys.modules\n"
        "assert 'vllm' not in sys.modules\n"
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn\n"
        "assert get_adv_estimator_fn('at_grpo').__module__ == 'verl_atgrpo.train.estimators.plain_job'\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "assert get_trainer_cls('at_grpo').__module__ == 'verl_atgrpo.train.trainer.trainer'\n",
        **chosen,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_cpu_mode_is_neither_active_nor_imported_beside_an_accelerator() -> None:
    result = run(
        "import sys, verl\n"
        "assert not [name for name in sys.modules if name.startswith('verl_atgrpo.cpu')]\n"
        "import os; assert 'VERL_ENGINE_DEVICE' not in os.environ\n"
        "from verl.plugin.platform import get_platform; assert get_platform().device_name == 'cuda'\n",
        VERL_PLATFORM="nvidia",
    )
    assert result.returncode == 0, result.stderr


def test_a_cuda_build_without_a_device_is_not_taken_for_a_cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from verl_atgrpo import platform_choice

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert not platform_choice.wants_cpu()


@pytest.mark.slow
def test_cpu_mode_imports_the_engine_the_compiler_and_data_sets_only_where_they_are_used() -> None:
    pytest.importorskip("vllm")
    result = run(
        "import sys, verl\n"
        "import verl.workers.engine_workers, verl.workers.rollout.vllm_rollout.vllm_rollout as rollout\n"
        "found = {'vllm', 'datasets', 'pandas', 'torch._inductor.lowering'} & set(sys.modules)\n"
        "assert not found, found\n"
        "assert rollout.VLLM_SLEEP_LEVEL == 2\n"
        "from verl.utils.dataset import rl_dataset, rm_dataset\n"
        "assert rl_dataset.datasets.load_dataset.__module__ == 'datasets.load'\n"
        "import pandas\n"
        "assert rm_dataset.pd.concat is pandas.concat\n"
        "from vllm import LLM\n"
        "from vllm.distributed import parallel_state\n"
        "assert isinstance(LLM, type) and parallel_state.get_world_group\n"
        "assert 'torch._inductor.lowering' not in sys.modules\n"
        "from torch._inductor import lowering\n"
        "assert lowering.lowerings\n",
        VERL_PLATFORM="cpu",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_cpu_mode_leaves_an_engine_as_it_is_that_was_imported_before() -> None:
    pytest.importorskip("vllm")
    result = run(
        "import verl, vllm\n"
        "from verl.third_party.vllm import LLM, parallel_state\n"
        "assert LLM is vllm.LLM and parallel_state.get_world_group\n",
        VERL_PLATFORM="cpu",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_failing_import_is_loud(tmp_path: Path) -> None:
    # A module of the plugin that cannot be imported, found first.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'verl_atgrpo.compat':\n"
        "            raise ImportError('compat is broken on purpose')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    result = run("import verl", PYTHONPATH=str(tmp_path))
    assert "verl-atgrpo: the plugin could not be loaded" in result.stderr
    assert "compat is broken on purpose" in result.stderr


@pytest.mark.parametrize(
    ("team", "save_freq", "val_only", "registered"),
    [(True, 5, False, 1), (True, 1, False, 1), (True, -1, False, 0), (True, 5, True, 0), (False, 5, False, 0)],
)
def test_a_teams_job_that_saves_has_last_words(
    team: bool, save_freq: int, val_only: bool, registered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    from verl_atgrpo.train.config import run_check

    calls: list[Any] = []
    trainer = SimpleNamespace(save_freq=save_freq, val_only=val_only)
    job = SimpleNamespace(trainer=trainer, steps=16) if team else None
    monkeypatch.setattr(plugin.atexit, "register", lambda *call: calls.append(call))
    monkeypatch.setattr(run_check, "check_run_or_exit", lambda config: job)
    plugin._check_and_announce(SimpleNamespace(), use_critic=False)
    ours = [call for call in calls if getattr(call[0], "__module__", "") == "verl_atgrpo.train.trainer.checkpoints"]
    assert [(call[1], call[3]) for call in ours] == [(trainer, 16)] * registered


def test_the_package_exports_what_authors_import_and_loads_neither_verl_nor_torch() -> None:
    names = (
        "Agent Candidate Environment EnvironmentConfigError EpisodeFailed EstimatorSpec Limits Message Outcome Score "
        "ScriptedTeam Split Team check_environment make play register run_python stable_hash"
    )
    result = run(
        "import sys, verl_atgrpo\n"
        "print(*verl_atgrpo.__all__)\n"
        "assert all(hasattr(verl_atgrpo, name) for name in verl_atgrpo.__all__)\n"
        "heavy = {'verl', 'torch', 'numpy', 'pydantic', 'omegaconf', 'ray'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == names


def test_hook_runs_once_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_atgrpo.compat import when_imported

    (tmp_path / "hooked_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    when_imported("hooked_module", lambda module: seen.append(module.value))
    assert importlib.util.find_spec("hooked_module") is not None and seen == []  # looked up, and not imported
    import hooked_module  # type: ignore[import-not-found]

    assert seen == [1]
    when_imported("hooked_module", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    assert importlib.util.find_spec("hooked_module") is not None
    assert hooked_module.__spec__ is not None


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 6),
        ({"cpu.max": "max 100000"}, 6),
        ({"cpu.max": "250000 100000"}, 3),  # a container, which sees its own group as the root
        ({"job/step/cpu.max": "max 100000", "job/cpu.max": "100000 100000"}, 1),
        ({"job/step/cpu.max": "20000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 6),
    ],
)
def test_a_quota_limits_the_cores(
    files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_atgrpo import platform_choice

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 3, 5, 7, 11, 13}, raising=False)
    (tmp_path / "cgroup").write_text("1:cpu:/other\n0::/job/step\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert platform_choice.cores(str(tmp_path), str(tmp_path)) == [2, 3, 5, 7, 11, 13][:most]


def test_a_module_is_imported_within_its_context_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_atgrpo.compat import import_within, when_imported

    (tmp_path / "inner_module.py").write_text("import builtins\nbuiltins.seen_by_hooks.append('module')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[str] = []
    monkeypatch.setattr("builtins.seen_by_hooks", seen, raising=False)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        seen.append("before")
        yield
        seen.append("after")

    import_within("inner_module", context)
    when_imported("inner_module", lambda module: seen.append("callback"))
    module = importlib.import_module("inner_module")
    assert seen == ["before", "module", "after", "callback"]
    import_within("inner_module", context)
    importlib.reload(module)
    assert seen[4:] == ["module"]
