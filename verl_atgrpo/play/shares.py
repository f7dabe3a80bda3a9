"""Shares: choices that come as often as their weights say, exactly and not by luck."""

from __future__ import annotations

import math
from collections.abc import Sequence


class Shares:
    """Chooses among numbers: the one that is furthest behind its share is next, at ties the first.

    Of any choices in a row each number has its share to less than one at either end. Weights may change between
    choices; what a number is behind or ahead by then stays.
    """

    def __init__(self, credit: Sequence[float]) -> None:
        """Begins with what each number is behind: zeros at first, or the `credit` of earlier choices."""
        self.credit = list(credit)

    def next(self, weights: Sequence[float]) -> int:
        """Returns the next choice; `weights` are at least 0, not all of them 0."""
        total = math.fsum(weights)
        for number, weight in enumerate(weights):
            self.credit[number] += weight / total
        chosen = max((number for number, weight in enumerate(weights) if weight), key=self.credit.__getitem__)
        self.credit[chosen] -= 1
        return chosen
