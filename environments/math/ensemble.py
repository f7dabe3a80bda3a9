"""Further workflows for mathematics: an ensemble with a judge, and a debate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from verl_atgrpo import Message, Outcome, Team
from verl_atgrpo.environments.common.options import Players, Turns, check_isolation, check_libraries, checked_options
from verl_atgrpo.environments.math.answers import majority
from verl_atgrpo.environments.math.team import (
    ASK_REASONING,
    LIMITS,
    Attempt,
    MathEnvironment,
    MathTask,
    ask_program,
    dialogue,
)


class MathEnsemble(MathEnvironment):
    """Reasoners and tool users answer in parallel; a judge sees all answers and decides.

    All reasoners are the agent `reasoner`, with one decision and so one group each; likewise the tool users.
    """

    agents: ClassVar[tuple[str, ...]] = ("reasoner", "tool_user", "judge")

    @checked_options
    def __init__(
        self,
        train: object = None,
        val: object = None,
        reasoners: Players = 2,
        tool_users: Players = 1,
        require_isolation: bool = False,
        libraries: Sequence[str] | None = None,
    ) -> None:
        """Reads the problems.

        Args:
            train: training problems (columns: question, answer).
            val: validation problems.
            reasoners: their number.
            tool_users: agents that answer by a program.
            require_isolation: refuses machines below level `namespaces` (docs/sandbox.md).
            libraries: packages that programs can import besides the standard library; by default sympy and numpy, if
                installed.

        Raises EnvironmentConfigError like `MathEnvironment`, for a number below 1, or if programs cannot be run as
        required.
        """
        check_isolation(require_isolation)
        super().__init__(train, val)
        self.libraries = check_libraries(libraries, LIMITS)
        self.reasoners = reasoners
        self.tool_users = tool_users

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the judge's answer is correct."""
        await self.check(task)
        ask = ask_program(self.libraries)
        names = [f"reasoner {number + 1}" for number in range(self.reasoners)]
        tools = [f"tool user {number + 1}" for number in range(self.tool_users)]
        attempts = await asyncio.gather(
            *(self.reason(team.reasoner, task, dialogue(name, task, [], ASK_REASONING)) for name in names),
            *(self.compute(team.tool_user, task, dialogue(name, task, [], ask)) for name in tools),
        )
        decide = f"Some of them may be wrong: decide. {ASK_REASONING}"
        asked = partial(_seen, "judge", task, dict(zip(names + tools, attempts, strict=True)), decide)
        verdict = await self.reason(team.judge, task, asked)
        return await self.outcome(task, verdict.answer)


class MathDebate(MathEnvironment):
    """Debaters answer in parallel, see each other's answers and revise theirs; the majority's answer counts."""

    agents: ClassVar[tuple[str, ...]] = ("debater",)

    @checked_options
    def __init__(
        self,
        train: object = None,
        val: object = None,
        debaters: Annotated[int, Ge(2), Le(64)] = 3,
        rounds: Turns = 2,
    ) -> None:
        """Reads the problems.

        Args:
            train: training problems (columns: question, answer).
            val: validation problems.
            debaters: their number.
            rounds: rounds; from the second on, prompts show the others' answers.

        Raises EnvironmentConfigError like `MathEnvironment`, or for fewer than 2 debaters or 1 round.
        """
        super().__init__(train, val)
        self.debaters = debaters
        self.rounds = rounds

    async def run(self, task: MathTask, team: Team) -> Outcome:
        """Plays one episode; success means that the majority's answer after the last round is correct."""
        await self.check(task)
        names = [f"debater {number + 1}" for number in range(self.debaters)]
        earlier: Mapping[str, Attempt] = {}
        answers: list[str | None] = []
        for _ in range(self.rounds):
            attempts = await asyncio.gather(
                *(
                    self.reason(team.debater, task, partial(_seen, name, task, earlier, ASK_REASONING))
                    for name in names
                )
            )
            answers = [attempt.answer for attempt in attempts]
            earlier = dict(zip(names, attempts, strict=True))
        return await self.outcome(task, await majority(answers), self.rounds)


def _seen(role: str, task: MathTask, attempts: Mapping[str, Attempt], ask: str) -> list[Message]:
    """Returns a prompt that quotes attempts by the names of those who made them."""
    return dialogue(role, task, [attempt.quote(f"The {name}") for name, attempt in attempts.items()], ask)
