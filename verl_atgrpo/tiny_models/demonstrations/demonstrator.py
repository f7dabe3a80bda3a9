"""Demonstrations: prompts with answers that are sampled from known distributions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.common.records import Record
from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.messages import Message
from verl_atgrpo.play.registry import make
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import Split

END = ""
"""Represents the end of an answer in a distribution."""
SPLITS: tuple[Split, ...] = get_args(Split)

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
    rows: Callable[[Split], list[Record]] | None = None
    """Returns the rows of the environment's data set; None for generated tasks."""

    def options_in(self, directory: Path) -> dict[str, Any]:
        """Returns the environment's options; a data set is `<split>.jsonl` in `directory`."""
        if self.rows is None:
            return dict(self.options)
        return {
            **self.options,
            **{split: {**self.options.get(split, {}), "path": str(directory / f"{split}.jsonl")} for split in SPLITS},
        }

    def make_environment(self, directory: Path) -> Environment:
        """Returns the environment; writes its data set, if it has one, to `directory`."""
        if self.rows is not None:
            directory.mkdir(parents=True, exist_ok=True)
            for split in SPLITS:
                lines = [json.dumps(row) + "\n" for row in self.rows(split)]
                (directory / f"{split}.jsonl").write_text("".join(lines))
        return make(self.environment, **self.options_in(directory))


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


Position = TypeVar("Position")


def move_about(
    position: Position,
    good_moves: Callable[[Position], Collection[str]],
    step: Callable[[Position, str], Position],
    noise: float,
    limit: int,
    rng: random.Random,
    draft: str = "",
) -> tuple[str, list[Choice]]:
    """Returns at most `limit` moves from `position` and the distributions they were sampled from.

    Moves are uniform over the good ones, or follow `draft` until the first deviation from it; with probability `noise`
    a move is random. The answer ends if no move is good.
    """
    moves, choices = "", []
    while len(moves) < limit and (good := good_moves(position)):
        if draft.startswith(moves) and len(draft) > len(moves):
            good = [draft[len(moves)]]
        choices.append({name: noise / len(MOVES) + (name in good) * (1 - noise) / len(good) for name in MOVES})
        names, chances = zip(*choices[-1].items(), strict=True)
        move = rng.choices(names, chances)[0]
        moves += move
        position = step(position, move)
    return moves, [*choices, {END: 1.0}]
