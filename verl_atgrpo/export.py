"""Every policy of a checkpoint as a Hugging Face model."""

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
    """Writes the trained policies of one step to `out/<policy>`; a policy with an adapter gets it merged in.

    Models that the checkpoint holds already are copied; others are put together by `verl.model_merger`, which
    writes bfloat16. A merged adapter also stays beside its model, in `lora_adapter`.

    Args:
        step: a folder `global_step_<n>` that training wrote.
        out: where the models go; made if it is not there.

    Returns policy -> its folder.

    Raises:
        ValueError: `step` is no complete checkpoint, or a policy was not trained with FSDP.
        FileExistsError: a policy's folder in `out` is there already.
        RuntimeError: `verl.model_merger` failed.
    """
    saved = trained_policies(step)
    for name in saved:
        if (out / name).exists():
            raise FileExistsError(f"{out / name} is there already: remove it, or name another folder")
    for name, folder in saved.items():
        _export_policy(folder, out / name)
    return {name: out / name for name in saved}


def trained_policies(step: Path) -> dict[str, Path]:
    """Returns policy -> its folder in the checkpoint `global_step_<n>`; raises ValueError if that is not complete."""
    if not (step / POLICIES_FILE).is_file():
        raise ValueError(f"{step} has no {POLICIES_FILE}: name a folder global_step_<n> of a complete step")
    saved: dict[str, str] = json.loads((step / POLICIES_FILE).read_text())
    return {name: step / folder for name, folder in saved.items()}


def whole_model(policy: Path) -> Path | None:
    """Returns the Hugging Face model that a policy's folder in a checkpoint holds, or None if it has shards only."""
    ready = policy / "huggingface"
    return ready if any(ready.glob("*.safetensors")) else None


def _export_policy(source: Path, target: Path) -> None:
    ready = whole_model(source)
    if ready is not None:
        shutil.copytree(ready, target)
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

    # In float32, so that only the result is rounded.
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, str(target / _ADAPTER)).merge_and_unload()
    merged.to(torch.bfloat16).save_pretrained(target)
    logger.info("%s: adapter merged in", target)
