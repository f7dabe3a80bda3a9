"""Measures scores per second on one core, for complete, partial and invalid replies to puzzles.

python benchmarks/bench_scores.py [--tasks 300] [--limit 20000]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import script

from verl_atgrpo import make
from verl_atgrpo.environments.sokoban.levels import solve

GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "plan_path 10 x 10": ("plan_path", {"size": 10}),
    "sokoban 6 x 6": ("sokoban", {"size": 6, "boxes": 1}),
    "sudoku 4 x 4": ("sudoku", {"size": 4}),
    "sudoku 9 x 9": ("sudoku", {"size": 9}),
}


def move_replies(gold: str, rng: random.Random) -> list[str]:
    """Returns a solution, prefixes of it, detours, random moves and invalid replies."""
    wandering = ["".join(rng.choices("UDLR", k=length)) for length in (1, 4, 12, 30)]
    lists = [gold, gold[: len(gold) // 2], gold[:-1] or "U", "UD" + gold, *wandering]
    replies = [f"I see a way.\nMoves: {', '.join(moves)}" for moves in lists]
    return [*replies, "", "Moves: X, Y", "Moves: " + "U" * 500, "I do not know. " * 20]


def grid_replies(givens: str, solution: str, size: int, rng: random.Random) -> list[str]:
    """Returns the solution, partial and wrong grids and invalid replies."""

    def part(share: float) -> str:
        return "".join(s if g != "." or rng.random() < share else "." for g, s in zip(givens, solution, strict=True))

    def wrong() -> str:
        return "".join(g if g != "." else str(rng.randint(1, size)) for g in givens)

    grids = [solution, part(0.2), part(0.5), part(0.9), givens, wrong(), wrong(), solution[::-1]]
    rows = ["\n".join(grid[i : i + size] for i in range(0, len(grid), size)) for grid in grids]
    return [*(f"Let me fill it in.\nGrid:\n{text}" for text in rows), "", "Grid:\n12", rows[0], "I do not know. " * 20]


def scored_a_second(name: str, options: dict[str, Any], tasks: int) -> tuple[float, int]:
    """Returns scores per second and their number; every task starts from a fresh initial state."""
    env: Any = make(name, **options)
    rng = random.Random(0)
    gold: Callable[[Any], str] = (
        (lambda task: task.shortest(task.start, rng)) if name == "plan_path" else lambda task: str(solve(task))
    )
    work = []
    for index in range(tasks):
        task = env.task("train", index)
        if name == "sudoku":
            replies = grid_replies(task.givens, task.solution, options["size"], rng)
        else:
            replies = move_replies(gold(task), rng)
        rng.shuffle(replies)
        work.append((env.initial(env.task("train", index)), replies))  # a new task, without cached results
    started = time.process_time()
    for state, replies in work:
        for reply in replies:
            env.score_reply(state, reply)
    count = sum(len(replies) for _, replies in work)
    return count / (time.process_time() - started), count


def main() -> int:
    """Prints a line per game; status 1 if one is below the limit."""
    parser = script.parser(__doc__, tasks=300)
    parser.add_argument("--limit", type=float, default=20_000.0, help="minimum of scores per second")
    options = parser.parse_args()
    below = False
    for title, (name, settings) in GAMES.items():
        rate, count = scored_a_second(name, settings, options.tasks)
        below |= rate < options.limit
        print(f"{title:<18} {rate:>9,.0f} scores/s ({count:,} replies, limit {options.limit:,.0f})")
    return int(below)


if __name__ == "__main__":
    raise SystemExit(main())
