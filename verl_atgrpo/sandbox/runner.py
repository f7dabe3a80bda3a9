"""Run one model-written Python program in a short-lived, limited child process (Linux only)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from verl_atgrpo.sandbox.launcher import LEVELS, MARK, Request
from verl_atgrpo.sandbox.pool import POOL

_SWEEP_SECONDS = 1.0
"""How long a run that was stopped is waited for: ending a fork bomb takes a while on a busy machine."""
_RUNS = 3
"""How often a program is run that somebody else kills: the system when memory runs out, as a rule."""
_NEEDS = {"sympy": ("mpmath",)}
"""Package -> others that it cannot be imported without."""
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Limits:
    """Bounds on one run: CPU seconds and address space (MiB) per process, `wall_seconds` for the whole run,
    `output_bytes` per stream, `processes` with threads and children, `file_mb` (MiB) per file.
    """

    cpu_seconds: int = 2
    wall_seconds: float = 4.0
    memory_mb: int = 256
    output_bytes: int = 65536
    processes: int = 16
    file_mb: int = 1


@dataclass(frozen=True)
class ExecutionResult:
    """What one program printed and how it ended: `returncode` is its exit code, 128 + n after signal n, None
    where we stopped it, or somebody what runs it; `timed_out` covers the wall and the CPU limit.
    """

    stdout: str
    stderr: str
    returncode: int | None
    timed_out: bool
    output_truncated: bool

    @property
    def ok(self) -> bool:
        """True if the program ran to its end with exit code 0 inside all limits."""
        return self.returncode == 0 and not self.timed_out and not self.output_truncated


@functools.cache
def isolation() -> str:
    """Returns what separates programs from this machine, found by trial runs in the first call: one of `LEVELS`.

    Raises RuntimeError if no program can be run here at all.
    """
    for level in LEVELS:
        # A trial that somebody killed says nothing of the level: to go on with a lesser one would be for good.
        for _ in range(_RUNS):
            error = _trial(level)
            if error is not None:
                break
        else:
            raise RuntimeError("the sandbox cannot be set up: what tries it is killed each time")
        if not error:
            return level
    raise RuntimeError(f"the sandbox cannot be set up: {error}")


def _trial(
    level: str, code: str = "", limits: Limits = Limits(wall_seconds=20), libraries: tuple[str, ...] = ()
) -> str | None:
    """Returns what keeps a program from running at `level`: an empty text if nothing does, None if it was killed."""
    ours, theirs = socket.socketpair()
    root = _make_root(code, libraries)
    try:
        with ours, tempfile.TemporaryFile() as streams:
            with theirs:
                request = _request(level, root, limits, libraries)
                POOL.start(request, (*[streams.fileno()] * 3, theirs.fileno()))
            told = ours.recv(16)
            streams.seek(0)
            errors = streams.read().decode("utf-8", "replace").strip()
            if told == b"0":
                return ""
            killed = told == str(128 + signal.SIGKILL).encode() or not (told or errors)
            return None if killed else errors[-500:] or f"the trial run ended with {told!r}"
    finally:
        _remove(root)


@functools.cache
def importable(library: str, limits: Limits) -> str:
    """Returns why programs cannot import a package under `limits`, found by a trial run; "" if they can."""
    if not library_folders((library,)):
        return "it is not installed"
    found = None
    for _ in range(_RUNS):
        if (found := _trial(isolation(), f"import {library}", limits, (library,))) is not None:
            break
    return "the trial is killed each time" if found is None else found.strip("\0\n").rpartition("\n")[2]


@functools.cache
def library_folders(libraries: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the folders of those packages that are installed, of what they need, and of their shared objects."""
    folders: dict[str, None] = {}
    for name in dict.fromkeys(need for library in libraries for need in (library, *_NEEDS.get(library, ()))):
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        for folder in (spec and spec.submodule_search_locations) or ():
            folders |= dict.fromkeys(path for path in (folder, f"{folder}.libs") if os.path.isdir(path))
    return tuple(os.path.abspath(folder) for folder in folders)


async def run_python(
    code: str, *, stdin: str = "", limits: Limits = Limits(), libraries: tuple[str, ...] = ()
) -> ExecutionResult:
    """Runs `code` as a program of its own with `stdin` as its input, and leaves no process or file behind.

    The program has the standard library, and of those `libraries`, by names of packages, what `importable` says.

    At most `os.cpu_count()` runs go on at once per event loop; `wall_seconds` starts when a run starts. A program that
    is killed, by itself or because the machine was out of memory, is run again, twice at most.
    Raises RuntimeError if the sandbox could not be set up; whatever the program does is a result.
    """
    level = await asyncio.to_thread(isolation)
    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1)):
        result = await _run_anew(level, code, stdin, limits, libraries)
        for _ in range(_RUNS - 1):
            if result is not None and not _killed(result):
                break
            POOL.counts["reruns"] += 1
            result = await _run_anew(level, code, stdin, limits, libraries)
    if result is None:
        raise RuntimeError("the sandbox could not be set up: what starts the programs is killed each time")
    return result


async def _run_anew(
    level: str, code: str, stdin: str, limits: Limits, libraries: tuple[str, ...]
) -> ExecutionResult | None:
    root = _make_root(code, libraries)
    try:
        return await _run(_request(level, root, limits, libraries), stdin, limits)
    finally:
        await asyncio.to_thread(_remove, root)


def _killed(result: ExecutionResult) -> bool:
    """Returns whether the program, or the launcher that watched it, was killed, and not by us."""
    stopped = result.timed_out or result.output_truncated
    return not stopped and result.returncode in (None, 128 + signal.SIGKILL)


def _request(level: str, root: str, limits: Limits, libraries: tuple[str, ...]) -> Request:
    seconds = limits.wall_seconds + _SWEEP_SECONDS
    bounds = limits.cpu_seconds, limits.memory_mb, limits.processes, limits.file_mb
    return Request(level, root, seconds, *bounds, library_folders(libraries))


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


def _remove(root: str) -> None:
    for path, folders, _ in os.walk(root):
        for folder in (os.path.join(path, name) for name in folders):
            if not os.path.islink(folder):
                os.chmod(folder, 0o700)  # a program may have locked its own folders
    shutil.rmtree(root, ignore_errors=True)


class _Stream:
    """What comes out of a pipe or socket: all of it is read, and `kept` up to one byte more than `limit`."""

    def __init__(self, file: int, limit: int, overflow: Callable[[], object]) -> None:
        self.kept = bytearray()
        self._file, self._limit, self._overflow = file, limit, overflow
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(file, self._read)

    @property
    def full(self) -> bool:
        return len(self.kept) > self._limit

    def _read(self) -> None:
        chunk = os.read(self._file, 1 << 16)
        self.kept += chunk[: self._limit + 1 - len(self.kept)]
        if self.full:
            self._overflow()
        if not chunk:
            self._loop.remove_reader(self._file)
            self.ended.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._file)


async def _run(request: Request, stdin: str, limits: Limits) -> ExecutionResult | None:
    """Returns how the program did, or None if what was to start it was killed."""
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
            text = given.enter_context(tempfile.TemporaryFile())  # nameless: a closed stdin cannot be read again
            text.write(stdin.encode("utf-8", "replace"))
            text.seek(0)
            POOL.start(request, (text.fileno(), stdout, stderr, reported.fileno()))

        def stop() -> None:
            control.shutdown(socket.SHUT_WR)  # the launcher ends the program, what is left of it, and itself

        ends = (out_end, limits.output_bytes), (err_end, limits.output_bytes + len(MARK)), (control.fileno(), 16)
        streams = [ours.enter_context(contextlib.closing(_Stream(file, limit, stop))) for file, limit in ends]
        running = [stream.ended for stream in streams]
        try:
            await asyncio.wait(running, timeout=limits.wall_seconds)
        finally:
            stop()
            await asyncio.wait(running, timeout=_SWEEP_SECONDS)
    out, err, told = (bytes(stream.kept) for stream in streams)
    if told in (b"", b"%d" % (128 + signal.SIGKILL)) and not err and running[-1].done():
        return None
    if not err.startswith(MARK) and (err or told.isdigit()):
        raise RuntimeError(f"the sandbox could not be set up: {err.decode('utf-8', 'replace')[-500:]}")
    truncated = any(stream.full for stream in streams)
    code = int(told) if told.isdigit() else None
    stopped = told == b"stopped" or not running[-1].done()
    return ExecutionResult(
        stdout=out[: limits.output_bytes].decode("utf-8", "replace"),
        stderr=err[len(MARK) :][: limits.output_bytes].decode("utf-8", "replace").replace(f"{request.root}/", ""),
        returncode=None if truncated else code,
        timed_out=(stopped and not truncated) or code == 128 + signal.SIGXCPU,
        output_truncated=truncated,
    )
