"""Demonstrations for games in which a number of stones in a row wins: the best moves, and other legal ones."""

from __future__ import annotations

import random

from verl_atgrpo.environments.common.workflow import chat
from verl_atgrpo.environments.in_a_row import InARow, best_moves, random_moves
from verl_atgrpo.lab.tiny_models.demonstrations.demonstrator import Demonstration, Demonstrator, write


def demonstrate(env: InARow, rng: random.Random, noise: float) -> Demonstration:
    """Returns a position of a random training game with the best moves, or with probability `noise` any legal one."""
    rules, opening = env.rules, env.task("train", rng.randrange(1 << 20)).opening
    board = rules.after(opening)
    board = rules.after([*opening, *random_moves(rules, board, rng.randint(0, len(board) - 1), rng)])
    legal, best = rules.moves(board), best_moves(rules, board, env.depth)
    chances = {str(move + 1): noise / len(legal) + (1 - noise) * (move in best) / len(best) for move in legal}
    return Demonstration(chat(env.prompt(board)), *write([chances], rng))


TIC_TAC_TOE = Demonstrator(
    "tic_tac_toe",
    {"style": "compact", "against": ["random", "search"]},
    demonstrate,
    response_length=2,
    training={"clean_steps": 600},
)
