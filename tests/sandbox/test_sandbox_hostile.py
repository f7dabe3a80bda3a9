"""Hostile programs: none escapes its isolation level or changes the machine."""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Leftovers
from waiting import HANG

from verl_atgrpo.environments.code.programs import Exchange, Problem, judge
from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.launcher import LEVELS
from verl_atgrpo.sandbox.pool import Pool
from verl_atgrpo.sandbox.runner import Limits

LIMITS = Limits(cpu_seconds=1, wall_seconds=0.5)
PATIENT = Limits(cpu_seconds=20, wall_seconds=HANG)
"""For programs that end by themselves, or by what they do: on a busy machine they must get to their deed."""
WALLED = tuple(level for level in LEVELS if "namespaces" in level or "landlock" in level)
SIGNAL_PROOF = tuple(level for level in LEVELS if level != "rlimits")
FILTERED = tuple(level for level in LEVELS if level not in ("bare namespaces", "rlimits"))
OTHER_USER = LEVELS if os.getuid() == 0 else SIGNAL_PROOF
"""Levels where what a user may do to his own processes does not count: root's programs run as users of their own."""


class Hostile(NamedTuple):
    """A program, the levels at which it is contained, and what it prints only if it is not."""

    code: str
    levels: tuple[str, ...] = LEVELS
    limits: Limits = LIMITS
    prize: str = "42"


HOSTILE = {
    "fork bomb": Hostile("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"),
    "fleeing by forks": Hostile("import os\nwhile True:\n  if os.fork(): os._exit(0)"),
    "memory bomb": Hostile("x = []\nwhile True: x.append(bytearray(1 << 24))", limits=PATIENT),
    "endless output": Hostile("while True: print('x' * 4096)", limits=replace(PATIENT, output_bytes=10_000)),
    "endless loop": Hostile("while True: pass"),
    "sleeping with all signals ignored": Hostile(
        "import signal, time\nfor s in range(1, 32):\n  s in (9, 19) or signal.signal(s, 1)\nwhile True: time.sleep(9)"
    ),
    "background processes": Hostile(
        "import os, time\nfor _ in range(8):\n  if os.fork() == 0: os.setsid(); os.fork(); time.sleep(3600)",
        limits=PATIENT,
    ),
    "environment of others": Hostile(
        "import glob\nfor path in glob.glob('/proc/[0-9]*/environ'):\n"
        "  try: text = open(path).read()\n  except OSError: continue\n  if 'hunter2' in text: print('hunter2')",
        WALLED if OTHER_USER == SIGNAL_PROOF else LEVELS,
        PATIENT,
        "hunter2",
    ),
    "memory of others": Hostile(
        "open('/proc/VICTIM/mem', 'r+b')\nprint(42)", WALLED if OTHER_USER == SIGNAL_PROOF else LEVELS, PATIENT
    ),
    "files of others": Hostile("print(open('FOLDER/secret').read())", WALLED, PATIENT, "hunter2"),
    "writing outside": Hostile("open('FOLDER/new', 'w').write('x')\nprint(42)", WALLED, PATIENT),
    "emptying a file": Hostile("import os\nos.truncate('FOLDER/secret', 0)\nprint(42)", WALLED, PATIENT),
    "socket": Hostile(
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint(42)", SIGNAL_PROOF, PATIENT
    ),
    "killing others": Hostile(
        "import os\nfor pid in (os.getppid(), VICTIM, -1):\n  try: os.kill(pid, 9)\n"
        "  except OSError: continue\n  if pid == VICTIM: print(42)",
        OTHER_USER,
        PATIENT,
    ),
    "killing by a file's signal": Hostile(
        "import fcntl, os, socket\na, b = socket.socketpair()\nfcntl.fcntl(a, fcntl.F_SETOWN, VICTIM)\n"
        "fcntl.fcntl(a, 10, 9)\nfcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)\nb.send(b'x')",
        OTHER_USER,
        PATIENT,
    ),
    "changing others' limits": Hostile(
        "import resource\nresource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0))\nprint(42)", OTHER_USER, PATIENT
    ),
    "ignoring the CPU limit's signal": Hostile(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        limits=replace(PATIENT, cpu_seconds=1),
    ),
    "enlarging its input": Hostile(
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nsize = ctypes.c_long(3 << 30)\n"
        "if libc.fallocate(0, 1, ctypes.c_long(0), size) == 0 or libc.ftruncate(0, size) == 0: print(42)\n"
        "try: os.pwrite(0, b'x', 0)\nexcept OSError: pass\nelse: print(42)",
        limits=PATIENT,
    ),
    "folders in folders": Hostile(
        "import os\nfor _ in range(1800):\n  os.mkdir('d')\n  os.chdir('d')", limits=PATIENT
    ),
    "long paths": Hostile(
        "import os\nfor _ in range(20):\n  os.mkdir('d' * 250)\n  os.chdir('d' * 250)\n  open('f' * 250, 'w')",
        limits=PATIENT,
    ),
    "locked folders": Hostile(
        "import os\nos.makedirs('a/b/c')\nfor path in 'a/b/c', 'a/b', 'a', '.': os.chmod(path, 0)", limits=PATIENT
    ),
    "reading its own standard error": Hostile(
        "import os\nprint('x', file=__import__('sys').stderr, flush=True)\n"
        "os.read(os.open('/proc/self/fd/2', os.O_RDONLY | os.O_NONBLOCK), 99)",
        limits=PATIENT,
    ),
    "a virtual machine's sockets": Hostile("import socket\nsocket.socket(40)\nprint(42)", FILTERED, PATIENT),
    "shared memory of System V": Hostile(
        "import ctypes\nif ctypes.CDLL(None).shmget(0x41544752, 1 << 20, 0o1600) >= 0: print(42)", FILTERED, PATIENT
    ),
    "namespaces of its own": Hostile(
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print(42)", FILTERED, PATIENT
    ),
}
CALLS = {"keyctl": 250, "add_key": 248, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425}
"""Numbers of system calls on x86-64; without a filter these calls give EFAULT or the like, not EPERM."""
if platform.machine() == "x86_64":
    HOSTILE |= {
        f"{name}'s system call": Hostile(
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            f"if libc.syscall({number}, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 1: print(42)",
            FILTERED,
            PATIENT,
        )
        for name, number in CALLS.items()
    }
    HOSTILE["system calls of 32 bits"] = Hostile(
        "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))  # getpid\n"
        "call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\n"
        "if call() > 0: print(42)",
        FILTERED,
        PATIENT,
    )


@pytest.fixture(scope="module")
def low_pool() -> Iterator[Pool]:
    """A pool whose interpreter is accessible to all users: root's programs run as unprivileged users."""
    pool = Pool()
    yield pool
    pool.close()


@functools.cache
def trial(level: str) -> str:
    return runner.trial(level)


@pytest.fixture
def level(request: pytest.FixtureRequest, low_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces an isolation level; skips if the machine does not support it."""
    forced = str(request.param)
    if forced != "namespaces":
        system = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
        monkeypatch.setattr(sys, "executable", system or sys.executable)
        monkeypatch.setattr(runner, "POOL", low_pool)
    if error := trial(forced):
        pytest.skip(f"this machine does not give {forced}: {error[-200:]}")
    monkeypatch.setattr(runner, "isolation", lambda: forced)
    return forced


class Victim(NamedTuple):
    """Targets of hostile programs: a process with a secret, a world-writable folder, and a server."""

    process: subprocess.Popen[bytes]
    folder: Path
    server: socket.socket

    def unharmed(self) -> bool:
        """Returns whether all targets are unchanged."""
        self.server.settimeout(0.01)
        try:
            self.server.accept()
        except TimeoutError:
            files = {path.name: path.read_text() for path in self.folder.iterdir()}
            return self.process.poll() is None and files == {"secret": "hunter2"}
        return False


@pytest.fixture
def victim() -> Iterator[Victim]:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    (folder / "secret").write_text("hunter2")
    (folder / "secret").chmod(0o666)
    with subprocess.Popen(["sleep", "infinity"], env={"SECRET": "hunter2"}) as process:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Victim(process, folder, server)
        process.kill()
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("level", "name"), [(level, name) for name, case in HOSTILE.items() for level in case.levels], indirect=["level"]
)
def test_contained(level: str, name: str, victim: Victim, leftovers: Leftovers) -> None:
    case = HOSTILE[name]
    code = case.code.replace("VICTIM", str(victim.process.pid)).replace("FOLDER", str(victim.folder))
    code = code.replace("PORT", str(victim.server.getsockname()[1]))
    test = Exchange("", f"{case.prize}\n")
    verdict = asyncio.run(judge(Problem("", (test,)), code, [test], case.limits))
    assert verdict.built and verdict.fraction == 0
    assert victim.unharmed()
    assert leftovers() == []


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_ordinary_programs_have_the_same_results_at_every_level(level: str) -> None:
    code = """
import os, random, socket, subprocess, sys, tempfile, threading
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("x")
os.mkdir("d"); os.rename("d", "e"); open(os.devnull, "w").write("x")
a, b = socket.socketpair(); a.send(b"pair"); print(b.recv(9))
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout, input())
sys.stdout.flush()
os.abort()
"""
    result = asyncio.run(runner.run_python(code, stdin="given"))
    assert result.stdout == "b'pair'\nthread\nchild\n given\n"
    assert result.returncode == 128 + 6


def test_output_in_packets_of_a_byte_costs_few_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[Any] = []

    class Counted(runner._Stream):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            streams.append(self)

    monkeypatch.setattr(runner, "_Stream", Counted)
    code = "import fcntl, os\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT | os.O_WRONLY)\nwhile True: os.write(1, b'x')"
    result = asyncio.run(runner.run_python(code, limits=LIMITS))
    output = streams[0]
    assert result.timed_out
    assert len(result.stdout) == output.reads - 1, "every read but the last got one byte"
    assert output.reads < 400
