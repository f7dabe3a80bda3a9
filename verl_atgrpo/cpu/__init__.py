"""verl on a machine without an accelerator: FSDP2 over gloo, vLLM for CPU, Ray with logical GPUs.

Imported only when `platform_choice.wants_cpu()` says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from verl_atgrpo.compat import import_within, when_imported
from verl_atgrpo.platform_choice import cores

_THREADS = min(4, len(cores()))

ENVIRONMENT = {
    # Read by this plugin in child processes.
    "VERL_PLATFORM": "cpu",
    # verl's engines are registered for cuda and npu; this is verl's switch to use them elsewhere.
    "VERL_ENGINE_DEVICE": "cuda",
    # "auto" would pin every server to core 0.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Rollout and training take turns, so each may use all cores, up to four.
    "OMP_NUM_THREADS": str(_THREADS),
    # OpenMP's threads spin for each other too long by default where something else has their core: beside two other
    # trainings a step of plan_path_cpu took 9 to 30 s, and 6 to 9 s with this. Idle, 100 steps of a warm start took
    # 6.6 s either way.
    "GOMP_SPINCOUNT": "3000",
    # Keep freed memory: returning it to the system and faulting it in again took a fifth of an update.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    # Compiling takes longer than a small model's whole step.
    "TORCHDYNAMO_DISABLE": "1",
    # TransferQueue's default of 8 is a warning at nearly every call on fewer cores, and rows are small.
    "TQ_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Set unless the user has set them; Ray passes the driver's environment to its workers."""


def activate() -> None:
    """Sets the CPU as verl's platform, in this process and its children."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from verl.plugin.platform import platform_manager

    from verl_atgrpo.cpu.platform import PlatformCPU

    _leave_out_imports()
    # `import verl` has already detected no accelerator and chosen nvidia; set_platform() would warn in every process.
    platform_manager._current_platform = PlatformCPU()
    when_imported("verl.utils.distributed", _use_gloo)
    when_imported("verl.utils.torch_functional", _vectorise_log_probs)
    when_imported("verl.utils.fsdp_utils", _leave_memory_unpinned)
    when_imported("torch.distributed.fsdp.sharded_grad_scaler", _scale_on_the_cpu)
    when_imported("vllm.platforms.cpu", _group_adapters)


def _use_gloo(distributed: ModuleType) -> None:
    """Sets the backend to "cpu:gloo"; verl's "cpu:gloo,cpu:gloo" names a device twice, which torch refuses."""
    original = distributed.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    setattr(distributed, initialize_global_process_group_ray.__name__, initialize_global_process_group_ray)


def _vectorise_log_probs(torch_functional: ModuleType) -> None:
    """Computes log-probs of all tokens at once.

    To save GPU memory verl computes the log-sum-exp per token: thousands of calls and autograd nodes per step, a
    third of the time of an update here.
    """
    setattr(torch_functional, "logprobs_from_logits_v2", torch_functional.logprobs_from_logits_naive)  # noqa: B010


def _leave_memory_unpinned(fsdp_utils: ModuleType) -> None:
    """Keeps a reference model in ordinary memory; pinned memory needs an accelerator."""
    policy = fsdp_utils.CPUOffloadPolicy
    setattr(fsdp_utils, "CPUOffloadPolicy", lambda pin_memory: policy(pin_memory=False))  # noqa: B010


def _group_adapters(vllm_platform: ModuleType) -> None:
    """Has vLLM multiply the tokens of each adapter together (`grouped_adapters`)."""
    name = "verl_atgrpo.cpu.grouped_adapters.GroupedPunicaWrapper"
    setattr(vllm_platform.CpuPlatform, "get_punica_wrapper", classmethod(lambda _: name))  # noqa: B010


def _scale_on_the_cpu(scaling: ModuleType) -> None:
    """Scales losses in float16; the scaler that verl makes is for CUDA, and without it turns itself off."""
    setattr(scaling, "ShardedGradScaler", functools.partial(scaling.ShardedGradScaler, device="cpu"))  # noqa: B010


def _leave_out_imports() -> None:
    """Leaves out what verl and vLLM import in every process and the CPU does not use, up to half of the time."""
    # Of an accelerator of another kind; it imports vLLM. verl catches the ImportError.
    sys.modules.setdefault("verl.checkpoint_engine.hccl_checkpoint_engine", None)  # type: ignore[arg-type]
    # Imports two names of vLLM that nothing takes from there; beside a number that a worker needs.
    import_within("verl.third_party.vllm", lambda: _replaced("vllm", "vllm.distributed", by=_WhenUsed))
    # Every process imports these for a constant beside them.
    import_within("verl.utils.dataset.rl_dataset", lambda: _replaced("datasets", by=_WhenUsed))
    import_within("verl.utils.dataset.rm_dataset", lambda: _replaced("pandas", by=_WhenUsed))
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        # Changes the compiler, where it can be imported.
        import_within("vllm.env_override", lambda: _replaced("torch._inductor.lowering"))


class _WhenUsed(ModuleType):
    """Stands for a module that is imported when a name of it is first used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            return Any  # while it is replaced: an annotation, or a name that is passed on
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _replaced(*names: str, by: Callable[[str], ModuleType | None] = lambda name: None) -> Iterator[None]:
    """Has imports find something in the place of modules, unless one is imported already; None: an ImportError."""
    mine = {} if {*names} & sys.modules.keys() else {name: by(name) for name in names}
    for name, module in mine.items():
        if module is not None:
            module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in mine:
            del sys.modules[name]
