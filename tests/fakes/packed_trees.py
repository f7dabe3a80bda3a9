"""Prefix trees of rows that a test writes out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_atgrpo.train.engine.prefix_tree.tree import TokenRows, Tree, cut, pack, sort

Made = Sequence[tuple[Sequence[int], int]]
"""Rows: tokens, and how many of them are the prompt."""


def rows_of(made: Made) -> TokenRows:
    """Lays rows end to end."""
    ids, prompts = zip(*made, strict=True)
    return TokenRows(np.concatenate(ids), np.cumsum([0, *map(len, ids)]), np.array(prompts))


def trees_of(made: Made, budget: int, at_least: int = 1) -> list[Tree]:
    """Returns all rows as trees of at most `budget` input tokens; see `cut`."""
    rows = rows_of(made)
    order = sort(rows)
    return [pack(rows, order, part) for part in cut(rows, order, budget, at_least)]
