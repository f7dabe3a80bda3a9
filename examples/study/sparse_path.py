"""Plan-Path by success alone: nothing is earned for a part of the way. And a start that knows near goals."""

import random

from verl_atgrpo import Outcome
from verl_atgrpo.environments.plan_path import SinglePlanPath
from verl_atgrpo.environments.plan_path.grid import State
from verl_atgrpo.lab.tiny_models.demonstrations import Demonstration, Demonstrator, path

BOARD = {"size": 8, "wall_density": 0.02, "max_turns": 2, "max_moves": 12, "style": "compact"}


class AllOrNothing(SinglePlanPath):
    """A single agent that earns 1 at the goal, else 0."""

    def outcome(self, state: State, turns: int) -> Outcome:
        """Returns the outcome of an episode that ends in `state`."""
        return Outcome(state.solved, float(state.solved), {"turns": float(turns)})


def _near(env: AllOrNothing, rng: random.Random, noise: float) -> Demonstration:
    """Returns a shortest way, each of whose moves is random with probability `noise`."""
    task = env.task("train", rng.randrange(1 << 40))
    answer = path(task, task.start, noise, env.max_moves, rng)
    return Demonstration(env.answer_prompt(State.initial(task)), *answer)


NEAR = Demonstrator(
    "sparse_path:AllOrNothing",
    {**BOARD, "max_distance": 2},
    _near,
    response_length=16,
    words=("draft", "goal"),
    training={"clean_steps": 300},
)
"""Goals at most two steps away."""
