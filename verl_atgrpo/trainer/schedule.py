"""When tasks are submitted, when requests are paused, and which tasks a resumed run replays."""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig
from verl.utils.dataset.rl_dataset import collate_fn

from verl_atgrpo.trainer.queue import list_tags


class Servers(Protocol):
    """All policies' servers, under verl's names (see `policy_unit.TeamSync`)."""

    def update_weights(self, global_steps: int) -> None:
        """Wakes them with new weights."""

    def sleep_replicas(self) -> None:
        """Frees their memory, including their weights."""

    def abort_replicas(self) -> None:
        """Aborts requests in flight, which return their tokens so far."""

    def resume_generation_replicas(self) -> None:
        """Accepts requests again."""


class Rollout(Protocol):
    """All rollout workers (see `rollout.manager.TeamRolloutManager`)."""

    def pause(self) -> None:
        """Returns once no training request is sent any more; scoring continues."""

    def resume(self) -> None:
        """Sends the waiting requests; interrupted candidates continue from their tokens so far."""


class Schedule(Protocol):
    """What a mode does during a step: sampling, update, weight sync and, if one is due, validation."""

    @property
    def prefetch(self) -> float:
        """Batches of tasks in flight in addition to the one that the step will train on."""

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """Is called when a step's rows are complete, before the update."""

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Is called after the update and, if one was due, the checkpoint."""

    def step_over(self, rollout: Rollout) -> None:
        """Is called after the validation, or at the end of a step without one."""


class Sync:
    """Samples all of a step's episodes, then updates: nothing is in flight during the update."""

    prefetch = 0.0

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """Puts the servers to sleep."""
        servers.sleep_replicas()

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Wakes the servers with the new weights."""
        servers.update_weights(global_steps)

    def step_over(self, rollout: Rollout) -> None:
        """Does nothing: no request is paused."""


@dataclass(frozen=True)
class ColocateAsync:
    """Updates as soon as a batch of episodes has ended; the others are interrupted and resume with the new weights.

    Training requests are paused from the end of sampling to the end of a validation, so validation has the servers to
    itself.
    """

    prefetch: float

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """Interrupts requests in flight and puts the servers to sleep; pauses first, or workers would send more."""
        rollout.pause()
        servers.abort_replicas()
        servers.sleep_replicas()

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Wakes the servers with the new weights; training requests stay paused."""
        servers.update_weights(global_steps)
        servers.resume_generation_replicas()

    def step_over(self, rollout: Rollout) -> None:
        """Goes on with the interrupted episodes."""
        rollout.resume()


@dataclass(frozen=True)
class SeparateAsync:
    """Samples on servers with devices of their own, also while the policies are updated.

    Requests are interrupted only for the weight sync, and resume with the new weights, after a validation if one is
    due.
    """

    prefetch: float

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """Does nothing: the servers continue."""

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Interrupts requests in flight and syncs weights; pauses first, or workers would send more."""
        rollout.pause()
        servers.update_weights(global_steps)

    def step_over(self, rollout: Rollout) -> None:
        """Goes on with the interrupted episodes."""
        rollout.resume()


def make_schedule(mode: str, trainer: DictConfig) -> Schedule:
    """Returns the schedule of `at_grpo.mode`, one of `config.MODES`, with verl's `trainer` section."""
    if mode == "sync":
        return Sync()
    prefetch = float(trainer.v1[mode].num_warmup_batches)
    return SeparateAsync(prefetch) if mode == "separate_async" else ColocateAsync(prefetch)


_FILE = "pending.json"


def tags_of(tasks: Sequence[Any], global_steps: int) -> list[dict[str, Any]]:
    """Returns the queue's tags for newly submitted tasks: verl's own, and the index of the task."""
    return [
        {"is_prompt": True, "status": "pending", "global_steps": global_steps, "task": int(task)} for task in tasks
    ]


class Deals:
    """Counts how often each task was submitted in a step, so that two submissions of a task have different seeds.

    A task is submitted twice where a new epoch begins within a step. The count follows the data loader's order, so it
    does not depend on how long episodes take, and a step that is repeated after a restart has the same counts.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._dealt: Counter[int] = Counter()

    def number(self, tasks: Sequence[Any], global_steps: int) -> list[int]:
        """Returns, for each newly submitted task, how often it was already submitted in this step."""
        if global_steps != self._step:
            self._step, self._dealt = global_steps, Counter()
        numbers = []
        for task in map(int, tasks):
            numbers.append(self._dealt[task])
            self._dealt[task] += 1
        return numbers


def unfinished_tasks() -> list[int]:
    """Returns the tasks in the queue (running, finished or failed) by the step of their submission."""
    prompts = [tags for tags in list_tags() if tags.get("is_prompt")]
    return [tags["task"] for tags in sorted(prompts, key=lambda tags: tags["global_steps"])]


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


def save(folder: Path, tasks: Sequence[int]) -> None:
    """Writes unfinished tasks into a checkpoint's folder."""
    (folder / _FILE).write_text(json.dumps({"tasks": list(tasks)}))


def load(folder: Path) -> list[int]:
    """Returns a checkpoint's unfinished tasks; none for checkpoints from before they were saved."""
    path = folder / _FILE
    return [int(task) for task in json.loads(path.read_text())["tasks"]] if path.is_file() else []


def replay_unfinished(dataset: Any, tasks: deque[int]) -> Iterator[dict[str, Any]]:
    """Yields tasks in the form of verl's data loader, one at a time, and removes each from `tasks`.

    Raises ValueError if the data set has become smaller.
    """
    while tasks:
        if tasks[0] >= len(dataset):
            raise ValueError(
                f"{_FILE} of the checkpoint names task {tasks[0]}, but there are {len(dataset)} training tasks: "
                "resume with as many as it was saved with, or set trainer.resume_mode=disable"
            )
        yield collate_fn([dataset[tasks.popleft()]])
