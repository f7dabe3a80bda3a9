"""Control groups of programs, in a folder that stands for a delegated cgroup: no machine of the tests has one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Leftovers
from processes import WAITING, WAKING, children, waiting_below
from waiting import HANG, until

from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits, run_once

LIMITS = Limits(cpu_seconds=20, wall_seconds=HANG, memory_mb=128, processes=7)


@pytest.fixture
def delegated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    runner.isolation()
    monkeypatch.setattr(runner, "cgroup", lambda: str(tmp_path))
    return tmp_path


def launcher() -> int:
    assert runner.POOL.server is not None
    (found,) = children(runner.POOL.server.pid)
    return found


def during(deed: Callable[[Path], object], delegated: Path) -> ExecutionResult | None:
    """Returns the result of a waiting program; does something with its cgroup's folder while it runs."""

    async def scenario() -> ExecutionResult | None:
        call = asyncio.create_task(run_once(runner.isolation(), WAITING, "", LIMITS, ()))
        await until(lambda: runner.POOL.server and waiting_below(runner.POOL.server.pid), every=0.002)
        (group,) = delegated.iterdir()
        deed(group)
        return await call

    return asyncio.run(scenario())


def emptied(group: Path) -> dict[str, str]:
    """Returns the files of a cgroup, and removes them, as the kernel does with a cgroup."""
    found = {path.name: path.read_text() for path in group.iterdir()}
    for path in list(group.iterdir()):
        path.unlink()
    return found


def test_a_program_has_limits_of_its_own_while_it_runs(delegated: Path) -> None:
    seen = {}

    def wake(group: Path) -> None:
        seen.update(emptied(group))
        (program,) = waiting_below(launcher())
        os.kill(program, WAKING)

    result = during(wake, delegated)
    assert result is not None and result.stdout == "done\n"
    tasks = 7 + runner.isolation().endswith("namespaces")
    limits = {"memory.max": str(128 << 20), "memory.oom.group": "1", "pids.max": str(tasks), "cgroup.procs": "0"}
    assert seen == limits
    assert list(delegated.iterdir()) == []


@pytest.mark.parametrize(("kills", "code", "message"), [(1, 1, "more than 128 MiB together"), (0, 137, "")])
def test_a_program_without_memory_left_fails_like_one_at_the_limit_of_a_process(
    kills: int, code: int, message: str, delegated: Path
) -> None:
    def kill(group: Path) -> None:
        (group / "memory.events").write_text(f"oom 5\noom_kill {kills}\noom_group_kill 0\n")
        for program in children(launcher()):
            os.kill(program, signal.SIGKILL)

    result = during(kill, delegated)
    assert result is not None
    assert result.returncode == code and message in result.stderr
    assert ("MemoryError" in result.stderr) == bool(kills)


def test_the_cgroup_of_a_killed_launcher_is_removed(delegated: Path, leftovers: Leftovers) -> None:
    def kill(group: Path) -> None:
        emptied(group)
        os.kill(launcher(), signal.SIGKILL)

    during(kill, delegated)
    assert leftovers() == []
    asyncio.run(until(lambda: not list(delegated.iterdir())))


def test_a_cgroup_in_which_no_program_can_run_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folders, found in (([str(tmp_path / "missing"), str(tmp_path)], str(tmp_path)), ([], "")):
        monkeypatch.setattr(runner, "_cgroups", folders.copy)
        assert runner.cgroup.__wrapped__() == found


@pytest.mark.parametrize(
    ("own", "root", "passed_on", "expected"),
    [
        ("/job/inner", "/", {"job": "cpu memory pids"}, ["job"]),
        ("/job/inner", "/", {"job": "memory pids", "job/inner": "pids memory"}, ["job/inner", "job"]),
        ("/job/inner", "/job", {"": "memory pids"}, [""]),  # in a container that sees a part of the tree
        ("/", "/", {"": "memory pids"}, [""]),
        ("/job/inner", "/", {"job": "cpu memory", "": "memory pids"}, []),
        ("/../other", "/", {"": "memory pids"}, []),
        ("/job", "/elsewhere", {"": "memory pids"}, []),
        ("/job", "/job/inner/..other", {"": "memory pids"}, []),
        ("/inner..", "/", {"": "memory pids"}, [""]),
    ],
)
def test_cgroups_are_this_process_s_and_the_one_above(
    own: str, root: str, passed_on: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    top = tmp_path / "cgroup"
    (top / "job" / "inner").mkdir(parents=True)
    for folder, controllers in passed_on.items():
        (top / folder / "cgroup.subtree_control").write_text(controllers + "\n")
    process = tmp_path / "process"
    process.mkdir()
    (process / "cgroup").write_text(f"4:memory:/\n0::{own}\n")
    (process / "mountinfo").write_text(
        f"24 1 0:22 / /proc rw - proc proc rw\n30 24 0:26 {root} {top} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    )
    assert runner._cgroups(str(process)) == [str(top / folder) if folder else str(top) for folder in expected]
    (process / "cgroup").write_text("4:memory:/\n")
    assert runner._cgroups(str(process)) == []
