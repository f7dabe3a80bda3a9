"""Ordinary programs, limits, the pool and isolation levels of the sandbox; nothing is left of any program."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from conftest import Leftovers
from processes import WAITING, WAKING, running, waiting_below
from waiting import HANG, until, wait_until

from verl_atgrpo import EnvironmentConfigError, make
from verl_atgrpo.environments.common import options
from verl_atgrpo.sandbox import launcher, pool, removal, runner
from verl_atgrpo.sandbox.launcher import Request
from verl_atgrpo.sandbox.pool import Pool
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits, isolation, run_python

PATIENT = Limits(cpu_seconds=20, wall_seconds=HANG)
needs_namespaces = pytest.mark.skipif(isolation() != "namespaces", reason="this machine gives no namespaces")


def run(code: str, stdin: str = "", limits: Limits = PATIENT) -> ExecutionResult:
    return asyncio.run(run_python(code, stdin=stdin, limits=limits))


def run_short(code: str) -> ExecutionResult:
    """Runs an endless program, with increasing wall-clock limits until it prints something."""
    for seconds in (0.5 * 2**number for number in itertools.count()):
        result = run(code, limits=Limits(cpu_seconds=3600, wall_seconds=seconds))
        if result.stdout or seconds > HANG:
            return result
    raise AssertionError


SPAWN = """
import os, sys
started = 0
for _ in range(50):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        {setsid}
        python = sys.executable
        os.execv(python, [python, "-I", "-S", "-c", "import time; time.sleep(3600)", "{marker}"])
    started += 1
print(started, flush=True)
"""


def test_prints_an_action_list() -> None:
    result = run("print(['U', 'R', 'D'])")
    assert result == ExecutionResult("['U', 'R', 'D']\n", "", 0, False, False)
    assert result.ok


def test_exit_code_and_signal_are_reported() -> None:
    assert run("raise SystemExit(7)").returncode == 7
    assert run("import os; os.abort()").returncode == 128 + 6
    assert not run("raise SystemExit(7)").ok


def test_syntax_error() -> None:
    result = run("print((")
    assert not result.ok
    assert 'File "main.py", line 1' in result.stderr
    assert "SyntaxError" in result.stderr


def test_sets_are_printed_in_the_same_order_in_every_run() -> None:
    code = "print({'north', 'south', 'east', 'west', 'up', 'down'})"
    assert len({run(code).stdout for _ in range(4)}) == 1


def test_unicode_and_stdin() -> None:
    text = "Grüße 世界 🧩\n" * 20_000  # far more than a pipe holds
    result = run("import sys; data = sys.stdin.read(); print(len(data), data[:11])", stdin=text)
    assert result.ok
    assert result.stdout == f"{len(text)} {text[:11]}\n"
    assert run("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_invalid_text_in_stdin_is_replaced() -> None:
    assert run("print(ascii(input()))", stdin="a\ud800b").stdout == "'a?b'\n"


def test_stdin_is_in_no_file() -> None:
    code = "import os, sys; print(*map(os.path.exists, (sys.argv[0], os.path.dirname(sys.argv[0]) + '/stdin')))"
    assert run(code, stdin="secret").stdout == "True False\n"


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(3600)",
        "import signal\nfor s in range(1, 32):\n  s in (9, 19) or signal.signal(s, 1)\nwhile 1: 1",
    ],
)
def test_wall_limit(code: str) -> None:
    result = run_short("print('before', flush=True)\n" + code)
    assert result == ExecutionResult("before\n", "", None, True, False)


IGNORING = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"


@pytest.mark.parametrize("ignored", ["", pytest.param(IGNORING, marks=pytest.mark.slow)])
def test_cpu_limit(ignored: str) -> None:
    result = run(ignored + "while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=HANG))
    assert result.timed_out and not result.ok
    assert result.returncode == 128 + signal.SIGXCPU  # by the kernel, however busy the machine


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list to which a program's streams are added: output, errors, the launcher's report."""
    streams: list[Any] = []

    class Recorded(runner._Stream):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            streams.append(self)

    monkeypatch.setattr(runner, "_Stream", Recorded)
    return streams


def test_endless_output(streams: list[Any]) -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * 4096)"
    result = run(code, limits=Limits(cpu_seconds=3600, wall_seconds=HANG, output_bytes=10_000))
    assert result.output_truncated and not result.ok and result.returncode is None
    assert len(result.stdout) == 10_000
    assert max(len(stream.kept) for stream in streams) == 10_001, "more than that is not held in memory"


@pytest.mark.parametrize("limit", [5, 14, 10_000, 10_001, 65_536])
def test_long_error_output_is_no_fault_and_its_ends_are_kept(limit: int, streams: list[Any]) -> None:
    text = "start" + "x" * 600_000 + "the end"
    code = "import sys\nprint('done')\nsys.stderr.write('start' + 'x' * 600_000 + 'the end')"
    result = run(code, limits=Limits(cpu_seconds=20, wall_seconds=HANG, output_bytes=limit))
    assert result.ok and result.stdout == "done\n" and not result.output_truncated
    assert result.stderr == text[: limit // 2] + text[-(limit - limit // 2) :]
    assert max(len(stream.kept) for stream in streams) <= max(limit, 10), "more than that is not held in memory"


@pytest.mark.slow
def test_endless_error_output_ends_with_the_limit_on_time(streams: list[Any]) -> None:
    code = "import sys\nwhile True: sys.stderr.write('x' * 4096)"
    result = run(code, limits=Limits(cpu_seconds=3600, wall_seconds=2.0, output_bytes=10_000))
    assert result.timed_out and not result.ok and len(result.stderr) == 10_000
    assert max(len(stream.kept) for stream in streams) == 10_000


def test_output_of_exactly_the_limit_is_kept() -> None:
    result = run("print('x' * 99)", limits=dataclasses.replace(PATIENT, output_bytes=100))
    assert result.ok and len(result.stdout) == 100


def test_output_in_packets_of_a_byte_costs_few_reads(streams: list[Any]) -> None:
    code = "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT | os.O_WRONLY)\nwhile True: os.write(1, b'x')"
    result = asyncio.run(runner.run_python(code, limits=Limits(cpu_seconds=1, wall_seconds=0.5)))
    output = streams[0]
    assert result.timed_out
    assert len(result.stdout) == output.reads - 1, "every read but the last got one byte"
    assert output.reads < 400


@pytest.mark.parametrize("setsid", ["", "os.setsid()"])
def test_children_are_bounded_and_gone(setsid: str) -> None:
    marker = f"sandbox-test-{uuid4().hex}"
    result = run(SPAWN.format(marker=marker, setsid=setsid))
    assert result.ok
    assert int(result.stdout) < 16
    if isolation() == "namespaces":
        assert int(result.stdout) == 15
    assert running(marker) == []


def test_children_are_gone_after_a_time_out() -> None:
    marker = f"sandbox-test-{uuid4().hex}"
    code = SPAWN.format(marker=marker, setsid="os.setsid()") + "import time; time.sleep(3600)"
    result = run_short(code)
    assert result.timed_out and int(result.stdout) > 1
    assert running(marker) == []


def test_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TEST_SECRET", "hunter2")
    result = run("import os; print(dict(os.environ))")
    assert result.ok and "PATH" in result.stdout
    assert "hunter2" not in result.stdout


@needs_namespaces
def test_other_processes_are_invisible() -> None:
    # /proc/*/environ would show secrets of other processes.
    result = run("import os; print(os.listdir('/proc'), os.getppid())")
    assert result.stdout == "[] 1\n"


def test_inherits_no_file() -> None:
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\nfor fd in range(64):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass"
        assert run(code).stdout.split() == ["0", "1", "2"]


def test_huge_file() -> None:
    result = run("with open('big', 'wb') as f:\n  for _ in range(64): f.write(bytes(1 << 20))")
    assert not result.ok
    assert "File too large" in result.stderr


def test_working_directory_is_writable_and_removed(leftovers: Leftovers) -> None:
    code = "import os; os.mkdir('d'); open('d/f', 'w').write('x'); os.chmod('d', 0)\n"
    result = run(code + "print(os.getcwd(), end='')")
    assert result.ok
    assert not os.path.exists(result.stdout)
    assert leftovers() == []


def test_cancelled_call_kills_its_program(leftovers: Leftovers) -> None:
    async def scenario() -> None:
        call = asyncio.create_task(run_python("import time; time.sleep(3600)", limits=PATIENT))
        await until(lambda: len(leftovers(within=0.0)) >= 2, every=0.002)  # its launcher and its folder
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    assert run("").ok
    asyncio.run(scenario())
    assert leftovers() == []


class WithoutThreads(ThreadPoolExecutor):
    """An executor whose threads are busy when a program's folder is to be removed."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = functools.partial(fn, *args, **kwargs)
        if runner.remove_root not in args + getattr(fn, "args", ()):
            return super().submit(call)
        self.waiting.append((Future(), call))
        return self.waiting[-1][0]

    def go_on(self) -> None:
        for future, call in self.waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(call())


def test_a_call_that_is_cancelled_while_it_waits_for_a_thread_leaves_nothing(leftovers: Leftovers) -> None:
    async def scenario() -> None:
        executor = WithoutThreads()
        asyncio.get_running_loop().set_default_executor(executor)
        call = asyncio.create_task(run_python("", limits=PATIENT))
        await until(lambda: executor.waiting, every=0.002)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        executor.go_on()

    assert run("").ok
    asyncio.run(scenario())
    assert leftovers() == []


def test_a_folder_into_which_a_dying_process_still_writes_is_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = runner._make_root("", ())
    emptied: list[int] = []

    def meanwhile(folder: int) -> None:
        removal_empty(folder)
        emptied.append(folder)
        if len(emptied) == 1:
            os.mkdir("work", dir_fd=folder)

    removal_empty = removal._empty
    monkeypatch.setattr(removal, "_empty", meanwhile)
    removal.remove_root(root, "rlimits")
    assert not os.path.exists(root)
    assert (len(emptied), caplog.records) == (2, [])


def test_fifty_runs_leave_nothing(leftovers: Leftovers) -> None:
    async def scenario() -> list[ExecutionResult]:
        return list(await asyncio.gather(*(run_python(f"print({i})") for i in range(50))))

    assert run("").ok
    files = len(os.listdir("/proc/self/fd"))
    assert [result.stdout for result in asyncio.run(scenario())] == [f"{i}\n" for i in range(50)]
    assert leftovers() == []
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_sandbox_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation()
    with tempfile.TemporaryDirectory() as empty:
        monkeypatch.setattr(runner, "_make_root", lambda *_: empty)
        monkeypatch.setattr(runner, "remove_root", lambda *_: None)
        with pytest.raises(RuntimeError, match=r"could not be set up: (?s:.)*No such file"):
            run("print(1)")


# ---------------------------------------------------------------------- the pool


def server_of(pool: Pool) -> int:
    assert pool.server is not None
    return pool.server.pid


def test_the_pool_survives_its_interpreter_being_killed(leftovers: Leftovers) -> None:
    async def scenario() -> ExecutionResult:
        call = asyncio.create_task(run_python(WAITING, limits=PATIENT))
        await until(lambda: waiting_below(server_of(runner.POOL)), every=0.002)
        (program,) = waiting_below(server_of(runner.POOL))
        os.kill(server_of(runner.POOL), signal.SIGKILL)
        await asyncio.sleep(0)
        os.kill(program, WAKING)
        return await call

    assert run("print(1)").ok
    before = server_of(runner.POOL)
    assert asyncio.run(scenario()).stdout == "done\n"  # a running program is not affected
    assert run("print(2)").stdout == "2\n"
    assert server_of(runner.POOL) != before
    assert leftovers() == []


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_request_lost_with_its_interpreter_is_repeated(deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(Pool):
        died = 0

        def start(self, request: Request, files: Sequence[int]) -> None:
            self.connect()
            dies = self.died < deaths
            self.died += dies
            if dies:  # stopped: it gets the request but does not handle it
                os.kill(server_of(self), signal.SIGSTOP)
            super().start(request, files)
            if dies:
                os.kill(server_of(self), signal.SIGKILL)

    isolation()
    pool = Dying()
    monkeypatch.setattr(runner, "POOL", pool)
    if deaths < 3:
        assert run("print(1)").stdout == "1\n"
    else:
        with pytest.raises(RuntimeError, match="killed every time"):
            run("print(1)")
    pool.close()


def test_a_fork_starts_its_own_interpreter() -> None:
    assert run("print(1)").ok
    ours = server_of(runner.POOL)
    child = os.fork()
    if child == 0:
        done = False
        try:
            done = run("print(1)").ok and server_of(runner.POOL) != ours
            runner.POOL.close()
        finally:
            os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run("print(1)").ok and server_of(runner.POOL) == ours


def test_everything_ends_with_its_owner(leftovers: Leftovers) -> None:
    elsewhere = {**os.environ, "TMPDIR": tempfile.gettempdir()}  # a killed process cannot remove its folders
    marker = f"sandbox-test-{uuid4().hex}"
    program = SPAWN.format(marker=marker, setsid="os.setsid()") + "import time; time.sleep(3600)"
    code = (
        "import asyncio\nfrom verl_atgrpo.sandbox.runner import Limits, run_python\n"
        f"asyncio.run(run_python({program!r}, limits=Limits(wall_seconds={HANG})))"
    )
    with subprocess.Popen([sys.executable, "-"], stdin=subprocess.PIPE, env=elsewhere) as owner:
        assert owner.stdin is not None
        owner.stdin.write(code.encode())
        owner.stdin.close()
        wait_until(lambda: len(running(marker)) > 5)
        owner.kill()
    wait_until(lambda: not running(marker))


# ---------------------------------------------------------------------- levels


@pytest.mark.parametrize("name", ["code", "code_single", "math", "math_ensemble", "plan_path", "sokoban", "sudoku"])
def test_less_than_the_required_isolation_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "isolation", lambda: "seccomp")
    message = "at_grpo.environment.require_isolation=true: .*level seccomp here, not namespaces; .*set it to false"
    with pytest.raises(EnvironmentConfigError, match=message):
        make(name, require_isolation=True)


@pytest.mark.parametrize("name", ["code", "code_single"])
@pytest.mark.parametrize(("level", "refused"), [("bare namespaces", False), ("seccomp", True), ("rlimits", True)])
@pytest.mark.parametrize("others", [True, False])
def test_golden_tests_are_not_at_stake_unless_that_is_accepted(
    name: str, level: str, refused: bool, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "isolation", lambda: level)
    monkeypatch.setattr(options, "users", lambda: range(5, 9) if others else range(0))
    weak, data = f"level {level} here, where they can read and change the golden tests", "environment.train"
    with pytest.raises(EnvironmentConfigError, match=data if others or not refused else weak):
        make(name)
    with pytest.raises(EnvironmentConfigError, match=data):
        make(name, require_isolation=False)


def test_isolation_is_not_required_where_no_program_runs() -> None:
    with pytest.raises(EnvironmentConfigError, match=r"require_isolation=True has no effect with tool: moves"):
        make("plan_path", tool="moves", require_isolation=True)
    with pytest.raises(EnvironmentConfigError, match="require_isolation='yes': true or false"):
        make("plan_path", require_isolation="yes")


@pytest.mark.parametrize(
    ("level", "severity", "cgroup", "memory"),
    [
        ("namespaces", "INFO", "/sys/x", "for the whole program"),
        ("rlimits", "WARNING", "", "for each of its processes"),
    ],
)
def test_the_level_is_logged_once(
    level: str,
    severity: str,
    cgroup: str,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options.log_isolation.cache_clear()
    monkeypatch.setattr(runner, "isolation", lambda: level)
    monkeypatch.setattr(runner, "cgroup", lambda: cgroup)
    with caplog.at_level("INFO", logger="verl_atgrpo"):  # its level is set where verl was imported before
        make("plan_path", tool="moves")
        assert not caplog.records
        make("plan_path")
        make("sudoku")
    (record,) = caplog.records
    assert record.levelname == severity and f"isolation level {level}" in record.message
    assert memory in record.message
    options.log_isolation.cache_clear()


def test_a_machine_that_cannot_run_programs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "trial", lambda level, *_: f"no {level}")
    isolation.cache_clear()
    with pytest.raises(EnvironmentConfigError, match=r"programs cannot be run on this machine: .*no rlimits"):
        make("plan_path")


def test_a_program_can_import_only_its_libraries(tmp_path: Path) -> None:
    """The packages are in a folder that is otherwise invisible to programs."""
    for name in ("given", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"name = {name!r}\n")
    sys.path.append(str(tmp_path))
    try:
        code = f"""
import os, sys, given
print(given.name, os.path.exists({str(tmp_path / "other")!r}), "site" in sys.modules)
try:
    open(given.__file__, "a")
except OSError:
    print("read only")
import other
"""
        result = asyncio.run(run_python(code, libraries=("given",)))
        assert not asyncio.run(run_python("import given")).ok
        assert runner.importable("given", Limits()) == "" != runner.importable("no_such_library", Limits())
    finally:
        sys.path.remove(str(tmp_path))
        runner.library_folders.cache_clear()
        runner.importable.cache_clear()
    assert "ModuleNotFoundError: No module named 'other'" in result.stderr
    if isolation() == "namespaces":
        assert result.stdout == "given False False\nread only\n"


# ------------------------------------------------------------------ how many at a time, and how often


@pytest.mark.parametrize(("cores", "at_once"), [(2, 2), (3, 3), (1, 1)])
def test_as_many_programs_run_at_once_as_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, at_once: int
) -> None:
    under_way, most = 0, 0

    async def one(*_: object) -> ExecutionResult:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(20):
            await asyncio.sleep(0)
        under_way -= 1
        return ExecutionResult("", "", 0, False, False)

    async def all_of_them() -> None:
        await asyncio.gather(*(run_python("") for _ in range(8)))

    monkeypatch.setattr(runner, "run_once", one)
    monkeypatch.setattr(pool, "cores", lambda: list(range(1000, 1000 + cores)))
    asyncio.run(all_of_them())
    assert most == at_once


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU recipe has eight rollout workers on a node: with all cores for each, programs would run out of time."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pool, "cores", lambda: [3])
    looks = []
    look = pool._lock_of_one
    monkeypatch.setattr(pool, "_lock_of_one", lambda *given: looks.append(given) or look(*given))
    monkeypatch.setattr(pool, "_POLL", 0)

    async def one_after_another() -> None:
        code = (
            "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
            "print('locked', flush=True); sys.stdin.read()"
        )
        folder = tmp_path / pool._LOCKS
        folder.mkdir(mode=0o700)
        other = subprocess.Popen(
            [sys.executable, "-c", code, folder / "3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == b"locked\n"
        entered = asyncio.Event()

        async def mine() -> None:
            async with pool.free_core():
                entered.set()

        task = asyncio.ensure_future(mine())
        while len(looks) < 3:
            await asyncio.sleep(0)
        assert not entered.is_set()
        other.stdin.close()
        await task
        other.stdout.close()
        assert other.wait() == 0

    asyncio.run(asyncio.wait_for(one_after_another(), HANG))


def test_a_folder_that_others_write_to_has_no_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / pool._LOCKS
    folder.mkdir()
    folder.chmod(0o777)

    async def twice() -> None:
        for _ in range(2):
            async with pool.free_core():
                assert not list(folder.iterdir())

    asyncio.run(twice())
    assert caplog.text.count("others may write there; processes do not share the cores for programs") == 1


@pytest.mark.parametrize(
    ("returncode", "timed_out", "truncated", "runs"),
    [
        (0, False, False, 1),
        (1, False, False, 1),
        (137, False, False, 3),  # perhaps out of memory
        (None, False, False, 3),
        (None, True, False, 1),  # by the sandbox
        (137, False, True, 1),
        (137, True, True, 1),
    ],
)
def test_a_killed_program_is_run_again_unless_the_sandbox_killed_it(
    monkeypatch: pytest.MonkeyPatch, returncode: int | None, timed_out: bool, truncated: bool, runs: int
) -> None:
    outcome = ExecutionResult("", "", returncode, timed_out, truncated)
    asked = []

    async def one(*_: object) -> ExecutionResult:
        asked.append(1)
        return outcome

    monkeypatch.setattr(runner, "run_once", one)
    before = runner.POOL.counts["reruns"]
    assert run("") == outcome
    assert len(asked) == runs
    assert runner.POOL.counts["reruns"] - before == runs - 1


# ------------------------------------------------------------------ root of a container without all users

IN_CONTAINER = """
import asyncio, ctypes, sys
ctypes.CDLL(None).unshare(0x10000000)  # a user namespace
print("unshared", flush=True)
sys.stdin.readline()
from verl_atgrpo.sandbox import runner
"""
IDENTITY = """
code = (
    "import ctypes, os; sets = (ctypes.c_uint32 * 6)();"
    "assert ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets) == 0; print(os.getuid(), max(sets))"
)
print(repr(runner.trial("namespaces")), asyncio.run(runner.run_python(code)).stdout)
"""
PACKAGES = """
runner.library_folders = lambda names: (sys.argv[1],) if names else ()
limits = runner.Limits(cpu_seconds=20, wall_seconds=60)
for level in "namespaces", "landlock+seccomp":
    if not runner.trial(level):
        for libraries in (), ("pip",):
            print(level, asyncio.run(runner.run_once(level, sys.argv[2], "", limits, libraries)).stdout.split())
"""
TESTS = """
from verl_atgrpo.environments.code.programs import Call, Problem, judge
problem = Problem("", (Call((1,), "kumquat"),), "found")
for level in runner.LEVELS:
    if not runner.trial(level):
        runner.isolation = lambda: level
        print(level, *asyncio.run(judge(problem, sys.argv[1], problem.tests, runner.Limits(wall_seconds=60))).shown)
"""
FIND = """
import os
def read(name):
    try:
        with open(f"/proc/{os.getppid()}/{name}", "rb") as file:
            return b"kum" b"quat" in file.read(1 << 16)
    except OSError:
        return False
known = [name for name in ("fd/0", "mem", "environ", "maps", "stat", "cmdline") if read(name)]
def found(_):
    return known
"""
IMPORT = """
try:
    print(len(open({!r} + "/__init__.py").read()) > 0)
    import pip
    print(pip.__file__)
except (OSError, ImportError) as error:
    print(type(error).__name__)
"""


def said_in_container(count: int, code: str, *arguments: object) -> str:
    """Runs code as root of a container that has so many users; returns what it prints."""
    if isolation() != "namespaces":
        pytest.skip("programs have no namespaces here")
    command = [sys.executable, "-c", IN_CONTAINER + code, *map(str, arguments)]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert job.stdin is not None and job.stdout is not None
    assert job.stdout.readline() == "unshared\n"
    for kind in ("uid_map", "gid_map"):
        Path(f"/proc/{job.pid}/{kind}").write_text(f"0 0 {count}\n")
    return job.communicate("\n", timeout=HANG)[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes the maps of another process")
@pytest.mark.parametrize(("count", "mapped"), [(1, {0}), (65_536, range(32_768, 49_152))])
def test_root_of_a_rootless_container_runs_programs(count: int, mapped: Container[int]) -> None:
    """Whose users are 0 to 65,535 as a rule, or 0 alone: the users that programs have elsewhere do not exist."""
    error, user, capabilities = said_in_container(count, IDENTITY).split()
    assert error == "''"
    assert int(user) in mapped
    assert capabilities == "0"


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes the maps of another process")
def test_packages_of_the_systems_python_are_hidden_but_for_the_libraries() -> None:
    """In an image this package is one of them, and its solvers would solve the games."""
    (version,) = Path(sys.base_prefix, "lib").glob(f"python3.{sys.version_info.minor}")
    package = version / "site-packages/pip"
    if not (package / "__init__.py").is_file():
        pytest.skip(f"{package} is not there")
    lines = said_in_container(1, PACKAGES, package, IMPORT.format(str(package))).splitlines()
    assert lines[0].startswith("namespaces ")
    hidden = {"namespaces": "FileNotFoundError", "landlock+seccomp": "PermissionError"}
    for without, given in zip(lines[::2], lines[1::2], strict=True):
        level = without.partition(" ")[0]
        assert without == f"{level} {[hidden[level]]}"
        assert given.startswith(f"{level} ['True', ") and given.endswith("libraries/pip/__init__.py']")


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes the maps of another process")
def test_at_no_level_does_a_function_find_its_tests_in_the_process_that_has_them() -> None:
    lines = said_in_container(1, TESTS, FIND).splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [*runner.LEVELS] and len(lines) > 1
    assert {line.rpartition(" ")[2] for line in lines} == {"[]"}


def test_a_limit_on_tasks_leaves_room_for_what_its_user_runs_already() -> None:
    """The kernel counts them below `namespaces`: a program that forks would fail beside a training."""
    stop, before = threading.Event(), launcher._tasks_of(os.getuid())
    threads = [threading.Thread(target=stop.wait) for _ in range(50)]
    for thread in threads:
        thread.start()
    assert launcher._tasks_of(os.getuid()) >= before + 40  # others may end
    stop.set()
    assert launcher._tasks_of(os.getuid() + 12_345) == 0


# ------------------------------------------------------------------ what a program leaves


def test_the_core_of_a_program_is_free_while_its_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    removing, go_on = [], threading.Event()

    def remove(root: str, level: str) -> None:
        removing.append(root)
        assert go_on.wait(HANG)
        removal.remove_root(root, level)

    async def two() -> None:
        calls = [asyncio.create_task(run_python("", limits=PATIENT)) for _ in range(2)]
        await until(lambda: len(removing) == 2)
        go_on.set()
        await asyncio.gather(*calls)

    isolation()
    monkeypatch.setattr(runner, "remove_root", remove)
    monkeypatch.setattr(pool, "cores", lambda: [1000])
    asyncio.run(two())
    assert not any(map(os.path.exists, removing))


@pytest.mark.parametrize(
    ("make", "over"),
    [
        (lambda top: None, False),
        (lambda top: [(top / str(n)).touch() for n in range(runner.MOST_FILES)], False),
        (lambda top: [(top / str(n)).touch() for n in range(runner.MOST_FILES + 1)], True),
        (lambda top: [(top / str(n % 9) / str(n)).mkdir(parents=True) for n in range(runner.MOST_FILES)], True),
        (lambda top: [(top / str(n)).symlink_to("/") for n in range(9)], False),  # not followed
        (lambda top: [(top / str(n)).symlink_to("/") for n in range(runner.MOST_FILES + 1)], True),
        (lambda top: nested(top, 20, "d" * 250), True),  # its path is too long
        (lambda top: nested(top, 200, "d"), False),
    ],
)
def test_files_and_folders_are_counted(make: Callable[[Path], object], over: bool, tmp_path: Path) -> None:
    make(tmp_path)
    assert runner.overfull(str(tmp_path)) == over
    removal._empty(os.open(tmp_path, os.O_RDONLY))  # pytest could not


def nested(top: Path, depth: int, name: str) -> None:
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def test_a_folder_that_is_gone_has_no_files(tmp_path: Path) -> None:
    assert not runner.overfull(str(tmp_path / "gone"))
