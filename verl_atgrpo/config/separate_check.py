"""What `at_grpo.mode: separate_async` cannot work with, and keys about servers of their own that others ignore."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.config.schema import SECTION, ConfigError

SEPARATE = "separate_async"
_KEYS = f"trainer.v1.{SEPARATE}"
_CPU_BACKEND = "gloo"
_CPU_MODULE = "verl_atgrpo.cpu.checkpoint_engine"
_OTHERS = {
    "naive": "hands weights to servers on the trainer's own devices",
    "delta_sharded": "sends changes of the weights, which has not been tried with several policies or frozen ones",
    _CPU_BACKEND: "is for machines without a GPU",
}
"""Why a backend is no way to standalone servers on GPUs; verl's others are taken at its word."""
_CUPY = "cupy-cuda12x or cupy-cuda13x, as torch's CUDA is"
_NEEDED = {
    "nccl": {"cupy": _CUPY},
    "nixl": {"cupy": _CUPY, "nixl": "nixl"},
    "kimi_ckpt_engine": {"checkpoint_engine": "checkpoint-engine"},
    "mooncake": {"mooncake": "mooncake-transfer-engine"},
}
"""Backend -> what verl's engine imports and verl does not install, with what pip calls it. verl passes over an engine
that it cannot import, and misses it when the models are loaded."""


def check_shared(mode: str, policies: Mapping[str, DictConfig]) -> None:
    """Raises ConfigError for a key about standalone servers in a mode that has none.

    Args:
        mode: `at_grpo.mode`, not separate_async.
        policies: key of a policy's section -> the section, with what `actor_rollout_ref` has.
    """
    for key, policy in policies.items():
        for name, neutral in (
            ("hybrid_engine", True),
            ("rollout.nnodes", 0),
            ("rollout.checkpoint_engine.backend", "naive"),
            ("rollout.checkpoint_engine.custom_backend_module", None),
        ):
            value: Any = OmegaConf.select(policy, name)
            if value != neutral:
                raise ConfigError(
                    f"{key}.{name}={_shown(value)} has no effect with {SECTION}.mode={mode}, whose servers are on the "
                    f"trainer's devices: set it to {_shown(neutral)}, or use {SECTION}.mode={SEPARATE}"
                )


def check_separate(config: DictConfig, policies: Mapping[str, DictConfig]) -> None:
    """Raises ConfigError for what servers of their own do not work with.

    Args:
        config: the job's configuration.
        policies: key of a policy's section -> the section, with what `actor_rollout_ref` has.
    """
    placement = OmegaConf.select(config, f"{SECTION}.placement") or "colocated"
    if placement != "colocated":
        raise ConfigError(
            f"{SECTION}.placement={placement} has not been tried with {SECTION}.mode={SEPARATE}: set it to colocated; "
            "the servers of every policy have devices of their own anyway"
        )
    steps = OmegaConf.select(config, f"{_KEYS}.parameter_sync_step")
    if steps != 1:
        raise ConfigError(
            f"{_KEYS}.parameter_sync_step={_shown(steps)}: weights are handed over after every step, set it to 1"
        )
    restarts = OmegaConf.select(config, f"{SECTION}.restart_servers")
    if restarts != 0:
        raise ConfigError(
            f"{SECTION}.restart_servers={_shown(restarts)}: servers on devices of their own are not started again, "
            "set it to 0"
        )
    for key, policy in policies.items():
        _check_policy(key, policy)
    _check_devices(config, policies)


def _check_policy(key: str, policy: DictConfig) -> None:
    if policy.get("hybrid_engine", True):
        raise ConfigError(
            f"{key}.hybrid_engine=true: with {SECTION}.mode={SEPARATE} there are no servers on the trainer's devices, "
            "set it to false"
        )
    for name in ("nnodes", "n_gpus_per_node"):
        value = policy.rollout.get(name)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{key}.rollout.{name}={_shown(value)}: with {SECTION}.mode={SEPARATE} the servers' own devices, a "
                "whole number above 0"
            )
    _check_backend(f"{key}.rollout.checkpoint_engine", policy.rollout.checkpoint_engine)
    for name in ("lora_rank", "lora_adapter_path", "lora.rank"):
        value = OmegaConf.select(policy, f"model.{name}")
        if value:
            raise ConfigError(
                f"{key}.model.{name}={value}: verl hands no adapters to standalone servers; train the whole model, or "
                f"use {SECTION}.mode=colocate_async"
            )
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    size = 1
    for name in sizes:
        size *= policy.rollout.get(name, 1)
    devices = devices_of(policy)
    if devices % size:
        raise ConfigError(
            f"{key}.rollout.n_gpus_per_node={policy.rollout.n_gpus_per_node}: {devices} devices (times nnodes) are "
            f"not a multiple of the {size} that one server takes ({' * '.join(sizes)}); make it one"
        )


def _check_backend(key: str, engine: DictConfig) -> None:
    if platform_choice.wants_cpu():
        for name, needed in (("backend", _CPU_BACKEND), ("custom_backend_module", _CPU_MODULE)):
            if engine.get(name) != needed:
                raise ConfigError(
                    f"{key}.{name}={_shown(engine.get(name))}: without a GPU weights get to standalone servers by "
                    f"this package's engine alone, set it to {needed}"
                )
    elif engine.backend in _OTHERS:
        raise ConfigError(f"{key}.backend={engine.backend} {_OTHERS[engine.backend]}: set it to nccl")
    elif engine.get("custom_backend_module") is None:  # such a module may have an engine of the same name
        _check_modules(key, engine.backend)


def _check_modules(key: str, backend: str) -> None:
    """Raises ConfigError if verl could not import its engine; nothing is imported here, which takes seconds."""
    if backend == "nccl" and importlib.util.find_spec("torch_npu") is not None:
        return  # then HCCL has this name
    for module, package in _NEEDED.get(backend, {}).items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{key}.backend={backend}: verl's engine imports {module}, which is not installed: pip install "
                f"{package}, or set another backend"
            )


def devices_of(policy: DictConfig) -> int:
    """Returns the number of devices of a policy's standalone servers."""
    return int(policy.rollout.nnodes * policy.rollout.n_gpus_per_node)


def _check_devices(config: DictConfig, policies: Mapping[str, DictConfig]) -> None:
    """Raises ConfigError if Ray is to be started with fewer devices than there are: the servers would wait for them
    for ever."""
    available = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    trainer = config.trainer.nnodes * config.trainer.n_gpus_per_node
    servers = {key: devices_of(policy) for key, policy in policies.items()}
    needed = trainer + sum(servers.values())
    if available is not None and available < needed:
        raise ConfigError(
            f"ray_kwargs.ray_init.num_gpus={available}: the trainer has {trainer} devices and the servers "
            f"{servers} of their own, set it to {needed}"
        )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
