"""Which parts are run in so many minutes, and which of them side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """What `gpu_check.py` runs in a process and a folder of its own."""

    name: str
    does: str
    seconds: float
    """Expected, on an H200."""
    gigabytes: float
    """Of device memory, at most."""
    alone: bool = False
    """Whether it measures time, for which nothing may run beside it."""

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return 2 * self.seconds + 60


def startable(waiting: Iterable[Part], running: Sequence[Part], gigabytes: float, beside: int) -> list[Part]:
    """Returns the parts to start now: those that run alone first, by priority, then as many as there is room for.

    Of those beside each other the longest start first, so that they end together.

    Args:
        waiting: by priority.
        running: what runs.
        gigabytes: the device's memory.
        beside: how many may run at once.
    """
    waiting = list(waiting)
    alone = [part for part in waiting if part.alone]
    if alone or any(part.alone for part in running):
        return [] if running else alone[:1]
    started: list[Part] = []
    for part in sorted(waiting, key=lambda part: -part.seconds):
        there = [*running, *started]
        if len(there) < beside and sum(one.gigabytes for one in [*there, part]) <= gigabytes:
            started.append(part)
    return started


def duration(parts: Sequence[Part], gigabytes: float, beside: int) -> float:
    """Returns the seconds that the parts are expected to take together; the other arguments as in `startable`."""
    waiting, running, now = list(parts), dict[Part, float](), 0.0
    while waiting or running:
        for part in startable(waiting, list(running), gigabytes, beside):
            waiting.remove(part)
            running[part] = now + part.seconds
        if not running:
            raise ValueError(f"{waiting[0].name} never fits into {gigabytes:g} GB")
        now = min(running.values())
        running = {part: end for part, end in running.items() if end > now}
    return now


def choose(parts: Sequence[Part], seconds: float, gigabytes: float, beside: int) -> tuple[list[Part], dict[str, str]]:
    """Returns the parts that are expected to end in time, and name -> reason of the others.

    Args:
        parts: by priority; a later one is taken where an earlier one does not fit.
        seconds: what there is for all of them.
        gigabytes: the device's memory.
        beside: how many may run at once.
    """
    chosen: list[Part] = []
    left: dict[str, str] = {}
    for part in parts:
        if part.gigabytes > gigabytes:
            left[part.name] = f"needs {part.gigabytes:g} GB of device memory, there are {gigabytes:.0f}"
        elif duration([*chosen, part], gigabytes, beside) > seconds:
            left[part.name] = f"no time for its {part.seconds:.0f} s"
        else:
            chosen.append(part)
    return chosen, left
