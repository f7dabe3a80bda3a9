"""The warm interpreter from which `sandbox` starts programs: one for each process of ours that runs any."""

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
    """A `sandbox_launcher`, started when it is first needed and again if it was killed.

    It ends with this process: its socket is then closed. A fork of this process starts one of its own.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self.counts: Counter[str] = Counter()
        """`restarts` of the interpreter, and `reruns` of programs that somebody killed, since they were last asked
        for."""
        self._set_up()

    def _set_up(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._lock = threading.Lock()  # event loops in several threads share the pool

    def start(self, request: Request, files: Sequence[int]) -> None:
        """Starts a program.

        Args:
            request: what to start, and how.
            files: its standard input, output and error, and a socket on which the exit code comes ("stopped" if it
                was ended) once nothing of the program is left; shutting down the other end ends the program.
        """
        message = [json.dumps(request).encode()]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        with self._lock:
            try:
                self._connected().sendmsg(message, ancillary)
            except (BrokenPipeError, ConnectionResetError):  # somebody killed it
                self.counts["restarts"] += 1
                self._close()
                self._connected().sendmsg(message, ancillary)

    def drain_counts(self) -> Counter[str]:
        """Returns the counts since the last call, by names that begin with `sandbox_`, and starts over."""
        counts, self.counts = self.counts, Counter()
        return Counter({f"sandbox_{name}": count for name, count in counts.items()})

    def close(self) -> None:
        """Ends the interpreter; programs under way go on to their end."""
        with self._lock:
            self._close()

    def _connected(self) -> socket.socket:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                python, end = os.path.realpath(sys.executable), theirs.fileno()
                command = [python, "-I", "-S", launcher.__file__, str(end)]
                # A session of its own: what a terminal sends to ours is not for it.
                self._server = subprocess.Popen(
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
        if self._requests is not None and self._server is not None:
            self._requests.close()
            self._server.kill()
            self._server.wait()
        self._requests = self._server = None

    def _forget(self) -> None:
        # In a fork of our process: the interpreter is not its child, and stays with the parent.
        if self._requests is not None:
            self._requests.close()
        self._set_up()


POOL = Pool()
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL._forget)
