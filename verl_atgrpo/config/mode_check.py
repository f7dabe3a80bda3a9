"""Checks verl's keys of asynchronous training and of standalone servers against `at_grpo.mode`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Gt, MultipleOf
from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.config.key_check import POLICY, leaves, shown_as, verls_defaults
from verl_atgrpo.config.kinds import Count, fits
from verl_atgrpo.config.schema import MODES, SECTION, ConfigError

SEPARATE = "separate_async"
_SHARED = ("sync", "colocate_async")
_ASYNC = ("colocate_async", SEPARATE)
_CORRECTION = "algorithm.rollout_correction"
_SAMPLER = "trainer.v1.sampler"
_ENGINE = "rollout.checkpoint_engine"
_UNSET = Literal[False, 0, ""] | None


class Rule(NamedTuple):
    """A key whose value is refused in some modes."""

    modes: tuple[str, ...]
    key: str
    """One below `actor_rollout_ref` is checked for every policy."""
    allowed: Any
    """What is accepted, as an annotation (`kinds`)."""
    why: str
    """The message after `key=value`, with `{mode}` for the mode."""


_HAS_NO_EFFECT = (
    " has no effect with at_grpo.mode={mode}, whose servers are on the trainer's devices: set it to %s, or use "
    "at_grpo.mode=separate_async"
)
_OWN_DEVICES = ": with at_grpo.mode={mode} the number of the servers' own devices, a whole number above 0"
_NO_ADAPTERS = (
    ": verl does not send adapters to standalone servers; train the whole model, or use at_grpo.mode=colocate_async"
)
RULES = (
    Rule(_SHARED, f"{POLICY}.hybrid_engine", Literal[True], _HAS_NO_EFFECT % "true"),
    Rule(_SHARED, f"{POLICY}.rollout.nnodes", Literal[0], _HAS_NO_EFFECT % "0"),
    Rule(_SHARED, f"{POLICY}.{_ENGINE}.backend", Literal["naive"], _HAS_NO_EFFECT % "naive"),
    Rule(_SHARED, f"{POLICY}.{_ENGINE}.custom_backend_module", None, _HAS_NO_EFFECT % "null"),
    Rule(
        (SEPARATE,),
        f"{SECTION}.placement",
        Literal["colocated"] | None,
        " has not been tried with at_grpo.mode={mode}: set it to colocated; the servers of every policy have devices "
        "of their own anyway",
    ),
    Rule(
        (SEPARATE,),
        f"trainer.v1.{SEPARATE}.parameter_sync_step",
        Literal[1],
        ": weights are synchronised after every step, set it to 1",
    ),
    Rule((SEPARATE,), f"{SECTION}.restart_servers", Literal[0], ": standalone servers are not restarted, set it to 0"),
    Rule(
        (SEPARATE,),
        f"{POLICY}.hybrid_engine",
        Literal[False],
        ": with at_grpo.mode={mode} there are no servers on the trainer's devices, set it to false",
    ),
    Rule((SEPARATE,), f"{POLICY}.rollout.nnodes", Count, _OWN_DEVICES),
    Rule((SEPARATE,), f"{POLICY}.rollout.n_gpus_per_node", Count, _OWN_DEVICES),
    Rule((SEPARATE,), f"{POLICY}.model.lora_rank", _UNSET, _NO_ADAPTERS),
    Rule((SEPARATE,), f"{POLICY}.model.lora_adapter_path", _UNSET, _NO_ADAPTERS),
    Rule((SEPARATE,), f"{POLICY}.model.lora.rank", _UNSET, _NO_ADAPTERS),
    Rule(
        _ASYNC,
        f"{_SAMPLER}.max_off_policy_strategy",
        Literal["wait"],
        " discards the longest episodes, so the policy would be trained on short ones; set it to wait",
    ),
    Rule(
        _ASYNC,
        f"{POLICY}.rollout.full_determinism",
        _UNSET,
        ": interruptions depend on time, so at_grpo.mode={mode} cannot be reproduced; set it to false, or use "
        "at_grpo.mode=sync",
    ),
    Rule(
        _ASYNC,
        f"{POLICY}.rollout.disaggregation.enabled",
        _UNSET,
        ": requests of a prefill server cannot be interrupted; set it to false, or use at_grpo.mode=sync",
    ),
)

_CPU_ENGINE = {"backend": "gloo", "custom_backend_module": "verl_atgrpo.cpu.checkpoint_engine"}
_OTHERS = {
    "naive": "syncs weights to servers on the trainer's own devices",
    "delta_sharded": "sends weight deltas, which has not been tried with several policies or frozen ones",
    "gloo": "is for machines without a GPU",
}
"""Backends that cannot sync weights to standalone servers on GPUs; verl's others are accepted."""
_CUPY = "cupy-cuda12x or cupy-cuda13x, as torch's CUDA is"
REQUIRED_MODULES = {
    "nccl": {"cupy": _CUPY},
    "nixl": {"cupy": _CUPY, "nixl": "nixl"},
    "kimi_ckpt_engine": {"checkpoint_engine": "checkpoint-engine"},
    "mooncake": {"mooncake": "mooncake-transfer-engine"},
}
"""Backend -> module that verl's checkpoint engine imports and verl does not install -> its distribution. verl skips an
engine that it cannot import, and fails only when the models have been loaded."""
ROUNDING = ("kimi_ckpt_engine", "mooncake")
"""Backends of verl that send weights in its engine's `rollout_dtype`: bfloat16, and YAML has no name for another."""


def check_mode(config: DictConfig, mode: str, policies: Mapping[str, DictConfig]) -> None:
    """Raises ConfigError for a key that the mode does not support, or that has no effect in it.

    Args:
        config: the job's configuration.
        mode: `at_grpo.mode`.
        policies: key of a policy's section -> the section, with the keys of `actor_rollout_ref`.
    """
    correction = config.algorithm.rollout_correction
    _check_correction(correction)
    _check_keys_of_other_modes(config, mode)
    for rule in RULES:
        if mode in rule.modes:
            _check_rule(rule, config, mode, policies)
    if mode == SEPARATE:
        for key, policy in policies.items():
            _check_backend(f"{key}.{_ENGINE}", policy.rollout.checkpoint_engine, policy.rollout.dtype)
            _check_server_size(key, policy)
    _check_devices(config, policies if mode == SEPARATE else {})
    if mode in _ASYNC:
        _check_staleness(config, mode)
        for key, policy in policies.items():
            _check_loss(correction, mode, key, policy.actor.policy_loss.loss_mode)


def _check_rule(rule: Rule, config: DictConfig, mode: str, policies: Mapping[str, DictConfig]) -> None:
    below = rule.key.removeprefix(f"{POLICY}.")
    places = {rule.key: config} if below == rule.key else {f"{key}.{below}": policies[key] for key in policies}
    for key, section in places.items():
        value: Any = OmegaConf.select(section, below)
        if not fits(rule.allowed, value):
            raise ConfigError(f"{key}={shown_as(value)}{rule.why.format(mode=mode)}")


def _check_keys_of_other_modes(config: DictConfig, mode: str) -> None:
    """Raises ConfigError for a key below trainer.v1 that the mode does not read, unless it has verl's default."""
    ignored = [other for other in MODES if other != mode] + (["sampler.max_off"] if mode == "sync" else [])
    section: Any = OmegaConf.to_container(config.trainer.v1, resolve=True)
    for name, value in leaves(section):
        default = verls_defaults().get(f"trainer.v1.{name}", ...)
        if name.startswith(tuple(ignored)) and value != default:
            raise ConfigError(
                f"trainer.v1.{name}={value} has no effect with {SECTION}.mode={mode}: remove it, or use another mode"
            )


def _check_correction(correction: DictConfig) -> None:
    for name in ("rollout_is", "rollout_rs"):
        if correction.bypass_mode and correction[name] is not None:
            raise ConfigError(
                f"{_CORRECTION}.{name}={correction[name]} is ignored by verl's V1 trainer with bypass_mode=true: set "
                "it to null, or bypass_mode to false"
            )
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        raise ConfigError(
            f"{_CORRECTION}.rollout_rs_threshold=null: rollout_rs={correction.rollout_rs} needs it, such as 2.0"
        )


def _check_loss(correction: DictConfig, mode: str, key: str, loss: str) -> None:
    """Raises ConfigError unless the loss uses the log-probs of the weights that sampled the candidates."""
    if correction.bypass_mode:
        if loss != "vanilla":
            raise ConfigError(
                f"{key}.actor.policy_loss.loss_mode={loss} with {_CORRECTION}.bypass_mode=true: only the ratio of "
                "loss_mode=vanilla is known to correct for older weights; set that, or bypass_mode to false and "
                "rollout_is to token"
            )
    elif correction.rollout_is not in ("token", "sequence"):
        raise ConfigError(
            f"{_CORRECTION}.rollout_is={shown_as(correction.rollout_is)}: with {SECTION}.mode={mode} candidates come "
            "from older weights, and their log-probs would not be used; set it to token or sequence"
        )
    elif loss == "bypass_mode":
        raise ConfigError(
            f"{key}.actor.policy_loss.loss_mode=bypass_mode ignores {_CORRECTION}.rollout_is={correction.rollout_is}: "
            "set it to vanilla"
        )


def _check_staleness(config: DictConfig, mode: str) -> None:
    key = f"trainer.v1.{mode}.num_warmup_batches"
    warmup = config.trainer.v1[mode].num_warmup_batches
    if not fits(Annotated[float, Gt(0)], warmup):
        raise ConfigError(
            f"{key}={warmup}: above 0, or no task is in flight in addition to a step's own and nothing is gained over "
            f"{SECTION}.mode=sync"
        )
    least = 1 + math.ceil(warmup)
    threshold = config.trainer.v1.sampler.max_off_policy_threshold
    if not fits(Annotated[float, Ge(least), MultipleOf(1)], threshold):
        raise ConfigError(
            f"{_SAMPLER}.max_off_policy_threshold={shown_as(threshold)}: with {SECTION}.mode={mode} a number of "
            f"steps, at least {least} (1 + {key}), which bounds the age of an episode"
        )


# ---------------------------------------------------------------------- standalone servers


def devices_of(policy: DictConfig) -> int:
    """Returns the number of devices of a policy's standalone servers."""
    return int(policy.rollout.nnodes * policy.rollout.n_gpus_per_node)


def _check_backend(key: str, engine: DictConfig, dtype: str) -> None:
    if platform_choice.wants_cpu():
        for name, needed in _CPU_ENGINE.items():
            if engine.get(name) != needed:
                raise ConfigError(
                    f"{key}.{name}={shown_as(engine.get(name))}: without a GPU only this package's engine syncs "
                    f"weights to standalone servers, set it to {needed}"
                )
    elif engine.backend in _OTHERS:
        raise ConfigError(f"{key}.backend={engine.backend} {_OTHERS[engine.backend]}: set it to nccl")
    elif engine.get("custom_backend_module") is None:  # such a module may have an engine of the same name
        _check_modules(key, engine.backend)
        if engine.backend in ROUNDING and dtype != "bfloat16":
            raise ConfigError(
                f"{key}.backend={engine.backend} rounds all weights to bfloat16, and the servers compute in {dtype} "
                "(rollout.dtype): they would not have the actor's; set it to nccl or nixl, or precision=bf16"
            )


def _check_modules(key: str, backend: str) -> None:
    """Raises ConfigError if verl could not import its engine; imports nothing, which would take seconds."""
    if backend == "nccl" and importlib.util.find_spec("torch_npu") is not None:
        return  # then HCCL has this name
    for module, package in REQUIRED_MODULES.get(backend, {}).items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{key}.backend={backend}: verl's engine imports {module}, which is not installed: pip install "
                f"{package}, or set another backend"
            )


def _check_server_size(key: str, policy: DictConfig) -> None:
    rollout, devices = policy.rollout, devices_of(policy)
    sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    size = math.prod(rollout.get(name, 1) for name in sizes)
    if devices % size:
        raise ConfigError(
            f"{key}.rollout.n_gpus_per_node={rollout.n_gpus_per_node}: {devices} devices (times nnodes) are "
            f"not a multiple of the {size} that one server takes ({' * '.join(sizes)}); make it one"
        )


def _check_devices(config: DictConfig, policies: Mapping[str, DictConfig]) -> None:
    """Raises ConfigError if Ray would start with fewer devices than are needed: the servers would wait for ever."""
    available = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    trainer = config.trainer.nnodes * config.trainer.n_gpus_per_node
    servers = {key: devices_of(policy) for key, policy in policies.items()}
    needed = trainer + sum(servers.values())
    if available is not None and available < needed:
        raise ConfigError(
            f"ray_kwargs.ray_init.num_gpus={available}: the trainer has {trainer} devices "
            f"(trainer.nnodes={config.trainer.nnodes} * trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}) and "
            f"the servers {servers or 'none'} of their own, set it to {needed}"
        )
