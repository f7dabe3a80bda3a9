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
class Schedule:
    """What servers and rollout workers do during a step: sampling, update, weight sync and, if due, validation.

    `sync` samples all of a step's episodes, then updates. `colocate_async` updates as soon as a batch of episodes has
    ended: the others are interrupted, and resume with the new weights after a validation, which has the servers to
    itself. The servers of `separate_async` have devices of their own and sample during the update, too; requests are
    interrupted for the weight sync, and wait for a validation.
    """

    mode: str
    """One of `schema.MODES`."""
    prefetch: float
    """Batches of tasks in flight in addition to the one that the step will train on."""

    def sample_end(self, servers: TeamSync, rollout: TeamRolloutManager) -> None:
        """Is called when a step's rows are complete, before the update."""
        if self.mode == "separate_async":
            return
        if self.mode == "colocate_async":
            rollout.pause()  # first, or workers would send more
            servers.abort_replicas()
        servers.sleep_replicas()

    def step_end(self, servers: TeamSync, rollout: TeamRolloutManager, global_steps: int) -> None:
        """Is called after the update and, if one was due, the checkpoint: gives the servers the new weights."""
        if self.mode == "separate_async":
            rollout.pause()
        servers.update_weights(global_steps)
        if self.mode == "colocate_async":
            servers.resume_generation_replicas()

    def step_over(self, rollout: TeamRolloutManager) -> None:
        """Is called after the validation, or at the end of a step without one: interrupted episodes go on."""
        if self.mode != "sync":
            rollout.resume()


def make_schedule(mode: str, trainer: DictConfig) -> Schedule:
    """Returns the schedule of `at_grpo.mode`, with verl's `trainer` section."""
    return Schedule(mode, 0.0 if mode == "sync" else float(trainer.v1[mode].num_warmup_batches))


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
    """Returns how many tasks to submit before a step of `batch` tasks.

    `in_flight` are submitted and not yet trained on; `prefetch` are batches in flight in addition to the step's own, a
    fraction of one rounded down to tasks. Tasks that the steps left, this one included, would not use are none.
    """
    wanted = min(batch + math.floor(prefetch * batch), steps_left * batch)
    return max(0, wanted - in_flight)
