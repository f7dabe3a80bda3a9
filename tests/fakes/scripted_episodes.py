"""Episodes with scripted players, and the parts of their records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from verl_atgrpo import Environment, ScriptedTeam, make, play
from verl_atgrpo.play.types import Decision, EpisodeRecord

Script = Callable[[str, int], str]
"""(prompt, number of the candidate) -> text."""


def scripted(env: Environment, task: object, scripts: Mapping[str, Script], candidates: int = 1) -> EpisodeRecord:
    return asyncio.run(play(env, task, ScriptedTeam(scripts, candidates=candidates)))


def episode(env: Environment, task: object, tool_user: Script, planner: Script, candidates: int = 1) -> EpisodeRecord:
    """An episode of a drafting game."""
    return scripted(env, task, {"tool_user": tool_user, "planner": planner}, candidates)


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    """The decisions of an agent, by turn."""
    return sorted((one for one in record.decisions if one.agent == agent), key=lambda decision: decision.turn)


def here(name: str) -> Callable[..., Environment]:
    """Makes environments for `check_environment` only in this process: imports in another one are slow."""
    return lambda **options: make(name, **options)


def check_programs(
    env: Environment, task: object, answers: Mapping[str, tuple[float, float]], planner: Script
) -> Decision:
    """Asserts the scores (team, local) of the tool user's replies, of which the last one is the best and the planner
    solves the task; returns the planner's decision."""
    texts = list(answers)
    record = episode(env, task, lambda prompt, k: texts[k], planner, candidates=len(texts))
    draft, plan = record.decisions
    scores = [(candidate.score.team, pytest.approx(candidate.score.local)) for candidate in draft.candidates]
    assert scores == list(answers.values())
    assert draft.committed == len(texts) - 1
    assert record.outcome.success
    return plan
