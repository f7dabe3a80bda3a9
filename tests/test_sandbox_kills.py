"""Somebody kills what runs a program, as the system does when memory runs out: no score is lost, nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from conftest import Leftovers
from processes import children

from verl_atgrpo import sandbox
from verl_atgrpo.sandbox import ExecutionResult, Limits, run_python
from verl_atgrpo.sandbox_pool import POOL

PATIENT = Limits(wall_seconds=20.0)


def launchers() -> list[int]:
    return children(POOL._server.pid) if POOL._server is not None else []


def programs() -> list[int]:
    """What launchers have started: the program, or what is process 1 to it."""
    return [child for launcher in launchers() for child in children(launcher)]


def busy_launchers() -> list[int]:
    """Those that have come as far as their program, which takes its time on a busy machine."""
    return [launcher for launcher in launchers() if children(launcher)]


async def kill(victims: Callable[[], list[int]], after: float, times: int) -> None:
    """Kills what there is, so long after it came, so many times."""
    for _ in range(times):
        while not victims():
            await asyncio.sleep(0.001)
        await asyncio.sleep(after)
        for victim in (targets := victims()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        while set(victims()) & set(targets):
            await asyncio.sleep(0.001)


def beside(call: Coroutine[Any, Any, ExecutionResult], disturb: Coroutine[Any, Any, None]) -> ExecutionResult:
    """Returns what the call returns while the other one goes on."""

    async def scenario() -> ExecutionResult:
        disturbing = asyncio.create_task(disturb)
        try:
            return await call
        finally:
            disturbing.cancel()

    sandbox.isolation()
    POOL.drain_counts()
    return asyncio.run(scenario())


SLOW = "import time; time.sleep(1.5); print('done')"
"""Far longer than any `after`: also on a busy machine it is there when it shall be killed."""


@pytest.mark.parametrize("victims", [launchers, programs])
@pytest.mark.parametrize("after", [0.0, 0.01, 0.2])  # before the program is walled off, at its start, in its midst
def test_a_program_that_was_killed_is_run_again(
    victims: Callable[[], list[int]], after: float, leftovers: Leftovers
) -> None:
    assert beside(run_python(SLOW, limits=PATIENT), kill(victims, after, times=1)).stdout == "done\n"
    assert POOL.drain_counts() == {"sandbox_reruns": 1}
    assert leftovers() == []


def test_the_interpreter_s_death_is_counted_and_costs_no_score(leftovers: Leftovers) -> None:
    assert asyncio.run(run_python("print(1)")).ok
    POOL.drain_counts()
    assert POOL._server is not None
    os.kill(POOL._server.pid, signal.SIGKILL)
    assert asyncio.run(run_python("print(2)")).stdout == "2\n"
    counts = POOL.drain_counts()
    # Where it was still dying as it took the request, the program is run again; where not, the request is sent again.
    assert counts["sandbox_restarts"] == 1
    assert counts["sandbox_reruns"] <= 1
    assert leftovers() == []


def test_a_program_that_kills_itself_is_a_result() -> None:
    POOL.drain_counts()
    result = asyncio.run(run_python("import os; print('x', flush=True); os.kill(os.getpid(), 9)"))
    assert (result.returncode, result.stdout, result.ok, result.timed_out) == (137, "x\n", False, False)
    assert POOL.drain_counts() == {"sandbox_reruns": 2}


def test_a_program_whose_launcher_is_killed_each_time_is_a_result(leftovers: Leftovers) -> None:
    # With little isolation a program could do that itself: it must not end the training.
    result = beside(run_python(SLOW, limits=PATIENT), kill(busy_launchers, 0.5, times=3))
    assert (result.returncode, result.ok, result.timed_out) == (None, False, False)
    assert leftovers() == []


def test_the_event_loop_goes_on_while_programs_are_killed() -> None:
    longest = 0.0

    async def watched_kills() -> None:
        nonlocal longest
        killing = asyncio.create_task(kill(launchers, 0.05, times=2))
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - began)
            if killing.done():
                killing.result()

    assert beside(run_python(SLOW, limits=PATIENT), watched_kills()).ok
    assert longest < 1.0  # a call that waited for the sandbox would take as long as a program
