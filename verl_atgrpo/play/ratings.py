"""Elo ratings of a policy at several steps from the games between them, with intervals."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_SCALE = 400 / math.log(10)
"""Elo points of a unit of log-odds: 400 points are odds of ten to one."""
_DRIFTS = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
"""Standard deviations of neighbours' differences around their mean, in points, equally likely before any game."""
_HALVED = (2.0, 8.0, math.inf)
"""After how many neighbours a deviation is halved, as equally likely: most policies learn fast, then level off."""
_COURSE = 100.0
"""Standard deviation of that mean."""
_NORMAL = 1.959964
"""Of a 95% interval."""


class Rating(NamedTuple):
    """A player's rating."""

    points: float
    margin: float
    """Half of the 95% interval of its difference to the anchor's."""


def elo(games: Mapping[tuple[int, int], tuple[float, float]]) -> dict[int, Rating]:
    """Returns the ratings of a policy at several steps above its oldest opponent, by the Bradley-Terry model.

    P(a beats b) = 1 / (1 + 10^((R_b - R_a) / 400)), a draw is half a win. Neighbours' differences are normal around a
    mean, as in whole-history rating (Coulom 2008), or those that lose by chance and leave the pool for it would stay
    too low. Of several deviations each counts as much as it makes the games probable. The posterior's mode, with the
    normal approximation around it. Draws are counted as if they were coin tosses, so where there are many, intervals
    are too wide, never too narrow.

    Args:
        games: (step, opponent's step) -> score (1 for a win, .5 for a draw) and the number of games.

    Raises ValueError for a score below 0 or above the number of games.
    """
    anchor, steps = min(other for _, other in games), sorted({step for pair in games for step in pair})
    players = [step for step in steps if step != anchor]
    place = {player: number for number, player in enumerate(players)}
    for pair, (score, number) in games.items():
        if not 0 <= score <= number:
            raise ValueError(f"games of {pair}: a score of {score} in {number} games")
    scores, numbers = np.array(list(games.values())).reshape(-1, 2).T
    # Of each pair the first and the second player's place; the anchor's is the last one, whose rating is 0.
    ones, others = np.array([[place.get(player, -1) for player in pair] for pair in games], dtype=int).reshape(-1, 2).T
    # From ratings to the differences of neighbours.
    apart = np.delete(np.diff(np.eye(len(steps)), axis=0), steps.index(anchor), axis=1)

    def likely(ratings: Array) -> tuple[float, Array, Array]:
        """Returns the logarithm of the likelihood, its gradient, and minus its second derivatives."""
        known = np.append(ratings, 0.0)
        leads = known[ones] - known[others]
        chances = 1 / (1 + np.exp(-leads))
        gradient, full = np.zeros(len(known)), np.zeros((len(known), len(known)))
        weights = numbers * chances * (1 - chances)
        for one, other in ((ones, others), (others, ones)):
            sign = 1 if one is ones else -1
            np.add.at(gradient, one, sign * (scores - numbers * chances))
            np.add.at(full, (one, one), weights)
            np.add.at(full, (one, other), -weights)
        return float((scores * leads - numbers * np.logaddexp(0, leads)).sum()), gradient[:-1], full[:-1, :-1]

    @functools.cache
    def posterior(first: float, halved: float) -> tuple[float, Array, Array]:
        """Returns the logarithm of the games' probability, the mode, and the variances around it."""
        drifts = np.maximum(first * 0.5 ** (np.arange(len(players)) / halved), _DRIFTS[0])
        spread = (np.diag(drifts**2) + _COURSE**2) / _SCALE**2
        precision = apart.T @ np.linalg.inv(spread) @ apart
        ratings = np.zeros(len(players))
        for _ in range(100):
            value, gradient, information = likely(ratings)
            step = np.linalg.solve(information + precision, gradient - precision @ ratings)
            largest = float(np.abs(step).max(initial=0.0))
            if largest < 1e-9:
                break
            # Newton's method overshoots from far away.
            ratings += step / max(1.0, largest)
        determinant = np.linalg.slogdet(information + precision)[1] - np.linalg.slogdet(precision)[1]
        evidence = value - float(ratings @ precision @ ratings + determinant) / 2
        return evidence, ratings, np.diag(np.linalg.inv(information + precision))

    # Small ones hardly differ when halved, so they stay as they are.
    priors = [(first, halved if first >= 80 else math.inf) for first in _DRIFTS for halved in _HALVED]
    evidences, modes, variances = zip(*itertools.starmap(posterior, priors), strict=True)
    likelihoods = np.exp(np.array(evidences) - max(evidences))
    weights = likelihoods / likelihoods.sum()
    ratings = weights @ np.array(modes)
    deviations = np.sqrt(weights @ (np.array(variances) + (np.array(modes) - ratings) ** 2))
    made = {
        player: Rating(float(ratings[row]) * _SCALE, float(deviations[row]) * _SCALE * _NORMAL)
        for player, row in place.items()
    }
    return {anchor: Rating(0.0, 0.0), **made}


def points(score: float) -> float:
    """Returns by how many points a player is ahead whose mean score is this one; infinite for 0 and 1."""
    return math.inf * (score - 0.5) if score in (0, 1) else _SCALE * math.log(score / (1 - score))


def results(rewards: Iterable[float]) -> dict[str, float]:
    """Returns the shares of games that are won (a reward above 0), drawn and lost; nothing of no game."""
    scores = list(map(score_of, rewards))
    names = {"win": 1.0, "draw": 0.5, "loss": 0.0}
    return {name: scores.count(score) / len(scores) for name, score in names.items()} if scores else {}


def score_of(reward: float) -> float:
    """Returns a game's score: 1 if its reward is above 0, .5 if it is 0, else 0."""
    return 0.5 * ((reward > 0) - (reward < 0)) + 0.5
