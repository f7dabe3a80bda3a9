"""Rules of what a job needs of the machine: models that can be read, folders that can be written, memory."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_atgrpo import platform_choice
from verl_atgrpo.files import HUB_NAME, folders
from verl_atgrpo.train.config.chat_rules import answering, hindsights, of_chats, of_hindsight, of_template_arguments
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.job_rules import loggers
from verl_atgrpo.train.config.policies import config_of_policy
from verl_atgrpo.train.config.policy_rules import of_context
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.view import ACTOR, dtype_name

_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json")
"""Files of a model that are parsed first: the error of transformers names none of them."""
_SHARED = "/dev/shm"
_FLASH = "flash_attention_2"
"""What verl has models compute attention with."""
_QUANTIZED = ("fp8", "torchao", "ascend")
"""Methods that verl's servers take."""
LARGE = 64 << 20
"""Bytes of weights on disk from which on a model's processes return what they free."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_ARENA_MAX": "2"}
"""Blocks of 4 MiB and more."""
_VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"


def of_models(job: Job) -> Iterator[str]:
    """Models of policies that cannot be loaded, or do not suit the job; raises ConfigError for the former.

    In CPU mode also a model that neither a folder nor the hub has, a prompt in chunks, and a padded vocabulary: verl
    masks logits beyond the tokenizer's length in vLLM but not in the actor, so that with a padded vocabulary the two
    disagree on the log-prob of every token. Trained models give those logits almost no probability; the untrained tiny
    models of CPU mode do not.
    """
    cpu, config, settings = platform_choice.wants_cpu(), job.config, job.settings
    if cpu and config.trainer.device != "cpu":
        yield (
            f"trainer.device={config.trainer.device}: this torch is built for the CPU, or VERL_PLATFORM=cpu; use "
            "hardware=cpu, or install verl-atgrpo[gpu] on a machine with a GPU (docs/one_gpu.md)"
        )
    for policy in job.policies.values():  # first what needs no model
        if not cpu:
            yield from _of_attention(policy.model)
            yield from _of_served_adapters(policy.key, policy.model, policy.rollout)
        _import(f"{policy.key}.model.external_lib", policy.model.external_lib)
        yield from _of_quantization(f"{policy.key}.rollout.quantization", policy.rollout.quantization)
        if cpu:
            yield from of_cpu_prefill(policy.key, policy.rollout)
            yield from of_shared_memory(policy.key, policy.rollout)
    tokenizers, answers = {}, answering(settings, job.env)
    for name, policy in job.policies.items():
        if cpu or os.path.isdir(policy.model.path):  # else a name on the hub, which the workers download
            longest, tokenizer, text = _read(policy.key, policy.model, padded=not cpu)
            if cpu:
                yield from of_bucket(policy.key, policy.rollout, text)
            yield from of_context(policy.key, policy.rollout, config.data, longest)
        else:
            yield from _of_hub_name(f"{policy.key}.model.path={policy.model.path}", policy.model.path)
            tokenizer = _downloaded_tokenizer(policy.model)
        if tokenizer is not None:
            yield from of_chats(settings, answers, name, tokenizer)
            tokenizers[f"policy {name!r}"] = tokenizer
    readers = [found for name in settings.critic_reads_as if (found := tokenizers.get(f"policy {name!r}")) is not None]
    texts = hindsights(settings, job.env) if readers else []
    for tokenizer in readers:
        yield from of_hindsight(texts, tokenizer, config.data)
    if len(tokenizers) == len(job.policies):  # else the trainer checks it
        yield from of_template_arguments(config.data, tokenizers)


def _of_attention(model: DictConfig) -> Iterator[str]:
    """A machine where transformers would miss the package of verl's default attention."""
    chosen = OmegaConf.select(model, "override_config.attn_implementation") or _FLASH
    # transformers takes `kernels` in its place, and torch_npu has its own.
    if chosen == _FLASH and not any(map(importlib.util.find_spec, ("flash_attn", "kernels", "torch_npu"))):
        yield (
            f"{ACTOR}.model: actors compute attention by {_FLASH}, whose package flash_attn is not installed; use "
            f"hardware=1_gpu, or set {ACTOR}.model.use_remove_padding=false and "
            f"++{ACTOR}.model.override_config.attn_implementation=sdpa"
        )


def _of_served_adapters(key: str, model: DictConfig, rollout: DictConfig) -> Iterator[str]:
    """Adapters in float32 on a GPU, where vLLM's kernels for them take halves only."""
    if model.lora_rank and dtype_name(rollout.dtype) == "float32":
        yield (
            f"{key}.rollout.dtype={rollout.dtype}: vLLM computes adapters on a GPU in bfloat16 or float16; use "
            "precision=bf16 or precision=fp16, or train the whole model"
        )


def _of_hub_name(where: str, name: str) -> Iterator[str]:
    """What is neither a folder, an address nor a name on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if "://" in name or os.path.isabs(name):  # verl copies it from there; a folder of the other nodes'
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        yield f"{where}: there is no such folder, and it is no owner/name of the hub's ({error})"


def _downloaded_tokenizer(model: DictConfig) -> Any:
    """Returns the tokenizer of a model on the hub if this machine has it, or None; the trainer checks all."""
    if model.trust_remote_code:  # whose code may do anything, such as download
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path or model.path, local_files_only=True)
    except _errors_of_loading():
        return None
    tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
    return tokenizer if tokenizer.chat_template else None


def _import(key: str, module: str | None) -> None:
    """Imports a module that the workers will; raises ConfigError if that fails."""
    if module is None:
        return
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{key}={module}: it cannot be imported, {type(error).__name__}: {str(error)[:200]}; name a module that "
            "the job's Python finds"
        ) from error


def _of_quantization(key: str, method: str | None) -> Iterator[str]:
    """A method by which verl does not quantize servers."""
    if method is not None and method not in _QUANTIZED:
        yield f"{key}={method}: verl quantizes servers by {' or '.join(_QUANTIZED)}; use one of these, or null"


def of_cpu_prefill(key: str, rollout: DictConfig) -> Iterator[str]:
    """Prompts in chunks: a seeded sample from one crashes the engine of vLLM for CPU."""
    if rollout.enable_chunked_prefill:
        yield (
            f"{key}.rollout.enable_chunked_prefill=true: samples have seeds, and vLLM for CPU fails on seeded "
            "sampling from a prompt in chunks; set it to false"
        )


def of_bucket(key: str, rollout: DictConfig, text: Any) -> Iterator[str]:
    """A bucket that does not hold a model's largest weights, which verl requires in CPU mode; `text` configures it."""
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes
    least = text.vocab_size * text.hidden_size * (2 if dtype_name(rollout.dtype) in ("bfloat16", "float16") else 4)
    if least > bucket << 20:
        yield (
            f"{key}.rollout.checkpoint_engine.update_weights_bucket_megabytes={bucket}: the model's embedding has "
            f"{-(-least >> 20)} MiB, which go to the servers at once; set it to at least that"
        )


def of_shared_memory(key: str, rollout: DictConfig) -> Iterator[str]:
    """A bucket of weights that does not fit into `/dev/shm`: writing to it would be a bus error."""
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes
    if os.path.isdir(_SHARED) and (free := shutil.disk_usage(_SHARED).free >> 20) < bucket:
        yield (
            f"{key}.rollout.checkpoint_engine.update_weights_bucket_megabytes={bucket}: weights go to the servers "
            f"through {_SHARED}, where {free} MiB are free; enlarge it, in Docker with --shm-size=1g"
        )


def _read(key: str, model: DictConfig, padded: bool) -> tuple[int, Any, Any]:
    """Returns a model's number of positions, tokenizer and configuration; raises ConfigError if it cannot be loaded.

    `padded` accepts more logits than tokens.
    """
    where, folder = f"{key}.model.path={model.path}", Path(model.path)
    on_hub = not folder.exists() and HUB_NAME.fullmatch(model.path) is not None
    if not on_hub and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{where}: there is no model; set this to a model's folder or its name on the hub, or make a tiny model: "
            f"verl-atgrpo make-model {model.path} --environment <name>"
        )
    for name in _FILES:
        _check_json(where, folder / name)
    from transformers import AutoConfig, AutoTokenizer

    trusted = bool(model.trust_remote_code)
    try:
        read = AutoConfig.from_pretrained(model.hf_config_path or model.path, trust_remote_code=trusted)
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path or model.path, trust_remote_code=trusted)
    except _errors_of_loading() as error:
        remedy = "make it anew, or set another path"
        if on_hub:
            remedy = "no folder has this name; without the hub verl-atgrpo make-smollm2 <folder> makes a small model"
        raise ConfigError(
            f"{where}: transformers cannot load its configuration or tokenizer, {type(error).__name__}: "
            f"{str(error)[:200]}; {remedy}"
        ) from error
    text = read.get_text_config()
    if text.vocab_size != len(tokenizer) and not padded:
        raise ConfigError(
            f"{where}: the model has {text.vocab_size} logits, its tokenizer {len(tokenizer)} tokens; resize the "
            "model's embeddings to the tokenizer"
        )
    tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
    if not tokenizer.chat_template:
        raise ConfigError(f"{where}: the tokenizer has no chat template; a team's prompts are chats")
    if not (longest := getattr(text, "max_position_embeddings", None)):
        raise ConfigError(
            f"{where}: verl's rollout needs a model with max_position_embeddings, and {text.model_type} has none; use "
            "another model"
        )
    return int(longest), tokenizer, text


def _errors_of_loading() -> tuple[type[Exception], ...]:
    """Returns what transformers raises for files that it cannot load, of a model or of a tokenizer."""
    from huggingface_hub.errors import StrictDataclassError

    return (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, StrictDataclassError)


def _check_json(where: str, file: Path) -> None:
    try:
        why = "" if isinstance(json.loads(file.read_bytes()), dict) else "is no JSON object"
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        why = f"cannot be read: {error}"
    if why:
        raise ConfigError(f"{where}: its {file.name} {why}; make the model anew, or set another path")


# ---------------------------------------------------------------------- folders


def of_folders(config: DictConfig) -> Iterator[str]:
    """Folders in which the run could not write: writes a temporary file there and removes it."""
    for where, path in _folders(config):
        if str(path).startswith("~"):
            yield f"{where}: ~ would be the name of a folder here; write ${{oc.env:HOME}} in its place"
        if "://" in str(path):
            yield f"{where}: it is an address, and would be a folder of this name; name a folder"
        if (why := _unwritable(Path(path))) is not None:
            yield f"{where}: {why}; set it to a folder that this job may write"


def _folders(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yields key and value, and the folder that must be writable."""
    trainer = config.trainer
    for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        if trainer[name] is not None:
            yield f"trainer.{name}={trainer[name]}", trainer[name]
    if config.global_profiler.tool is not None and config.global_profiler.save_path is not None:
        yield f"global_profiler.save_path={config.global_profiler.save_path}", config.global_profiler.save_path
    # As verl's `Tracking` chooses them.
    if "file" in loggers(trainer) and (file := os.environ.get("VERL_FILE_LOGGER_PATH")) is not None:
        yield f"trainer.logger=file with VERL_FILE_LOGGER_PATH={file}", os.path.dirname(file) or "."
    elif "file" in loggers(trainer):
        root, project = os.path.expanduser(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")), trainer.project_name
        yield f"trainer.logger=file with trainer.project_name={project}", os.path.join(root, project)
    if "tensorboard" in loggers(trainer):
        folder = f"tensorboard_log/{trainer.project_name}/{trainer.experiment_name}"
        folder = os.environ.get("TENSORBOARD_DIR", folder)
        yield f"trainer.logger=tensorboard with TENSORBOARD_DIR={folder}", folder


def _unwritable(folder: Path) -> str | None:
    """Returns why a file cannot be written to a folder, or None; makes the folder, and removes what was not there."""
    try:
        folder = folder.absolute()
        existing = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
        if not existing.is_dir():
            return f"{existing} is no folder"
        with folders(folder, keep=False), tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else folder
        return f"{str(named)[:200]} cannot be written ({error.strerror})"
    except ValueError as error:  # NUL
        return f"it is no name of a folder ({error})"


# ---------------------------------------------------------------------- memory in CPU mode


def return_large_blocks(config: DictConfig, settings: AtGrpoConfig) -> None:
    """Sets RETURNED for all processes of a job with a large model, where the job does not set them itself.

    CPU mode keeps freed memory (`verl_atgrpo.cpu`), which makes tiny models a fifth faster; two policies of SmolLM2
    would fill 24 GB in 20 steps so.
    """
    models = {config_of_policy(config, name).actor_rollout_ref.model.path for name in settings.policy_settings()}
    if max(map(_bytes, models)) >= LARGE:
        with open_dict(config):
            variables = {**RETURNED, **(OmegaConf.select(config, _VARIABLES) or {})}
            OmegaConf.update(config, _VARIABLES, variables, force_add=True)


def _bytes(model: str) -> int:
    if not Path(model).is_dir():  # of a hub, which has no tiny ones
        return LARGE
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
