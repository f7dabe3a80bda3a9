"""Hostile and ordinary programs in the sandbox: each is contained, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_atgrpo.sandbox import ExecutionResult, Limits, extract_python, isolation, run_python

DEFAULT = Limits()
QUICK = Limits(cpu_seconds=1, wall_seconds=1.0)
needs_namespaces = pytest.mark.skipif(isolation() != "namespaces", reason="this machine gives no namespaces")


def run(code: str, stdin: str = "", limits: Limits = DEFAULT) -> ExecutionResult:
    return asyncio.run(run_python(code, stdin=stdin, limits=limits))


def running(marker: str) -> list[int]:
    """Processes whose command line holds `marker`, which a test gives to what its program starts."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile
            continue
    return found


Children = Callable[[], list[str]]


@pytest.fixture
def children() -> Children:
    """What a test has left so far, zombies included; not what ran before, such as the one that compares answers."""

    def all_of_them() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = all_of_them()
    return lambda: sorted(all_of_them() - before)


def sandboxes() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("sandbox-*"))


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
        os.execv(python, [python, "-I", "-S", "-c", "import time; time.sleep(60)", "{marker}"])
    started += 1
print(started)
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


def test_unicode_and_stdin() -> None:
    text = "Grüße 世界 🧩\n" * 20_000  # far more than a pipe holds
    result = run("import sys; data = sys.stdin.read(); print(len(data), data[:11])", stdin=text)
    assert result.ok
    assert result.stdout == f"{len(text)} {text[:11]}\n"
    assert run("import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_stdin_is_in_no_file() -> None:
    code = "import os, sys; print(*map(os.path.exists, (sys.argv[0], os.path.dirname(sys.argv[0]) + '/stdin')))"
    assert run(code, stdin="secret").stdout == "True False\n"


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import signal\nfor s in range(1, 32):\n  s in (9, 19) or signal.signal(s, 1)\nwhile 1: 1",
    ],
)
def test_wall_limit(code: str) -> None:
    start = time.monotonic()
    result = run("print('before', flush=True)\n" + code, limits=Limits(cpu_seconds=20, wall_seconds=1.0))
    assert time.monotonic() - start < 2.0
    assert result == ExecutionResult("before\n", "", None, True, False)


def test_cpu_limit() -> None:
    start = time.monotonic()
    result = run("while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=10.0))
    assert time.monotonic() - start < 6.0
    assert result.timed_out and not result.ok


def test_memory_bomb() -> None:
    result = run("x = bytearray(1 << 30)")
    assert not result.ok
    assert "MemoryError" in result.stderr


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output(stream: str) -> None:
    start = time.monotonic()
    code = f"import sys\nwhile True: sys.{stream}.write('x' * 4096)"
    result = run(code, limits=Limits(output_bytes=10_000))
    assert time.monotonic() - start < 3.0
    assert result.output_truncated and not result.ok and result.returncode is None
    assert len(getattr(result, stream)) == 10_000


def test_output_of_exactly_the_limit_is_kept() -> None:
    result = run("print('x' * 99)", limits=Limits(output_bytes=100))
    assert result.ok and len(result.stdout) == 100


@pytest.mark.parametrize("setsid", ["", "os.setsid()"])
def test_children_are_bounded_and_gone(setsid: str) -> None:
    marker = f"sandbox-test-{os.getpid()}-{time.monotonic_ns()}"
    result = run(SPAWN.format(marker=marker, setsid=setsid))
    assert result.ok
    assert int(result.stdout) < 16
    if isolation() == "namespaces":
        assert int(result.stdout) == 15
    assert running(marker) == []


def test_children_are_gone_after_a_time_out() -> None:
    marker = f"sandbox-test-{os.getpid()}-{time.monotonic_ns()}"
    code = SPAWN.format(marker=marker, setsid="os.setsid()") + "import time; time.sleep(60)"
    result = run(code, limits=QUICK)
    assert result.timed_out
    assert running(marker) == []


def test_fork_bomb(children: Children) -> None:
    start = time.monotonic()
    run("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", limits=QUICK)
    assert time.monotonic() - start < 3.0
    assert children() == []


def test_environment_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_TEST_SECRET", "hunter2")
    result = run("import os; print(dict(os.environ))")
    assert result.ok and "PATH" in result.stdout
    assert "hunter2" not in result.stdout


@needs_namespaces
def test_processes_of_the_machine_are_out_of_sight() -> None:
    # /proc/*/environ would show the secrets of whatever else runs here.
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


def test_working_directory_is_writable_and_removed() -> None:
    before = sandboxes()
    code = "import os; os.mkdir('d'); open('d/f', 'w').write('x'); os.chmod('d', 0)\n"
    result = run(code + "print(os.getcwd(), end='')")
    assert result.ok
    assert not os.path.exists(result.stdout)
    assert [path for path in sandboxes() if path not in before] == []


@needs_namespaces
def test_nothing_else_is_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    assert not run(f"open({str(victim)!r}, 'w').write('x')").ok
    assert not victim.exists()


@needs_namespaces
def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"
        result = run(code)
        assert not result.ok and "OSError" in result.stderr
        with pytest.raises(TimeoutError):
            server.accept()


def test_cancelled_call_kills_its_program(children: Children) -> None:
    before = sandboxes()

    async def scenario() -> None:
        call = asyncio.create_task(run_python("import time; time.sleep(60)", limits=Limits(wall_seconds=60)))
        await asyncio.sleep(0.4)
        assert children()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    start = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - start < 2.0
    assert children() == []
    assert [path for path in sandboxes() if path not in before] == []


def test_many_at_once_leave_no_zombie(children: Children) -> None:
    async def scenario() -> list[ExecutionResult]:
        return list(await asyncio.gather(*(run_python(f"print({i})") for i in range(16))))

    assert [result.stdout for result in asyncio.run(scenario())] == [f"{i}\n" for i in range(16)]
    assert children() == []


def test_fifty_runs_leave_no_zombie(children: Children) -> None:
    async def scenario() -> None:
        for _ in range(50):
            assert (await run_python("")).ok

    asyncio.run(scenario())
    assert children() == []


def test_a_sandbox_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation()
    monkeypatch.setattr("inspect.getsource", lambda _: "def _launch(): raise OSError('no such wall')")
    with pytest.raises(RuntimeError, match="no such wall"):
        run("print(1)")


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("no code", None),
        ("```\nx\n```", None),
        ("```python\nx = 1\n", None),
        ("a\n```python\nx = 1\n```\nb\n```python\ny = '```'\n```\nend", "y = '```'\n"),
        ("```python\r\nx\r\n```\r\n", "x\r\n"),
        ("```python\n```", ""),
    ],
)
def test_extract_python(reply: str, code: str | None) -> None:
    assert extract_python(reply) == code
