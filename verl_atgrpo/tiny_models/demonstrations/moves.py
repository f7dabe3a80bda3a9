"""Answers that are moves: any of the good ones, now and then a random one."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import TypeVar

from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.tiny_models.demonstrations.demonstrator import END, Choice

Position = TypeVar("Position")


def move_about(
    position: Position,
    good_moves: Callable[[Position], Collection[str]],
    step: Callable[[Position, str], Position],
    noise: float,
    limit: int,
    rng: random.Random,
    draft: str = "",
) -> tuple[str, list[Choice]]:
    """Returns at most `limit` moves from `position` and the choices they were drawn from.

    The demonstrator takes any of the good moves, or follows `draft` for as long as it has done so; each move is a
    random one with chance `noise`, after which it goes on from where that led. It ends where no move is good.
    """
    moves, choices = "", []
    while len(moves) < limit and (good := good_moves(position)):
        if draft.startswith(moves) and len(draft) > len(moves):
            good = [draft[len(moves)]]
        choices.append({name: noise / len(MOVES) + (name in good) * (1 - noise) / len(good) for name in MOVES})
        names, chances = zip(*choices[-1].items(), strict=True)
        move = rng.choices(names, chances)[0]
        moves += move
        position = step(position, move)
    return moves, [*choices, {END: 1.0}]
