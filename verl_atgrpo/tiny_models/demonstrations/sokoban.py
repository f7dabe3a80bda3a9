"""Demonstrations for Sokoban: any move on a shortest solution."""

from __future__ import annotations

import random
from collections import deque

from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.sokoban import Sokoban
from verl_atgrpo.environments.sokoban.board import Position, SokobanTask, State, moved, walk
from verl_atgrpo.tiny_models.demonstrations.demonstrator import Choice, Demonstration, Demonstrator, move_about


def distances(task: SokobanTask) -> dict[Position, int]:
    """Returns the fewest moves to the solution for all reachable positions that can be solved.

    `solve` finds one solution from one position; this covers all positions, which is fast for a single box.
    """
    before: dict[Position, list[Position]] = {(task.player, task.boxes): []}
    queue = deque(before)
    while queue:
        position = queue.popleft()
        if position[1] == task.targets:
            continue
        for name in MOVES:
            after = moved(task, *position, name)
            if after not in before:
                before[after] = []
                queue.append(after)
            before[after].append(position)
    moves = dict.fromkeys((position for position in before if position[1] == task.targets), 0)
    queue = deque(moves)
    while queue:
        after = queue.popleft()
        for position in before[after]:
            if position not in moves:
                moves[position] = moves[after] + 1
                queue.append(position)
    return moves


def solve_from(
    task: SokobanTask,
    position: Position,
    left: dict[Position, int],
    noise: float,
    limit: int,
    rng: random.Random,
    draft: str = "",
) -> tuple[str, list[Choice]]:
    """Returns moves from `position` towards the solution and the distributions they were sampled from.

    `left` has the fewest remaining moves for every position, as `distances` returns them.
    """

    def good_moves(position: Position) -> list[str]:
        if position not in left:
            return []
        return [name for name in MOVES if left.get(moved(task, *position, name)) == left[position] - 1]

    return move_about(position, good_moves, lambda at, move: moved(task, *at, move), noise, limit, rng, draft)


def demonstrate(env: Sokoban, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent, at the start of a board or at a later position."""
    task = env.task("train", rng.randrange(1 << 40))
    left = distances(task)
    position = (task.player, task.boxes)
    if rng.random() < 0.5:
        position = rng.choice([position for position, moves in left.items() if moves > 0])
    state = State(task, *position, 0, task.potential(position[1]), frozenset())

    def answer(noise: float, draft: str = "") -> tuple[str, list[Choice]]:
        return solve_from(task, position, left, noise, env.max_moves, rng, draft)

    if rng.random() < 0.5:
        return Demonstration(env.draft_prompt(state), *answer(noise))
    # Good and bad drafts, so that the planner learns to use where they lead.
    drafted, _ = answer(0.3 if rng.random() < 0.5 else 0.0)
    end = walk(state, drafted).end
    good = left.get((end.player, end.boxes)) == left[position] - len(drafted)
    return Demonstration(env.plan_prompt(state, Draft(drafted, drafted)), *answer(noise, drafted if good else ""))


SOKOBAN = Demonstrator(
    "sokoban",
    {"size": 6, "boxes": 1, "wall_density": 0.1, "max_turns": 4, "max_moves": 8, "tool": "moves", "style": "compact"},
    demonstrate,
    response_length=10,
    words=("draft", "plan", "goal", "none"),
    training={"clean_steps": 600, "noise": 0.15},
)
