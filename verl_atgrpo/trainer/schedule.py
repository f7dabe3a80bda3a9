"""When servers draw and when the policies are updated: the modes of a training (`at_grpo.mode`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from omegaconf import DictConfig


class Servers(Protocol):
    """All policies' servers, under verl's names (see `policy_unit.TeamSync`)."""

    def update_weights(self, global_steps: int) -> None:
        """Wakes them with new weights."""

    def sleep_replicas(self) -> None:
        """Frees their memory, and with it their weights."""

    def abort_replicas(self) -> None:
        """Ends the requests under way, each with its tokens so far."""

    def resume_generation_replicas(self) -> None:
        """Lets them take requests again."""


class Rollout(Protocol):
    """All rollout workers (see `rollout.manager.TeamRolloutManager`)."""

    def hold(self) -> None:
        """Returns once no request of a training episode is sent any more; what is scored goes on."""

    def release(self) -> None:
        """Sends what waited, interrupted candidates with their tokens so far."""


class Schedule(Protocol):
    """What a mode does at the points of a step; a step is sampling, update, weight sync and, where due, validation."""

    @property
    def prefetch(self) -> float:
        """Batches of tasks under way beside the one that the step will train on."""

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """A step's rows are there; the update comes next."""

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """The policies are updated, and saved where that was due."""

    def step_over(self, rollout: Rollout) -> None:
        """Validation, where it was due, is done."""


class Sync:
    """Draws all of a step's episodes, then updates: nothing is under way during the update."""

    prefetch = 0.0

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """Puts the servers to sleep."""
        servers.sleep_replicas()

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Wakes the servers with the new weights."""
        servers.update_weights(global_steps)

    def step_over(self, rollout: Rollout) -> None:
        """Nothing waits."""


@dataclass(frozen=True)
class ColocateAsync:
    """Updates as soon as a batch of episodes has ended; the others are interrupted and go on with the new weights.

    Training requests are held from the end of sampling to the end of a validation, so validation has the servers to
    itself, and the time it takes is no time for training episodes.
    """

    prefetch: float

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """Interrupts what is under way and puts the servers to sleep: held first, or workers would send more."""
        rollout.hold()
        servers.abort_replicas()
        servers.sleep_replicas()

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Wakes the servers with the new weights; training requests still wait."""
        servers.update_weights(global_steps)
        servers.resume_generation_replicas()

    def step_over(self, rollout: Rollout) -> None:
        """Goes on with the interrupted episodes."""
        rollout.release()


@dataclass(frozen=True)
class SeparateAsync:
    """Draws on servers with devices of their own, also while the policies are updated; requests are interrupted for
    the transfer of the weights alone, and go on with the new ones, after a validation where one is due."""

    prefetch: float

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """The servers go on."""

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Interrupts what is under way and hands over the weights: held first, or workers would send more."""
        rollout.hold()
        servers.update_weights(global_steps)

    def step_over(self, rollout: Rollout) -> None:
        """Goes on with the interrupted episodes."""
        rollout.release()


def make_schedule(mode: str, trainer: DictConfig) -> Schedule:
    """Returns the schedule of `at_grpo.mode`, one of `config.MODES`, with verl's `trainer` section."""
    if mode == "sync":
        return Sync()
    prefetch = float(trainer.v1[mode].num_warmup_batches)
    return SeparateAsync(prefetch) if mode == "separate_async" else ColocateAsync(prefetch)
