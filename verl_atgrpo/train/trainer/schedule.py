"""When tasks are submitted, and when requests are paused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

if TYPE_CHECKING:
    from verl_atgrpo.train.rollout.manager import TeamRolloutManager
    from verl_atgrpo.train.trainer.policies import TeamSync


@dataclass(frozen=True)
class Sync:
    """Samples all of a step's episodes, then updates: nothing is in flight during the update.

    The other modes differ in what they do during a step: sampling, update, weight sync and, if one is due, validation.
    """

    prefetch: float = 0.0
    """Batches of tasks in flight in addition to the one that the step will train on."""

    def sample_end(self, servers: TeamSync, rollout: TeamRolloutManager) -> None:
        """Is called when a step's rows are complete, before the update: puts the servers to sleep."""
        servers.sleep_replicas()

    def step_end(self, servers: TeamSync, rollout: TeamRolloutManager, global_steps: int) -> None:
        """Is called after the update and, if one was due, the checkpoint: wakes the servers with the new weights."""
        servers.update_weights(global_steps)

    def step_over(self, rollout: TeamRolloutManager) -> None:
        """Is called after the validation, or at the end of a step without one: no request is paused."""


class ColocateAsync(Sync):
    """Updates as soon as a batch of episodes has ended; the others are interrupted and resume with the new weights.

    Training requests are paused from the end of sampling to the end of a validation, so validation has the servers to
    itself.
    """

    def sample_end(self, servers: TeamSync, rollout: TeamRolloutManager) -> None:
        """Interrupts requests in flight and puts the servers to sleep; pauses first, or workers would send more."""
        rollout.pause()
        servers.abort_replicas()
        servers.sleep_replicas()

    def step_end(self, servers: TeamSync, rollout: TeamRolloutManager, global_steps: int) -> None:
        """Wakes the servers with the new weights; training requests stay paused."""
        servers.update_weights(global_steps)
        servers.resume_generation_replicas()

    def step_over(self, rollout: TeamRolloutManager) -> None:
        """Goes on with the interrupted episodes."""
        rollout.resume()


class SeparateAsync(Sync):
    """Samples on servers with devices of their own, also while the policies are updated.

    Requests are interrupted only for the weight sync, and resume with the new weights, after a validation if one is
    due.
    """

    def sample_end(self, servers: TeamSync, rollout: TeamRolloutManager) -> None:
        """Does nothing: the servers continue."""

    def step_end(self, servers: TeamSync, rollout: TeamRolloutManager, global_steps: int) -> None:
        """Interrupts requests in flight and syncs weights; pauses first, or workers would send more."""
        rollout.pause()
        servers.update_weights(global_steps)

    def step_over(self, rollout: TeamRolloutManager) -> None:
        """Goes on with the interrupted episodes."""
        rollout.resume()


def make_schedule(mode: str, trainer: DictConfig) -> Sync:
    """Returns the schedule of `at_grpo.mode`, one of `schema.MODES`, with verl's `trainer` section."""
    if mode == "sync":
        return Sync()
    prefetch = float(trainer.v1[mode].num_warmup_batches)
    return SeparateAsync(prefetch) if mode == "separate_async" else ColocateAsync(prefetch)


class Submissions:
    """Counts how often each task was submitted in a step, so that two submissions of a task have different seeds.

    A task is submitted twice where a new epoch begins within a step. The count follows the data loader's order, so it
    does not depend on how long episodes take, and a step that is repeated after a restart has the same counts.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._counts: Counter[int] = Counter()

    def number(self, tasks: Sequence[Any], global_steps: int) -> list[int]:
        """Returns, for each newly submitted task, how often it was already submitted in this step."""
        if global_steps != self._step:
            self._step, self._counts = global_steps, Counter()
        numbers = []
        for task in map(int, tasks):
            numbers.append(self._counts[task])
            self._counts[task] += 1
        return numbers


def tasks_to_submit(in_flight: int, batch: int, prefetch: float, steps_left: int) -> int:
    """Returns how many tasks to submit before a step.

    Args:
        in_flight: tasks submitted and not yet trained on.
        batch: tasks per step.
        prefetch: batches in flight in addition to the step's own; a fraction of a batch is rounded down to tasks.
        steps_left: including this one; tasks that they would not use are not submitted.
    """
    wanted = min(batch + math.floor(prefetch * batch), steps_left * batch)
    return max(0, wanted - in_flight)
