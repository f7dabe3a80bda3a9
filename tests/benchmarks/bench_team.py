"""Measures framework time per decision: everything but model and score.

python tests/benchmarks/bench_team.py [--episodes 64] [--turns 4] [--candidates 8] [--limit-ms 2]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from fakes.simulated_engine import Turns

from verl_atgrpo.rollout.rows import training_rows
from verl_atgrpo.team import ScriptedTeam, play


async def step(environment: Turns, episodes: int, candidates: int) -> tuple[int, int]:
    """Plays the episodes concurrently and makes their rows; returns (decisions, rows)."""
    scripts = {agent: lambda prompt, index: "4321" for agent in environment.agents}
    records = await asyncio.gather(
        *(play(environment, task, ScriptedTeam(scripts, candidates=candidates)) for task in range(episodes))
    )
    rows = [row for task, record in enumerate(records) for row in training_rows(str(task), 0, record, "tree")]
    return sum(len(record.decisions) for record in records), len(rows)


def main() -> int:
    """Prints the median over ten steps; status 1 if it is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--limit-ms", type=float, default=2.0)
    options = parser.parse_args()
    environment = Turns(options.turns)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        decisions, rows = asyncio.run(step(environment, options.episodes, options.candidates))
        times.append((time.perf_counter() - started) / decisions * 1e3)
    median = statistics.median(times)
    print(f"{decisions} decisions, {rows} candidates, K = {options.candidates}")
    print(f"framework time per decision: {median:.3f} ms (limit {options.limit_ms} ms)")
    return int(median > options.limit_ms)


if __name__ == "__main__":
    raise SystemExit(main())
