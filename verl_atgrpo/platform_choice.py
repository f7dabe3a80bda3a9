"""Decides whether verl runs on the CPU. Runs in every process, so it is quick and does not import verl."""

from __future__ import annotations

import os


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
