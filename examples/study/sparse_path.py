"""Plan-Path by success alone: nothing is earned for a part of the way."""

from verl_atgrpo import Outcome
from verl_atgrpo.environments.plan_path import SinglePlanPath
from verl_atgrpo.environments.plan_path.grid import State


class AllOrNothing(SinglePlanPath):
    """A single agent that earns 1 at the goal, else 0."""

    def outcome(self, state: State, turns: int) -> Outcome:
        """Returns the outcome of an episode that ends in `state`."""
        return Outcome(state.solved, float(state.solved), {"turns": float(turns)})
