"""Hostile programs: none escapes its isolation level or changes the machine."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
WALLED = LEVELS[:2]
FILTERED = LEVELS[:3]
OTHER_USER = LEVELS if os.getuid() == 0 else FILTERED
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
        WALLED if OTHER_USER == FILTERED else LEVELS,
        PATIENT,
        "hunter2",
    ),
    "memory of others": Hostile(
        "open('/proc/VICTIM/mem', 'r+b')\nprint(42)", WALLED if OTHER_USER == FILTERED else LEVELS, PATIENT
    ),
    "files of others": Hostile("print(open('FOLDER/secret').read())", WALLED, PATIENT, "hunter2"),
    "writing outside": Hostile("open('FOLDER/new', 'w').write('x')\nprint(42)", WALLED, PATIENT),
    "emptying a file": Hostile("import os\nos.truncate('FOLDER/secret', 0)\nprint(42)", WALLED, PATIENT),
    "socket": Hostile("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint(42)", FILTERED, PATIENT),
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
}


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
