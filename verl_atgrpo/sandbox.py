"""Run one model-written Python program in a short-lived, limited child process (Linux only)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass

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
    where we stopped it; `timed_out` covers the wall and the CPU limit.
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


def _launch() -> None:
    # The launcher starts the program and ends its leftovers; it gets this source by `-c` to start fast.
    new_ns, new_ipc, new_user, new_pid, new_net = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
    ms_nosuid_nodev, ms_bind_rec, ms_private_rec = 0x6, 0x5000, 0x44000
    set_death_signal, set_subreaper, set_no_new_privs = 1, 36, 38
    libc = ctypes.CDLL(None, use_errno=True)
    (level, root), (cpu_seconds, memory_mb, tasks, file_mb) = sys.argv[1:3], map(int, sys.argv[3:])
    walled, uid, gid, python = level == "namespaces", os.getuid(), os.getgid(), sys.executable
    work, copy = os.path.join(root, "work"), os.path.join(root, "python")
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": work, "TMPDIR": work}

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def mount(source: str, target: str, flags: int, options: str = "") -> None:
        kind = source.encode()  # of the file system; a bind mount ignores it
        check(libc.mount(kind, target.encode(), kind, ctypes.c_ulong(flags), options.encode()))

    def wall_off() -> None:
        # Only `work` is writable, no process is in sight, root's spare users reach the interpreter.
        nonlocal python
        check(libc.unshare(new_ns))
        mount("none", "/", ms_private_rec)
        if os.getuid() == 0:
            mount(sys.base_prefix, copy, ms_bind_rec)
            python, environment["LD_LIBRARY_PATH"] = python.replace(sys.base_prefix, copy, 1), f"{copy}/lib"
        # mount_setattr(everything below /, read-only)
        failed = libc.syscall(442, -100, b"/", 0x8000, (ctypes.c_uint64 * 4)(1), 32)
        check(failed if ctypes.get_errno() != 38 else 0)  # ENOSYS: kernels before 5.12
        size = f"size={tasks * file_mb}m,nr_inodes=1024"
        mount("tmpfs", work, ms_nosuid_nodev, f"{size},mode=700,uid={uid},gid={gid}")
        mount("tmpfs", "/proc", ms_nosuid_nodev, "size=4k,mode=555")

    def start_program() -> None:
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        libc.prctl(set_no_new_privs, 1, 0, 0, 0)
        libc.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
        names, memory, file_size = "CPU AS NPROC FSIZE NOFILE CORE", memory_mb << 20, file_mb << 20
        for name, value in zip(names.split(), (cpu_seconds, memory, tasks, file_size, 64, 0), strict=True):
            limit = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(limit)[1] % (1 << 63)  # unlimited is -1; only root may raise this
            resource.setrlimit(limit, (min(value, hard), min(value + (name == "CPU"), hard)))
        os.chdir(work)
        os.stat(python)  # a spare user may not reach it: fail before the mark, not as the program
        os.write(2, b"\0")  # tells our process that everything above is in force
        os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", f"{root}/main.py"], environment)

    def finish(code: int, _frame: object = None) -> None:  # also the handler of SIGTERM
        # As subreaper the launcher inherits every orphan, also those that left the session.
        try:
            while True:
                with open(f"/proc/self/task/{os.getpid()}/children") as listing:
                    for child in listing.read().split():
                        os.kill(int(child), signal.SIGKILL)
                os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(code)  # none left

    def exit_code_of(wanted: int) -> int:
        pid = 0
        while pid != wanted:
            pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    libc.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    libc.prctl(set_subreaper, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, finish)
    if uid == 0:
        # RLIMIT_NPROC does not bind root and counts per user: each of root's programs gets a user of its own.
        uid = gid = 1_900_000_000 + os.getpid()
        os.chmod(root, 0o711)
        os.chown(work, uid, gid)
    elif walled:
        check(libc.unshare(new_user))
        tasks += 2  # this namespace counts launcher and init too
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if walled:
        check(libc.unshare(new_net | new_ipc | new_pid))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if walled:
            libc.prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
            wall_off()
            if program := os.fork():  # not PID 1 itself: that one ignores signals, RLIMIT_CPU's too
                os._exit(exit_code_of(program))
        start_program()
    finish(exit_code_of(child))


def _command(level: str, root: str, code: str, limits: Limits) -> list[str]:
    os.mkdir(os.path.join(root, "work"))
    os.mkdir(os.path.join(root, "python"))
    with open(os.path.join(root, "main.py"), "w", encoding="utf-8", errors="replace", newline="") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(code)
    numbers = (limits.cpu_seconds, limits.memory_mb, limits.processes, limits.file_mb)
    source = f"import ctypes, os, resource, signal, sys\n{inspect.getsource(_launch)}\n_launch()"
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", source, level, root, *map(str, numbers)]


def _remove(root: str) -> None:
    for path, folders, _ in os.walk(root):
        for folder in (os.path.join(path, name) for name in folders):
            if not os.path.islink(folder):
                os.chmod(folder, 0o700)  # a program may have locked its own folders
    shutil.rmtree(root, ignore_errors=True)


@functools.cache
def isolation() -> str:
    """Return what separates programs from this machine, found by a trial run in the first call.

    "namespaces": no network, no sight of other processes, no write outside the working directory.
    "rlimits": resource limits only; unless we are root, `processes` counts all tasks of our user.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-") as root:
        command = _command("namespaces", root, "", Limits())
        trial = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env={})
        return "namespaces" if trial.returncode == 0 else "rlimits"


async def run_python(code: str, *, stdin: str = "", limits: Limits = Limits()) -> ExecutionResult:
    """Run `code` as a program of its own with `stdin` as its input, and leave no process or file behind.

    At most `os.cpu_count()` runs go on at once per event loop; `wall_seconds` starts when a run starts.
    Raises RuntimeError if the sandbox could not be set up; whatever the program does is a result.
    """
    level = await asyncio.to_thread(isolation)
    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1)):
        root = tempfile.mkdtemp(prefix="sandbox-")
        try:
            return await _run(_command(level, root, code, limits), root, stdin, limits)
        finally:
            await asyncio.to_thread(_remove, root)


async def _run(command: list[str], root: str, stdin: str, limits: Limits) -> ExecutionResult:
    with tempfile.TemporaryFile() as given:  # without a name: who closes descriptor 0 cannot read it again
        given.write(stdin.encode("utf-8", "replace"))
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=given, stdout=PIPE, stderr=PIPE, env={}, start_new_session=True
        )
    out, err = bytearray(), bytearray()
    ended = asyncio.gather(
        _drain(process, process.stdout, out, limits.output_bytes),
        _drain(process, process.stderr, err, limits.output_bytes + 1),  # 1 for the launcher's mark
        process.wait(),
    )
    try:
        late = not (await asyncio.wait((ended,), timeout=limits.wall_seconds))[0]
    finally:
        try:
            with contextlib.suppress(ProcessLookupError, asyncio.TimeoutError):
                process.terminate()
                await asyncio.wait_for(process.wait(), 0.5)  # time for the launcher to end its children
        finally:
            ended.cancel()
            if process.returncode is None or process.returncode < 0:  # the launcher did not get to sweep
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if not late and not err.startswith(b"\0"):
        raise RuntimeError(f"sandbox could not be set up: {err.decode('utf-8', 'replace')[-500:]}")
    truncated = len(out) > limits.output_bytes or len(err) > limits.output_bytes + 1
    code = process.returncode
    return ExecutionResult(
        stdout=out[: limits.output_bytes].decode("utf-8", "replace"),
        stderr=err[1 : limits.output_bytes + 1].decode("utf-8", "replace").replace(f"{root}/", ""),
        returncode=None if late or truncated or code is None else code if code >= 0 else 128 - code,
        timed_out=late or code == 128 + signal.SIGXCPU,
        output_truncated=truncated,
    )


async def _drain(process: Process, stream: asyncio.StreamReader | None, kept: bytearray, limit: int) -> None:
    while stream and (chunk := await stream.read(16384)):
        kept += chunk[: limit + 1 - len(kept)]  # one more than allowed tells an overflow
        if len(kept) > limit:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()


def extract_python(reply: str) -> str | None:
    """Return the body of the last ```python block of `reply`, or None if there is no closed one."""
    blocks = re.findall(r"(?ms)^[ \t]*```python[ \t]*\r?\n(.*?)^[ \t]*```[ \t]*\r?$", reply)
    return blocks[-1] if blocks else None
