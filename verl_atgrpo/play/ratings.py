"""Elo ratings of players from the games between them, with intervals."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

Player = TypeVar("Player", bound=Hashable)
_SCALE = 400 / math.log(10)
"""Elo points of a unit of log-odds: 400 points are odds of ten to one."""
_PRIOR = 600.0
"""Standard deviation of ratings before any game, in points: one player may have won all of them."""
_NORMAL = 1.959964
"""Of a 95% interval."""


class Rating(NamedTuple):
    """A player's rating."""

    points: float
    margin: float
    """Half of the 95% interval of its difference to the anchor's."""


def elo(games: Mapping[tuple[Player, Player], tuple[float, float]], anchor: Player) -> dict[Player, Rating]:
    """Returns the ratings of all players relative to one of them, by the Bradley-Terry model.

    P(a beats b) = 1 / (1 + 10^((R_b - R_a) / 400)), a draw is half a win. The posterior's mode under a normal prior,
    with the normal approximation around it. Draws are counted as if they were coin tosses, so where there are many,
    intervals are too wide, never too narrow.

    Args:
        games: (a, b) -> a's score (1 for a win, .5 for a draw) and the number of games.
        anchor: the player whose rating is 0.

    Raises ValueError for a score below 0 or above the number of games.
    """
    players = list(dict.fromkeys(player for pair in games for player in pair if player != anchor))
    place = {player: number for number, player in enumerate(players)}
    for pair, (score, number) in games.items():
        if not 0 <= score <= number:
            raise ValueError(f"games of {pair}: a score of {score} in {number} games")
    scores, numbers = np.array(list(games.values())).reshape(-1, 2).T
    # A row for each pair: 1 for the first player and -1 for the second; the anchor has no column.
    sides = np.zeros((len(games), len(players)))
    for row, pair in enumerate(games):
        for player, sign in zip(pair, (1.0, -1.0), strict=True):
            if player != anchor:
                sides[row, place[player]] = sign
    prior = (_SCALE / _PRIOR) ** 2
    ratings = np.zeros(len(players))
    information = prior * np.eye(len(players))
    for _ in range(100):
        chances = 1 / (1 + np.exp(-sides @ ratings))
        gradient = sides.T @ (scores - numbers * chances) - prior * ratings
        information = prior * np.eye(len(players)) + sides.T * (numbers * chances * (1 - chances)) @ sides
        step = np.linalg.solve(information, gradient)
        largest = float(np.abs(step).max(initial=0.0))
        # Newton's method overshoots from far away.
        ratings += step / max(1.0, largest)
        if largest < 1e-9:
            break
    deviations = np.sqrt(np.diag(np.linalg.inv(information)))
    made = {
        player: Rating(float(ratings[row]) * _SCALE, float(deviations[row]) * _SCALE * _NORMAL)
        for player, row in place.items()
    }
    return {anchor: Rating(0.0, 0.0), **made}


def results(rewards: Iterable[float]) -> dict[str, float]:
    """Returns the shares of games that are won (a reward above 0), drawn and lost; nothing of no game."""
    scores = list(map(score_of, rewards))
    names = {"win": 1.0, "draw": 0.5, "loss": 0.0}
    return {name: scores.count(score) / len(scores) for name, score in names.items()} if scores else {}


def score_of(reward: float) -> float:
    """Returns a game's score: 1 if its reward is above 0, .5 if it is 0, else 0."""
    return 0.5 * ((reward > 0) - (reward < 0)) + 0.5
