"""Profiles a training step with py-spy in every process of a job; prints the top costs by process.

Trains a recipe, skips the first steps, then samples the Python stacks of all processes for some steps. A sample counts
for the innermost frame in one of the packages below, so time in torch or the standard library counts for its caller;
waiting is not sampled. CPU seconds are the system's and include threads without Python.

python benchmarks/profile_step.py --model runs/models/plan_path_tiny [--steps 4] [--rate 50] [--top 5]
    [--keep folder] [override ...]

Needs py-spy ('py-spy>=0.4,<0.5' from pip; on the PATH or --py-spy) and permission to trace processes (root, or
kernel.yama.ptrace_scope=0).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import real_stack
import training_jobs
from processes import exit_on_sigterm

WARM_UP = 2
PACKAGES = ("verl_atgrpo", "verl", "vllm", "transfer_queue", "transformers", "tensordict", "ray")
ROLES = {
    "TaskRunnerV1": "driver",
    "TeamRolloutWorker": "rollout worker",
    "DecisionServer": "server",
    "EngineCore": "engine",
    "WorkerDict": "actor worker",
}
_FRAME = re.compile(r"(?P<function>.+) \((?P<file>[^():]+)(:\d+)?\)$")


def place(stack: str) -> str:
    """Returns the innermost frame of a folded stack that is in one of the packages, as `file:function`.

    A stack without any goes under its innermost frame, which is Python's own.
    """
    frames = [found for found in map(_FRAME.match, stack.split(";")) if found]
    for frame in reversed(frames):
        if frame["file"].split("/", 1)[0] in PACKAGES:
            return f"{frame['file']}:{frame['function']}"
    return f"{frames[-1]['file']}:{frames[-1]['function']}" if frames else "?"


def costs(folded: Iterable[str]) -> Counter[str]:
    """Returns place -> samples from py-spy's raw format, a stack and its count on every line."""
    found: Counter[str] = Counter()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        if stack:
            found[place(stack)] += int(count)
    return found


def table(found: Counter[str], samples_a_second: float, steps: int, top: int) -> str:
    """Returns the top places of a process as text: seconds per step and share of its samples."""
    total = sum(found.values())
    return "\n".join(
        f"  {count / samples_a_second / steps:7.3f} s  {count / total:6.1%}  {where}"
        for where, count in found.most_common(top)
    )


def processes_of(job: subprocess.Popen[bytes]) -> dict[int, str]:
    """Returns pid -> name for the job's processes with a title of Ray's or vLLM's."""
    found = {}
    for process in training_jobs.living(job.pid):
        with suppress(psutil.NoSuchProcess):
            name = real_stack.name_of((process.cmdline() or [""])[0])
            if name not in ("Ray itself", "IDLE"):
                found[process.pid] = name
    return found


def cpu_of(pids: Iterable[int]) -> dict[int, float]:
    """Returns the CPU seconds of the processes that are alive."""
    spent = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            spent[pid] = times.user + times.system
    return spent


def record(spy: str, pid: int, out: Path, rate: int) -> subprocess.Popen[bytes]:
    """Starts py-spy on a process; it writes its samples when it is interrupted."""
    where = [f"--pid={pid}", f"--output={out}", "--format=raw", "--function"]
    return subprocess.Popen(
        [spy, "record", *where, f"--rate={rate}", "--duration=unlimited", "--nonblocking"],
        stdout=subprocess.DEVNULL,
        stderr=(out.parent / f"{out.name}.err").open("wb"),
    )


def profile(options: argparse.Namespace, spy: str, folder: Path) -> None:
    """Trains, samples and prints the tables."""
    steps = WARM_UP + options.steps
    metrics = folder / "metrics.jsonl"
    spies: dict[int, subprocess.Popen[bytes]] = {}
    job = training_jobs.start(
        options.recipe,
        folder,
        options.model.resolve(),
        # More than are profiled; the job is ended below.
        f"trainer.total_training_steps={steps + 50}",
        *training_jobs.TRAIN_ONLY,
        "trainer.resume_mode=disable",
        *options.overrides,
    )
    try:
        training_jobs.wait_for_lines(metrics, WARM_UP, job, folder)
        names = processes_of(job)
        spies = {pid: record(spy, pid, folder / f"{pid}.folded", options.rate) for pid in names}
        before, began = cpu_of(names), time.perf_counter()
        first = metrics.read_bytes().count(b"\n")
        training_jobs.wait_for_lines(metrics, first + options.steps, job, folder)
        seconds = time.perf_counter() - began
        after = cpu_of(names)
        for process in spies.values():
            process.send_signal(signal.SIGINT)
        for process in spies.values():
            process.wait(timeout=600)
    finally:
        for process in spies.values():
            if process.poll() is None:
                process.kill()
        training_jobs.end(job)
    print(f"{options.steps} steps of {seconds / options.steps:.2f} s while sampled; {real_stack.load_average()}")
    print(timers(list(training_jobs.metrics_of(folder).values())[first : first + options.steps]))
    spent = {pid: (after[pid] - before[pid]) / options.steps for pid in after}
    for pid in sorted(spent, key=lambda pid: -spent[pid]):
        print(f"\n{ROLES.get(names[pid], names[pid])} ({names[pid]}): {spent[pid]:.2f} CPU s a step")
        file = folder / f"{pid}.folded"
        if not file.exists():
            print(f"  no samples: {(folder / f'{file.name}.err').read_text(errors='replace').strip()[-300:]}")
            continue
        found = costs(file.read_text(errors="replace").splitlines())
        if found:
            print(table(found, options.rate, options.steps, options.top))


def timers(records: Sequence[dict[str, float]]) -> str:
    """Returns verl's timers of these steps, medians, as text."""
    names = sorted(name for name in records[0] if name.startswith("timing_s/"))
    medians = {name: statistics.median(record[name] for record in records) for name in names}
    return "verl's timers: " + ", ".join(
        f"{name.removeprefix('timing_s/')} {value:.2f} s" for name, value in medians.items()
    )


def main() -> int:
    """Prints the tables; status 1 without py-spy."""
    parser = real_stack.parser(__doc__, steps=4, top=5)
    parser.add_argument("--rate", type=int, default=50, help="samples per second")
    parser.add_argument("--py-spy", default=None)
    parser.add_argument("--keep", type=Path, help="folder for the folded stacks, the log and the metrics")
    options = parser.parse_args()
    spy = options.py_spy or shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if not spy:
        print("py-spy is missing: pip install 'py-spy>=0.4,<0.5', or name it with --py-spy", file=sys.stderr)
        return 1
    exit_on_sigterm()
    if options.keep:
        options.keep.mkdir(parents=True)
        profile(options, spy, options.keep.resolve())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        profile(options, spy, Path(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
