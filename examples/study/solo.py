"""One role of a game on its own: how "trained alone, then put in the team" is trained.

The role gets the prompts that it gets in the team, but no partner, and its answer is played as it stands.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar

from verl_atgrpo import Outcome
from verl_atgrpo.environment import Message
from verl_atgrpo.environments.drafting import Draft, DraftingGame
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.sudoku import Sudoku
from verl_atgrpo.team import Team


class Solo(DraftingGame[Any, Any]):
    """A game of two roles, played by one of them."""

    @abstractmethod
    def ask(self, state: Any) -> list[Message]:
        """Returns the role's question."""

    async def run(self, task: object, team: Team) -> Outcome:
        """Plays one episode with the one agent there is."""
        state, turns = self.initial(task), 0
        while turns < self.max_turns and not self.solved(state):
            reply = await team[self.agents[0]].act(self.ask(state), functools.partial(self.score_reply, state))
            answer = self.parse(reply.text)
            state = state if answer is None else self.apply(state, answer)
            turns += 1
        return self.outcome(state, turns)


class Planner(Solo):
    """The planner, to whom nobody drafts."""

    agents: ClassVar[tuple[str, ...]] = ("planner",)

    def ask(self, state: Any) -> list[Message]:
        """Returns the planner's question, without a draft."""
        return self.plan_prompt(state, Draft("", None))


class ToolUser(Solo):
    """The tool user, whose draft is the answer."""

    agents: ClassVar[tuple[str, ...]] = ("tool_user",)

    def ask(self, state: Any) -> list[Message]:
        """Returns the tool user's question."""
        return self.draft_prompt(state)


class PlanPathPlanner(Planner, PlanPath):
    """Plan-Path for the planner alone."""


class PlanPathToolUser(ToolUser, PlanPath):
    """Plan-Path for the tool user alone."""


class SudokuPlanner(Planner, Sudoku):
    """Sudoku for the planner alone."""


class SudokuToolUser(ToolUser, Sudoku):
    """Sudoku for the tool user alone."""
