"""Demonstrations for Plan-Path: any step that leads closer to the goal."""

from __future__ import annotations

import random

from verl_atgrpo.environments.common.drafting import Draft
from verl_atgrpo.environments.common.moves import MOVES, Cell, moved
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.plan_path.grid import PlanPathTask, State, walk
from verl_atgrpo.lab.tiny_models.demonstrations.demonstrator import END, Choice, Demonstration, Demonstrator


def path(
    task: PlanPathTask, position: Cell, noise: float, limit: int, rng: random.Random, draft: str = ""
) -> tuple[str, list[Choice]]:
    """Returns at most `limit` moves from `position` and the distributions they were sampled from.

    Moves are uniform over those that lead closer to the goal, or follow `draft` until the first deviation from it;
    with probability `noise` a move is random. The answer ends at the goal.
    """
    moves, choices = "", []
    while len(moves) < limit and (good := task.closer(position)):
        if draft.startswith(moves) and len(draft) > len(moves):
            good = [draft[len(moves)]]
        choices.append({name: noise / len(MOVES) + (name in good) * (1 - noise) / len(good) for name in MOVES})
        names, chances = zip(*choices[-1].items(), strict=True)
        move = rng.choices(names, chances)[0]
        moves += move
        ahead = moved(position, move)
        position = ahead if task.free(ahead) else position
    return moves, [*choices, {END: 1.0}]


def demonstrate(env: PlanPath, rng: random.Random, noise: float) -> Demonstration:
    """Returns a demonstration for either agent."""
    task = env.task("train", rng.randrange(1 << 40))
    cells = [cell for cell in task.distance if cell != task.goal]
    # Detours around walls are hard and rare: half of the demonstrations start with one if possible.
    detours = [cell for cell in cells if task.distance[cell] > _manhattan(cell, task.goal)]
    if detours and rng.random() < 0.5:
        position = rng.choice(detours)
    else:
        position = task.start if rng.random() < 0.7 else rng.choice(cells)
    state = State(task, position, task.distance[position])
    if rng.random() < 0.5:
        return Demonstration(env.draft_prompt(state), *path(task, position, noise, env.max_moves, rng))
    # Good and bad drafts, so that the planner learns to use where they lead.
    drafted, _ = path(task, position, 0.3 if rng.random() < 0.5 else 0.0, env.max_moves, rng)
    follow = drafted if walk(state, drafted).on_shortest_path else ""
    answer = path(task, position, noise, env.max_moves, rng, follow)
    return Demonstration(env.plan_prompt(state, Draft(drafted, drafted)), *answer)


def _manhattan(cell: Cell, goal: Cell) -> int:
    return abs(cell[0] - goal[0]) + abs(cell[1] - goal[1])


PLAN_PATH = Demonstrator(
    "plan_path",
    {"size": 4, "wall_density": 0.2, "max_turns": 4, "max_moves": 8, "tool": "moves", "style": "compact"},
    demonstrate,
    response_length=10,
    words=("draft", "plan", "goal", "none"),
)
