"""The isolation level: found by trial runs, and not lowered if one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.launcher import LEVELS, Request


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    found = runner.isolation.__wrapped__()
    runner.isolation.cache_clear()
    yield
    runner.isolation.cache_clear()
    assert runner.isolation() == found


class Killer:
    """Fails the first trials as if launcher or program were killed."""

    def __init__(self, times: int, report: bytes) -> None:
        self.times, self.report = times, report
        self.levels: list[str] = []
        self._start = runner.POOL.start

    def start(self, request: Request, files: tuple[int, ...]) -> None:
        self.levels.append(request.level)
        if self.times > 0:
            self.times -= 1
            if self.report:
                os.write(files[3], self.report)
            return  # no report, and the other end is closed
        self._start(request, files)


@pytest.mark.parametrize("report", [b"", str(128 + signal.SIGKILL).encode()])
def test_a_killed_trial_is_repeated(report: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    level = runner.isolation()
    runner.isolation.cache_clear()
    killer = Killer(2, report)
    monkeypatch.setattr(runner.POOL, "start", killer.start)
    assert runner.isolation() == level
    assert killer.levels[:3] == [LEVELS[0]] * 3


def test_the_level_is_not_lowered_if_all_trials_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(100, b"")
    monkeypatch.setattr(runner.POOL, "start", killer.start)
    with pytest.raises(RuntimeError, match="every trial run was killed"):
        runner.isolation()
    assert set(killer.levels) == {LEVELS[0]}
