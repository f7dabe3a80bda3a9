"""Exact match and F1 of short answers, as SQuAD and HotpotQA compute them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = ("yes", "no", "noanswer")
"""Answers that have no words in common with others (HotpotQA)."""
_LONGEST = 1000
"""Characters of an answer, from its start, that are compared."""


def normalised(text: str, most: int | None = _LONGEST) -> str:
    """Returns a text in lower case without punctuation, articles and surplus blanks (SQuAD, arXiv 1606.05250).

    Of more than `most` characters, those at its start; None: all.
    """
    lower = "".join(char for char in text[:most].lower() if char not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", lower).split())


def exact(said: str, answers: Sequence[str]) -> bool:
    """Returns whether an answer is one of the accepted ones, up to `normalised`."""
    return any(normalised(said) == normalised(answer) for answer in answers)


def f1(said: str, answers: Sequence[str]) -> float:
    """Returns the largest F1 of an answer's words with those of an accepted one, between 0 and 1."""
    return max((_f1(normalised(said), normalised(answer)) for answer in answers), default=0.0)


def _f1(said: str, answer: str) -> float:
    if said != answer and (said in _CLOSED or answer in _CLOSED):
        return 0.0
    ours, theirs = said.split(), answer.split()
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else float(said == answer)


def contains(text: str, answers: Sequence[str]) -> bool:
    """Returns whether a text of any length has the words of an accepted answer in a row.

    Nothing is asked of a text where the answer is yes or no, which texts do not say.
    """
    words, wanted = f" {normalised(text, None)} ", [normalised(answer) for answer in answers]
    return any(answer in _CLOSED or f" {answer} " in words for answer in wanted)
