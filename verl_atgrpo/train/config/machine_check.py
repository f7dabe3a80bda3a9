"""Checks what a job needs of the machine: models that can be read, folders that can be written, loggers' packages."""

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
from verl_atgrpo.train.config import check
from verl_atgrpo.train.config.answer_check import check_chats, check_hindsight, check_template_arguments, hindsights
from verl_atgrpo.train.config.job_rules import loggers
from verl_atgrpo.train.config.policies import config_of_policy
from verl_atgrpo.train.config.policy_rules import of_context
from verl_atgrpo.train.config.schema import SECTION, AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.view import ACTOR

_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json")
"""Files of a model that are parsed first: the error of transformers names none of them."""
_SHARED = "/dev/shm"
_FLASH = "flash_attention_2"
"""What verl has models compute attention with."""
LARGE = 64 << 20
"""Bytes of weights on disk from which on a model's processes return what they free."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_ARENA_MAX": "2"}
"""Blocks of 4 MiB and more."""
_VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"


def check_models(config: DictConfig, settings: AtGrpoConfig) -> None:
    """Raises ConfigError if a policy's model is a folder that cannot be loaded, or does not suit the job.

    In CPU mode also if neither a folder nor the hub has it, if prefill is chunked, or if the vocabulary is padded:
    verl masks logits beyond the tokenizer's length in vLLM but not in the actor, so that with a padded vocabulary the
    two disagree on the log-prob of every token. Trained models give those logits almost no probability; the untrained
    tiny models of CPU mode do not.
    """
    cpu = platform_choice.wants_cpu()
    if cpu and config.trainer.device != "cpu":
        raise ConfigError(
            f"trainer.device={config.trainer.device}: this torch is built for the CPU, or VERL_PLATFORM=cpu; use "
            "hardware=cpu, or install verl-atgrpo[gpu] on a machine with a GPU (docs/one_gpu.md)"
        )
    policies = {
        name: (
            f"{SECTION}.policies.{name}" if settings.policies else ACTOR,
            config_of_policy(config, name).actor_rollout_ref,
        )
        for name in settings.policy_settings()
    }
    for key, policy in policies.values():  # first what needs no model
        if not cpu:
            _check_attention(policy.model)
        _check_library(f"{key}.model.external_lib", policy.model.external_lib)
        _check_quantization(f"{key}.rollout.quantization", policy.rollout.quantization)
        if cpu:
            check_cpu_prefill(key, policy.rollout)
            check_shared_memory(key, policy.rollout)
    tokenizers = {}
    for name, (key, policy) in policies.items():
        if cpu or os.path.isdir(policy.model.path):  # else a name on the hub, which the workers download
            longest, tokenizer = _check_model(key, policy.model, padded=not cpu)
            check(of_context(key, policy.rollout, config.data, longest))
        else:
            _check_hub_name(f"{key}.model.path={policy.model.path}", policy.model.path)
            tokenizer = _downloaded_tokenizer(policy.model)
        if tokenizer is not None:
            check_chats(settings, name, tokenizer)
            tokenizers[f"policy {name!r}"] = tokenizer
    readers = [found for name in settings.critic_reads_as if (found := tokenizers.get(f"policy {name!r}")) is not None]
    texts = hindsights(settings, settings.make_environment()) if readers else []
    for tokenizer in readers:
        check_hindsight(texts, tokenizer, config.data)
    if len(tokenizers) == len(settings.policy_settings()):  # else the trainer checks it
        check_template_arguments(config.data, tokenizers)


def _check_attention(model: DictConfig) -> None:
    """Raises ConfigError where transformers would miss the package of verl's default attention."""
    chosen = OmegaConf.select(model, "override_config.attn_implementation") or _FLASH
    # transformers takes `kernels` in its place, and torch_npu has its own.
    if chosen != _FLASH or any(importlib.util.find_spec(name) for name in ("flash_attn", "kernels", "torch_npu")):
        return
    raise ConfigError(
        f"{ACTOR}.model: actors compute attention by {_FLASH}, whose package flash_attn is not installed; use "
        f"hardware=1_gpu, or set {ACTOR}.model.use_remove_padding=false and "
        f"++{ACTOR}.model.override_config.attn_implementation=sdpa"
    )


def _check_hub_name(where: str, name: str) -> None:
    """Raises ConfigError for what is neither a folder, an address nor a name on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    if "://" in name or os.path.isabs(name):  # verl copies it from there; a folder of the other nodes'
        return
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"{where}: there is no such folder, and it is no owner/name of the hub's ({error})"
        ) from None


def _downloaded_tokenizer(model: DictConfig) -> Any:
    """Returns the tokenizer of a model on the hub if this machine has it, or None; the trainer checks all."""
    if model.trust_remote_code:  # whose code may do anything, such as download
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path or model.path, local_files_only=True)
    except (OSError, ValueError):
        return None
    tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
    return tokenizer if tokenizer.chat_template else None


def _check_library(key: str, module: str | None) -> None:
    """Raises ConfigError for a module that the workers could not import."""
    if module is None:
        return
    try:
        importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{key}={module}: it cannot be imported, {type(error).__name__}: {str(error)[:200]}; name a module that "
            "the job's Python finds"
        ) from error


def _check_quantization(key: str, method: str | None) -> None:
    """Raises ConfigError for a method that vLLM does not have."""
    if method is None or importlib.util.find_spec("vllm") is None:
        return
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as known

    if method not in known:
        raise ConfigError(f"{key}={method}: vLLM has no such method; use one of {', '.join(sorted(known))}, or null")


def check_cpu_prefill(key: str, rollout: DictConfig) -> None:
    """Raises ConfigError if vLLM for CPU would chunk prompts: a seeded sample from one crashes its engine."""
    if rollout.enable_chunked_prefill:
        raise ConfigError(
            f"{key}.rollout.enable_chunked_prefill=true: samples have seeds, and vLLM for CPU fails on seeded "
            "sampling from a prompt in chunks; set it to false"
        )


def check_shared_memory(key: str, rollout: DictConfig) -> None:
    """Raises ConfigError if a bucket of weights does not fit into `/dev/shm`: writing to it would be a bus error."""
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes
    if os.path.isdir(_SHARED) and (free := shutil.disk_usage(_SHARED).free >> 20) < bucket:
        raise ConfigError(
            f"{key}.rollout.checkpoint_engine.update_weights_bucket_megabytes={bucket}: weights go to the servers "
            f"through {_SHARED}, where {free} MiB are free; enlarge it, in Docker with --shm-size=1g"
        )


def _check_model(key: str, model: DictConfig, padded: bool) -> tuple[int, Any]:
    """Returns the model's number of positions and its tokenizer; `padded` accepts more logits than tokens."""
    where, folder = f"{key}.model.path={model.path}", Path(model.path)
    on_hub = not folder.exists() and HUB_NAME.fullmatch(model.path) is not None
    if not on_hub and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{where}: there is no model; set this to a model's folder or its name on the hub, or make a tiny model: "
            f"verl-atgrpo make-model {model.path} --environment <name>"
        )
    for name in _FILES:
        _check_json(where, folder / name)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoTokenizer

    trusted = bool(model.trust_remote_code)
    try:
        read = AutoConfig.from_pretrained(model.hf_config_path or model.path, trust_remote_code=trusted)
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer_path or model.path, trust_remote_code=trusted)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, StrictDataclassError) as error:
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
    return int(text.max_position_embeddings), tokenizer


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
