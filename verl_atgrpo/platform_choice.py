"""What this machine is: whether verl runs on the CPU, and which cores it has for us.

Runs in every process, so it is quick and does not import verl.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path


def wants_cpu() -> bool:
    """Returns True with VERL_PLATFORM=cpu, or if VERL_PLATFORM is not set and torch has no accelerator support.

    Checks the torch build, not the devices: a Ray actor without a GPU and the head node of a GPU cluster have no
    device either, but must not switch to CPU mode.
    """
    chosen = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if chosen:
        return chosen == "cpu"
    import torch

    built_for_accelerator = bool(torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None))
    return not built_for_accelerator and not hasattr(torch, "npu")


def cores(root: str = "/sys/fs/cgroup", process: str = "/proc/self") -> list[int]:
    """Returns the numbers of the cores that this process may use; the first of them if its cgroup has a CPU quota.

    `root` is where control groups are mounted, `process` this process's folder in `/proc`.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    own = Path("/")
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(process, "cgroup").read_text().splitlines()
        own = Path(next(line[3:] for line in lines if line.startswith("0::/")))
    quotas = [math.inf]
    for folder in (own, *own.parents):  # inside a container its own is the root
        with contextlib.suppress(OSError, ValueError):
            quota, period = Path(f"{root}{folder}", "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))  # ValueError: "max"
    with contextlib.suppress(OSError, ValueError):  # version 1
        quota, period = (Path(root, "cpu", f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        quotas += [int(quota) / int(period)] * (int(quota) > 0)
    least = min(quotas)
    return sorted(allowed)[: None if least == math.inf else max(1, math.ceil(least))]
