"""Environments that train the planner alone, for the variant "each trained alone, then put in the team".

Its prompts are the team's prompts without a draft. A tool user alone is the game's single agent.
"""

from __future__ import annotations

from typing import Any, ClassVar

from verl_atgrpo import Candidate, Message, Team
from verl_atgrpo.environments.common.drafting import Draft, SingleAgent
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.sudoku import Sudoku


class PlannerAlone(SingleAgent[Any, Any]):
    """A planner without tool user."""

    agents: ClassVar[tuple[str, ...]] = ("planner",)

    def answer_prompt(self, state: Any) -> list[Message]:
        """Returns the planner's prompt without a draft."""
        return self.plan_prompt(state, Draft("", None))

    async def decide(self, state: Any, team: Team) -> Candidate:
        """Returns the reply that is played in a turn."""
        return await team.planner.act(self.answer_prompt(state), lambda reply: self.score_reply(state, reply))


class PlanPathPlanner(PlannerAlone, PlanPath):
    """Plan-Path for the planner alone."""


class SudokuPlanner(PlannerAlone, Sudoku):
    """Sudoku for the planner alone."""
