"""Teams with a policy that records its requests and responds by a function of the test."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from waiting import HANG

from verl_atgrpo import Environment, Message, Outcome, Score, Team, play
from verl_atgrpo.play.types import EpisodeRecord, Generation, PlayMode, TeamOptions

Answer = Callable[[str, int], Awaitable[str]]
"""(decision id, number of the candidate at that decision) -> text."""
Workflow = Callable[[Team], Awaitable[Outcome | None]]

T = TypeVar("T")


class Numbered(Environment):
    """An environment whose tasks are their numbers."""

    def task(self, split: str, index: int) -> int:
        return index

    def fingerprint(self, task: int) -> str:
        return str(task)


class Play(Numbered):
    """An environment that runs a given workflow."""

    agents = ("left", "right")

    def __init__(self, workflow: Workflow) -> None:
        self._workflow = workflow

    async def run(self, task: int, team: Team) -> Outcome:
        return await self._workflow(team) or Outcome(False)


class Recorder:
    """A policy that records its requests and responds by a function of the test."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.encoded: list[list[Message]] = []
        self.asked: list[tuple[str, list[int], int | None]] = []
        self._numbers: Counter[str] = Counter()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        self.encoded.append(list(messages))
        return [ord(char) for message in messages for char in message["content"]]

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        number = self._numbers[decision_id]
        self._numbers[decision_id] += 1
        self.asked.append((decision_id, list(prompt_ids), seed))
        text = await self.answer(decision_id, number)
        return Generation([ord(char) for char in text], [-0.5] * len(text), text)

    @property
    def seeds(self) -> list[int | None]:
        return [seed for _, _, seed in self.asked]


async def number(decision_id: str, index: int) -> str:
    return str(index)


def team_of(
    answer: Answer = number, agents: Sequence[str] = ("left", "right"), **kwargs: Any
) -> tuple[Team, Recorder]:
    """A team whose agents share one recording policy; keywords of TeamOptions, PlayMode and Team mixed."""
    names = ("candidates", "agent_candidates", "alpha", "local_weight", "selection")
    options = TeamOptions(**{key: kwargs.pop(key) for key in names if key in kwargs})
    mode = PlayMode(**{key: kwargs.pop(key) for key in ("scheme", "scored") if key in kwargs})
    kwargs.setdefault("mode", mode)
    policy = Recorder(answer)
    policies = dict.fromkeys(agents, "shared")
    return Team(dict.fromkeys(agents, policy), options, policies=policies, **kwargs), policy


def run(workflow: Workflow, team: Team) -> EpisodeRecord:
    return bounded(play(Play(workflow), 0, team))


def bounded(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main`; fails after a timeout, or if a task is still running."""

    async def whole() -> T:
        before = asyncio.all_tasks()
        result = await main
        assert asyncio.all_tasks() == before
        return result

    async def limited() -> T:
        return await asyncio.wait_for(whole(), HANG)

    return asyncio.run(limited())


def rewarded(*rewards: float) -> Callable[[str], Score]:
    """Scores answer "k" with the k-th reward."""
    return lambda text: Score(local=rewards[int(text)])
