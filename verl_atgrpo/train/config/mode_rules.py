"""Rules of asynchronous training and of standalone servers: verl's keys against `at_grpo.mode`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Annotated, Any

from annotated_types import Ge, Gt, MultipleOf
from omegaconf import OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.train.config.job import SEPARATE, Job, Policy
from verl_atgrpo.train.config.kinds import Count, fits
from verl_atgrpo.train.config.policy_rules import SERVER
from verl_atgrpo.train.config.schema import MODES
from verl_atgrpo.train.config.view import leaves, same, shown_as, verls_defaults

_ASYNC = ("colocate_async", SEPARATE)
_CORRECTION = "algorithm.rollout_correction"
_SAMPLER = "trainer.v1.sampler"
_ENGINE = "rollout.checkpoint_engine"
_OF_STANDALONE_SERVERS = {
    "hybrid_engine": True,
    "rollout.nnodes": 0,
    f"{_ENGINE}.backend": "naive",
    f"{_ENGINE}.custom_backend_module": None,
}
"""Keys of a policy that only standalone servers read -> what they are elsewhere."""
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


def of_modes(job: Job) -> Iterator[str]:
    """Keys of a job that its mode does not support, or that have no effect in it."""
    mode, correction = job.settings.mode, job.config.algorithm.rollout_correction
    for name in ("rollout_is", "rollout_rs"):
        if correction.bypass_mode and correction[name] is not None:
            yield (
                f"{_CORRECTION}.{name}={correction[name]} is ignored by verl's V1 trainer with bypass_mode=true: set "
                "it to null, or bypass_mode to false"
            )
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        yield f"{_CORRECTION}.rollout_rs_threshold=null: rollout_rs={correction.rollout_rs} needs it, such as 2.0"
    ignored = [other for other in MODES if other != mode] + (["sampler.max_off"] if mode == "sync" else [])
    section: Any = OmegaConf.to_container(job.trainer.v1, resolve=True)
    for name, value in leaves(section):
        default = verls_defaults().get(f"trainer.v1.{name}", ...)
        if name.startswith(tuple(ignored)) and value != default:
            yield f"trainer.v1.{name}={value} has no effect with at_grpo.mode={mode}: remove it, or use another mode"
    if mode == SEPARATE:
        yield from _of_separate_servers(job)
    if mode not in _ASYNC:
        return
    yield from _of_staleness(job)
    if not correction.bypass_mode and correction.rollout_is not in ("token", "sequence"):
        yield (
            f"{_CORRECTION}.rollout_is={shown_as(correction.rollout_is)}: with at_grpo.mode={mode} candidates come "
            "from older weights, and their log-probs would not be used; set it to token or sequence"
        )


def _of_separate_servers(job: Job) -> Iterator[str]:
    settings, key = job.settings, f"trainer.v1.{SEPARATE}.parameter_sync_step"
    if settings.placement != "colocated":
        yield (
            f"at_grpo.placement={settings.placement} has not been tried with at_grpo.mode={SEPARATE}: set it to "
            "colocated; the servers of every policy have devices of their own anyway"
        )
    if (steps := OmegaConf.select(job.config, key)) != 1:
        yield f"{key}={shown_as(steps)}: weights are synchronised after every step, set it to 1"
    if settings.restart_servers:
        yield f"at_grpo.restart_servers={settings.restart_servers}: standalone servers are not restarted, set it to 0"


def _of_staleness(job: Job) -> Iterator[str]:
    mode, sampler = job.settings.mode, job.trainer.v1.sampler
    key, warmup = f"trainer.v1.{mode}.num_warmup_batches", job.trainer.v1[mode].num_warmup_batches
    if sampler.max_off_policy_strategy != "wait":
        yield (
            f"{_SAMPLER}.max_off_policy_strategy={sampler.max_off_policy_strategy} discards the longest episodes, so "
            "the policy would be trained on short ones; set it to wait"
        )
    if not fits(Annotated[float, Gt(0)], warmup):
        why = "no task is in flight in addition to a step's own and nothing is gained over at_grpo.mode=sync"
        yield f"{key}={warmup}: above 0, or {why}"
    least, threshold = 1 + math.ceil(warmup), sampler.max_off_policy_threshold
    if not fits(Annotated[float, Ge(least), MultipleOf(1)], threshold):
        yield (
            f"{_SAMPLER}.max_off_policy_threshold={shown_as(threshold)}: with at_grpo.mode={mode} a number of "
            f"steps, at least {least} (1 + {key}), which bounds the age of an episode"
        )


def of_a_policys_mode(policy: Policy) -> Iterator[str]:
    """Keys of a policy that the job's mode does not support, or that have no effect in it."""
    mode, loss = policy.job.settings.mode, policy.actor.policy_loss.loss_mode
    yield from _of_standalone_servers(policy) if mode == SEPARATE else _of_shared_devices(policy)
    if mode not in _ASYNC:
        return
    for name, why in (
        ("full_determinism", f"interruptions depend on time, so at_grpo.mode={mode} cannot be reproduced"),
        ("disaggregation.enabled", "requests of a prefill server cannot be interrupted"),
    ):
        if OmegaConf.select(policy.rollout, name):
            yield f"{policy.key}.rollout.{name}=true: {why}; set it to false, or use at_grpo.mode=sync"
    correction = policy.job.config.algorithm.rollout_correction
    # The loss must use the log-probs of the weights that sampled the candidates.
    if correction.bypass_mode and loss != "vanilla":
        yield (
            f"{policy.key}.actor.policy_loss.loss_mode={loss} with {_CORRECTION}.bypass_mode=true: only vanilla's "
            "ratio is known to correct for older weights; set that, or bypass_mode to false and rollout_is to token"
        )
    if not correction.bypass_mode and loss == "bypass_mode":
        ignored = f"{_CORRECTION}.rollout_is={correction.rollout_is}"
        yield f"{policy.key}.actor.policy_loss.loss_mode=bypass_mode ignores {ignored}: set it to vanilla"


def _of_shared_devices(policy: Policy) -> Iterator[str]:
    for name, neutral in _OF_STANDALONE_SERVERS.items():
        if not same(value := OmegaConf.select(policy.section, name), neutral):
            yield (
                f"{policy.key}.{name}={shown_as(value)} has no effect with at_grpo.mode={policy.job.settings.mode}, "
                f"whose servers are on the trainer's devices: set it to {shown_as(neutral)}, or use "
                f"at_grpo.mode={SEPARATE}"
            )


# ---------------------------------------------------------------------- standalone servers


def devices_of(policy: Any) -> int:
    """Returns the number of devices of a policy's standalone servers, from its `actor_rollout_ref`."""
    return int(policy.rollout.nnodes * policy.rollout.n_gpus_per_node)


def _of_backends(policy: Policy) -> Iterator[str]:
    key, engine, dtype = f"{policy.key}.{_ENGINE}", policy.rollout.checkpoint_engine, policy.rollout.dtype
    backend = engine.backend
    if platform_choice.wants_cpu():
        for name, needed in _CPU_ENGINE.items():
            if engine.get(name) != needed:
                yield (
                    f"{key}.{name}={shown_as(engine.get(name))}: without a GPU only this package's engine syncs "
                    f"weights to standalone servers, set it to {needed}"
                )
        return
    if backend in _OTHERS:
        yield f"{key}.backend={backend} {_OTHERS[backend]}: set it to nccl"
    if engine.get("custom_backend_module") is not None:  # which may have an engine of the same name
        return
    # Imports nothing, which would take seconds. On Ascend HCCL has NCCL's name.
    hccl = backend == "nccl" and importlib.util.find_spec("torch_npu") is not None
    for module, package in REQUIRED_MODULES.get(backend, {}).items() if not hccl else ():
        if importlib.util.find_spec(module) is None:
            yield (
                f"{key}.backend={backend}: verl's engine imports {module}, which is not installed: pip install "
                f"{package}, or set another backend"
            )
    if backend in ROUNDING and dtype != "bfloat16":
        yield (
            f"{key}.backend={backend} rounds all weights to bfloat16, and the servers compute in {dtype} "
            "(rollout.dtype): they would not have the actor's; set it to nccl or nixl, or precision=bf16"
        )


def _of_standalone_servers(policy: Policy) -> Iterator[str]:
    key, section, rollout = policy.key, policy.section, policy.rollout
    mode = f"with at_grpo.mode={SEPARATE}"
    if section.hybrid_engine:
        yield f"{key}.hybrid_engine=true: {mode} there are no servers on the trainer's devices, set it to false"
    for name in ("nnodes", "n_gpus_per_node"):
        if not fits(Count, rollout[name]):
            devices = "the number of the servers' own devices, a whole number above 0"
            yield f"{key}.rollout.{name}={shown_as(rollout[name])}: {mode} {devices}"
    for name in ("lora_rank", "lora_adapter_path", "lora.rank"):
        if value := OmegaConf.select(section.model, name):
            yield (
                f"{key}.model.{name}={shown_as(value)}: verl does not send adapters to standalone servers; train the "
                "whole model, or use at_grpo.mode=colocate_async"
            )
    yield from _of_backends(policy)
    if (devices := devices_of(section)) % (size := math.prod(rollout.get(name, 1) for name in SERVER)):
        yield (
            f"{key}.rollout.n_gpus_per_node={rollout.n_gpus_per_node}: {devices} devices (times nnodes) are not a "
            f"multiple of the {size} that one server takes ({' * '.join(SERVER)}); make it one"
        )


def of_rays_devices(job: Job) -> Iterator[str]:
    """Rays that would start with fewer devices than are needed, for which the servers would wait for ever."""
    available, trainer = OmegaConf.select(job.config, "ray_kwargs.ray_init.num_gpus"), job.trainer
    policies = job.policies.values() if job.settings.mode == SEPARATE else ()
    servers = {policy.key: devices_of(policy.section) for policy in policies}
    devices = trainer.nnodes * trainer.n_gpus_per_node
    if available is not None and available < devices + sum(servers.values()):
        yield (
            f"ray_kwargs.ray_init.num_gpus={available}: the trainer has {devices} devices "
            f"(trainer.nnodes={trainer.nnodes} * trainer.n_gpus_per_node={trainer.n_gpus_per_node}) and "
            f"the servers {servers or 'none'} of their own, set it to {devices + sum(servers.values())}"
        )
