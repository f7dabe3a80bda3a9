"""What a demonstrator is: someone who can answer an environment's compact prompts, with or without mistakes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from verl_atgrpo.environment import Environment, Message, Split, make
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
