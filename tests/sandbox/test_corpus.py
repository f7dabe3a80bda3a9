"""The corpus of hostile programs: each reaches its aim exactly where the table of docs/sandbox.md says so."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import itertools
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import hostile
import pytest
from hostile import Program
from processes import WAITING, WAKING, children, running, waiting_below
from waiting import HANG, until, wait_until

from verl_atgrpo.sandbox import pool as pool_module
from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.launcher import FIRST_USER, LEVELS
from verl_atgrpo.sandbox.pool import Pool
from verl_atgrpo.sandbox.removal import SHARED_FOLDERS
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits

OTHER = 1_800_000_000 + os.getpid()
"""The user who is not root, and his group; not the one of tests beside these, with whom he would share limits."""
SECRET = "hunter2"
AT_ONCE = 4
PLACES = [(level, user) for level in LEVELS for user in hostile.seen_users()]
RUNS = 300
NEIGHBOUR = f"import time\nfor name in 'secret', 'other': open(name, 'w').write('{SECRET}')\ntime.sleep(3600)"


class Arena:
    """An isolation level and a user of the job, with targets for hostile programs: processes, files, sockets, keys."""

    def __init__(self, level: str, user: str, patch: pytest.MonkeyPatch, held: contextlib.ExitStack) -> None:
        self.level, self.user = level, user
        self.owner = OTHER if user == "user" and os.getuid() == 0 else os.getuid()
        self.folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="arena-")))
        self.folder.chmod(0o711)
        self.mine = {} if self.owner == os.getuid() else {"user": OTHER, "group": OTHER, "extra_groups": ()}
        # Where it is ignored, as after nohup, the pool's interpreter would have no handler of its own.
        held.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        # All users' programs must have access to the interpreter.
        python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
        patch.setattr(sys, "executable", python or sys.executable)
        self.pool = Pool()
        held.callback(self.pool.close)
        patch.setattr(runner, "POOL", self.pool)
        patch.setattr(runner, "isolation", lambda: level)
        patch.setattr(tempfile, "tempdir", str(self.folder))
        make_root = runner._make_root
        patch.setattr(runner, "_make_root", lambda *arguments: self.given(make_root(*arguments)))
        popen = functools.partial(subprocess.Popen, **self.mine)
        patch.setattr(pool_module, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
        with victim_key():
            if error := runner.trial(level):
                pytest.skip(f"this machine does not give {level}: {error[-200:]}")
        self.server = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))
        self.port = self.server.getsockname()[1]
        for kind, name in ((socket.SOCK_STREAM, ""), (socket.SOCK_DGRAM, "-d")):
            abstract = held.enter_context(socket.socket(socket.AF_UNIX, kind))
            abstract.bind(f"\0atgrpo-{self.port}{name}")
            if kind == socket.SOCK_STREAM:
                abstract.listen(100)
        udp = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", self.port))

    def given(self, root: str) -> str:
        """Gives a folder and what is in it to the user of the job."""
        for path in (root, *(os.path.join(root, name) for name in os.listdir(root))):
            os.chown(path, self.owner, self.owner if self.mine else -1)
        return root

    async def worked(self, programs: list[Program]) -> list[str]:
        """Runs the programs beside another one; returns those that reached their aim."""
        free = asyncio.Semaphore(AT_ONCE)
        beside = asyncio.create_task(runner.run_once(self.level, NEIGHBOUR, "", Limits(wall_seconds=HANG), ()))
        await until(lambda: list(self.folder.glob("sandbox-*")), every=0.002)
        (neighbour,) = self.folder.glob("sandbox-*")
        if "namespaces" not in self.level:
            await until((neighbour / "work" / "other").exists, every=0.002)

        async def one(program: Program) -> bool:
            async with free:
                with Targets(self, program, neighbour) as targets:
                    return await targets.reached()

        together = [program for program in programs if not program.alone]
        done = dict(zip(together, await asyncio.gather(*map(one, together)), strict=True))
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        for program in programs:
            if program.alone:
                done[program] = await one(program)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.pool.close()
        return [program.tries for program in programs if done[program]]

    def left(self) -> list[str]:
        """Returns what is left of all programs, once what is ending has ended."""
        seen: list[str] = []

        def nothing() -> bool:
            seen[:] = self._left()
            return not seen

        with contextlib.suppress(AssertionError):
            wait_until(nothing)
        return seen

    def _left(self) -> list[str]:
        server = self.pool.server
        processes = children(server.pid) if server is not None else []
        return [*map(str, processes), *os.listdir(self.folder), *self._files(), *self._ipc_objects()]

    def _files(self) -> list[str]:
        """Returns the files of unprivileged users that only programs of these tests have."""
        found = []
        for folder in SHARED_FOLDERS:
            for entry in os.scandir(folder):
                with contextlib.suppress(FileNotFoundError):
                    if self._owns(entry.stat(follow_symlinks=False).st_uid):
                        found.append(entry.path)
        return found

    def _ipc_objects(self) -> list[str]:
        return [line for line in ipc_objects() if self._owns(int(line.split()[3]))]

    def _owns(self, user: int) -> bool:
        """Returns whether programs of this arena run as `user`; those of root have what tests beside these have."""
        return user == self.owner if self.mine else user >= FIRST_USER


class Targets:
    """The targets of one program, removed with what it left."""

    def __init__(self, arena: Arena, program: Program, neighbour: Path) -> None:
        self.arena, self.program = arena, program
        self.token, self.key = f"left-{uuid4().hex}", random.randrange(1 << 20, 1 << 30)
        self.code = program.code
        self.folders: list[Path] = []
        self.victim: subprocess.Popen[bytes] | None = None
        for name, mode in (("FOLDER", 0o700), ("PUBLIC", 0o777)):
            if name in self.code:
                folder = Path(tempfile.mkdtemp(prefix="target-"))
                (folder / "secret").write_text(SECRET)
                (folder / "secret").chmod(mode & 0o666)
                folder.chmod(mode)
                arena.given(str(folder))
                self.folders.append(folder)
                self.code = self.code.replace(name, str(folder))
        if "VICTIM" in self.code:
            command = ["sleep", "infinity"]
            self.victim = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={"SECRET": SECRET}, **arena.mine)
            self.code = self.code.replace("VICTIM", str(self.victim.pid))
        self.code = self._filled(self.code).replace("NEIGHBOUR", str(neighbour))

    def _filled(self, code: str) -> str:
        return code.replace("PORT", str(self.arena.port)).replace("TOKEN", self.token).replace("KEY", str(self.key))

    def __enter__(self) -> Targets:
        return self

    async def reached(self) -> bool:
        """Returns whether the program reached its aim: by its own word, by what it left, or by harm."""
        result = await self._run(self.code)
        reached = result is not None and ("worked" in result.stdout.split() or self._unexpected(result))
        if self.program.then:
            after = await self._run(self._filled(self.program.then))
            reached |= after is not None and "worked" in after.stdout.split()
        return reached or self._harmed() or bool(self._left())

    async def _run(self, code: str) -> ExecutionResult | None:
        # Below `namespaces` the limit counts all processes of the user of the job, victims and fork bombs included.
        limits = Limits(**{"cpu_seconds": 20, "wall_seconds": HANG, "processes": 200, **self.program.limits})
        return await runner.run_once(self.arena.level, code, SECRET, limits, ())

    def _unexpected(self, result: ExecutionResult) -> bool:
        return any(getattr(result, name) != value for name, value in self.program.expect.items())

    def _harmed(self) -> bool:
        killed = False
        if self.victim is not None:
            self.victim.terminate()  # a signal on its way to it comes first
            killed = self.victim.wait() != -signal.SIGTERM
        named = all(os.listdir(folder) == ["secret"] for folder in self.folders)
        return killed or not named or any((folder / "secret").read_text() != SECRET for folder in self.folders)

    def _left(self) -> list[str]:
        """Returns files, IPC objects and processes with the names that this program was given."""
        if "TOKEN" in self.program.code:
            files = [f"{folder}/{name}" for folder in SHARED_FOLDERS for name in os.listdir(folder)]
            return [*(path for path in files if self.token in path), *map(str, running(self.token))]
        return (
            [line for line in ipc_objects() if int(line.split()[1]) == self.key] if "KEY" in self.program.code else []
        )

    def __exit__(self, *_: object) -> None:
        if self.victim is not None:
            self.victim.kill()
            self.victim.wait()
        for folder in self.folders:
            shutil.rmtree(folder)
        for left in self._left():
            if left.isdecimal():
                os.kill(int(left), signal.SIGKILL)
            elif left[0] != "/":
                remove_ipc(left)
            elif os.path.isdir(left) and not os.path.islink(left):
                shutil.rmtree(left)
            else:
                os.unlink(left)


def ipc_objects() -> list[str]:
    """Returns kind, key, id and creator of all IPC objects of System V."""
    found = []
    for kind in ("shm", "sem", "msg"):
        head, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
        found += [f"{kind} {row[0]} {row[1]} {row[head.index('cuid')]}" for row in rows]
    return found


def remove_ipc(listed: str) -> None:
    kind, _, number, _ = listed.split()
    libc = ctypes.CDLL(None)
    {"shm": libc.shmctl, "sem": libc.semctl, "msg": libc.msgctl}[kind](int(number), 0, None)


def keys_of_programs() -> list[str]:
    """Returns the lines of the users of root's programs: each has keys, or processes that are ending."""
    lines = Path("/proc/key-users").read_text().splitlines()
    return [line for line in lines if int(line.split(":")[0]) >= FIRST_USER]


@contextlib.contextmanager
def victim_key() -> Iterator[None]:
    """Puts a key into the session keyring of this process while a pool's interpreter starts."""
    libc, possible = ctypes.CDLL(None), platform.machine() == "x86_64"
    key = libc.syscall(248, b"user", b"atgrpo-victim", b"x", 1, -3) if possible else -1
    yield
    if key > 0:
        libc.syscall(250, 9, key, -3)  # KEYCTL_UNLINK


@pytest.fixture
def arena(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    with contextlib.ExitStack() as held:
        yield Arena(*request.param, monkeypatch, held)


everywhere = pytest.mark.parametrize("arena", PLACES, indirect=True, ids="-".join)


@pytest.mark.slow
@everywhere
def test_programs_reach_their_aims_only_where_the_table_says(arena: Arena) -> None:
    programs = [program for program in hostile.programs() if program.can_run and not program.slow]
    should = {program.tries for program in programs if program.works_at(arena.level, arena.user)}
    worked = set(asyncio.run(arena.worked(programs)))
    assert sorted(worked - should) == [], "programs reached their aims: fix it, or declare it"
    assert sorted(should - worked) == [], "programs no longer reach their aims: the table may promise more"
    assert arena.left() == []


@pytest.mark.slow
def test_hundreds_of_contained_programs_leave_nothing() -> None:
    files, processes = len(os.listdir("/proc/self/fd")), children(os.getpid())
    for level, user in PLACES:
        held = [one for one in hostile.programs() if one.can_run and not one.alone and not one.works_at(level, user)]
        held.sort(key=lambda one: not one.slow)  # the others have run where the table is tested
        runs = list(itertools.islice(itertools.cycle(held), RUNS // len(PLACES)))
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as held_open:
            arena = Arena(level, user, patch, held_open)
            assert asyncio.run(arena.worked(runs)) == []
            assert arena.left() == []
    assert len(os.listdir("/proc/self/fd")) == files
    assert children(os.getpid()) == processes
    wait_until(lambda: not keys_of_programs())


@everywhere
def test_ordinary_programs_have_the_same_results_everywhere(arena: Arena) -> None:
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
    assert result.returncode == 128 + signal.SIGABRT


@pytest.mark.parametrize("arena", [("landlock+seccomp", hostile.seen_users()[0])], indirect=True)
def test_orphans_live_as_long_as_their_program(arena: Arena) -> None:
    code = f"""
import os
readable, writable = os.pipe()
if os.fork() == 0:
    if os.fork():
        os._exit(0)
    {WAITING.strip().replace(chr(10), chr(10) + "    ")}
os.wait()
os.close(writable)
os.read(readable, 1)
"""

    async def scenario() -> ExecutionResult:
        call = asyncio.create_task(runner.run_python(code))
        await until(lambda: arena.pool.server and waiting_below(arena.pool.server.pid), every=0.002)
        assert (await runner.run_python("print(1)")).ok
        assert arena.pool.server is not None
        for orphan in waiting_below(arena.pool.server.pid):
            os.kill(orphan, WAKING)
        return await call

    assert asyncio.run(scenario()).stdout == "done\n"


def test_an_entry_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "row.yaml"
    for text, message in (
        ("can: x\nprograms: []", r"row.yaml: keys are \['can', 'programs'\]; .*'cost'"),
        ("can: x\ncost: x\nprograms: [{tries: y, code: z, levels: 1}]", "row.yaml: y: keys are .*levels"),
        ("can: x\ncost: x\nprograms: [{tries: y, code: z, works: {user: [none]}}]", "row.yaml: y: works=.*none"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            hostile.read(path)
