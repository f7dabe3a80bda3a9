"""What a model thinks and what it says: one rule for parsers, scores, tools and prompts.

What stands in thoughts, finished or not, is no answer: it is graded by nothing and shown to no other agent. A policy
whose tokenizer or chat template marks thoughts in a way of its own writes them in `<think>` (`train.chat`).
"""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
_TAG = re.compile(
    r"(?i:<\|?|\u25c1)(?P<end>(?i:/|end_(?:of_)?))?(?i:(?:start_|begin_(?:of_)?|[a-z]{1,9}:)?(?:think(?:ing)?|thoughts?))"
    r"(?:\|?>|\u25b7)|\[(?P<slash>/)?THINK\]"
)
"""As models' families write them: `<think>`, `<thinking>`, `<seed:think>`, `<|START_THINKING|>`, `[THINK]`."""


def split_thought(raw: str, opened: bool = False) -> tuple[str, str]:
    """Returns what an answer thought and what it said; a thought that its prompt has begun is `opened`.

    A thought that has not ended reaches to the end. An end without a beginning ends a thought from the start. Without
    thoughts all of the answer is said, blanks around it included.
    """
    words = raw.lower()
    if not opened and "think" not in words and "thought" not in words:  # at once, of texts of a megabyte too
        return "", raw
    thoughts: list[str] = []
    said: list[str] = []
    at = start = 0
    thinking = opened
    for tag in _TAG.finditer(raw):
        ends = bool(tag["end"] or tag["slash"])
        (thoughts if thinking else said).append(raw[at : tag.start()])
        if ends and not thinking:  # the template has begun it
            start = tag.start()
            thoughts.clear()
            said.clear()
        at, thinking = tag.end(), not ends
    if not at and not opened:
        return "", raw
    (thoughts if thinking else said).append(raw[at:])
    thoughts.insert(0, _TAG.sub("", raw[:start]))
    return "\n".join(filter(None, (part.strip() for part in thoughts))), "".join(said).strip()


def marks(name: str) -> bool:
    """Returns whether a text that a tokenizer or a template has is a tag of thoughts as `split_thought` reads them."""
    return _TAG.fullmatch(name) is not None


def begins(prompt: str) -> bool:
    """Returns whether the end of a prompt begins a thought, which its answer goes on with."""
    tags = list(_TAG.finditer(prompt))
    return bool(tags) and not (tags[-1]["end"] or tags[-1]["slash"] or prompt[tags[-1].end() :].strip())
