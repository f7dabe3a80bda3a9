"""Which row goes into which mini-batch: a fixed number of optimizer steps, padding spread evenly.

verl pads a batch to a multiple of its mini-batch size in rows. With episodes of varying length that would
make the number of optimizer steps vary, and could leave one real row alone in a mini-batch of padding,
where token-mean gives it the weight of a whole step. Here the number of steps is fixed and every
mini-batch gets its share of the real rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def spread_padding(padding: Sequence[bool], ranks: int, mini_batches: int, seed: int) -> list[int]:
    """Returns an order of the rows in which every mini-batch of every rank has its share of padding.

    Args:
        padding: one flag a row, in the balanced order: rank r owns the r-th of `ranks` equal runs.
        ranks: data-parallel ranks.
        mini_batches: optimizer steps; rows per rank must be a multiple of it.
        seed: real rows are shuffled within their rank, so that a mini-batch is not all one agent.

    Raises:
        ValueError: the rows cannot be divided evenly.
    """
    per_rank, rest = divmod(len(padding), ranks)
    size, rest_of_rank = divmod(per_rank, mini_batches)
    if rest or rest_of_rank:
        raise ValueError(f"{len(padding)} rows do not divide into {ranks} ranks x {mini_batches} mini-batches")
    order: list[int] = []
    placed = 0
    for rank in range(ranks):
        mine = range(rank * per_rank, (rank + 1) * per_rank)
        real = [row for row in mine if not padding[row]]
        pads = [row for row in mine if padding[row]]
        random.Random(f"{seed}.{rank}").shuffle(real)
        for step in range(mini_batches):
            # Dealt out in turn, from one rank to the next: shares differ by one at most within a rank, and over all
            # ranks as well, so that no mini-batch is all padding where another has two real rows.
            share = [pad for number, pad in enumerate(pads, placed) if number % mini_batches == step]
            order += [real.pop() for _ in range(size - len(share))] + share
        placed += len(pads)
    return order
