"""Tests wait for events: none reads a wall clock, which depends on the load of the machine."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

pytest.importorskip("ray")

from fakes.simulated_engine import run_virtually
from waiting import HANG, until, wait_until

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}


def _tests() -> list[Path]:
    """Every file but benchmarks, which measure time, and what jobs load, which writes times down."""
    root = Path(__file__).parent
    measured = {"benchmarks", "external"}
    return sorted(
        file
        for file in root.rglob("*.py")
        if measured.isdisjoint(file.relative_to(root).parts) or file.name.startswith("test_")
    )


@pytest.mark.parametrize("path", _tests(), ids=lambda path: path.name)
def test_no_outcome_depends_on_seconds(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name) if name in CLOCKS:
                found.append((node.lineno, name))
            case ast.Call(
                func=ast.Attribute(attr="wait" | "join" | "poll"), args=[ast.Constant(value=int() | float())]
            ):
                found.append((node.lineno, "wait for seconds"))
            case ast.Call(
                func=ast.Attribute(attr="wait" | "run" | "result" | "communicate" | "get"),
                keywords=[*_, ast.keyword(arg="timeout", value=ast.Constant(value=int() | float()))],
            ):
                found.append((node.lineno, "timeout"))
    assert found == [] or path.name == "waiting.py"


def test_a_condition_that_holds_ends_the_wait_and_one_that_cannot_does_too() -> None:
    polls = iter([False, False, True])
    wait_until(lambda: next(polls))
    with pytest.raises(AssertionError, match="is gone"):
        wait_until(lambda: False, alive=lambda: False)
    with pytest.raises(AssertionError, match="in 0 s"):
        wait_until(lambda: False, limit=0.0)


def test_an_event_loop_s_own_clock_counts() -> None:
    begun = asyncio.Event()

    async def begin() -> None:
        await asyncio.sleep(HANG / 2)
        begun.set()

    async def main() -> None:
        await asyncio.gather(begin(), until(begun.is_set, every=1.0))
        with pytest.raises(AssertionError, match="did not happen"):
            await until(lambda: False, every=1.0)

    assert run_virtually(main())[1] >= 1.5 * HANG
