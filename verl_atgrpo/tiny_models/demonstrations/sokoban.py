"""Shows Sokoban: any move that brings the board closer to solved."""

from __future__ import annotations

import random
from collections import deque

from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.sokoban import Sokoban
from verl_atgrpo.environments.sokoban.board import Boxes, SokobanTask, State, walk
from verl_atgrpo.tiny_models.demonstrations.demonstrator import Choice, Demonstration, Demonstrator, move_about

Stand = tuple[int, Boxes]
"""Where the player and the boxes stand."""


def distances(task: SokobanTask) -> dict[Stand, int]:
    """Returns the fewest moves to solve the board from wherever it can get to, where it can be solved at all.

    The solver finds one way from one place; this finds all from everywhere, which is little on a board with one box.
    """
    before: dict[Stand, list[Stand]] = {(task.player, task.boxes): []}
    queue = deque(before)
    while queue:
        stand = queue.popleft()
        if stand[1] == task.targets:
            continue
        for name in MOVES:
            after = step(task, stand, name)
            if after not in before:
                before[after] = []
                queue.append(after)
            before[after].append(stand)
    moves = dict.fromkeys((stand for stand in before if stand[1] == task.targets), 0)
    queue = deque(moves)
    while queue:
        after = queue.popleft()
        for stand in before[after]:
            if stand not in moves:
                moves[stand] = moves[after] + 1
                queue.append(stand)
    return moves


def step(task: SokobanTask, stand: Stand, move: str) -> Stand:
    """Returns where a move leads; one that is blocked leads nowhere."""
    player, boxes = stand
    ahead = player + task.steps[move]
    if ahead in boxes:
        beyond = ahead + task.steps[move]
        return stand if beyond in task.walls or beyond in boxes else (ahead, boxes - {ahead} | {beyond})
    return stand if ahead in task.walls else (ahead, boxes)


def solve_from(
    task: SokobanTask,
    stand: Stand,
    left: dict[Stand, int],
    noise: float,
    limit: int,
    rng: random.Random,
    draft: str = "",
) -> tuple[str, list[Choice]]:
    """Returns moves from `stand` that solve the board, or lead there, and the choices they were drawn from.

    `left` holds the fewest moves from every place, as `distances` returns it.
    """

    def good_moves(stand: Stand) -> list[str]:
        return [name for name in MOVES if stand in left and left.get(step(task, stand, name)) == left[stand] - 1]

    return move_about(stand, good_moves, lambda stand, move: step(task, stand, move), noise, limit, rng, draft)


def demonstrate(env: Sokoban, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent, on a board as it is dealt or as it stands later."""
    task = env.task("train", rng.randrange(1 << 40))
    left = distances(task)
    stand = (task.player, task.boxes)
    if rng.random() < 0.5:
        stand = rng.choice([stand for stand, moves in left.items() if moves > 0])
    state = State(task, *stand, 0, task.potential(stand[1]), frozenset())

    def answer(noise: float, draft: str = "") -> tuple[str, list[Choice]]:
        return solve_from(task, stand, left, noise, env.max_moves, rng, draft)

    if rng.random() < 0.5:
        return Demonstration(env.draft_prompt(state), *answer(noise))
    # The planner meets good drafts as well as bad ones, so that it learns to look at where they lead.
    drafted, _ = answer(0.3 if rng.random() < 0.5 else 0.0)
    end = walk(state, drafted).end
    good = left.get((end.player, end.boxes)) == left[stand] - len(drafted)
    return Demonstration(env.plan_prompt(state, Draft(drafted, drafted)), *answer(noise, drafted if good else ""))


SOKOBAN = Demonstrator(
    "sokoban",
    {
        "size": 6,
        "boxes": 1,
        "wall_density": 0.1,
        "max_turns": 4,
        "max_moves": 8,
        "tool": "moves",
        "style": "compact",
    },
    demonstrate,
    response_length=10,
    words=("draft", "plan", "goal", "none"),
    training={"clean_steps": 600, "noise": 0.15},
)
