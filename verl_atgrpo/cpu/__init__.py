"""verl on a machine without an accelerator: FSDP2 over gloo, vLLM for CPU, Ray with logical GPUs.

Imported only when `platform_choice.wants_cpu()` says so.
"""

from __future__ import annotations

import os
from types import ModuleType

from verl_atgrpo.compat import when_imported

_THREADS = min(4, os.cpu_count() or 1)

ENVIRONMENT = {
    # Read by this plugin in child processes, so that they agree with the driver.
    "VERL_PLATFORM": "cpu",
    # verl's engines are registered for cuda and npu; this is its own switch to use them elsewhere.
    "VERL_ENGINE_DEVICE": "cuda",
    # "auto" would pin every server to core 0.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Rollout and training take turns, so each may use what there is, up to a laptop's worth.
    "OMP_NUM_THREADS": str(_THREADS),
    # OpenMP's threads spin for each other too long by default where something else has their core: beside two other
    # trainings a step of plan_path_cpu took 9 to 30 s, and 6 to 9 s with this. Idle, 100 steps of a warm start took
    # 6.6 s either way.
    "GOMP_SPINCOUNT": "3000",
    # A server's threads spin while they wait for each other, and the rollout needs cores of its own.
    "VERL_ATGRPO_SERVER_THREADS": str(max(1, _THREADS // 2)),
    # Keep freed memory: returning it to the system and faulting it in again costs a fifth of an update.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    # Compiling takes longer than a small model's whole step.
    "TORCHDYNAMO_DISABLE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Set unless the user has set them; Ray hands the driver's environment on to its workers."""


def activate() -> None:
    """Makes verl see the CPU as its platform, in this process and those it starts."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from verl.plugin.platform import platform_manager

    from verl_atgrpo.cpu.platform import PlatformCPU

    # `import verl` has already looked for an accelerator and fallen back to nvidia; replacing that through
    # set_platform() would warn about it in every process.
    platform_manager._current_platform = PlatformCPU()
    when_imported("verl.utils.distributed", _use_gloo)
    when_imported("verl.utils.torch_functional", _vectorise_log_probs)
    when_imported("verl.utils.fsdp_utils", _leave_memory_unpinned)


def _use_gloo(distributed: ModuleType) -> None:
    """verl asks for "cpu:gloo,cpu:gloo" here, which torch refuses for naming a device twice."""
    original = distributed.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    setattr(distributed, initialize_global_process_group_ray.__name__, initialize_global_process_group_ray)


def _vectorise_log_probs(torch_functional: ModuleType) -> None:
    """verl takes the log-sum-exp token by token to save GPU memory: thousands of calls a step, and as many
    nodes to walk backwards, which took a third of an update here."""
    setattr(torch_functional, "logprobs_from_logits_v2", torch_functional.logprobs_from_logits_naive)  # noqa: B010


def _leave_memory_unpinned(fsdp_utils: ModuleType) -> None:
    """verl keeps a reference model in pinned memory, which torch has for an accelerator only."""
    policy = fsdp_utils.CPUOffloadPolicy
    setattr(fsdp_utils, "CPUOffloadPolicy", lambda pin_memory: policy(pin_memory=False))  # noqa: B010
