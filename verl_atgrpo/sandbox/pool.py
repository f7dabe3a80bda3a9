"""The warm interpreter that starts the sandbox's programs: one for each process that runs any."""

from __future__ import annotations

import array
import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence

from verl_atgrpo.sandbox import launcher
from verl_atgrpo.sandbox.launcher import Request


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
