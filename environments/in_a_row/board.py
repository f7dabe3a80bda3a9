"""Boards of games in which a number of stones in a row wins, and players that look ahead."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

EMPTY, STONES = ".", "xo"


@dataclass(frozen=True)
class Rules:
    """The size of a board, and what wins."""

    rows: int
    columns: int
    length: int
    """Stones in a row that win."""
    falls: bool
    """Whether a move names a column, in which the stone falls to the lowest empty cell; else it names a cell."""

    def start(self) -> str:
        """Returns the empty board: its rows from the top, one character a cell."""
        return EMPTY * (self.rows * self.columns)

    def moves(self, board: str) -> list[int]:
        """Returns the legal moves, counted from 0; none if the game is over."""
        if self.winner(board):
            return []
        # The top row is full last.
        return [place for place, cell in enumerate(board[: self.columns] if self.falls else board) if cell == EMPTY]

    def play(self, board: str, move: int) -> str:
        """Returns the board after a legal move of the player whose turn it is."""
        cell = move
        if self.falls:
            cell = max(place for place in range(move, len(board), self.columns) if board[place] == EMPTY)
        return board[:cell] + self.turn(board) + board[cell + 1 :]

    def after(self, moves: Iterable[int]) -> str:
        """Returns the board after these moves from the start."""
        return functools.reduce(self.play, moves, self.start())

    def turn(self, board: str) -> str:
        """Returns whose turn it is: x begins."""
        return STONES[(len(board) - board.count(EMPTY)) % 2]

    def winner(self, board: str) -> str:
        """Returns who has won, or an empty text."""
        for line in _lines(self):
            first = board[line[0]]
            if first != EMPTY and all(board[cell] == first for cell in line):
                return first
        return ""


@functools.cache
def _lines(rules: Rules) -> list[tuple[int, ...]]:
    """Returns the cells of every row, column and diagonal of the winning length."""

    def found() -> Iterator[tuple[int, ...]]:
        for row in range(rules.rows):
            for column in range(rules.columns):
                for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    last_row, last_column = row + down * (rules.length - 1), column + right * (rules.length - 1)
                    if last_row < rules.rows and 0 <= last_column < rules.columns:
                        steps = range(rules.length)
                        yield tuple((row + down * n) * rules.columns + column + right * n for n in steps)

    return list(found())


@functools.lru_cache(1 << 18)
def value(rules: Rules, board: str, depth: int) -> int:
    """Returns the value of a position for the player whose turn it is, if both look so many moves ahead.

    0 for a draw, or for a position from which no end is in sight; above 0 for a win, and the larger the sooner; below
    0 for a loss. Perfect play where `depth` is at least the number of empty cells.
    """
    if rules.winner(board):
        return -1 - depth  # by the move before
    moves = rules.moves(board)
    if not moves or not depth:
        return 0
    return max(-value(rules, rules.play(board, move), depth - 1) for move in moves)


def best_moves(rules: Rules, board: str, depth: int) -> list[int]:
    """Returns the legal moves of the largest value, of a position that is not over."""
    values = {move: -value(rules, rules.play(board, move), depth - 1) for move in rules.moves(board)}
    best = max(values.values())
    return [move for move, worth in values.items() if worth == best]


def choose(rules: Rules, board: str, depth: int, rng: random.Random) -> int:
    """Returns a move of a player who looks `depth` moves ahead, a random one of the best; of any with a depth of 0."""
    return rng.choice(best_moves(rules, board, depth) if depth else rules.moves(board))


def random_moves(rules: Rules, board: str, number: int, rng: random.Random) -> list[int]:
    """Returns so many random moves from a position, or fewer: none that ends the game."""
    moves: list[int] = []
    for _ in range(number):
        move = rng.choice(rules.moves(board))
        board = rules.play(board, move)
        if not rules.moves(board):
            break
        moves.append(move)
    return moves
