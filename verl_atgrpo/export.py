"""Exports the policies of a checkpoint as Hugging Face models."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from verl_atgrpo.config.policies import POLICIES_FILE

logger = logging.getLogger(__name__)

_ADAPTER = "lora_adapter"


def export(step: Path, out: Path) -> dict[str, Path]:
    """Writes the trained policies of one step to `out/<policy>`, adapters merged.

    Copies models that the checkpoint holds; `verl.model_merger` makes the others from shards, in bfloat16. A merged
    adapter is also in its model's folder, in `lora_adapter`.

    Args:
        step: a checkpoint folder `global_step_<n>`.
        out: the folder for the models, made if it does not exist.

    Returns policy -> its folder.

    Raises:
        ValueError: `step` is no complete checkpoint, or a policy was not trained with FSDP.
        FileExistsError: a policy's folder in `out` exists.
        RuntimeError: `verl.model_merger` failed.
    """
    saved = trained_policies(step)
    for name in saved:
        if (out / name).exists():
            raise FileExistsError(f"{out / name} exists: remove it, or use another folder")
    for name, folder in saved.items():
        _export_policy(folder, out / name)
    return {name: out / name for name in saved}


def trained_policies(step: Path) -> dict[str, Path]:
    """Returns policy -> its folder in the checkpoint `global_step_<n>`; raises ValueError if that is not complete."""
    if not (step / POLICIES_FILE).is_file():
        raise ValueError(f"{step} has no {POLICIES_FILE}: give a folder global_step_<n> of a complete step")
    saved: dict[str, str] = json.loads((step / POLICIES_FILE).read_text())
    return {name: step / folder for name, folder in saved.items()}


def whole_model(policy: Path) -> Path | None:
    """Returns the Hugging Face model in a policy's checkpoint folder, or None if it has only shards."""
    folder = policy / "huggingface"
    return folder if any(folder.glob("*.safetensors")) else None


def _export_policy(source: Path, target: Path) -> None:
    model = whole_model(source)
    if model is not None:
        shutil.copytree(model, target)
        return
    if not (source / "fsdp_config.json").is_file():
        raise ValueError(f"{source} has no FSDP shards: use python -m verl.model_merger with its backend")
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(source), "--target_dir", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if (target / _ADAPTER).is_dir():
        _merge_adapter(target)


def _merge_adapter(target: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # Merged in float32, so that only the result is rounded.
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(target / _ADAPTER)).merge_and_unload()
    merged.to(torch.bfloat16).save_pretrained(target)
    logger.info("%s: merged the adapter", target)
