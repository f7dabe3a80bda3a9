"""Plan-Path and Sokoban by success alone, and starts that know the last moves."""

import random
from dataclasses import replace

from verl_atgrpo import Outcome
from verl_atgrpo.environments.common.drafting import GameState
from verl_atgrpo.environments.common.moves import MOVES
from verl_atgrpo.environments.plan_path import SinglePlanPath
from verl_atgrpo.environments.plan_path.grid import State as PathState
from verl_atgrpo.environments.sokoban import SingleSokoban
from verl_atgrpo.environments.sokoban.board import SokobanTask, State
from verl_atgrpo.environments.sokoban.levels import solve
from verl_atgrpo.lab.tiny_models.demonstrations import END, Choice, Demonstration, Demonstrator, path

PATH_BOARD = {"size": 10, "wall_density": 0.02, "max_turns": 4, "max_moves": 6, "style": "compact"}
SOKOBAN_BOARD = {"size": 6, "wall_density": 0.05, "max_turns": 6, "max_moves": 4}


class AllOrNothing:
    """Earns 1 for success, else 0."""

    def outcome(self, state: GameState, turns: int) -> Outcome:
        """Returns the outcome of an episode that ends in `state`."""
        return Outcome(state.solved, float(state.solved), {"turns": float(turns)})


class Path(AllOrNothing, SinglePlanPath):
    """A single agent on its way to a goal."""


class Sokoban(AllOrNothing, SingleSokoban):
    """A single agent that pushes boxes. Its prompts are a tiny model's."""

    style = "compact"

    def shown(self, state: State) -> str:
        """Returns row and column of the player, the boxes and the targets, then the board without its border."""
        task = state.task
        cells = [state.player, *sorted(state.boxes), *sorted(task.targets)]
        rows = state.draw().replace(" ", "-").split("\n")[1:-1]
        numbers = "".join(f"{row}{column}" for row, column in (divmod(cell, task.stride) for cell in cells))
        return "\n".join([numbers, *(row[1:-1] for row in rows)])


def _near_goal(env: Path, rng: random.Random, noise: float) -> Demonstration:
    """Returns a shortest way, each of whose moves is random with probability `noise`."""
    task = env.task("train", rng.randrange(1 << 40))
    answer = path(task, task.start, noise, env.max_moves, rng)
    return Demonstration(env.answer_prompt(PathState.initial(task)), *answer)


def _last_moves(env: Sokoban, rng: random.Random, noise: float) -> Demonstration:
    """Returns moves that lead closer to a solution, each of which is random with probability `noise`."""
    start = State.initial(env.task("train", rng.randrange(1 << 40)))
    state, answer, choices = start, "", list[Choice]()
    # A random move may push a box where it stays.
    while (left := _left(state)) > 0 and len(answer) < env.max_moves:
        ahead = {name: env.apply(state, name) for name in MOVES}
        good = [name for name, end in ahead.items() if _left(end) == left - 1]
        choices.append({name: noise / len(MOVES) + (name in good) * (1 - noise) / len(good) for name in MOVES})
        move = rng.choices(*zip(*choices[-1].items(), strict=True))[0]
        answer, state = answer + move, ahead[move]
    return Demonstration(env.answer_prompt(start), answer, [*choices, {END: 1.0}])


def _left(state: State) -> int:
    """Returns the moves of a shortest solution; -1 if there is none."""
    moves = solve(SokobanTask(state.draw()))
    return -1 if moves is None else len(moves)


NEAR_GOALS = Demonstrator(
    "sparse:Path",
    {**PATH_BOARD, "max_distance": 2},
    _near_goal,
    response_length=8,
    words=("draft", "goal"),
    training={"clean_steps": 300},
)
"""Goals at most two steps away."""
LAST_MOVES = replace(
    NEAR_GOALS,
    environment="sparse:Sokoban",
    options={**SOKOBAN_BOARD, "max_solution": 4},
    demonstrate=_last_moves,
)
"""Boards with at most four moves left: enough to walk around a box."""
