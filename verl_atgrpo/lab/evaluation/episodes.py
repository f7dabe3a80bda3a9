"""Plays the episodes of an evaluation concurrently and writes each to the result file when it ends."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_atgrpo.lab.evaluation.results import AgentUsage, EpisodeKey, EpisodeRow, Failure, ResultFile
from verl_atgrpo.play.environment import Environment, play
from verl_atgrpo.play.sampler import Sampler
from verl_atgrpo.play.seeds import episode_seed
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.types import EVALUATE, Decision, EpisodeFailed, Outcome, PolicyUnusable, TeamOptions
from verl_atgrpo.play.user_code import asking, gather_or_cancel

logger = logging.getLogger(__name__)

_REPORTS = 10
"""Number of progress logs per run."""


@dataclass(frozen=True)
class Lineup:
    """The agents' policies."""

    agents: Mapping[str, str]
    """Agent -> policy."""
    samplers: Mapping[str, Sampler]
    """Agent -> its sampler, shared by all episodes."""
    versus: Mapping[str, str] = field(default_factory=dict)
    """Agent -> policy where the agent is an opponent, if that is another one."""
    versus_samplers: Mapping[str, Sampler] = field(default_factory=dict)

    def against(self, opponents: Sequence[str]) -> Lineup:
        """Returns the policies for a task with these opponents."""
        if not self.versus:
            return self
        policies = {agent: self.versus[agent] for agent in opponents}
        samplers = {agent: self.versus_samplers[agent] for agent in opponents}
        return Lineup({**self.agents, **policies}, {**self.samplers, **samplers})


def wanted(tasks: int, seeds: Sequence[int], episodes: int) -> list[EpisodeKey]:
    """Returns the episodes of an evaluation, ordered by seed, sample, task."""
    return [EpisodeKey(task, seed, sample) for seed in seeds for sample in range(episodes) for task in range(tasks)]


def pending(keys: Iterable[EpisodeKey], rows: Mapping[EpisodeKey, EpisodeRow]) -> list[EpisodeKey]:
    """Returns the episodes that were not played or that failed."""
    return [key for key in keys if key not in rows or rows[key].failed is not None]


def check_tasks(environment: Environment, rows: Iterable[EpisodeRow]) -> None:
    """Raises ValueError if a task is not the problem that it was when its episodes were played."""
    known: dict[int, str] = {}
    for row in rows:
        if row.task not in known:
            known[row.task] = _task(environment, row.task)[2]
        if row.fingerprint != known[row.task]:
            raise ValueError(f"task {row.task} has changed since its episodes were played: name another file")


def _task(environment: Environment, index: int) -> tuple[Any, Sequence[str], str]:
    """Returns a validation task, its opponents and its fingerprint, or raises EnvironmentConfigError."""
    with asking(type(environment).__name__, f"task('val', {index}), its opponents or its fingerprint"):
        task = environment.task("val", index)
        text = environment.fingerprint(task).encode()
        return task, environment.opponents(task), hashlib.blake2b(text, digest_size=16).hexdigest()


async def play_all(
    environment: Environment,
    lineup: Lineup,
    keys: Sequence[EpisodeKey],
    results: ResultFile,
    *,
    in_flight: int,
    max_failed: int,
) -> None:
    """Plays `keys` and adds each to `results` when it ends; an error cancels the episodes in flight.

    At most `in_flight` are played at the same time. Raises PolicyUnusable if a policy cannot answer any request, and
    RuntimeError if more than `max_failed` episodes failed, or the environment has a defect.
    """
    queue, played, started = iter(keys), list[EpisodeRow](), time.monotonic()

    async def play_next() -> None:
        for key in queue:
            played.append(await play_one(environment, lineup, key))
            results.add(played[-1])
            _report(played, len(keys), max_failed, started)

    await gather_or_cancel([play_next() for _ in range(min(in_flight, len(keys)))])


async def play_one(environment: Environment, lineup: Lineup, key: EpisodeKey) -> EpisodeRow:
    """Plays an episode with the seeds of validation during training; a failed one is a row with `failed`.

    Raises PolicyUnusable if a policy cannot answer any request, RuntimeError if the environment has a defect,
    EnvironmentConfigError if it cannot make the task.
    """
    task, opponents, fingerprint = _task(environment, key.task)
    lineup = lineup.against(opponents)
    team = Team(
        lineup.samplers,
        TeamOptions(),
        EVALUATE,
        policies=lineup.agents,
        episode_id=".".join(map(str, key)),
        seed=episode_seed(key.seed, "val", "val", key.task, key.sample),
        on_score_error=_fail,
    )
    started = time.monotonic()
    failure = None
    try:
        outcome = (await play(environment, task, team)).outcome
    except EpisodeFailed as failed:
        outcome, failure = Outcome(success=False), Failure(failed.reason, str(failed))
    except PolicyUnusable:
        raise
    except Exception as error:  # any error of a user's environment, reported with its episode
        raise RuntimeError(f"task {key.task}, seed {key.seed}, sample {key.sample}: {error!r}") from error
    decided = Counter(decision.agent for decision in team.decisions)
    return EpisodeRow(
        task=key.task,
        fingerprint=fingerprint,
        seed=key.seed,
        sample=key.sample,
        success=outcome.success,
        team_reward=outcome.team_reward,
        metrics=dict(outcome.metrics),
        turns=max(decided.values(), default=0),
        decisions=len(team.decisions),
        agents={agent: _usage(agent, policy, team.decisions) for agent, policy in lineup.agents.items()},
        failed=failure,
        seconds=round(time.monotonic() - started, 3),
    )


def _fail(agent: str, turn: int, reply: str, error: Exception) -> None:
    message = f"agent {agent!r}, turn {turn}: scoring {reply[:500]!r} raises {error!r}"
    raise EpisodeFailed("score", message) from error


def _usage(agent: str, policy: str, decisions: Sequence[Decision]) -> AgentUsage:
    mine = [decision for decision in decisions if decision.agent == agent]
    sampled = [(decision, candidate.generation) for decision in mine for candidate in decision.candidates]
    return AgentUsage(
        policy=policy,
        decisions=len(mine),
        prompt_tokens=sum(len(d.prompt_ids) if made.usage is None else made.usage[0] for d, made in sampled),
        generated_tokens=sum(made.tokens for _, made in sampled),
        truncated=sum(made.truncated for _, made in sampled),
    )


def _report(played: Sequence[EpisodeRow], total: int, max_failed: int, started: float) -> None:
    """Logs the last episode if it failed, and progress; raises RuntimeError if too many of this run failed."""
    row, done = played[-1], len(played)
    is_due = done * _REPORTS // total > (done - 1) * _REPORTS // total
    if row.failed is None and not is_due:
        return
    failed = Counter(one.failed.reason for one in played if one.failed is not None)
    if row.failed is not None:
        logger.warning("task %d, seed %d, sample %d failed: %s", *row.key, row.failed.message)
        if failed.total() > max_failed:
            raise RuntimeError(
                f"{failed.total()} episodes of this run failed ({dict(failed)}), more than "
                f"at_grpo.max_failed_episodes={max_failed}; the same command retries them"
            )
    if is_due:
        solved, speed = sum(one.success for one in played), done / max(time.monotonic() - started, 1e-9)
        counts = done, total, solved, failed.total(), speed
        logger.info("%d of %d episodes, %d solved, %d failed, %.1f episodes/s", *counts)
