"""Answers of one word or number, for games that are told in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from verl_atgrpo import Score
from verl_atgrpo.environments.common.replies import after_thoughts

Value = TypeVar("Value", str, int)

WORDY = 0.05
"""What words beside the answer cost. Models that are trained learn within a few steps to answer with nothing else,
which makes steps several times faster."""
_LONGEST = 2000
"""Characters of a reply, from its end, in which an answer is looked for."""
_NOT_WHOLE = re.compile(r"[-\u2212.,/][0-9]|[0-9][,/^%][0-9]|[0-9]\.[0-9]|[0-9][A-Za-z]|[A-Za-z][0-9]")
"""Digits that are part of something else: a negative number, a fraction, a word."""
_AROUND = " \t\r\n.!*_`\"'"


@dataclass(frozen=True)
class Said(Generic[Value]):
    """An answer in a reply."""

    value: Value
    alone: bool
    """Whether the reply is nothing but the answer."""

    def worth(self, score: float) -> Score:
        """Returns the score of an answer that is worth `score`, less what further words cost."""
        return Score(local=score if self.alone else max(0.0, score - WORDY))


def read_word(reply: str, words: Sequence[str]) -> Said[str] | None:
    """Returns the one of `words` (in lower case) that a reply contains, in any case; None without or with several."""
    text = after_thoughts(reply)[-_LONGEST:]
    found = {word for word in re.findall(r"[a-z]+", text.lower()) if word in words}
    if len(found) != 1:
        return None
    (word,) = found
    return Said(word, text.strip(_AROUND).lower() == word)


def read_number(reply: str) -> Said[int] | None:
    """Returns the whole number from 0 to 9999 that a reply contains; None without one, with several, or in a word."""
    text = after_thoughts(reply)[-_LONGEST:]
    found = set(re.findall(r"[0-9]+", text))
    if len(found) != 1 or _NOT_WHOLE.search(text):
        return None
    (digits,) = found
    return Said(int(digits), text.strip(_AROUND) == digits) if digits.isascii() and len(digits) <= 4 else None
