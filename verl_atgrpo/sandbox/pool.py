"""The warm interpreter that starts the sandbox's programs, one for each process that runs any, and their cores."""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import fcntl
import functools
import json
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from verl_atgrpo.platform_choice import cores
from verl_atgrpo.sandbox import launcher
from verl_atgrpo.sandbox.launcher import Request

logger = logging.getLogger(__name__)
_POLL = 0.01
"""Seconds between looks for a free core, while other processes have all."""
_LOCKS = f"verl-atgrpo-cores-{os.getuid()}"
"""Name of the folder with the locks of cores."""
_waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
"""So that no more tasks of a loop look than there are cores."""


@contextlib.asynccontextmanager
async def free_core() -> AsyncIterator[None]:
    """Waits for a core that no other program of this user has, in whatever process: time limits count on it.

    A lock of a file stands for a core, so that it is free when its process dies.
    """
    numbers = cores()
    async with _waiting.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(len(numbers))):
        folder = os.path.join(tempfile.gettempdir(), _LOCKS)
        if not _is_ours(folder):
            yield
            return
        while (lock := _lock_of_one(folder, numbers)) is None:
            await asyncio.sleep(_POLL)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a fork of this process may have the file as well
            os.close(lock)


@functools.cache
def _is_ours(folder: str) -> bool:
    """Returns whether locks can be in a folder, which is made if missing; warns if they cannot."""
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        found = os.stat(folder, follow_symlinks=False)
        fault = "" if (found.st_uid, found.st_mode & 0o777) == (os.getuid(), 0o700) else "others may write there"
    except OSError as error:
        fault = str(error)
    if fault:
        logger.warning("%s: %s; processes do not share the cores for programs", folder, fault)
    return not fault


def _lock_of_one(folder: str, numbers: Sequence[int]) -> int | None:
    """Returns a file descriptor with the lock of a core, or None if others have all of them."""
    os.makedirs(folder, 0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
    for number in random.sample(numbers, len(numbers)):
        file = os.open(os.path.join(folder, str(number)), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        else:
            return file
    return None


class Pool:
    """A `launcher` process, started when first needed and restarted if it was killed.

    It ends with this process, which closes its socket. Forks of this process start their own.
    """

    def __init__(self) -> None:
        """Prepares the pool; the first program starts the interpreter."""
        self.counts: Counter[str] = Counter()
        """`restarts` of the interpreter and `reruns` of killed programs, since the last `drain_counts`."""
        self._set_up()

    def _set_up(self) -> None:
        self.server: subprocess.Popen[bytes] | None = None
        """None while no interpreter runs."""
        self._requests: socket.socket | None = None
        self._lock = threading.Lock()  # event loops in several threads share the pool

    def start(self, request: Request, files: Sequence[int]) -> None:
        """Starts a program.

        Args:
            request: the program and its limits.
            files: its standard input, output and error, and a socket. When all of the program's processes have ended,
                the socket gets the exit code ("stopped" if the program was stopped). Shutting down the other end stops
                the program.
        """
        message = [json.dumps(request).encode()]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        with self._lock:
            try:
                self.connect().sendmsg(message, ancillary)
            except (BrokenPipeError, ConnectionResetError):  # it was killed
                self.counts["restarts"] += 1
                self._close()
                self.connect().sendmsg(message, ancillary)

    def drain_counts(self) -> Counter[str]:
        """Returns the counts since the last call, with names `sandbox_...`, and resets them."""
        counts, self.counts = self.counts, Counter()
        return Counter({f"sandbox_{name}": count for name, count in counts.items()})

    def close(self) -> None:
        """Ends the interpreter; running programs continue."""
        with self._lock:
            self._close()

    def connect(self) -> socket.socket:
        """Returns the socket to the interpreter, which is started if needed."""
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                python, end = os.path.realpath(sys.executable), theirs.fileno()
                command = [python, "-I", "-S", launcher.__file__, str(end)]
                # A separate session: signals of the terminal must not reach it.
                self.server = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                    pass_fds=[end],
                    start_new_session=True,
                )
        return self._requests

    def _close(self) -> None:
        if self._requests is not None and self.server is not None:
            self._requests.close()
            self.server.kill()
            self.server.wait()
        self._requests = self.server = None

    def _forget(self) -> None:
        # After a fork: the interpreter belongs to the parent process.
        if self._requests is not None:
            self._requests.close()
        self._set_up()


POOL = Pool()
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL._forget)
