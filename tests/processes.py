"""Processes of this machine by /proc, zombies included, and how a script ends with all that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn


def children(process: int) -> list[int]:
    """Returns what the main thread of a process has started; nothing where the process is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


WAKING = 40
"""A signal that nobody but these tests sends."""
WAITING = f"""
import signal, time
def end(*_):
    print("done")
    raise SystemExit
signal.signal({WAKING}, end)
while True:
    time.sleep(0.01)  # not pause: the signal may come just before
"""
"""A program that ends when it is told to, by a signal."""


def waiting_below(process: int) -> list[int]:
    """Returns those of the processes below one that have come as far as to run `WAITING`."""
    found = []
    for child in children(process):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            caught = re.search(r"(?m)^SigCgt:\s*(\w+)", Path(f"/proc/{child}/status").read_text())
            if caught and int(caught[1], 16) >> (WAKING - 1) & 1:
                found.append(child)
        found += waiting_below(child)
    return found


def of_session(session: int) -> list[int]:
    """Returns the processes of a session, whose number is that of its first process, there or gone."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(name)) == session:
                found.append(int(name))
    return found


def exit_on_sigterm() -> None:
    """Makes SIGTERM, as `timeout` sends it, raise SystemExit with status 143, so that `finally`s end what was started.

    A second one is ignored: `timeout` signals the process and then its whole group.
    """

    def leave(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
