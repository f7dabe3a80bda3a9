"""A warm interpreter that forks a launcher for each program of the sandbox.

`pool` runs this file as a separate program, with only the standard library and an empty environment. It ends when its
socket is closed. A launcher isolates its program, waits for its exit, for its owner to stop it or for the time limit,
and then kills all remaining processes of the program.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import glob
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

LEVELS = ("namespaces", "landlock+seccomp", "bare namespaces", "seccomp", "rlimits")
"""Levels of isolation, strongest first; docs/sandbox.md says what each guarantees.

All but the last and `bare namespaces`, which is for machines without libseccomp, filter system calls.
"""
MARK = b"started "
"""Sent to the program's owner once all limits are in force, before the program's exit code."""

FIRST_USER = 1_900_000_000
"""Root's programs run as unprivileged users of their own: this one and those after it, where they exist."""

_SYSTEM = "/usr /bin /sbin /lib /lib32 /lib64 /etc /nix /gnu"
_PREFIXES = ("", "/usr", "/usr/local", sys.base_prefix)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NEW_CGROUP, _NEW_UTS, _NEW_TIME = 0x2000000, 0x4000000, 0x80
_NOSUID_NODEV, _BIND, _BIND_REC, _PRIVATE_REC, _DETACH = 0x6, 0x1000, 0x5000, 0x44000, 2
_SET_DEATH_SIGNAL, _SET_SECCOMP, _SET_SECUREBITS, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 22, 28, 36, 38
_NO_ROOT = 0b11
_MORE_TASKS = 1024
"""Tasks that the job's user may start while a program runs."""
"""SECBIT_NOROOT, locked: a program of user 0 has no capabilities."""


class Request(NamedTuple):
    """One program to start.

    The folder `root` has its `main.py`, empty folders `work` and `inside`, and, if there are libraries, `libraries`
    with a link to each.
    """

    level: str
    root: str
    seconds: float
    """Time limit of the launcher; usually the owner stops the program earlier."""
    cpu_seconds: int
    memory_mb: int
    processes: int
    file_mb: int
    libraries: Sequence[str] = ()
    """Folders of packages that the program can read, besides the system and the interpreter."""
    cgroup: str = ""
    """Folder of the cgroup (v2) below which the program gets its own, which limits memory and processes of the whole
    program; "" for none."""


class _User(NamedTuple):
    """The program's user, and its limit on processes and threads."""

    uid: int
    gid: int
    tasks: int


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# ---------------------------------------------------------------------- the server


def serve(requests: socket.socket) -> None:
    """Forks a launcher for every request until the socket is closed; also returns in the launchers.

    A request is the JSON of a `Request` with four files: the program's standard streams and a socket to its owner.
    """
    os.umask(0o022)  # root's unprivileged users need access to the folders that launchers make
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would print a traceback as the program's output
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    _leave_keyring()
    launchers: dict[int, str] = {}
    cgroups: set[str] = set()  # of launchers that have ended
    signals = _signal_pipe(signal.SIGCHLD)
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    poll.register(requests, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if signals in ready:
            os.read(signals, 256)
            cgroups |= {launchers.pop(pid) for pid, *_ in _reaped() if pid in launchers} - {""}
            for orphan in _children() - launchers.keys():  # left by a launcher that was killed
                os.kill(orphan, signal.SIGKILL)
            cgroups = {folder for folder in cgroups if not _removed(folder)}
        if requests.fileno() not in ready:
            continue
        space = socket.CMSG_LEN(4 * array.array("i").itemsize)
        data, ancillary, _, _ = requests.recvmsg(65536, space, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        files = array.array("i", b"".join(received for _, _, received in ancillary))
        request = Request(*json.loads(data))
        if request.level == "namespaces":
            # Made before the first fork, for all launchers.
            with contextlib.suppress(OSError):  # raised again in the launcher, where it is reported
                _compiled_filter(only_signals_to=None)
        elif "landlock" in request.level:
            _without_packages()
        launcher = os.fork()
        if launcher == 0:
            requests.close()
            _launch(request, *files)
            return
        launchers[launcher] = _cgroup(request)
        for file in files:
            os.close(file)


def _signal_pipe(*wanted: signal.Signals) -> int:
    """Returns a file descriptor that gets the number of each received signal as a byte."""
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in wanted:
        signal.signal(number, lambda *_: None)
    return signals


def _reaped() -> Iterator[tuple[int, int, float]]:
    """Yields process id, status and CPU seconds of all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.wait3(os.WNOHANG))[0]:
            pid, status, used = ended
            yield pid, status, used.ru_utime + used.ru_stime


def _children() -> set[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listing:
        return set(map(int, listing.read().split()))


# ---------------------------------------------------------------------- a launcher


def _launch(request: Request, stdin: int, stdout: int, stderr: int, control: int) -> None:
    os.setsid()
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)  # forks do not inherit it
    _leave_keyring()
    for stream, file in enumerate((stdin, stdout, stderr)):
        os.dup2(file, stream)
        os.close(file)
    owner = socket.socket(fileno=control)
    signals = _signal_pipe(signal.SIGCHLD, signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, request.seconds)
    child = _start(request, owner)
    code = _wait(child, signals, owner, request.cpu_seconds)
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # all at once: a fork bomb outruns kills one by one
    # As subreaper this process inherits all orphans, also from other sessions.
    with contextlib.suppress(ChildProcessError):
        while True:
            for orphan in _children():
                os.kill(orphan, signal.SIGKILL)
            os.waitpid(-1, 0)
    if code == 128 + signal.SIGKILL and _out_of_memory(request):
        code = 1  # as after the MemoryError that a limit of one process raises
        with contextlib.suppress(OSError):  # the program may have made the pipe refuse
            os.write(2, f"MemoryError: its processes took more than {request.memory_mb} MiB together\n".encode())
    _removed(_cgroup(request))
    if (uid := _own_user()) is not None and request.level in ("bare namespaces", "rlimits"):
        _remove_keys_of(uid)
    with contextlib.suppress(OSError):  # the owner has exited
        owner.send(b"stopped" if code is None else str(code).encode())
    os._exit(0)


def users(process: str = "/proc/self") -> range:
    """Returns the users that programs of root may run as, each of which is a group, too; none for other users.

    Above `FIRST_USER` nobody else is; a container without these (rootless ones, `userns-remap`) has 65,536 users as a
    rule, of which those from 32,768 on are not given to anybody.
    """
    if os.getuid() != 0:
        return range(0)
    both = range(0, 1 << 32)
    for kind in ("uid_map", "gid_map"):
        with open(f"{process}/{kind}") as lines:
            maps = [(int(inside), int(inside) + int(count)) for inside, _, count in map(str.split, lines)]
        first, end = max(maps, key=lambda ids: ids[1] - ids[0])
        both = range(max(both.start, first), min(both.stop, end))
    if FIRST_USER + (1 << 22) in both:
        return range(FIRST_USER, FIRST_USER + (1 << 22))  # as many as there can be processes
    return both[len(both) // 2 : len(both) * 3 // 4]


def _own_user() -> int | None:
    """Returns the user of this launcher's program, or None if it has none of its own."""
    known = users()
    return known[os.getpid() % len(known)] if known else None


def _start(request: Request, owner: socket.socket) -> int:
    user = _User(os.getuid(), os.getgid(), request.processes)
    work = os.path.join(request.root, "work")
    namespaced = request.level.endswith("namespaces")
    if (uid := _own_user()) is not None:
        # RLIMIT_NPROC ignores root and counts per user: each of root's programs gets its own unprivileged user.
        user = _User(uid, uid, request.processes)
        os.chown(request.root, 0, uid)
        os.chmod(request.root, 0o710)  # not for the users of other programs
        os.chown(work, uid, uid)
    elif namespaced:
        _enter_user_namespace(user)
        user = user._replace(tasks=user.tasks + 2)  # this namespace counts launcher and init too
    else:
        # The kernel counts all that this user runs, the training too, and what that starts in the meantime.
        user = user._replace(tasks=user.tasks + _tasks_of(user.uid) + _MORE_TASKS)
    if namespaced:
        _check(_libc.unshare(_NEW_NET | _NEW_IPC | _NEW_PID))
    if request.cgroup:
        _make_cgroup(request, request.processes + namespaced)  # PID 1 counts
    child = os.fork()
    if child == 0:
        if request.cgroup:
            _write(f"{_cgroup(request)}/cgroup.procs", "0")
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        if namespaced:
            _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            _isolate(request, user)
            if program := os.fork():  # not PID 1 itself: it ignores signals, also RLIMIT_CPU's
                os._exit(_code_of(program, request.cpu_seconds))
        _execute_program(request, user, owner)
    return child


def _tasks_of(uid: int) -> int:
    """Returns the number of threads of all processes of a user."""
    tasks = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # ended in the meantime
                if entry.stat().st_uid == uid:
                    tasks += len(os.listdir(f"{entry.path}/task"))
    return tasks


def _wait(child: int, signals: int, owner: socket.socket, cpu_seconds: int) -> int | None:
    """Returns the exit code, or None if the owner stopped the program or exited, or at the time limit."""
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    poll.register(owner, select.POLLIN)
    while owner.fileno() not in dict(poll.poll()):
        if signal.SIGALRM in os.read(signals, 256):
            return None
        for ended, status, used in _reaped():
            if ended == child:
                return _code(status, used, cpu_seconds)
    return None


def _code_of(wanted: int, cpu_seconds: int) -> int:
    pid = 0
    while pid != wanted:
        pid, status, used = os.wait3(0)
    return _code(status, used.ru_utime + used.ru_stime, cpu_seconds)


def _code(status: int, used: float, cpu_seconds: int) -> int:
    """Returns the exit code, 128 + n after signal n.

    A program that ignores SIGXCPU gets SIGKILL a second later, as one that somebody kills: its CPU time distinguishes
    them.
    """
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and used >= cpu_seconds:
        return 128 + signal.SIGXCPU
    return code if code >= 0 else 128 - code


def _execute_program(request: Request, user: _User, owner: socket.socket) -> NoReturn:
    work, python = os.path.join(request.root, "work"), sys.executable
    if user.uid != os.getuid():
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    elif user.uid == 0:
        _check(_libc.prctl(_SET_SECUREBITS, _NO_ROOT, 0, 0, 0))  # of its namespace, where there is no other user
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.chdir(work)
    os.stat(python)  # may be inaccessible to the unprivileged user: fail before MARK
    if "landlock" in request.level:
        _restrict_files(request, work)
    if request.level == "namespaces":
        _load(_compiled_filter(only_signals_to=None))
    elif "seccomp" in request.level:
        _load(_compiled_filter(only_signals_to=os.getpid()))
    limits = {"CPU": request.cpu_seconds, "AS": request.memory_mb << 20, "FSIZE": request.file_mb << 20}
    for name, value in (limits | {"NPROC": user.tasks, "NOFILE": 64, "CORE": 0, "MSGQUEUE": 0}).items():
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1] % (1 << 63)  # unlimited is -1; only root can raise it
        resource.setrlimit(limit, (min(value, hard), min(value + (name == "CPU"), hard)))
    # The order of sets is the same in every run: a reply's score and the next prompt follow from what it prints.
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": work, "TMPDIR": work, "PYTHONHASHSEED": "0"}
    isolated = ["-s", "-P"] if sys.version_info >= (3, 11) else ["-s"]  # -I, without ignoring these variables
    if request.libraries:
        # BLAS threads count against the limits on memory and processes.
        environment |= {"PYTHONPATH": f"{request.root}/libraries"}
        environment |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    owner.send(MARK)  # the program does not get this socket, so it cannot take the mark back
    os.execve(python, [python, *isolated, "-S", "-B", "-X", "utf8", f"{request.root}/main.py"], environment)


def _system() -> list[str]:
    """Returns the folders that programs can read at the levels that restrict files, but for `_packages` in them."""
    return [path for path in dict.fromkeys((*_SYSTEM.split(), sys.base_prefix)) if os.path.isdir(path)]


@functools.cache
def _packages() -> list[str]:
    """Returns the folders with packages of the system's interpreters, of which programs can read their libraries only.

    In an image our own are among them, and with them the solvers of the games.
    """
    patterns = [f"{prefix}/lib*/python3*/{kind}-packages" for prefix in _PREFIXES for kind in ("site", "dist")]
    return sorted({path for pattern in patterns for path in glob.glob(pattern) if os.path.isdir(path)})


@functools.cache
def _without_packages() -> list[str]:
    """Returns files and folders that together are `_system` without `_packages`."""
    hidden = {os.path.realpath(path) for path in _packages()}

    def parts(path: str) -> list[str]:
        if path in hidden:
            return []
        if not any(one.startswith(f"{path}/") for one in hidden):
            return [path]
        with os.scandir(path) as entries:  # what links lead to has its own place
            return [part for entry in entries if not entry.is_symlink() for part in parts(entry.path)]

    return [part for path in map(os.path.realpath, _system()) for part in parts(path)]


def _keyctl(operation: int, argument: int | None) -> int:
    """Calls keyctl; returns -1 where a container denies keyrings, also to programs."""
    number = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    return -1 if number is None else int(_libc.syscall(number, operation, argument, 0))


def _leave_keyring() -> None:
    """Joins an empty session keyring: the owner's keys are not for its programs, nor are those of other programs."""
    _keyctl(1, None)


def _remove_keys_of(user: int) -> None:
    """Becomes an unprivileged user and removes both of its keyrings, which the kernel would keep."""
    os.setresuid(user, user, user)
    for keyring in [_keyctl(0, special) for special in (-4, -5)]:  # makes them if there are none
        _keyctl(21, keyring)  # invalidates it


# ---------------------------------------------------------------------- control groups


def _cgroup(request: Request) -> str:
    return os.path.join(request.cgroup, os.path.basename(request.root)) if request.cgroup else ""


def _make_cgroup(request: Request, tasks: int) -> None:
    folder = _cgroup(request)
    os.mkdir(folder)
    _write(f"{folder}/memory.max", str(request.memory_mb << 20))
    _write(f"{folder}/memory.oom.group", "1")
    if os.path.exists(f"{folder}/memory.swap.max"):
        _write(f"{folder}/memory.swap.max", "0")
    _write(f"{folder}/pids.max", str(tasks))


def _out_of_memory(request: Request) -> bool:
    """Returns whether the kernel killed the program because its cgroup had no memory left."""
    if not request.cgroup:
        return False
    with open(f"{_cgroup(request)}/memory.events") as file:
        return any(int(line.split()[1]) > 0 for line in file if line.startswith("oom_kill "))


def _removed(cgroup: str) -> bool:
    """Removes a cgroup if it has no process; returns whether it is gone."""
    with contextlib.suppress(OSError):
        os.rmdir(cgroup)
    return not os.path.isdir(cgroup)


# ---------------------------------------------------------------------- namespaces


def _enter_user_namespace(user: _User) -> None:
    _check(_libc.unshare(_NEW_USER))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user.uid} {user.uid} 1"),
        ("gid_map", f"{user.gid} {user.gid} 1"),
    ):
        _write(f"/proc/self/{name}", text)


def _isolate(request: Request, user: _User) -> None:
    """Makes only the system, the interpreter and the program visible, and only `work` writable."""
    root, inside = request.root, os.path.join(request.root, "inside")
    _check(_libc.unshare(_NEW_NS))
    _mount("none", "/", _PRIVATE_REC)
    _mount("tmpfs", inside, _NOSUID_NODEV, "size=1m,mode=755")
    os.mkdir(f"{inside}/proc")
    hidden = _packages()
    for path in (*_system(), *hidden, *request.libraries, *_DEVICES, root):
        if path in hidden:
            if os.path.isdir(inside + path):
                _mount("tmpfs", inside + path, _NOSUID_NODEV, "size=1m,mode=755")
            continue
        if os.path.isdir(path):
            os.makedirs(inside + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(inside + path), exist_ok=True)
            os.close(os.open(inside + path, os.O_CREAT))
        _mount(path, inside + path, _BIND if path == root else _BIND_REC)
    # mount_setattr(everything below, read-only)
    failed = _libc.syscall(442, -100, inside.encode(), 0x8000, (ctypes.c_uint64 * 4)(1), 32)
    _check(failed if ctypes.get_errno() != 38 else 0)  # ENOSYS: kernels before 5.12
    size = f"size={user.tasks * request.file_mb}m,nr_inodes=1024"
    _mount("tmpfs", f"{inside}{root}/work", _NOSUID_NODEV, f"{size},mode=700,uid={user.uid},gid={user.gid}")
    os.chdir(inside)
    _check(_libc.pivot_root(b".", b"."))
    _check(_libc.umount2(b".", _DETACH))  # the old root, now mounted over the new one


def _mount(source: str, target: str, flags: int, options: str = "") -> None:
    kind = source.encode()  # of the file system; a bind mount ignores it
    _check(_libc.mount(kind, target.encode(), kind, ctypes.c_ulong(flags), options.encode()))


# ---------------------------------------------------------------------- Landlock


def _restrict_files(request: Request, work: str) -> None:
    """Denies this process all files but those visible in `_isolate`, and access to other processes.

    Raises OSError for kernels before 6.2, whose Landlock does not restrict truncation.
    """
    create, add_rule, restrict_self = 444, 445, 446
    execute, write_file, read_file, read_folder, truncate = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
    everything = (1 << 15) - 1  # these, and creating, removing and moving files
    if _check(_libc.syscall(create, None, 0, 1)) < 3:
        raise OSError("Landlock is older than Linux 6.2")
    rules = _check(_libc.syscall(create, ctypes.byref(ctypes.c_uint64(everything)), 8, 0))
    # Python lists the folders that it imports from, also those of which it may read parts only.
    allowed = dict.fromkeys(_system(), read_folder)
    for path in (*_without_packages(), *request.libraries, request.root):
        allowed[path] = execute | read_file | (read_folder if os.path.isdir(path) else 0)
    allowed |= dict.fromkeys(_DEVICES, read_file | write_file | truncate) | {work: everything}
    for path, rights in allowed.items():
        beneath = os.open(path, os.O_PATH)
        rule = rights.to_bytes(8, sys.byteorder) + beneath.to_bytes(4, sys.byteorder)
        _check(_libc.syscall(add_rule, rules, 1, rule, 0))
        os.close(beneath)
    _check(_libc.syscall(restrict_self, rules, 0))
    os.close(rules)


# ---------------------------------------------------------------------- seccomp

_ALLOWED = (
    # files, by name and open
    "open openat close close_range creat read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 "
    "lseek stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat "
    "getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir mknod mknodat link "
    "linkat symlink symlinkat unlink unlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask "
    "utime utimes utimensat futimesat getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr truncate "
    "ftruncate fallocate fsync fdatasync sync_file_range fadvise64 readahead sendfile copy_file_range splice pipe "
    "pipe2 dup dup2 dup3 "
    # waiting
    "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd "
    "eventfd2 pause nanosleep clock_nanosleep alarm getitimer setitimer timerfd_create timerfd_settime "
    "timerfd_gettime timer_create timer_settime timer_gettime timer_getoverrun timer_delete "
    # its own sockets, from socketpair
    "recvfrom recvmsg shutdown getsockname getpeername getsockopt setsockopt "
    # memory
    "brk mmap mprotect munmap mremap madvise msync memfd_create membarrier "
    # processes and threads of its own
    "fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp setpgid getsid "
    "setsid futex futex_waitv set_robust_list get_robust_list set_tid_address rseq arch_prctl restart_syscall "
    "sched_yield rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack "
    "signalfd signalfd4 "
    # what it may know
    "capget getuid geteuid getresuid getgid getegid getresgid getgroups getrlimit setrlimit getrusage times time "
    "gettimeofday clock_gettime clock_getres uname sysinfo getrandom getcpu getpriority sched_getaffinity "
    "sched_getparam sched_getscheduler sched_getattr sched_get_priority_max sched_get_priority_min "
    "sched_rr_get_interval"
)
"""System calls of ordinary programs; all others, those of future kernels too, are denied."""
_ALLOWED_FCNTL = (
    *(0, 1030),  # F_DUPFD, F_DUPFD_CLOEXEC
    *(1, 2, 3, 4),  # flags of a descriptor and of an open file
    *(1031, 1032),  # size of a pipe
    *(1033, 1034),  # seals of a file in memory
)
"""No locks and leases: they would stop other processes, on files that a program may only read, too."""
_ALLOWED_IOCTL = (
    *(0x5401, 0x5413),  # is it a terminal, and its size
    *(0x541B, 0x5421),  # bytes to be read; whether it blocks
    *(0x5450, 0x5451),  # whether it is inherited
)
_ALLOWED_PRCTL = (
    *(1, 2),  # signal at its parent's death
    *(15, 16, 0x53564D41),  # names of threads and memory
    *(3, 21, 38, 39),  # asks; no new privileges
    4,  # keeps others out of its memory and files
)


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp` of libseccomp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


@functools.cache
def _compiled_filter(only_signals_to: int | None) -> bytes:
    """Returns a BPF program that denies all system calls but those of ordinary programs.

    Among the denied ones are sockets, locks of files, access to other processes, and namespaces.

    Calls libseccomp directly, because its Python wrapper is not available with `python -I -S`.

    Args:
        only_signals_to: the only process that may be sent signals; None for all, if programs have a process
            namespace of their own, where they can only signal themselves.

    Raises OSError if the library is missing, or if it does not support a rule.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    equals, masked, allow, errno = 4, 7, 0x7FFF0000, 0x00050000
    eperm, enosys = errno | 1, errno | 38
    rules = ctypes.c_void_p(library.seccomp_init(eperm))

    def rule(name: str, *comparison: int, action: int = allow) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # of another processor, or newer than the library
            return
        count = int(bool(comparison))  # without one, the library does not read the structure
        failed = library.seccomp_rule_add_array(rules, action, number, count, ctypes.byref(_Comparison(*comparison)))
        if failed:
            raise OSError(-failed, f"seccomp_rule_add({name})")

    for name in _ALLOWED.split():
        rule(name)
    for name in "kill", "tgkill":
        rule(name, *(() if only_signals_to is None else (0, equals, only_signals_to)))
    rule("prlimit64", 0, equals, 0)
    rule("sendto", 4, equals, 0)  # without an address
    rule("socketpair", 0, equals, socket.AF_UNIX)
    int_bits = 0xFFFFFFFF  # the kernel ignores the upper bits of these arguments
    for name, place, accepted in (
        ("fcntl", 1, _ALLOWED_FCNTL),
        ("ioctl", 1, _ALLOWED_IOCTL),
        ("prctl", 0, _ALLOWED_PRCTL),
    ):
        for value in accepted:
            rule(name, place, masked, int_bits, value)
    namespaces = _NEW_NS | _NEW_CGROUP | _NEW_UTS | _NEW_IPC | _NEW_USER | _NEW_PID | _NEW_NET | _NEW_TIME
    rule("clone", 0, masked, namespaces, 0)
    rule("clone3", action=enosys)  # filters cannot read its flags; the C library falls back to clone
    exported = os.memfd_create("filter")
    try:
        failed = library.seccomp_export_bpf(rules, exported)
        if failed:
            raise OSError(-failed, "seccomp_export_bpf")
        library.seccomp_release(rules)
        return os.pread(exported, os.fstat(exported).st_size, 0)
    finally:
        os.close(exported)


class _Filter(ctypes.Structure):
    """`struct sock_fprog` of the kernel."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _load(program: bytes) -> None:
    """Loads a filter for this process and its children; raises OSError if the kernel refuses it."""
    instruction = 8  # bytes
    _check(_libc.prctl(_SET_SECCOMP, 2, ctypes.byref(_Filter(len(program) // instruction, program)), 0, 0))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
