"""What a demonstration is, and how answers with mistakes are written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from verl_atgrpo.environment import Environment, Message, Split, make
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.common.records import Record

END = ""
"""Stands for the end of an answer among a demonstrator's choices."""
SPLITS: tuple[Split, ...] = get_args(Split)

Choice = dict[str, float]
"""The demonstrator's distribution over tokens and END at one place of an answer."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt, an answer to it, and how likely the demonstrator was to go on otherwise."""

    prompt: list[Message]
    answer: Sequence[str]
    """Token by token; in a text every character is one."""
    choices: list[Choice]
    """One for every token of the answer, and one for what comes after it. Learning from these instead of from the
    one token drawn takes several times fewer examples."""


@dataclass(frozen=True)
class Demonstrator:
    """Who shows a tiny model one environment."""

    environment: str
    """Its registered name."""
    options: Mapping[str, Any]
    """Its options, those of the CPU recipe."""
    demonstrate: Callable[[Any, random.Random, float], Demonstration]
    """Returns an answer to a prompt of the environment's, on a training task drawn with the generator; tokens that
    matter are random ones with the chance given."""
    response_length: int
    """Tokens of the longest answer, its end included."""
    words: tuple[str, ...] = ()
    """Words of the prompts and answers that are one token each, which makes rows shorter."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `warm_start.WarmStart` that are other than its defaults."""
    rows: Callable[[Split], list[Record]] | None = None
    """Makes the rows of its data set; None where tasks are generated."""

    def options_in(self, directory: Path) -> dict[str, Any]:
        """Returns the environment's options, its data set being `<split>.jsonl` in `directory` if it has one."""
        if self.rows is None:
            return dict(self.options)
        return {
            **self.options,
            **{split: {**self.options.get(split, {}), "path": str(directory / f"{split}.jsonl")} for split in SPLITS},
        }

    def make_environment(self, directory: Path) -> Environment:
        """Returns the environment whose answers are shown; its data set, if it has one, is written to `directory`."""
        if self.rows is not None:
            directory.mkdir(parents=True, exist_ok=True)
            for split in SPLITS:
                lines = [json.dumps(row) + "\n" for row in self.rows(split)]
                (directory / f"{split}.jsonl").write_text("".join(lines))
        return make(self.environment, **self.options_in(directory))


DIGITS = "0123456789"


def sure(tokens: Sequence[str]) -> list[Choice]:
    """Returns the choices of someone who writes exactly these tokens."""
    return [{token: 1.0} for token in tokens]


def unsure(text: str, noise: float, *kinds: str) -> list[Choice]:
    """Returns the choices of someone who takes a character for any of its kind with chance `noise`.

    A kind is a text of the characters that are confused with each other; those of no kind are sure.
    """
    choices = []
    for char in text:
        likely = next((kind for kind in kinds if char in kind), char)
        choices.append({other: noise / len(likely) + (other == char) * (1 - noise) for other in likely})
    return choices


def write(choices: Sequence[Choice], rng: random.Random) -> tuple[list[str], list[Choice]]:
    """Returns an answer drawn from `choices`, and these with its end, as a `Demonstration` takes them."""
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
    """Returns at most `limit` moves from `position` and the choices they were drawn from.

    The demonstrator takes any of the good moves, or follows `draft` for as long as it has done so; each move is a
    random one with chance `noise`, after which it goes on from where that led. It ends where no move is good.
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
