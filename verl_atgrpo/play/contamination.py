"""Finds validation tasks that are also training tasks: the same problem, or a near duplicate by its text."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.types import Split

NEAR = 0.5
"""Jaccard similarity (shared shingles as a share of all) from which two texts are near duplicates."""
LONG, SHORT = 8, 5
"""Words per shingle of a long text, and of one with fewer than `LONG_TEXT` words."""
LONG_TEXT = 40
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Chinese characters and kana, which no spaces part: each is a word."""
_WORD = re.compile(rf"\d+(?:[.,]\d+)*|[{_NO_SPACES}]|[^\W\d{_NO_SPACES}]+|[-+*/^=<>%()\[\]|]|(?<=[\d)])!")


@dataclass(frozen=True)
class Overlap:
    """A validation task that is also a training task, or a near duplicate of one."""

    val: int
    train: int
    similarity: float | None = None
    """Jaccard similarity of the texts; None for tasks with equal keys or fingerprints."""
    equal: str = "key"
    """What is equal of such tasks."""

    def __str__(self) -> str:
        if self.similarity is None:
            return f"validation task {self.val} has the {self.equal} of training task {self.train}"
        return f"validation task {self.val} is nearly training task {self.train} (similarity {self.similarity:.2f})"


def shingles(text: str, width: int) -> set[str]:
    """Returns all sequences of `width` words of a text; the whole text if it is shorter, nothing if it is empty.

    Ignores case and punctuation; numbers, arithmetic signs and brackets are words.
    """
    words = _WORD.findall(text.lower())
    starts = range(max(1, len(words) - width + 1)) if words else ()
    return {" ".join(words[start : start + width]) for start in starts}


class NearIndex:
    """Finds near duplicates of a text in a fixed set of texts, without comparing all pairs.

    An inverted index with prefix filtering (Chaudhuri et al., ICDE 2006): near duplicates share one of their rarest
    shingles, so boilerplate in every text costs nothing. It misses no pair. A changed word changes as many shingles as
    a shingle has words, hence the shorter shingles of short texts: texts of fewer than 19 words that differ in one
    inner word count as different problems.
    """

    def __init__(self, texts: Mapping[int, str]) -> None:
        """Indexes `texts` (key -> text)."""
        self._shingles: dict[int, set[str]] = {}
        for key, text in texts.items():
            width = LONG if len(_WORD.findall(text)) >= LONG_TEXT else SHORT
            self._shingles[key] = shingles(text, width)
        self._count = Counter(shingle for own in self._shingles.values() for shingle in own)
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        for key, own in self._shingles.items():
            for shingle in self._rarest(own, self._dispensable(own) + 1):
                self._holders[shingle].append(key)

    def near(self, text: str) -> dict[int, float]:
        """Returns key -> similarity of the near duplicates of `text`."""
        found: dict[int, float] = {}
        for width in (LONG, SHORT):  # texts with different widths share no shingle
            mine = shingles(text, width)
            known = {shingle for shingle in mine if shingle in self._count}
            spare = self._dispensable(mine) - (len(mine) - len(known))  # unknown shingles are the rarest
            keys = {key for shingle in self._rarest(known, spare + 1) for key in self._holders.get(shingle, ())}
            for key in sorted(keys):
                shared = len(mine & self._shingles[key])
                similarity = shared / (len(mine) + len(self._shingles[key]) - shared)
                if similarity >= NEAR:
                    found[key] = similarity
        return found

    def _dispensable(self, own: set[str]) -> int:
        """Returns the number of shingles that a near duplicate may lack."""
        return len(own) - math.ceil(NEAR * len(own))

    def _rarest(self, own: set[str], number: int) -> list[str]:
        if number <= 0:
            return []
        return sorted(own, key=lambda shingle: (self._count[shingle], shingle))[:number]


def overlaps(env: Environment, train: int, val: int) -> Iterator[Overlap]:
    """Yields the overlaps of the first `train` training and the first `val` validation tasks, by training task.

    Makes every task once, the validation tasks first. Time is linear in the words of both splits, memory in those of
    the validation split: 20,000 training and 500 validation texts of 50 words take a few seconds.
    """
    same: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    texts: dict[int, str] = {}

    of_their_own = type(env).task_key is not Environment.task_key  # else keys are the fingerprints

    def marks(task: Any) -> list[tuple[str, str]]:
        key = ("key", env.task_key(task))
        return [key, ("fingerprint", env.fingerprint(task))] if of_their_own else [key]

    for index in range(val):
        task = env.task("val", index)
        for mark in marks(task):
            same[mark].append(index)
        if (text := env.dedup_text(task)) is not None:
            texts[index] = text
    near = NearIndex(texts)
    for index in range(train):
        task = env.task("train", index)
        equal: dict[int, str] = {}
        for what, own in marks(task):
            for other in same.get((what, own), []):
                equal.setdefault(other, what)
        yield from (Overlap(other, index, equal=what) for other, what in equal.items())
        if (text := env.dedup_text(task)) is not None:
            found = near.near(text).items()
            yield from (Overlap(other, index, similarity) for other, similarity in found if other not in equal)


def _different(env: Environment, split: Split, size: int) -> str:
    """Returns words for how many of a split's tasks are different problems, or none if all are."""
    prints = {stable_hash(env.fingerprint(env.task(split, index))) for index in range(size)}
    return "" if len(prints) == size else f" ({len(prints):,} different)"


def report(env: Environment, train: int, val: int, shown: int = 20) -> tuple[str, bool]:
    """Returns a line for each of the first `shown` overlaps with a summary, and whether there are any."""
    found = overlaps(env, train, val)
    first = list(islice(found, shown))
    kinds = Counter(overlap.similarity is None for overlap in first)
    kinds.update(overlap.similarity is None for overlap in found)
    # A mixture's parts may differ.
    has_text = any(env.dedup_text(env.task("val", index)) is not None for index in range(val))
    near = f"{kinds[False]} near" if has_text else "tasks have no text, so near duplicates were not searched for"
    tasks = (
        f"{train:,} training{_different(env, 'train', train)} and {val:,} validation task{'s' * (val != 1)}"
        f"{_different(env, 'val', val)}"
    )
    summary = f"{tasks}: {kinds[True]} with equal keys or fingerprints, {near}"
    return "\n".join([*map(str, first), summary]), kinds.total() > 0
