"""Killed launchers, programs and interpreters, as when memory runs out: no score is lost and nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from conftest import Leftovers
from processes import WAITING, WAKING, children, waiting_below
from waiting import HANG, until

from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.pool import POOL
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits, run_python

PATIENT = Limits(cpu_seconds=20, wall_seconds=HANG)


def launchers() -> list[int]:
    return children(POOL.server.pid) if POOL.server is not None else []


def programs() -> list[int]:
    """Returns the children of launchers: the program, or its PID 1."""
    return [child for launcher in launchers() for child in children(launcher)]


def busy_launchers() -> list[int]:
    """Returns the launchers whose program is running."""
    return [launcher for launcher in launchers() if waiting_below(launcher)]


async def kill(victims: Callable[[], list[int]], ready: Callable[[], object], after: float = 0.0) -> None:
    """Kills the victims `after` seconds after `ready` is true; the programs here do not end by themselves."""
    await until(lambda: victims() and ready(), every=0.002)
    await asyncio.sleep(after)
    for victim in (targets := victims()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    await until(lambda: not set(victims()) & set(targets), every=0.002)


async def wake() -> None:
    """Wakes programs repeatedly, because a woken one may be dying."""
    while True:
        for launcher in launchers():
            for program in waiting_below(launcher):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(program, WAKING)
        await asyncio.sleep(0.002)


def beside(disturb: Coroutine[Any, Any, None]) -> ExecutionResult:
    """Returns the result of a program that waits to be woken while `disturb` runs in the same event loop."""

    async def scenario() -> ExecutionResult:
        running = asyncio.create_task(run_python(WAITING, limits=PATIENT)), asyncio.create_task(disturb)
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if running[1].done():
                running[1].result()
            return await running[0]
        finally:
            for task in running:
                task.cancel()

    runner.isolation()
    POOL.drain_counts()
    return asyncio.run(scenario())


@pytest.mark.parametrize("victims", [launchers, programs])
@pytest.mark.parametrize(
    ("ready", "after"),
    [(lambda: True, 0.0), (lambda: True, 0.01), (busy_launchers, 0.0)],
    ids=["before the program is walled off", "at its start", "in its midst"],
)
def test_a_program_that_was_killed_is_run_again(
    victims: Callable[[], list[int]], ready: Callable[[], object], after: float, leftovers: Leftovers
) -> None:
    async def disturb() -> None:
        await kill(victims, ready, after)
        await wake()

    assert beside(disturb()).stdout == "done\n"
    assert POOL.drain_counts() == {"sandbox_reruns": 1}
    assert leftovers() == []


def test_a_killed_interpreter_is_counted_and_loses_no_score(leftovers: Leftovers) -> None:
    assert asyncio.run(run_python("print(1)")).ok
    POOL.drain_counts()
    assert POOL.server is not None
    os.kill(POOL.server.pid, signal.SIGKILL)
    assert asyncio.run(run_python("print(2)")).stdout == "2\n"
    counts = POOL.drain_counts()
    # If it got the request before it died, the program is run again; otherwise the request is sent again.
    assert counts["sandbox_restarts"] == 1
    assert counts["sandbox_reruns"] <= 1
    assert leftovers() == []


def test_a_program_that_kills_itself_is_a_result() -> None:
    POOL.drain_counts()
    result = asyncio.run(run_python("import os; print('x', flush=True); os.kill(os.getpid(), 9)"))
    assert (result.returncode, result.stdout, result.ok, result.timed_out) == (137, "x\n", False, False)
    assert POOL.drain_counts() == {"sandbox_reruns": 2}


def test_a_program_whose_launcher_is_killed_every_time_is_a_result(leftovers: Leftovers) -> None:
    # At low isolation levels a program could do that itself; it must not end the training.
    async def disturb() -> None:
        while True:
            await kill(busy_launchers, lambda: True)

    result = beside(disturb())
    assert (result.returncode, result.ok, result.timed_out) == (None, False, False)
    assert leftovers() == []


def test_the_event_loop_goes_on_while_programs_are_killed() -> None:
    async def disturb() -> None:
        for _ in range(2):
            await kill(launchers, lambda: True)
        for _ in range(100):
            await asyncio.sleep(0)
        await wake()

    # A blocked event loop could not wake the program, which does not end otherwise.
    assert beside(disturb()).ok


@pytest.mark.parametrize(("wall_seconds", "runs"), [(HANG, 3), (0.01, 1)])
def test_a_killed_program_is_run_again_only_in_the_first_half_of_its_time(
    wall_seconds: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, made = Limits(wall_seconds=wall_seconds), []

    async def killed(*_: Any) -> ExecutionResult:
        made.append(True)
        await asyncio.sleep(0.006)  # of 0.01 more than half
        return ExecutionResult("", "", 128 + signal.SIGKILL, timed_out=False, output_truncated=False)

    runner.isolation()
    monkeypatch.setattr(runner, "run_once", killed)
    assert asyncio.run(run_python("", limits=limits)).returncode == 128 + signal.SIGKILL
    assert len(made) == runs
