"""Measures trivial programs per second in the sandbox and in bare interpreters, and checks for leftovers.

python benchmarks/bench_sandbox.py [--runs 200] [--at-once 2] [--limit 40] [--libraries sympy numpy]

The limit is for an idle machine with two cores; use `--limit 0` on a busy one. Also prints the CPU time per program,
which hardly depends on other load. With libraries, programs import these, and their largest memory is printed.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import script
from processes import children

from verl_atgrpo.sandbox import runner

MEMORY = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
"""Prints a program's largest resident memory in KiB."""


async def sandboxed(runs: int, concurrent: int, libraries: Sequence[str]) -> int:
    """Runs programs, `concurrent` at a time, all of which must succeed.

    Returns the largest memory of a program in KiB; 0 without libraries, where programs do nothing.
    """
    free = asyncio.Semaphore(concurrent)
    code = f"import {', '.join(libraries)}; {MEMORY}" if libraries else "pass"
    limits = runner.Limits(cpu_seconds=5, wall_seconds=20, memory_mb=1024)

    async def one() -> int:
        async with free:
            result = await runner.run_python(code, limits=limits, libraries=tuple(libraries))
            assert result.ok, result
            return int(result.stdout or 0)

    return max(await asyncio.gather(*(one() for _ in range(runs))))


def bare(runs: int, *options: str) -> None:
    """Runs interpreters one after the other."""
    for _ in range(runs):
        subprocess.run([sys.executable, *options, "-c", "pass"], check=True)


def rate(name: str, work: Callable[[int], None], runs: int) -> float:
    """Runs the work; prints and returns its runs per second."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) + time.process_time()
    started = time.perf_counter()
    work(runs)
    seconds = time.perf_counter() - started
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) + time.process_time() - before
    print(f"{name:40} {runs / seconds:6.1f}/s, {1e3 * cpu / runs:5.1f} ms of CPU each")
    return runs / seconds


def leftovers() -> dict[str, int]:
    """Counts child processes of this process and its pool (without zombies), open files and temporary files."""
    server = runner.POOL.server
    assert server is not None
    there = {*children(os.getpid()), *children(server.pid)} - {server.pid}
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in there]
    return {
        "zombies": states.count("Z"),
        "processes": len(states) - states.count("Z"),
        "open files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", server.pid)),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def main() -> int:
    """Prints rates and leftovers; status 1 if the sandbox is too slow, or anything is left."""
    parser = script.parser(__doc__, runs=200, limit=40.0)
    parser.add_argument("--at-once", type=int, default=os.cpu_count())
    parser.add_argument("--libraries", nargs="*", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        tempfile.tempdir = folder
        print(f"isolation: {runner.isolation()}, {options.at_once} at a time on {os.cpu_count()} cores")
        asyncio.run(sandboxed(options.at_once, options.at_once, options.libraries))
        before = leftovers()
        after: dict[str, int] = {}

        def work(runs: int) -> None:
            memory = asyncio.run(sandboxed(runs, options.at_once, options.libraries))
            if memory:
                print(f"largest memory of a program: {memory / 1024:.0f} MiB")
            after.update(leftovers())
            runner.POOL.close()  # its CPU time is counted after it has ended

        reached = rate("sandbox", work, options.runs)
    few = min(options.runs, 100)
    alone = rate("subprocess.run([python, -c, pass])", lambda runs: bare(runs), few)
    rate("subprocess.run([python, -I, -S, -c, pass])", lambda runs: bare(runs, "-I", "-S"), few)
    left = {name: after[name] - before[name] for name in after}
    print(f"sandbox / bare: {reached / alone:.2f}")
    print(f"left after {options.runs} runs: {', '.join(f'{count} {name}' for name, count in left.items())}")
    return int(reached < options.limit or any(left.values()))


if __name__ == "__main__":
    raise SystemExit(main())
