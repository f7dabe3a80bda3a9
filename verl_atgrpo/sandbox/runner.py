"""Runs model-written Python programs in isolated child processes with limits (Linux only)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import importlib.util
import logging
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_atgrpo.sandbox.launcher import LEVELS, MARK, Request
from verl_atgrpo.sandbox.pool import POOL, free_core
from verl_atgrpo.sandbox.removal import remove_root

logger = logging.getLogger(__name__)
_SWEEP_SECONDS = 1.0
"""Time limit for stopping a run; killing a fork bomb takes a while on a busy machine."""
MOST_FILES = 1024
"""Most files and folders of a program: as many as its file system has at `namespaces`. At the other levels they are
counted now and then, so that a program has at most some thousands when it is stopped."""
_COUNT_SECONDS = 0.05
_RUNS = 3
"""Most runs of a program that is killed by others, usually by the system when memory runs out."""
_NEEDS = {"sympy": ("mpmath",)}
"""Package -> packages that it imports."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run: CPU seconds and address space (MiB) per process, `wall_seconds` for the whole run,
    `output_bytes` of standard output, after which the program is stopped, and of standard error, of which more is
    left out, `processes` including threads and children, `file_mb` (MiB) per file.

    With a `cgroup`, `memory_mb` is also the memory of all its processes together.
    """

    cpu_seconds: int = 2
    wall_seconds: float = 4.0
    memory_mb: int = 256
    output_bytes: int = 65536
    processes: int = 16
    file_mb: int = 1


@dataclass(frozen=True)
class ExecutionResult:
    """Output and exit of one program.

    `returncode` is its exit code, 128 + n after signal n, and None if it was stopped or its launcher was killed;
    `timed_out` covers the wall-clock and the CPU limit. Of long standard error the start and the end are kept.
    """

    stdout: str
    stderr: str
    returncode: int | None
    timed_out: bool
    output_truncated: bool

    @property
    def ok(self) -> bool:
        """Whether the program ended with exit code 0 within all limits."""
        return self.returncode == 0 and not self.timed_out and not self.output_truncated

    @property
    def printed(self) -> str:
        """Standard output as a prompt may show it: without addresses of memory, which differ between runs."""
        return without_addresses(self.stdout)


def without_addresses(text: str) -> str:
    """Returns a text without the addresses in which Python's representations of objects end."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", text)


@functools.cache
def isolation() -> str:
    """Returns the strongest of `LEVELS` that works on this machine, found by trial runs in the first call.

    Raises RuntimeError if no program can be run.
    """
    for level in LEVELS:
        error = trial(level)
        if error is None:
            raise RuntimeError("the sandbox cannot be set up: every trial run was killed")
        if not error:
            return level
    raise RuntimeError(f"the sandbox cannot be set up: {error}")


@functools.cache
def cgroup() -> str:
    """Returns the folder of the cgroup (v2) below which programs get cgroups of their own; "" if there is none.

    It is this process's or the one above, if trial runs can limit memory and tasks below it. In such a cgroup
    `memory_mb` and `processes` are limits of the whole program.
    """
    return next((folder for folder in _cgroups() if trial(isolation(), cgroup=folder) == ""), "")


def _cgroups(process: str = "/proc/self") -> list[str]:
    """Returns the folders of a process's cgroup and of the one above, as far as they pass on both controllers."""
    with open(f"{process}/cgroup") as listing:
        own = next((line[3:].strip() for line in listing if line.startswith("0::")), "")
    with open(f"{process}/mountinfo") as listing:
        mounts = [line.split() for line in listing if " - cgroup2 " in line]
    folders = []
    for *_, root, top in (mount[:5] for mount in mounts):
        relative = os.path.relpath(own, root) if own and "/.." not in own else ".."  # outside of what is visible here
        for path in () if relative.startswith("..") else (relative, os.path.dirname(relative)):
            folder = os.path.normpath(os.path.join(top, path))
            control = os.path.join(folder, "cgroup.subtree_control")
            if os.access(folder, os.W_OK) and os.path.exists(control):
                with open(control) as file:
                    if {"memory", "pids"} <= set(file.read().split()):
                        folders.append(folder)
    return list(dict.fromkeys(folders))


def trial(
    level: str,
    code: str = "",
    limits: Limits = Limits(wall_seconds=20),
    libraries: tuple[str, ...] = (),
    cgroup: str = "",
) -> str | None:
    """Returns the error of a program at `level`: "" if it ran, None if it was killed every time.

    Killed trials are repeated: they say nothing about the level, and results are cached.
    """
    trials = (_trial(level, code, limits, libraries, cgroup) for _ in range(_RUNS))
    return next((error for error in trials if error is not None), None)


def _trial(level: str, code: str, limits: Limits, libraries: tuple[str, ...], cgroup: str) -> str | None:
    ours, theirs = socket.socketpair()
    root = _make_root(code, libraries)
    try:
        with ours, tempfile.TemporaryFile() as streams:
            with theirs:
                request = _request(level, root, limits, libraries, cgroup)
                POOL.start(request, (*[streams.fileno()] * 3, theirs.fileno()))
            report = b"".join(iter(functools.partial(ours.recv, 16), b""))
            streams.seek(0)
            errors = streams.read().decode("utf-8", "replace").strip()
            started, report = report.startswith(MARK), report.removeprefix(MARK)
            if started and report == b"0":
                return ""
            killed = report == str(128 + signal.SIGKILL).encode() or not (report or errors)
            return None if killed else errors[-500:] or f"the trial run ended with {report!r}"
    finally:
        remove_root(root, level)


@functools.cache
def importable(library: str, limits: Limits) -> str:
    """Returns the reason why programs cannot import a package under `limits`, from a trial run; "" if they can."""
    if not library_folders((library,)):
        return "it is not installed"
    error = trial(isolation(), f"import {library}", limits, (library,))
    return "every trial run was killed" if error is None else error.rpartition("\n")[2]


@functools.cache
def library_folders(libraries: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the folders of installed packages, of their dependencies, and of their shared objects."""
    folders: dict[str, None] = {}
    for name in dict.fromkeys(need for library in libraries for need in (library, *_NEEDS.get(library, ()))):
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        for folder in (spec and spec.submodule_search_locations) or ():
            folders |= dict.fromkeys(path for path in (folder, f"{folder}.libs") if os.path.isdir(path))
    return tuple(os.path.abspath(folder) for folder in folders)


async def run_python(
    code: str, *, stdin: str = "", limits: Limits = Limits(), libraries: tuple[str, ...] = ()
) -> ExecutionResult:
    """Runs `code` as a program with `stdin` as its input; removes all its processes and files.

    The program has the standard library and those packages of `libraries` that are `importable`.

    As many programs run at the same time as there are cores for this user's processes, all together; `wall_seconds`
    starts when a run starts. A program that is killed, by itself or because the machine is out of memory, is run
    again, at most twice, and not after half of `wall_seconds`: all runs of a program take 1.5 x `wall_seconds` at
    most.

    Raises RuntimeError if the sandbox cannot be set up; anything the program does is a result.
    """
    level = await asyncio.to_thread(isolation)
    roots: list[str] = []
    try:
        async with free_core():
            clock = asyncio.get_running_loop().time
            began = clock()
            result = await run_once(level, code, stdin, limits, libraries, roots)
            for _ in range(_RUNS - 1):
                late = clock() - began > limits.wall_seconds / 2
                if result is not None and (late or not _killed(result)):
                    break
                POOL.counts["reruns"] += 1
                result = await run_once(level, code, stdin, limits, libraries, roots)
    finally:  # other programs have the core meanwhile
        await _removed(roots, level)
    if result is None:
        raise RuntimeError("the sandbox could not be set up: its launcher was killed every time")
    return result


async def run_once(
    level: str,
    code: str,
    stdin: str,
    limits: Limits,
    libraries: tuple[str, ...],
    roots: list[str] | None = None,
) -> ExecutionResult | None:
    """Runs a program once, without retries; returns None if its launcher was killed.

    Its folder is added to `roots`, for the caller to remove; without them, it is removed.
    """
    group = await asyncio.to_thread(cgroup)
    root = _make_root(code, libraries)
    if roots is not None:
        roots.append(root)
    try:
        return await _run(_request(level, root, limits, libraries, group), stdin, limits)
    finally:
        if roots is None:
            await _removed([root], level)


async def _removed(roots: Sequence[str], level: str) -> None:
    # Shielded: a cancelled call that waits for a thread would never begin.
    await asyncio.shield(asyncio.gather(*(asyncio.to_thread(remove_root, root, level) for root in roots)))


def _killed(result: ExecutionResult) -> bool:
    """Returns whether the program or its launcher was killed, other than by the sandbox."""
    stopped = result.timed_out or result.output_truncated
    return not stopped and result.returncode in (None, 128 + signal.SIGKILL)


def _request(level: str, root: str, limits: Limits, libraries: tuple[str, ...], cgroup: str) -> Request:
    seconds = limits.wall_seconds + _SWEEP_SECONDS
    bounds = limits.cpu_seconds, limits.memory_mb, limits.processes, limits.file_mb
    return Request(level, root, seconds, *bounds, library_folders(libraries), cgroup)


def _make_root(code: str, libraries: tuple[str, ...]) -> str:
    root = tempfile.mkdtemp(prefix="sandbox-")
    os.mkdir(os.path.join(root, "work"))
    os.mkdir(os.path.join(root, "inside"))
    if libraries:
        os.mkdir(os.path.join(root, "libraries"))
    for folder in library_folders(libraries):
        os.symlink(folder, os.path.join(root, "libraries", os.path.basename(folder)))
    with open(os.path.join(root, "main.py"), "w", encoding="utf-8", errors="replace", newline="") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(code)
    return root


def _sealed(data: bytes) -> int:
    """Returns a file descriptor of a file in memory with this content, which nobody can change or enlarge."""
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(file), "wb") as writer:
        writer.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


class _Stream:
    """Reads a pipe or socket to its end; `kept` has at most one byte more than `limit`.

    With `overflow`, it is called at more than that; without, the first and the last half of the limit are kept.
    After a few reads it pauses between them: a program may write single bytes as packets, each of which costs a read.
    """

    _PROMPT_READS, _PAUSE = 32, 0.01

    def __init__(self, file: int, limit: int, overflow: Callable[[], object] | None) -> None:
        self.reads = 0
        self._start, self._end = bytearray(), bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._file, self._limit, self._overflow = file, limit, overflow
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(file, self._read)

    @property
    def kept(self) -> bytes:
        return bytes(self._start + self._end)

    @property
    def full(self) -> bool:
        return len(self._start) > self._limit

    def _read(self) -> None:
        chunk = os.read(self._file, 1 << 16)
        self.reads += 1
        most = self._limit // 2 if self._overflow is None else self._limit + 1
        room = most - len(self._start)
        self._start += chunk[:room]
        if self._overflow is None:
            self._end += chunk[room:]
            del self._end[: -(self._limit - most) or None]
        elif self.full:
            self._overflow()
        if not chunk:
            self._loop.remove_reader(self._file)
            self.ended.set_result(None)
        elif self.reads > self._PROMPT_READS:
            self._loop.remove_reader(self._file)
            self._timer = self._loop.call_later(self._PAUSE, self._loop.add_reader, self._file, self._read)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._file)


async def _count_files(request: Request, stop: Callable[[], None]) -> None:
    """Stops a program with more than MOST_FILES; at `namespaces` the kernel counts."""
    if not request.level.endswith("namespaces"):
        while not overfull(os.path.join(request.root, "work")):
            await asyncio.sleep(_COUNT_SECONDS)
        stop()


def overfull(top: str) -> bool:
    """Returns whether there are more than MOST_FILES files and folders in a folder, or some that cannot be counted."""
    count, folders = 0, [top]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > MOST_FILES:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:  # just removed
            continue
        except OSError:  # locked, or deeper than a path is long
            return True
    return False


async def _run(request: Request, stdin: str, limits: Limits) -> ExecutionResult | None:
    """Returns the result of the program, or None if its launcher was killed."""
    with contextlib.ExitStack() as ours:
        with contextlib.ExitStack() as given:
            control, reported = socket.socketpair()
            ours.enter_context(control)
            given.enter_context(reported)

            def pipe() -> tuple[int, int]:
                readable, writable = os.pipe()
                ours.callback(os.close, readable)
                given.callback(os.close, writable)
                return readable, writable

            (out_end, stdout), (err_end, stderr) = pipe(), pipe()
            text = _sealed(stdin.encode("utf-8", "replace"))
            given.callback(os.close, text)
            POOL.start(request, (text, stdout, stderr, reported.fileno()))

        def stop() -> None:
            control.shutdown(socket.SHUT_WR)  # the launcher kills all of the program's processes and exits

        ends = (out_end, limits.output_bytes, stop), (err_end, limits.output_bytes, None), (control.fileno(), 32, stop)
        streams = [ours.enter_context(contextlib.closing(_Stream(*end))) for end in ends]
        running = [stream.ended for stream in streams]
        counter = asyncio.create_task(_count_files(request, stop))
        try:
            await asyncio.wait(running, timeout=limits.wall_seconds)
        finally:
            counter.cancel()
            stop()
            await asyncio.wait(running, timeout=_SWEEP_SECONDS)
    out, err, report = (stream.kept for stream in streams)
    started, report = report.startswith(MARK), report.removeprefix(MARK)
    if not (started or err) and report in (b"", b"%d" % (128 + signal.SIGKILL)) and running[-1].done():
        return None
    if not started and (err or report.isdigit()):
        raise RuntimeError(f"the sandbox could not be set up: {err.decode('utf-8', 'replace')[-500:]}")
    truncated = any(stream.full for stream in streams)
    code = int(report) if report.isdigit() else None
    stopped = report == b"stopped" or not running[-1].done()
    return ExecutionResult(
        stdout=out[: limits.output_bytes].decode("utf-8", "replace"),
        stderr=err[: limits.output_bytes].decode("utf-8", "replace").replace(f"{request.root}/", ""),
        returncode=None if truncated else code,
        timed_out=(stopped and not truncated) or code == 128 + signal.SIGXCPU,
        output_truncated=truncated,
    )
