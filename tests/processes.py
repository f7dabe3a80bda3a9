"""Lists processes from /proc, including zombies, and lets a script end with its children."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn


def children(process: int) -> list[int]:
    """Returns the children of a process's main thread; none if the process does not exist."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


WAKING = 40
"""A signal that only these tests send."""
WAITING = f"""
import signal, time
def end(*_):
    print("done")
    raise SystemExit
signal.signal({WAKING}, end)
while True:
    time.sleep(0.01)  # not pause: the signal may arrive just before
"""
"""A program that ends on that signal."""


def waiting_below(process: int) -> list[int]:
    """Returns the descendants of a process that run `WAITING` and have installed its handler."""
    found = []
    for child in children(process):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            caught = re.search(r"(?m)^SigCgt:\s*(\w+)", Path(f"/proc/{child}/status").read_text())
            if caught and int(caught[1], 16) >> (WAKING - 1) & 1:
                found.append(child)
        found += waiting_below(child)
    return found


def running(marker: str) -> list[int]:
    """Returns the processes with `marker` in their command line."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if marker.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
    return found


def of_session(session: int) -> list[int]:
    """Returns the processes of a session; its id is that of its first process, which may have ended."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(name)) == session:
                found.append(int(name))
    return found


def exit_on_sigterm() -> None:
    """Makes SIGTERM (as sent by `timeout`) raise SystemExit with status 143, so that `finally` blocks run.

    Ignores a second one: `timeout` signals the process and then its group.
    """

    def leave(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
