"""A clock that stands still except in chosen calls."""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import Any

import pytest


class Clock:
    """Replaces `time.perf_counter`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: Counter[str] = Counter()
        """Name -> calls so far; each takes a second."""
        self._patch = monkeypatch
        monkeypatch.setattr(time, "perf_counter", lambda: float(self.called.total()))

    def costs(self, owner: Any, *names: str) -> None:
        """Lets each call of these functions of `owner` take a second."""
        for name in names:
            self._patch.setattr(owner, name, self._slow(name, getattr(owner, name)))

    def _slow(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def slow(*args: Any, **kwargs: Any) -> Any:
            self.called[name] += 1
            return function(*args, **kwargs)

        return slow
