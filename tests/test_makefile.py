"""What `make train` would do on a GPU, and what its installation asks of the machine; nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def commands(*arguments: str) -> str:
    made = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return made.stdout


@pytest.mark.parametrize(
    ("arguments", "expected", "absent"),
    [
        (["RECIPE=walk_smollm2"], [".venv/bin/", "runs/walk_smollm2/done"], ["hardware=", "-gpu"]),
        (["HARDWARE=cpu"], [".venv/bin/", "hardware=cpu", "cpu-setup"], ["-gpu", "install_gpu"]),
        (
            ["RECIPE=walk_smollm2", "HARDWARE=1_gpu", "ARGS=precision=fp16"],
            [".venv-gpu/bin/", "hardware=1_gpu", "precision=fp16", "make-smollm2", "runs/walk_smollm2_1_gpu/done"],
            [".venv/", "cpu-setup", "install_cpu"],
        ),
        (["HARDWARE=1_gpu"], ["make-model runs/models/plan_path_tiny", "hardware=1_gpu"], [".venv/"]),
        (["RECIPE=plan_path_qwen3_1p7b", "HARDWARE=8_gpus"], ["hardware=8_gpus"], ["make-model", "make-smollm2"]),
        (
            ["RECIPE=walk_smollm2", "ARGS=+roles=navigator_pacer at_grpo.candidates=4 +mode=async"],
            [
                "runs/walk_smollm2_navigator_pacer_async/done",
                "+roles=navigator_pacer at_grpo.candidates=4 +mode=async",
            ],
            ["runs/walk_smollm2/"],
        ),
    ],
)
def test_hardware_chooses_environment_recipe_and_folder(
    arguments: list[str], expected: list[str], absent: list[str], tmp_path: Path
) -> None:
    said = commands("train", *arguments, "-B")
    assert all(each in said for each in expected), said
    assert not any(each in said for each in absent), said


@pytest.mark.parametrize(
    ("flags", "arguments", "precision"),
    [
        ("avx512f avx512_bf16", ["RECIPE=walk_smollm2"], "precision=bf16"),
        ("amx_bf16 amx_tile", ["RECIPE=number_search_smollm2"], "precision=bf16"),
        ("avx512f", ["RECIPE=walk_smollm2"], None),
        ("avx512_bf16", ["RECIPE=walk_smollm2", "ARGS=precision=fp32"], "precision=fp32"),
        ("avx512_bf16", ["RECIPE=plan_path_cpu"], None),
        ("avx512_bf16", ["RECIPE=walk_smollm2", "HARDWARE=1_gpu"], None),
    ],
)
def test_a_real_model_is_computed_in_bfloat16_where_the_cpu_multiplies_in_it(
    flags: str, arguments: list[str], precision: str | None, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags: fpu {flags} lm\n")
    said = commands("train", *arguments, f"CPUINFO={tmp_path}/cpuinfo", "-B")
    assert said.count("precision=") == (2 if precision else 0)  # the command, and what is said of it
    assert not precision or said.count(precision) == 2


@pytest.mark.parametrize(
    ("driver", "compiler", "refusal"),
    [
        (None, True, "nvidia-smi shows no GPU"),
        ("", True, "nvidia-smi shows no GPU"),
        ("570.86.15", True, "the GPU's driver is 570.86.15"),
        ("580.65.06", False, "there is no C compiler"),
        ("590.1", True, "no interpreter"),  # so far it came
    ],
)
def test_a_machine_that_cannot_run_it_is_told_before_anything_is_installed(
    driver: str | None, compiler: bool, refusal: str, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {"mine": "echo no interpreter >&2; exit 1", "cc": "exit 0", "nvidia-smi": f"echo {driver}"}
    for name, text in scripts.items():
        if (name, compiler) != ("cc", False) and (name, driver) != ("nvidia-smi", None):
            (tools / name).write_text(f"#!/bin/bash\n{text}\n")
            (tools / name).chmod(0o755)
    for name in ("bash", "head", "dirname", "env"):
        (tools / name).symlink_to(shutil.which(name) or name)
    made = subprocess.run(
        ["bash", str(ROOT / "scripts" / "install_gpu_stack.sh"), str(tmp_path / "venv")],
        env={**os.environ, "PATH": str(tools), "PYTHON": "mine"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 1 and refusal in made.stderr, made.stderr
    assert not (tmp_path / "venv").exists()
