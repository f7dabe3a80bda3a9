"""Rows of tokens as prefix trees of bounded size, in the order in which a model reads them. No torch in here.

A row is a prompt and a response. The model reads all its tokens but the last, which is predicted only; rows that begin
with the same tokens share those as inputs. A tree is packed depth first: a token comes after its ancestors and before
everything that comes after its subtree, so which tokens see which follows from two numbers a token, its index and the
end of its subtree (as in TRL's pull request 7328 and AReaL's tree training).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_SMALL = 512
"""Tokens of a tree below which a micro-batch is mostly overhead."""


@dataclass(frozen=True)
class Tree:
    """A prefix tree, packed. `L` tokens that are read, `M` response tokens over all rows, a row's in order.

    Token `k` is visible to token `q` if `k <= q < ends[k]`.
    """

    rows: Ints
    """Which rows are in it, in the order of `counts`."""
    tokens: Ints
    """Token ids, [L]."""
    depths: Ints
    """Positions in their rows, [L]."""
    ends: Ints
    """Index after the last token of each token's subtree, [L]."""
    predictors: Ints
    """For every response token, the index of the token before it: where the model predicts it, [M]."""
    labels: Ints
    """The response tokens' ids, [M]."""
    counts: Ints
    """Response tokens of each row, [rows]."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenRows:
    """Rows of tokens, laid end to end; raises ValueError if one has no prompt or no response."""

    tokens: Ints
    """Prompts and responses, row after row."""
    offsets: Ints
    """Where each row begins, and the end of the last, [rows + 1]."""
    prompts: Ints
    """Prompt tokens of each row, [rows]."""

    def __post_init__(self) -> None:
        short = (self.prompts < 1) | (self.prompts >= np.diff(self.offsets))
        if short.any():
            row = int(short.argmax())
            raise ValueError(
                f"row {row} has {self.prompts[row]} prompt tokens of {self.offsets[row + 1] - self.offsets[row]}: "
                "a row is a prompt and a response, with a token each at least"
            )

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, row: int) -> Ints:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True)
class Order:
    """Rows sorted by their tokens, so that rows which share a prefix are neighbours."""

    rows: Ints
    """The rows, sorted."""
    shared: Ints
    """Input tokens that each shares with the one before it; 0 for the first."""


def sort(rows: TokenRows) -> Order:
    """Sorts rows by their tokens and counts what neighbours share of the tokens that the model reads."""
    data = rows.tokens.astype(">u4").tobytes()  # big-endian: bytes sort as the ids do
    keys = [data[4 * start : 4 * end] for start, end in pairwise(rows.offsets)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        before, row = rows[order[place - 1]], rows[order[place]]
        size = min(len(before), len(row)) - 1
        different = before[:size] != row[:size]
        first = int(different.argmax()) if size else 0
        shared[place] = first if size and different[first] else size
    return Order(np.array(order, dtype=np.int64), shared)


def cut(rows: TokenRows, order: Order, budget: int, at_least: int = 1) -> list[slice]:
    """Cuts sorted rows into trees of at most `budget` input tokens; a longer row is a tree of its own.

    There are `at_least` so many: as many as on other ranks, which run the model together. Raises ValueError if there
    are fewer rows.
    """
    if at_least > len(rows):
        raise ValueError(f"{len(rows)} rows cannot be {at_least} trees")
    inputs = np.diff(rows.offsets)[order.rows] - 1
    added = (inputs - order.shared).tolist()
    starts, size = [], budget + 1
    for place, (new, whole) in enumerate(zip(added, inputs.tolist(), strict=True)):
        size += new
        if size > budget:
            starts.append(place)
            size = whole
    # Trees are split in halves of about as many tokens, the largest first.
    bounds = [*starts, len(rows)]
    before = np.concatenate([[0], np.cumsum(added)])
    while len(bounds) <= at_least:
        sizes = [before[end] - before[start] if end - start > 1 else -1 for start, end in pairwise(bounds)]
        largest = int(np.argmax(sizes))
        start, end = bounds[largest], bounds[largest + 1]
        middle = int(np.searchsorted(before[start:end], (before[start] + before[end]) / 2)) + start
        bounds.insert(largest + 1, min(max(middle, start + 1), end - 1))
    return [slice(start, end) for start, end in pairwise(bounds)]


def cost(lengths: Ints, square: float) -> float:
    """Returns what a model takes for sequences of these lengths, in tokens without attention.

    `square` is the length at which attention, which grows with the square, costs as much as all else, or infinite.
    """
    return float((lengths * (1 + lengths / square)).sum())


def best_cut(rows: TokenRows, order: Order, budget: int, square: float) -> tuple[int, float]:
    """Returns the number of tokens up to which trees cost least, and their cost; see `cut` and `cost`.

    It is `budget`, or that halved once or more, if it is `_SMALL` at least.
    """
    inputs = np.diff(rows.offsets)[order.rows] - 1
    before = np.concatenate([[0], np.cumsum(inputs - order.shared)])
    found: list[tuple[float, int]] = []
    while not found or (budget >= _SMALL and square < np.inf):
        starts, ends = np.array([(part.start, part.stop) for part in cut(rows, order, budget)]).T
        lengths = before[ends] - before[starts] + order.shared[starts]  # the first row of a tree shares nothing
        found.append((cost(lengths, square), budget))
        budget //= 2
    least, most = min(found)
    return most, least


def pack(rows: TokenRows, order: Order, part: slice) -> Tree:
    """Packs sorted rows `part` as one tree."""
    chosen, shared = order.rows[part], order.shared[part].copy()
    shared[0] = 0  # whatever came before is in another tree
    inputs = np.diff(rows.offsets)[chosen] - 1
    size = int((inputs - shared).sum())
    tokens, depths, ends = np.empty(size, np.int64), np.empty(size, np.int64), np.full(size, size, np.int64)
    path = np.empty(int(inputs.max()), np.int64)
    predictors, labels = [], []
    filled = length = 0
    for row, common, count in zip(chosen.tolist(), shared.tolist(), inputs.tolist(), strict=True):
        ends[path[common:length]] = filled
        ids, prompt, end = rows[row], int(rows.prompts[row]), filled + count - common
        tokens[filled:end] = ids[common:count]
        depths[filled:end] = np.arange(common, count)
        path[common:count] = np.arange(filled, end)
        predictors.append(path[prompt - 1 : count].copy())
        labels.append(ids[prompt:])
        filled, length = end, count
    return Tree(
        rows=chosen,
        tokens=tokens,
        depths=depths,
        ends=ends,
        predictors=np.concatenate(predictors),
        labels=np.concatenate(labels),
        counts=inputs + 1 - rows.prompts[chosen],
    )
