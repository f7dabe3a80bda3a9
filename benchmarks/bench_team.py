"""Measures framework time per decision: everything but model and score.

python benchmarks/bench_team.py [--episodes 64] [--turns 4] [--candidates 8] [--limit-ms 2] [--branch every]

With --branch episodes are played again for every candidate of their branch points; decisions are then those that were
sampled, in episodes and continuations, not those that were replayed.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time

import script
from fakes.simulated_engine import Turns

from verl_atgrpo import ScriptedTeam, Team, play
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.types import EpisodeRecord, PlayMode, TeamOptions
from verl_atgrpo.train.config.schema import BranchSettings
from verl_atgrpo.train.rollout.episode_rows import training_rows


async def step(environment: Turns, episodes: int, candidates: int) -> tuple[int, int]:
    """Plays the episodes concurrently and makes their rows; returns (decisions, rows)."""
    scripts = {agent: lambda prompt, index: "4321" for agent in environment.agents}
    records = await asyncio.gather(
        *(play(environment, task, ScriptedTeam(scripts, candidates=candidates)) for task in range(episodes))
    )
    rows = [row for task, record in enumerate(records) for row in training_rows(str(task), 0, record, "tree")]
    return sum(len(record.decisions) for record in records), len(rows)


async def branched_step(environment: Turns, episodes: int, candidates: int, at: str) -> tuple[int, int]:
    """Plays the episodes and their branches concurrently and makes their rows; returns (decisions, rows)."""
    policies = {agent: ScriptedPolicy(lambda prompt, index: "4321") for agent in environment.agents}

    def make(mode: PlayMode) -> Team:
        return Team(policies, TeamOptions(candidates=candidates), mode)

    async def one(task: int) -> EpisodeRecord:
        return await play_branched(environment, task, make, BranchSettings.model_validate({"at": at}), task)

    records = await asyncio.gather(*(one(task) for task in range(episodes)))
    rows = [row for task, record in enumerate(records) for row in training_rows(str(task), 0, record, "branch")]
    samples = sum(count for policy in policies.values() for count in policy.calls.values())
    groups = sum(decision.trained for record in records for decision in record.decisions)
    return samples - groups * (candidates - 1), len(rows)


def main() -> int:
    """Prints the median over ten steps; status 1 if it is above the limit."""
    parser = script.parser(__doc__, episodes=64, turns=4, candidates=8, limit_ms=2.0)
    parser.add_argument("--branch", choices=["first", "random", "every"])
    options = parser.parse_args()
    gc.freeze()  # as in rollout workers: what is imported is not looked through again and again
    environment = Turns(options.turns)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        sizes = environment, options.episodes, options.candidates
        decisions, rows = asyncio.run(branched_step(*sizes, options.branch) if options.branch else step(*sizes))
        times.append((time.perf_counter() - started) / decisions * 1e3)
    median = statistics.median(times)
    print(f"{decisions} decisions, {rows} candidates, K = {options.candidates}")
    print(f"framework time per decision: {median:.3f} ms (limit {options.limit_ms} ms)")
    return int(median > options.limit_ms)


if __name__ == "__main__":
    raise SystemExit(main())
