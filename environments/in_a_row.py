"""Tic-tac-toe and Connect Four, played against oneself or against players that follow a program.

A task is an opening, the side in training and who plays the other one. Training tasks are played against the other
agent (`Environment.opponents`), validation tasks against a random player and against one that looks ahead.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from verl_atgrpo import Environment, Outcome, Split, Team, stable_hash
from verl_atgrpo.environments.common.options import option_error, with_options
from verl_atgrpo.environments.common.replies import last_line
from verl_atgrpo.environments.common.workflow import Style

Opponent = Literal["self", "random", "search"]
_MARK = re.compile(
    r"move[\s*_`]*:[\s*_`$(\[<]*(?:\\boxed\{\s*)?(?:(?:cell|column)\s+)?([0-9]{1,2})\W*$", re.IGNORECASE
)
EMPTY, STONES = ".", "xo"


# ------------------------------------------------------------------ boards, and players that look ahead


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
    reach = rules.length - 1
    return [
        tuple((row + down * n) * rules.columns + column + right * n for n in range(rules.length))
        for row in range(rules.rows)
        for column in range(rules.columns)
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
        if row + down * reach < rules.rows and 0 <= column + right * reach < rules.columns
    ]


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


# ------------------------------------------------------------------ the games


@dataclass(frozen=True)
class Game:
    """A task."""

    opening: tuple[int, ...]
    """Moves that were played before."""
    side: str
    """Who is in training: `x` or `o`."""
    opponent: Opponent
    seed: int
    """Of the other side's random numbers."""


@with_options
class InARow(Environment):
    """A game of two sides; the subclasses have the rules."""

    agents = ("x", "o")
    # A move is worth what becomes of the game.
    schemes: ClassVar[Mapping[str, tuple[str, ...]]] = {agent: ("branch", "parallel") for agent in agents}
    rules: ClassVar[Rules]
    title: ClassVar[str]
    depth = 9
    """Moves that the player `search` looks ahead."""

    opening: Annotated[int, Ge(0), Le(6)] = 2
    """Most random moves at the start of a training game."""
    opponent: Opponent = "self"
    """Who plays the other side in training; `self` is the other agent."""
    against: Sequence[Opponent] = ("random", "search")
    """Who plays the other side in validation; `self` needs allow_overlap."""
    val_games: Annotated[int, Ge(1), Le(100_000)] = 100
    """Validation games against each."""
    style: Style = "full"
    """`full` prompts explain the game; after `compact` ones the reply is the move."""
    seed: int = 0
    """Tasks derive from it."""

    def __post_init__(self) -> None:
        if not self.against or len(set(self.against)) < len(self.against):
            raise option_error(f"against={list(self.against)}: one or more, each once")

    def task(self, split: Split, index: int) -> Game:
        """Returns game `index` of `split`; the sides take turns. Validation games begin with an empty board."""
        rng = random.Random(stable_hash("in a row", self.title, self.seed, split, index))
        side = STONES[index % 2]
        if split == "val":
            return Game((), side, self.against[index // self.val_games], rng.getrandbits(31))
        moves = random_moves(self.rules, self.rules.start(), rng.randint(0, self.opening), rng)
        board = self.rules.after(moves)
        if self.rules.turn(board) != side and any(
            self.rules.winner(self.rules.play(board, move)) for move in self.rules.moves(board)
        ):
            moves.pop()  # or the game could end before this side has moved
        return Game(tuple(moves), side, self.opponent, rng.getrandbits(31))

    def fingerprint(self, task: Game) -> str:
        """Returns opening, side and opponent; games against a program also differ by its random numbers."""
        seed = "" if task.opponent == "self" else f" {task.seed}"
        return f"{task.opening} {task.side} {task.opponent}{seed}"

    def num_tasks(self, split: Split) -> int | None:
        """Returns the number of validation games; training goes on without end."""
        return len(self.against) * self.val_games if split == "val" else None

    def data_sets(self, split: Split) -> Mapping[str, int]:
        """Returns the validation games by opponent."""
        return dict.fromkeys(self.against, self.val_games) if split == "val" else {}

    def opponents(self, task: Game) -> tuple[str, ...]:
        """Returns the other side, in games against it."""
        return tuple(agent for agent in self.agents if agent != task.side) if task.opponent == "self" else ()

    async def run(self, task: Game, team: Team) -> Outcome:
        """Plays a game. An illegal move loses; the other side makes a random one instead.

        Success means that it is not lost. The reward is 1 if it is won, 0 for a draw, -1 if it is lost.
        """
        rules, board, rng = self.rules, self.rules.after(task.opening), random.Random(task.seed)
        illegal, decisions = False, 0
        while legal := rules.moves(board):
            agent = rules.turn(board)
            if agent != task.side and task.opponent != "self":
                board = rules.play(board, choose(rules, board, self.depth * (task.opponent == "search"), rng))
                continue
            chosen = self.move_in((await team[agent].act(self.prompt(board), train=agent == task.side)).text)
            if chosen not in legal:
                if illegal := agent == task.side:
                    break
                chosen = rng.choice(legal)
            decisions += agent == task.side
            board = rules.play(board, chosen)
        won = rules.winner(board)
        reward = -1.0 if illegal or won not in ("", task.side) else float(won == task.side)
        results = {"win": reward > 0, "draw": reward == 0, "loss": reward < 0, "illegal": illegal}
        metrics = {name: float(happened) for name, happened in results.items()}
        return Outcome(reward >= 0, reward, {**metrics, "moves": float(decisions)})

    # ------------------------------------------------------------------ prompts

    def prompt(self, board: str) -> str:
        """Returns what the player whose turn it is sees; empty cells, or columns, are numbered from 1."""
        rules, numbered = self.rules, list(board)
        if not rules.falls:
            for place in rules.moves(board):
                numbered[place] = str(place + 1)
        rows = [numbered[start : start + rules.columns] for start in range(0, len(board), rules.columns)]
        gap = "" if self.style == "compact" else " "
        drawn = "\n".join(gap.join(row) for row in rows)
        if self.style == "compact":
            return f"{drawn}\n{rules.turn(board)}"
        if rules.falls:
            drawn += "\n" + gap.join(str(column + 1) for column in range(rules.columns))
        legal = ", ".join(str(move + 1) for move in rules.moves(board))
        name = "column" if rules.falls else "cell"
        falls = " A stone falls to the lowest empty cell of its column." if rules.falls else ""
        return (
            f"You play {self.title} as {rules.turn(board)}: {rules.length} of your stones in a row, column or "
            f"diagonal win.{falls} The board:\n{drawn}\n"
            f"Free {name}s: {legal}.\nEnd with one line of the form 'Move: <number of a free {name}>'."
        )

    def move_in(self, reply: str) -> int | None:
        """Returns the move in a reply of this environment's style, counted from 0, or None."""
        text = reply.strip()
        if self.style == "full":
            found = _MARK.search(last_line(text))
            return int(found[1]) - 1 if found else None
        return int(text) - 1 if re.fullmatch(r"\d{1,2}", text, re.ASCII) else None


class TicTacToe(InARow):
    """Tic-tac-toe: three in a row on nine cells; the player that looks ahead is perfect."""

    rules = Rules(3, 3, 3, falls=False)
    title = "tic-tac-toe"


@with_options
class ConnectFour(InARow):
    """Connect Four: four in a row, in columns from the bottom."""

    title = "Connect Four"
    rows: Annotated[int, Ge(4), Le(9)] = 6
    """Of the board."""
    columns: Annotated[int, Ge(4), Le(9)] = 7
    """Of the board."""
    depth: Annotated[int, Ge(1), Le(6)] = 3
    """Moves that the player `search` looks ahead."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules = Rules(self.rows, self.columns, 4, falls=True)  # type: ignore[misc]  # of the options
