"""Demonstrations: prompts with answers that are sampled from known distributions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.messages import Message
from verl_atgrpo.play.registry import make
from verl_atgrpo.play.tools import Tool

END = ""
"""Represents the end of an answer in a distribution."""

Choice = dict[str, float]
"""The demonstrator's distribution over tokens and END at one position of an answer."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt, an answer, and the distributions that its tokens were sampled from."""

    prompt: list[Message]
    answer: Sequence[str]
    """Tokens; in a string every character is a token."""
    choices: list[Choice]
    """Distributions of every token of the answer and of END. Training on distributions instead of sampled tokens takes
    several times fewer examples."""
    tools: Sequence[Tool] = ()
    """What the prompt gives it to call."""


@dataclass(frozen=True)
class Demonstrator:
    """Makes demonstrations for one environment."""

    environment: str
    """Registered name of the environment."""
    options: Mapping[str, Any]
    """Options of the environment, as in the CPU recipe."""
    demonstrate: Callable[[Any, random.Random, float], Demonstration]
    """Returns a demonstration on a random training task; with the given probability relevant tokens are random."""
    response_length: int
    """Tokens of the longest answer, including its end."""
    words: tuple[str, ...] = ()
    """Words of prompts and answers that are one token each, to shorten sequences."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `warm_start.WarmStart` that differ from its defaults."""

    def make_environment(self) -> Environment:
        """Returns the environment."""
        return make(self.environment, **self.options)


DIGITS = "0123456789"


def sure(tokens: Sequence[str]) -> list[Choice]:
    """Returns distributions that always give these tokens."""
    return [{token: 1.0} for token in tokens]


def unsure(text: str, noise: float, *kinds: str) -> list[Choice]:
    """Returns distributions over characters that with probability `noise` give a random one of the same kind.

    A kind is a string of characters that are confused with each other; other characters are certain.
    """
    choices = []
    for char in text:
        likely = next((kind for kind in kinds if char in kind), char)
        choices.append({other: noise / len(likely) + (other == char) * (1 - noise) for other in likely})
    return choices


def write(choices: Sequence[Choice], rng: random.Random) -> tuple[list[str], list[Choice]]:
    """Returns an answer sampled from `choices`, and the distributions including END."""
    answer = [rng.choices(*zip(*choice.items(), strict=True))[0] for choice in choices]
    return answer, [*choices, {END: 1.0}]
