"""Foreign code that reads replies, in a process of its own under limits of time and memory.

`LimitedProcess` is the side that asks, `serve` the process that answers. A reply whose reading exceeds a limit costs
its process, which is replaced, and has no result. Programs of models do not belong here but into the sandbox: the
process may read and write what this one may.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WALL_SECONDS = 120.0
"""Wall time of one request, for code that waits in the place of computing; the limit that counts is of CPU time."""
_EXCEEDED = -signal.SIGPROF
"""How a process ends that has exceeded its limits."""


@dataclass(eq=False, repr=False)
class LimitedProcess:
    """A process that answers requests one after the other, started when first needed and again after it ended."""

    module: str
    """Its `main` calls `serve`."""
    process: subprocess.Popen[str] | None = None
    """None until the first request, and after one that exceeded its limits."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _owner: int = 0

    def ask(self, request: object) -> Any:
        """Returns the answer to a request, or None if it exceeded a limit; retried once if others killed the process.

        It waits, so an event loop calls it in a thread.

        Args:
            request: what JSON can represent.

        Raises RuntimeError if the process does not work at all, and for an exception of the code in it.
        """
        with self._lock:
            answer, ended = self._ask(request)
            if ended is not None and ended != _EXCEEDED:
                answer, ended = self._ask(request)
            return answer

    def _ask(self, request: object) -> tuple[Any, int | None]:
        """Returns the answer and None, or None and the return code if the process ended."""
        if self.process is None or self._owner != os.getpid():  # forks must not share pipes
            self._start()
        process = self.process
        assert process and process.stdin and process.stdout
        waits = False
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            poll = select.poll()  # select() knows no descriptor above 1,023
            poll.register(process.stdout, select.POLLIN)
            waits = not poll.poll(WALL_SECONDS * 1000)
            if waits:
                process.kill()
            answer = process.stdout.readline()
        except BrokenPipeError:  # ended since the last request
            answer = ""
        except BaseException:  # an interrupt: the next request must not read this one's answer
            process.kill()
            self.process = None
            raise
        if answer:
            told = json.loads(answer)
            if "raised" in told:
                raise RuntimeError(f"{self.module}: {told['raised']}")
            return told["found"], None
        with contextlib.suppress(BrokenPipeError):
            process.communicate()
        if process.returncode > 0:  # not killed by a signal: it does not work at all
            raise RuntimeError(f"{self.module} does not work; to see why: {sys.executable} -m {self.module}")
        self.process = None
        return None, _EXCEEDED if waits else process.returncode

    def _start(self) -> None:
        self._owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries write warnings
            text=True,
            # Threads of numpy take address space, and nothing here needs them.
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",  # sets have one order in all of them
            },
            start_new_session=True,  # not interrupted by Ctrl-C
        )


def serve(
    answer: Callable[[Any], object],
    cpu_seconds: Callable[[Any], float],
    memory_bytes: int,
    prepare: Callable[[Any], object] = lambda request: None,
) -> None:
    """Answers the requests on standard input, a line of JSON each, until it ends.

    The kernel kills the process when an answer exceeds its time, as Python's own signal handlers would not interrupt
    code in C. The process also ends when there is no memory, or when the code would exit.

    Args:
        answer: request -> what JSON can represent.
        cpu_seconds: request -> CPU time of its answer.
        memory_bytes: address space.
        prepare: called with each request before its time runs, for work that no reply has a part in.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries must not print into the answers
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for line in sys.stdin:
        request = json.loads(line)
        prepare(request)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds(request))
        try:
            found = json.dumps({"found": answer(request)})
        except (MemoryError, SystemExit):  # what other code has left behind is not known
            os.kill(os.getpid(), signal.SIGPROF)
        except Exception as error:  # noqa: BLE001  # raised where the request came from
            found = json.dumps({"raised": f"{type(error).__name__}: {error}"})
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(found + "\n")
        answers.flush()
