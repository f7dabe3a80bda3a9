"""Which parts run in so many minutes, which side by side, and how: each has a process, a folder, a log, a cluster."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import real_stack
import training_jobs

from one_gpu import measures
from one_gpu.results import Result, last_lines

_TERM = 30.0
"""Seconds that a part has to end its jobs."""
_SCRATCH = "RAY_TMPDIR"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    "PYTHONUNBUFFERED": "1",
    "RAY_DEDUP_LOGS": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled
}
MEASURES = "measures.jsonl"


def environment() -> dict[str, str]:
    """Returns the environment of a part: nothing asks a network, and modules of the tests can be imported."""
    return {**_ENVIRONMENT, **real_stack.environment()}


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
    """Returns the parts to start now: as many as there is room for, the longest first, so that they end together.

    Those that run alone come last, by priority: what they measure is time, and if they take longer than expected,
    nothing else is left out.

    Args:
        waiting: by priority.
        running: what runs.
        gigabytes: the device's memory.
        beside: how many may run at once.
    """
    waiting = list(waiting)
    shared = [part for part in waiting if not part.alone]
    if not shared or any(part.alone for part in running):
        return [] if running else waiting[:1]
    started: list[Part] = []
    for part in sorted(shared, key=lambda part: -part.seconds):
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


# ------------------------------------------------------------ processes


@dataclass
class Running:
    """A part's process."""

    part: Part
    process: subprocess.Popen[bytes]
    folder: Path
    scratch: Path
    """For Ray's sockets, whose names may have 107 letters at most."""
    began: float

    @classmethod
    def start(cls, part: Part, folder: Path, command: Sequence[str], clock: Callable[[], float]) -> Running:
        """Starts a part with an empty folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        scratch = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        process = subprocess.Popen(
            command,
            stdout=(folder / "log").open("wb"),
            stderr=subprocess.STDOUT,
            env={**environment(), _SCRATCH: str(scratch)},
            start_new_session=True,
        )
        return cls(part, process, folder, scratch, clock())

    def end(self) -> None:
        """Ends the process and its jobs, which it ends itself when it is terminated, but not when it crashes."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_TERM)
        training_jobs.end(self.process)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(_SCRATCH) == str(self.scratch):  # a job has a session of its own
                    process.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def result(self, seconds: float, reason: str = "") -> Result:
        """Ends the part, which took so many seconds, and returns its result; with a `reason` it has failed."""
        self.end()
        code = self.process.returncode
        if not reason and code:
            reason = f"exit status {code}; {self.folder}/log"
        found = measures.read(self.folder / MEASURES)
        if not reason and not found:
            reason = f"it measured nothing; {self.folder}/log"
        if reason:
            return Result(
                self.part.name, "failed", self.part.does, seconds, found, reason, last_lines(self.folder / "log")
            )
        return Result(self.part.name, "done", self.part.does, seconds, found)


def run_all(
    parts: Sequence[Part],
    folder: Path,
    command: Callable[[Part], Sequence[str]],
    *,
    seconds: float,
    gigabytes: float,
    beside: int,
    tell: Callable[[str], None],
    ended: Callable[[Result], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs the parts in the order of `startable`.

    Args:
        parts: by priority.
        folder: has a folder for each.
        command: a part's command.
        seconds: after these, what runs is ended, and what has not begun is not run.
        gigabytes: the device's memory.
        beside: how many may run at once.
        tell: is called with progress.
        ended: is called with each part's result when it ends, so that nothing is lost if this process is killed.
        clock: tells the time.
    """
    end = clock() + seconds
    waiting, running = list(parts), list[Running]()
    try:
        while waiting or running:
            left = end - clock()
            if left <= 0:
                for part in waiting:
                    ended(Result(part.name, "not run", part.does, reason="time was up"))
                waiting = []
            for part in startable(waiting, [one.part for one in running], gigabytes, beside):
                waiting.remove(part)
                tell(f"{part.name}: {part.does}")
                running.append(Running.start(part, folder / part.name, command(part), clock))
            for one in list(running):
                took, reason = clock() - one.began, ""
                if one.process.poll() is None:
                    if left <= 0:
                        reason = f"time was up after its first {took:.0f} s"
                    elif took > one.part.limit:
                        reason = f"not ended in {one.part.limit:.0f} s"
                    else:
                        continue
                running.remove(one)
                result = one.result(took, reason)
                tell(f"{one.part.name}: {result.state} after {took:.0f} s {result.reason}".rstrip())
                ended(result)
            time.sleep(0.2)
    finally:
        for one in running:
            one.end()
