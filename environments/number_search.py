"""Number search: a guesser names the middle of what is left, a judge says which is larger, the guess or the secret.

The guesser is given the numbers that are left, so that its answer is a copy from the middle of a list.
The judge answers with a number: small models learn in a few steps to copy the larger of two numbers, and for dozens
of steps answer "yes" or "no" by chance. A wrong verdict excludes the secret, which ends the episode. Splits differ in
the first number of the range, so no first prompt of validation occurs in training.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from verl_atgrpo import Environment, Outcome, Score, Split, Team, stable_hash
from verl_atgrpo.environments.common.options import Turns, option_error, with_options
from verl_atgrpo.environments.common.splits import part_of
from verl_atgrpo.environments.common.words import read_number
from verl_atgrpo.environments.common.workflow import chat

_ANY, _INSIDE = 0.05, 0.1
_FIRST = 10
"""First number of the lowest range: small models compare numbers digit by digit, 9 and 12 wrongly for long."""
_LISTED = 40
"""Most numbers that the guesser is given one by one, which small models understand better than the ends of a range."""


@dataclass(frozen=True)
class Search:
    """A secret number, and the range in which it is known to be."""

    secret: int
    low: int
    high: int

    def inside(self, guess: int) -> bool:
        """Returns whether a guess is in the range."""
        return self.low <= guess <= self.high

    def after(self, guess: int, larger: bool) -> Search:
        """Returns the search after the verdict that a guess is larger than the secret, or smaller."""
        return replace(self, high=guess - 1) if larger else replace(self, low=guess + 1)

    def worst(self, guess: int) -> int:
        """Returns how many numbers are left after a guess in the range, at worst."""
        return max(guess - self.low, self.high - guess)


@with_options
class NumberSearch(Environment):
    """A guesser names numbers, a judge says which is larger, the guess or the secret."""

    agents: ClassVar[tuple[str, ...]] = ("guesser", "judge")

    numbers: Annotated[int, Ge(2), Le(1000)] = 15
    """Numbers in the range."""
    starts: Annotated[int, Ge(2), Le(1000)] = 30
    """Numbers that the range may start with; the first is 10."""
    max_turns: Turns = 4
    """Guesses of an episode."""
    seed: int = 0
    """Tasks derive from it."""

    def __post_init__(self) -> None:
        if 2**self.max_turns <= self.numbers:
            raise option_error(
                f"max_turns={self.max_turns}: so many guesses find one of at most {2**self.max_turns - 1} numbers, "
                f"and numbers={self.numbers}"
            )

    def task(self, split: Split, index: int) -> Search:
        """Returns search `index` of `split`; splits are disjoint because they have different ranges."""
        rng = random.Random(stable_hash("number_search", self.seed, split, index))
        low = rng.choice(part_of(range(_FIRST, _FIRST + self.starts), split))
        return Search(low + rng.randrange(self.numbers), low, low + self.numbers - 1)

    def fingerprint(self, task: Search) -> str:
        """Returns range and secret."""
        return f"{task.secret} from {task.low} to {task.high}"

    def task_key(self, task: Search) -> str:
        """Returns the range, which the first prompt tells."""
        return f"{task.low} {task.high}"

    def hindsight(self, task: Search) -> str:
        """Returns the secret."""
        return f"The number is {task.secret}."

    async def run(self, task: Search, team: Team) -> Outcome:
        """Plays one episode; success means that the secret was guessed."""
        search, turns, found = task, 0, False
        while turns < self.max_turns and not found and search.inside(task.secret):
            turns += 1
            guess = await self._guess(search, team)
            if guess is None:
                continue
            found = guess == task.secret
            larger = None if found else await self._is_larger(search, guess, team)
            if larger is not None:
                search = search.after(guess, larger)
        misled = not search.inside(task.secret)
        return Outcome(found, float(found), {"turns": float(turns), "misled": float(misled)})

    async def _guess(self, search: Search, team: Team) -> int | None:
        """Returns the team's guess, or None if it makes none inside the range."""
        numbers = range(search.low, search.high + 1)
        left = ", ".join(map(str, numbers)) if len(numbers) <= _LISTED else f"{search.low} to {search.high}"
        prompt = chat(f"Which number is in the middle? Answer with the number only. Numbers: {left}.")
        reply = await team[self.agents[0]].act(prompt, functools.partial(self.score_guess, search))
        said = read_number(reply.text)
        return said.value if said is not None and search.inside(said.value) else None

    async def _is_larger(self, search: Search, guess: int, team: Team) -> bool | None:
        """Returns whether the guess is larger than the secret according to the judge, or None if it does not say."""
        reply = await team.judge.act(
            chat(f"Which number is larger, {guess} or {search.secret}? Answer with the number only."),
            functools.partial(self.score_verdict, search, guess),
        )
        said = read_number(reply.text)
        return said.value == guess if said is not None and said.value in (guess, search.secret) else None

    def score_guess(self, search: Search, reply: str) -> Score:
        """Scores a guess by what it leaves at worst: 1 in the middle, down to .1 at an end, .05 out of the range.

        Whether it is the secret does not count: that is luck.
        """
        said = read_number(reply)
        if said is None:
            return Score()
        if not search.inside(said.value):
            return said.worth(_ANY)
        most, least = search.high - search.low, (search.high - search.low + 1) // 2
        share = 1.0 if most == least else (most - search.worst(said.value)) / (most - least)
        return said.worth(_INSIDE + (1 - _INSIDE) * share)

    def score_verdict(self, search: Search, guess: int, reply: str) -> Score:
        """Scores a verdict: 1 for the larger number, .05 for the other one."""
        said = read_number(reply)
        if said is None or said.value not in (guess, search.secret):
            return Score()
        return said.worth(1.0 if said.value == max(guess, search.secret) else _ANY)


class SingleNumberSearch(NumberSearch):
    """One agent guesses; the environment says whether a guess is larger, so nobody can mislead it."""

    agents: ClassVar[tuple[str, ...]] = ("solo",)

    async def _is_larger(self, search: Search, guess: int, team: Team) -> bool | None:
        return guess > search.secret
