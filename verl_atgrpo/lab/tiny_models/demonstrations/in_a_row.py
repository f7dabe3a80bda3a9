"""Demonstrations for games in which a number of stones in a row wins: legal moves, none better than another."""

from __future__ import annotations

import random

from verl_atgrpo.environments.common.workflow import chat
from verl_atgrpo.environments.in_a_row.environment import InARow
from verl_atgrpo.lab.tiny_models.demonstrations.demonstrator import Demonstration, Demonstrator, write


def demonstrate(env: InARow, rng: random.Random, noise: float) -> Demonstration:
    """Returns a random position of a random game, and all of its legal moves alike; there is no noise to add."""
    rules, board = env.rules, env.rules.start()
    for _ in range(rng.randint(0, len(board) - 1)):
        after = rules.play(board, rng.choice(rules.moves(board)))
        if not rules.moves(after):
            break
        board = after
    moves = [str(move + 1) for move in rules.moves(board)]
    return Demonstration(chat(env.prompt(board)), *write([{move: 1 / len(moves) for move in moves}], rng))


TIC_TAC_TOE = Demonstrator(
    "tic_tac_toe",
    {"style": "compact"},
    demonstrate,
    response_length=2,
    training={"clean_steps": 300, "noisy_steps": 0},
)
