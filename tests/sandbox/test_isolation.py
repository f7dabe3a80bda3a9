"""The isolation level: found by trials, and not lowered because one of them was killed."""

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
    """Kills the first trials: their launcher as soon as it is started, or whatever tells of the program."""

    def __init__(self, times: int, told: bytes) -> None:
        self.times, self.told = times, told
        self.levels: list[str] = []
        self._start = runner.POOL.start

    def start(self, request: Request, files: tuple[int, ...]) -> None:
        self.levels.append(request.level)
        if self.times > 0:
            self.times -= 1
            if self.told:
                os.write(files[3], self.told)
            return  # nothing comes, and the other end is closed
        self._start(request, files)


@pytest.mark.parametrize("told", [b"", str(128 + signal.SIGKILL).encode()])
def test_a_trial_that_is_killed_is_made_again(told: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    level = runner.isolation()
    runner.isolation.cache_clear()
    killer = Killer(2, told)
    monkeypatch.setattr(runner.POOL, "start", killer.start)
    assert runner.isolation() == level
    assert killer.levels[:3] == [LEVELS[0]] * 3


def test_no_lesser_level_is_taken_where_trials_are_killed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(100, b"")
    monkeypatch.setattr(runner.POOL, "start", killer.start)
    with pytest.raises(RuntimeError, match="every trial run was killed"):
        runner.isolation()
    assert set(killer.levels) == {LEVELS[0]}
