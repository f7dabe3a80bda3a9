"""Episodes of the drafting games with scripted players."""

from __future__ import annotations

import asyncio

from verl_atgrpo.environments.common.drafting import DraftingGame
from verl_atgrpo.team import Decision, EpisodeRecord, ScriptedTeam, play
from verl_atgrpo.testing import Script


def episode(env: DraftingGame, task: object, tool_user: Script, planner: Script, candidates: int = 1) -> EpisodeRecord:
    team = ScriptedTeam({"tool_user": tool_user, "planner": planner}, candidates=candidates)
    return asyncio.run(play(env, task, team))


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    return [decision for decision in record.decisions if decision.agent == agent]
