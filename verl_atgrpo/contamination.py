"""Whether validation tasks are training tasks as well: the same problem, or one in nearly the same words."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from verl_atgrpo.environment import Environment
from verl_atgrpo.report.text import counted

NEAR = 0.5
"""Least Jaccard similarity (shared shingles as a share of all) of two texts that count as nearly the same."""
LONG, SHORT = 8, 5
"""Words in a shingle of a long text, and of one with fewer than `LONG_TEXT` words."""
LONG_TEXT = 40
_WORD = re.compile(r"\w+|[-+*/^=<>%]")


@dataclass(frozen=True)
class Overlap:
    """A validation task that also is a training task, or nearly so."""

    val: int
    train: int
    similarity: float | None = None
    """Jaccard similarity of the texts; None for tasks of equal keys."""

    def __str__(self) -> str:
        if self.similarity is None:
            return f"validation task {self.val} has the key of training task {self.train}"
        return f"validation task {self.val} is nearly training task {self.train} (similarity {self.similarity:.2f})"


def shingles(text: str, width: int) -> set[str]:
    """Returns every run of `width` words of a text, the whole of a shorter one, nothing of an empty one.

    Case and punctuation do not count; the signs of arithmetic are words.
    """
    words = _WORD.findall(text.lower())
    starts = range(max(1, len(words) - width + 1)) if words else ()
    return {" ".join(words[start : start + width]) for start in starts}


class NearIndex:
    """Finds those of a fixed set of texts that are nearly a given one, without a look at every pair.

    An inverted index with prefix filtering (Chaudhuri et al., ICDE 2006): two texts that share enough share one of
    their rarest shingles, so boilerplate that every text has costs nothing. It misses no pair. One changed word spoils
    as many shingles as a shingle has words, hence the short ones: texts of fewer than 19 words that differ in a word
    within are different problems.
    """

    def __init__(self, texts: Mapping[int, str], least: float = NEAR) -> None:
        """Indexes `texts` (key -> text); `least` is the similarity, above 0, from which on two are nearly the same."""
        self._least = least
        self._shingles: dict[int, set[str]] = {}
        for key, text in texts.items():
            width = LONG if len(_WORD.findall(text)) >= LONG_TEXT else SHORT
            self._shingles[key] = shingles(text, width)
        self._count = Counter(shingle for held in self._shingles.values() for shingle in held)
        self._holders: defaultdict[str, list[int]] = defaultdict(list)
        for key, held in self._shingles.items():
            for shingle in self._rarest(held, self._dispensable(held) + 1):
                self._holders[shingle].append(key)

    def near(self, text: str) -> dict[int, float]:
        """Returns key -> similarity for the texts that are nearly `text`."""
        found: dict[int, float] = {}
        for width in (LONG, SHORT):  # shingles of one width never equal those of the other
            mine = shingles(text, width)
            known = {shingle for shingle in mine if shingle in self._count}
            spare = self._dispensable(mine) - (len(mine) - len(known))  # the unknown are the rarest of all
            keys = {key for shingle in self._rarest(known, spare + 1) for key in self._holders.get(shingle, ())}
            for key in sorted(keys):
                shared = len(mine & self._shingles[key])
                similarity = shared / (len(mine) + len(self._shingles[key]) - shared)
                if similarity >= self._least:
                    found[key] = similarity
        return found

    def _dispensable(self, held: set[str]) -> int:
        """Returns how many of its shingles a text may lack in another one that is nearly the same."""
        return len(held) - math.ceil(self._least * len(held))

    def _rarest(self, held: set[str], number: int) -> list[str]:
        if number <= 0:
            return []
        return sorted(held, key=lambda shingle: (self._count[shingle], shingle))[:number]


def overlaps(env: Environment, train: int, val: int) -> Iterator[Overlap]:
    """Yields what the first `train` training tasks and the first `val` validation tasks share, by training task.

    Makes every task once, and every validation task before the first training task. Time grows with the words of
    both splits together, and memory with those of the validation split: 20,000 training and 500 validation texts of
    50 words take a few seconds.
    """
    same: defaultdict[str, list[int]] = defaultdict(list)
    texts: dict[int, str] = {}
    for index in range(val):
        task = env.task("val", index)
        same[env.task_key(task)].append(index)
        if (text := env.dedup_text(task)) is not None:
            texts[index] = text
    near = NearIndex(texts)
    for index in range(train):
        task = env.task("train", index)
        equal = same.get(env.task_key(task), [])
        yield from (Overlap(other, index) for other in equal)
        if (text := env.dedup_text(task)) is not None:
            found = near.near(text).items()
            yield from (Overlap(other, index, similarity) for other, similarity in found if other not in equal)


def report(env: Environment, train: int, val: int, shown: int = 20) -> tuple[str, bool]:
    """Returns a line for each of the first `shown` overlaps and a summary, and whether there is any."""
    found = overlaps(env, train, val)
    first = list(islice(found, shown))
    kinds = Counter(overlap.similarity is None for overlap in first)
    kinds.update(overlap.similarity is None for overlap in found)
    has_text = env.dedup_text(env.task("val", 0)) is not None
    near = f"{kinds[False]} near" if has_text else "tasks have no text, so near duplicates were not looked for"
    tasks = f"{train:,} training and {counted(val, 'validation task')}"
    summary = f"{tasks}: {kinds[True]} with equal keys, {near}"
    return "\n".join([*map(str, first), summary]), kinds.total() > 0
