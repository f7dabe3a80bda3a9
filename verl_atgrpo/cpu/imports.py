"""Leaves out what verl and vLLM import in every process and the CPU does not use, up to half of the imports' time."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from verl_atgrpo.compat import import_within


def leave_out() -> None:
    """Has later imports of verl and vLLM leave it out."""
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
