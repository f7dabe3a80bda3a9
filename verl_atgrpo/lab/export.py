"""Exports the policies of a checkpoint as Hugging Face models."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from verl_atgrpo.files import FileError, check_safetensors, new_folder, read_json
from verl_atgrpo.train.config.policies import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, POLICIES_FILE
from verl_atgrpo.train.config.schema import Name

logger = logging.getLogger(__name__)

_SHARDS = "fsdp_config.json"
_INDEX = ".safetensors.index.json"


class _ModelConfig(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model_type: str


class _AdapterConfig(BaseModel):
    base_model_name_or_path: str | None = None
    r: int


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in peft's format."""

    folder: str
    base: str
    """The model that it was trained on; empty if peft's file does not say."""
    rank: int

    def __str__(self) -> str:
        return self.folder


class _Index(BaseModel):
    weight_map: dict[str, str]


_POLICIES: TypeAdapter[dict[str, str]] = TypeAdapter(dict[Name, str])
_MODEL_CONFIG, _WEIGHTS = TypeAdapter(_ModelConfig), TypeAdapter(_Index)
_ADAPTERS = TypeAdapter(_AdapterConfig)
_JSON: TypeAdapter[dict[str, Any] | list[Any]] = TypeAdapter(dict[str, Any] | list[Any])


def export(step: Path, out: Path, left_out: str = "") -> dict[str, Path]:
    """Writes the trained policies of one step to `out/<policy>`, adapters merged; returns policy -> its folder.

    Copies models that the checkpoint holds; `verl.model_merger` makes the others from shards, in bfloat16. A merged
    adapter is also in its model's folder, in `lora_adapter`. After an error `out` is as it was.

    Args:
        step: a checkpoint folder `global_step_<n>`.
        out: the folder for the models, made if it does not exist.
        left_out: a policy that is not exported.

    Raises ValueError if `step` is no complete checkpoint with a number, or a policy was not trained with FSDP;
    FileError if a file of it is damaged, or a link out of it; FileExistsError for a policy's folder in `out`;
    RuntimeError from the merger.
    """
    saved = {name: folder for name, folder in trained_policies(step).items() if name != left_out}
    if not saved:
        raise ValueError(f"{step / POLICIES_FILE} names no policy: there is nothing to export")
    number_of(step)
    for source in saved.values():
        _check_links(source, step)
        found = saved_model(source)
        if isinstance(found, Adapter) and Path(found.base).is_absolute() and not Path(found.base).is_dir():
            raise ValueError(f"{found}/{ADAPTER_CONFIG}: its base model is not in {found.base} any more")
    with ExitStack() as folders:
        for name, source in saved.items():
            _export_policy(source, folders.enter_context(new_folder(out / name)))
    return {name: out / name for name in saved}


def number_of(step: Path) -> int:
    """Returns the number in the name of a folder `global_step_<n>`; raises ValueError for another name."""
    if (named := re.fullmatch(r"global_step_(\d+)", step.name)) is None:
        raise ValueError(f"{step}: name it global_step_<n>, as its card says after how many steps it is")
    return int(named[1])


def trained_policies(step: Path) -> dict[str, Path]:
    """Returns policy -> its folder in the checkpoint `global_step_<n>`.

    Raises ValueError if that is not complete, FileError if its list of policies is damaged, or names a folder outside.
    """
    file = step / POLICIES_FILE
    if not file.is_file():
        raise ValueError(f"{step} has no {POLICIES_FILE}: give a folder global_step_<n> of a complete step")
    saved = read_json(file, _POLICIES, "a mapping from trained policies to their folders")
    for name, folder in saved.items():
        if "\0" in folder or not (step / folder).is_dir():
            raise FileError(f"{file}: {name}={folder!r} is not a folder in {step}")
        if not _within(step / folder, step):
            raise FileError(f"{file}: {name}={folder!r} is outside {step}: a checkpoint holds its own policies")
    return {name: step / folder for name, folder in saved.items()}


def _within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _check_links(policy: Path, step: Path) -> None:
    """Raises FileError for a link out of the checkpoint: the copy would have a file that no training wrote."""
    for path in policy.rglob("*"):
        if path.is_symlink() and not _within(path, step):
            raise FileError(f"{path} is a link out of {step}: copy the file there")


def check_model(folder: Path) -> None:
    """Raises FileError or OSError unless a folder's model is whole: JSON, and the headers and sizes of its weights."""
    read_json(folder / "config.json", _MODEL_CONFIG, "a model's configuration")
    for file in sorted(folder.glob("*.json")):
        read_json(file, _JSON, "a JSON object or list")
    for file in sorted(folder.glob(f"*{_INDEX}")):
        for shard in sorted({*read_json(file, _WEIGHTS, "an index of weights").weight_map.values()}):
            if Path(shard).name != shard or not (folder / shard).is_file():
                raise FileError(f"{file}: weight_map has {shard!r}, which is not a file in {folder}")
    for file in sorted(folder.glob("*.safetensors")):
        check_safetensors(file)


def refuse_to_overwrite(folder: Path, remedy: str) -> None:
    """Raises FileError if a folder has files of a model: its configuration, tokenizer or weights."""
    for pattern in ("*config.json", "tokenizer*", "*.safetensors", "*.bin", "*.pt", "*.gguf", f"*{_INDEX}"):
        for file in sorted(folder.glob(pattern)) if folder.is_dir() else ():
            raise FileError(f"{folder} has a model that this command did not make ({file.name}): {remedy}")


def saved_model(policy: Path) -> Path | Adapter | None:
    """Returns the Hugging Face model in a policy's checkpoint folder, or its adapter if other policies have the base.

    None if there are only shards. Raises FileError or OSError if it is damaged.
    """
    if any((model := policy / "huggingface").glob("*.safetensors")):
        check_model(model)
        return model
    is_adapter = (policy / ADAPTER / ADAPTER_CONFIG).is_file() and not (policy / _SHARDS).is_file()
    return check_adapter(policy / ADAPTER) if is_adapter else None


def check_adapter(folder: Path) -> Adapter:
    """Returns the adapter in a folder; raises FileError or OSError if it is not whole."""
    config = read_json(folder / ADAPTER_CONFIG, _ADAPTERS, "peft's configuration of an adapter on a base model")
    check_safetensors(folder / ADAPTER_WEIGHTS)
    return Adapter(str(folder), config.base_model_name_or_path or "", config.r)


def _export_policy(source: Path, target: Path) -> None:
    found = saved_model(source)
    if isinstance(found, Path):
        _copy(found, target)
        return
    if found is not None:
        _copy(Path(found.folder), target / ADAPTER)
        _merge_adapter(found.base, target)
        return
    if not (source / _SHARDS).is_file():
        raise ValueError(f"{source} has no FSDP shards: use python -m verl.model_merger with its backend")
    read_json(source / _SHARDS, _JSON, "verl's description of FSDP shards")
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(source), "--target_dir", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeError(
            f"{source}: the shards cannot be merged ({last[:500]}); for all of the output run {' '.join(command)}"
        )
    check_model(target)
    if (target / ADAPTER).is_dir():
        _merge_adapter(str(target), target)


def _copy(source: Path, target: Path) -> None:
    """Copies a folder; raises OSError for the first file that cannot be copied."""
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except shutil.Error as error:  # a list of (file, copy, text)
        (file, _, why), number = error.args[0][0], len(error.args[0])
        room = f"where {shutil.disk_usage(target.parent).free >> 20:,} MiB are free ({number} files in all)"
        raise OSError(f"{file} cannot be copied to {target.parent}, {room}: {why}") from error


def _merge_adapter(base: str, target: Path) -> None:
    """Writes a base model, by its folder or name on the hub, with the adapter in `target` to `target`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Merged in float32, so that only the result is rounded.
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(target / ADAPTER)).merge_and_unload()
    merged.to(torch.bfloat16).save_pretrained(target)
    has_own = (target / ADAPTER / "tokenizer_config.json").is_file()  # with the chat template of the training
    AutoTokenizer.from_pretrained(target / ADAPTER if has_own else base).save_pretrained(target)
    logger.info("%s: merged the adapter", target)
