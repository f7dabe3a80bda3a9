"""A team whose policies are tables, so that every path can be enumerated and the gradient is known exactly."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from fakes.scripted_policy import Numbered
from numpy.typing import NDArray

from verl_atgrpo import Message, Outcome, Score, Team, play, stable_hash
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.types import TREE, EpisodeRecord, Generation, PlayMode, TeamOptions
from verl_atgrpo.train.config.schema import BranchSettings

REPLIES = "012"
ORDER = ("left", "right", "left", "right")
"""Who decides; each is told all replies before."""
Gradient = NDArray[np.float64]
"""Derivatives by the logits of every reply after every history, float64 (number of histories, 3)."""

Play = Callable[[int], Coroutine[Any, Any, EpisodeRecord]]
"""Plays an episode by its number."""
HISTORIES = ["".join(said) for length in range(len(ORDER)) for said in itertools.product(REPLIES, repeat=length)]


class Tables:
    """Logits for every history and outcomes for every episode, from a seed."""

    def __init__(self, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        self.policy = {}
        for history in HISTORIES:
            weights = np.exp(numbers.normal(size=len(REPLIES)))
            self.policy[history] = weights / weights.sum()
        ends = ["".join(said) for said in itertools.product(REPLIES, repeat=len(ORDER))]
        self.outcomes = {end: float(worth) for end, worth in zip(ends, numbers.uniform(size=len(ends)), strict=True)}

    def value(self, said: str) -> float:
        """Returns the expected outcome after these replies."""
        if said in self.outcomes:
            return self.outcomes[said]
        return float(sum(self.policy[said][k] * self.value(said + reply) for k, reply in enumerate(REPLIES)))

    def gradient(self) -> Gradient:
        """Returns the exact gradient of the expected outcome."""
        total = np.zeros((len(HISTORIES), len(REPLIES)))
        reached = {"": 1.0}
        for row, history in enumerate(HISTORIES):  # shorter ones first
            shares, probability = self.policy[history], reached[history]
            for k, reply in enumerate(REPLIES):
                reached[history + reply] = probability * shares[k]
                total[row] += (
                    probability * shares[k] * self.value(history + reply) * (np.eye(len(REPLIES))[k] - shares)
                )
        return total

    def estimate(self, record: EpisodeRecord) -> Gradient:
        """Returns an episode's estimate: (reward - mean of the others') * d log-prob, times the decision's weight."""
        total = np.zeros((len(HISTORIES), len(REPLIES)))
        for decision in record.decisions:
            if not decision.trained:
                continue
            history = "".join(map(chr, decision.prompt_ids))
            rewards = [candidate.reward for candidate in decision.candidates]
            for candidate, reward in zip(decision.candidates, rewards, strict=True):
                others = (sum(rewards) - reward) / (len(rewards) - 1)
                direction = np.eye(len(REPLIES))[int(candidate.text)] - self.policy[history]
                total[HISTORIES.index(history)] += decision.weight * (reward - others) * direction / len(rewards)
        return total

    def estimates(self, play: Play, episodes: int) -> list[Gradient]:
        """Returns the estimates of the episodes with the numbers 0, 1, ..."""

        async def all_of_them() -> list[Gradient]:
            return [self.estimate(await play(number)) for number in range(episodes)]

        return asyncio.run(all_of_them())


class Relay(Numbered):
    """Two agents speak in turns; the outcome is looked up by all that was said."""

    agents = ("left", "right")

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    async def run(self, task: int, team: Team) -> Outcome:
        said = ""
        for agent in ORDER:
            # The exact value of a reply, which only a game of tables can tell.
            exact = functools.partial(self._exact, said)
            said += (await team[agent].act(said, exact)).text
        return Outcome(False, self.tables.outcomes[said])

    def _exact(self, said: str, reply: str) -> Score:
        return Score(team=self.tables.value(said + reply))


class TablePolicy:
    """Samples from the tables; a seed decides each sample."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [ord(char) for message in messages for char in message["content"]]

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        shares = self.tables.policy["".join(map(chr, prompt_ids))]
        (reply,) = random.Random(seed).choices(REPLIES, shares)
        return Generation([ord(reply)], [0.0], reply)


async def branched(tables: Tables, number: int, options: BranchSettings, candidates: int) -> EpisodeRecord:
    """Plays an episode with branches."""
    k = TeamOptions(candidates=candidates)

    def make(mode: PlayMode) -> Team:
        return _team(tables, number, k, mode)

    return await play_branched(Relay(tables), 0, make, options, number)


async def tree(tables: Tables, number: int, **options: Any) -> EpisodeRecord:
    """Plays an episode of AT-GRPO: K candidates at every decision, scored by their exact values."""
    return await play(Relay(tables), 0, _team(tables, number, TeamOptions(**options)))


def _team(tables: Tables, number: int, options: TeamOptions, mode: PlayMode = TREE) -> Team:
    samplers = dict.fromkeys(Relay.agents, TablePolicy(tables))
    return Team(samplers, options, mode, seed=stable_hash("episode", number))


def distance(estimates: Sequence[Gradient], exact: Gradient) -> tuple[float, float]:
    """Returns how far the mean of estimates is from the exact gradient, and its standard error, in Euclidean norm.

    For an unbiased estimate the two are equal on average.
    """
    stacked = np.stack(estimates)
    error = stacked.mean(0) - exact
    variance = stacked.var(0, ddof=1) / len(stacked)
    return float(np.sqrt((error**2).sum())), float(np.sqrt(variance.sum()))
