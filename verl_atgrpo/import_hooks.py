"""Running code right after a module is imported, without importing it early.

verl loads plugins at the end of `import verl`, in every process. Importing its trainer there would cost
every one of them seconds (and pull in vLLM), so what extends a module waits until somebody needs it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _CallbackLoader(importlib.abc.Loader):
    """Loads as `loader` does, then runs the callbacks."""

    def __init__(self, loader: importlib.abc.Loader, callbacks: Sequence[Callback]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for callback in self._callbacks:
            callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: wraps the loader of the modules somebody waits for."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callbacks = self.callbacks.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallbackLoader(spec.loader, callbacks)
        return spec


_FINDER = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Calls `callback(module)` once `name` has been imported: now, if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.callbacks.setdefault(name, []).append(callback)
