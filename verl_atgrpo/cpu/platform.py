"""The CPU as a platform of verl: torch.cuda calls that do nothing, and the process's memory use."""

from __future__ import annotations

import functools
import os
import resource
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

SERVER_THREADS = ("VERL_ATGRPO_SERVER_THREADS", "VERL_ATGRPO_RECIPE_SERVER_THREADS", "OMP_NUM_THREADS")
"""Environment variables with the number of a server's threads: the user's, the recipe's, every process's."""


def _always(value: Any = None) -> Callable[..., Any]:
    """Returns a function that returns a value, whatever it is given."""
    return lambda *_, **__: value


def _device_module() -> types.ModuleType:
    """Returns torch.cpu with the functions of torch.cuda that verl calls."""
    module = types.ModuleType("verl_atgrpo.cpu.device_module")
    usage = functools.partial(resource.getrusage, resource.RUSAGE_SELF)
    resets = ("reset_peak_memory_stats", "reset_max_memory_allocated")
    members: dict[str, Any] = {
        **{name: member for name, member in vars(torch.cpu).items() if not name.startswith("__")},
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", *resets), _always()),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_, **__: psutil.Process().memory_info().rss),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_, **__: usage().ru_maxrss * 1024),
        "is_available": _always(True),
        "device_count": _always(1),
        "current_device": _always(0),
        "mem_get_info": lambda *_, **__: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_device_name": _always("cpu"),
        "get_device_capability": _always((None, None)),
    }
    vars(module).update(members)
    return module


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    """One logical device: the machine's cores."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "generic")
    device_module = property(lambda self: _DEVICE_MODULE)
    set_device = synchronize = set_allocator_settings = empty_cache = _always()
    profiler_start = profiler_stop = cudart = _always()
    is_available = _always(True)
    device_count = _always(1)
    # verl passes this to Tensor.to(): a number would mean cuda:N.
    current_device = _always(torch.device("cpu"))
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    nvtx_range = _always(nullcontext())
    # Logical GPUs declared by ray_init.num_gpus: verl needs a resource for which Ray assigns ids.
    ray_resource_name = _always("GPU")
    # Weights are sent to the server through shared memory.
    is_ipc_supported = _always(False)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def rollout_env_vars(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": next(os.environ[name] for name in SERVER_THREADS if name in os.environ)}
