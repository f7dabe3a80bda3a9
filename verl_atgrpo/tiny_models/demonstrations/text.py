"""Answers that are a fixed text with some places that can go wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

from verl_atgrpo.tiny_models.demonstrations.demonstrator import END, Choice

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
