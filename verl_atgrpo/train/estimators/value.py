"""Values of situations by ridge regression, and the scores of candidates that follow from them.

A value V predicts an episode's team reward from x, a vector of its decision's prompt, as y = m + w . z with z = x less
its mean, over its standard deviation. Of earlier decisions, which weigh `decay` for each step that has passed since,

    w = argmin of sum (y - m - w . z)^2 + d |w|^2,     d the dimension

the posterior mean of a linear function whose prior has the variance of the noise. A candidate's score is its
generalised advantage (arXiv 1506.02438, gamma 1), over the decisions k from its own on:

    A = sum of lam^k d_k,     d = V of the next prompt - V of its own,     after the last: the team reward - V

The next prompt is the first of a decision that started after this one had ended: agents that act at the same time do
not see each other's answers. ArCHer (arXiv 2402.19446) has values of utterances by a trained network and targets of
one step; here they are by Monte Carlo, in closed form, and mostly of the last steps' episodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """What a regression needs of the decisions seen so far: weighted sums of float64, however many there were."""

    count: float
    x: Tensor
    """(D,)."""
    xx: Tensor
    """(D, D)."""
    y: float
    xy: Tensor
    """(D,)."""
    lowest: float
    highest: float
    """The least and the largest y, of which no value is beyond."""

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Moments:
        """Returns the sums of decisions: (N, D), (N,)."""
        x, y = x.double(), y.double()
        return cls(len(y), x.sum(0), x.T @ x, float(y.sum()), x.T @ y, float(y.min()), float(y.max()))

    def then(self, later: Moments, decay: float) -> Moments:
        """Returns the sums of a step and of those before it, which weigh less."""
        return Moments(
            decay * self.count + later.count,
            decay * self.x + later.x,
            decay * self.xx + later.xx,
            decay * self.y + later.y,
            decay * self.xy + later.xy,
            min(self.lowest, later.lowest),
            max(self.highest, later.highest),
        )

    def values(self, x: Tensor) -> Tensor:
        """Returns the values of situations: (N, D) -> (N,) float64."""
        mean, level = self.x / self.count, self.y / self.count
        spread = (self.xx.diagonal() / self.count - mean**2).clamp(min=0).sqrt()
        # What is constant up to rounding says nothing, and would be large elsewhere.
        scale = torch.where(spread > 1e-6 * mean.abs() + 1e-12, 1 / spread, 0.0)
        zz = (self.xx - self.count * torch.outer(mean, mean)) * torch.outer(scale, scale)
        zy = (self.xy - self.count * level * mean) * scale
        zz.diagonal().add_(len(mean))
        weights = torch.cholesky_solve(zy[:, None], torch.linalg.cholesky(zz))[:, 0]
        values: Tensor = level + ((x.double() - mean) * scale) @ weights
        return values.clamp(self.lowest, self.highest)

    def shares(self, values: Tensor) -> Tensor:
        """Returns values or rewards as shares of the way from the least reward to the largest."""
        return (values - self.lowest) / ((self.highest - self.lowest) or 1.0)


def scores(values: Tensor, rows: Sequence[Mapping[str, Any]], lam: float) -> Tensor:
    """Returns the candidates' scores: values of the prompts of whole episodes (N,) float64 -> (N,).

    Reads the tags `episode`, `order` (how many of its decisions had started before), `place` (how many had ended
    before it ended), `after` (how many had ended when it started) and `episode_reward`.
    """
    of, episodes = values.tolist(), defaultdict(list)
    for number, tags in enumerate(rows):
        episodes[tags["episode"]].append(number)
    result = torch.zeros_like(values)
    for numbers in episodes.values():
        for number in sorted(numbers, key=lambda one: rows[one]["place"], reverse=True):
            later = [other for other in numbers if rows[other]["after"] > rows[number]["place"]]
            if later:
                following = min(later, key=lambda other: rows[other]["order"])
                change = of[following] - of[number] + lam * result[following]
            else:
                change = rows[number]["episode_reward"] - of[number]
            result[number] = change
    return result
