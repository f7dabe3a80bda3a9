"""When tasks are handed to the rollout, when requests are paused, and what a restart must play again."""

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

from verl_atgrpo.trainer.queue import listed


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

    def pause(self) -> None:
        """Returns once no request of a training episode is sent any more; what is scored goes on."""

    def resume(self) -> None:
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
    """Samples all of a step's episodes, then updates: nothing is under way during the update."""

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
        rollout.pause()
        servers.abort_replicas()
        servers.sleep_replicas()

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Wakes the servers with the new weights; training requests still wait."""
        servers.update_weights(global_steps)
        servers.resume_generation_replicas()

    def step_over(self, rollout: Rollout) -> None:
        """Goes on with the interrupted episodes."""
        rollout.resume()


@dataclass(frozen=True)
class SeparateAsync:
    """Samples on servers with devices of their own, also while the policies are updated; requests are interrupted for
    the transfer of the weights alone, and go on with the new ones, after a validation where one is due."""

    prefetch: float

    def sample_end(self, servers: Servers, rollout: Rollout) -> None:
        """The servers go on."""

    def step_end(self, servers: Servers, rollout: Rollout, global_steps: int) -> None:
        """Interrupts what is under way and hands over the weights: held first, or workers would send more."""
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
    """Returns what TransferQueue is told of newly submitted tasks: verl's own tags, and which task of the data set."""
    return [
        {"is_prompt": True, "status": "pending", "global_steps": global_steps, "task": int(task)} for task in tasks
    ]


class Deals:
    """Counts a step's submissions of each task, so that two episodes of one task do not have the same seed.

    A task comes twice where the data set begins anew within a step. The count follows the order of submission, which
    is the data loader's, so it is the same however long episodes take; a step that is begun again after a restart
    counts from 0 as it did the first time.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._dealt: Counter[int] = Counter()

    def number(self, tasks: Sequence[Any], global_steps: int) -> list[int]:
        """Returns for each of newly submitted tasks how often it was submitted before in this step."""
        if global_steps != self._step:
            self._step, self._dealt = global_steps, Counter()
        numbers = []
        for task in map(int, tasks):
            numbers.append(self._dealt[task])
            self._dealt[task] += 1
        return numbers


def unfinished_tasks() -> list[int]:
    """Returns the tasks in TransferQueue, by the step of their submission: being played, played, or failed."""
    prompts = [tags for tags in listed() if tags.get("is_prompt")]
    return [tags["task"] for tags in sorted(prompts, key=lambda tags: tags["global_steps"])]


def tasks_to_submit(under_way: int, batch: int, prefetch: float, steps_left: int) -> int:
    """Returns how many tasks to submit before a step.

    Args:
        under_way: tasks submitted and not yet trained on.
        batch: tasks of a step.
        prefetch: batches under way beside the step's own; of a part of a batch, whole tasks.
        steps_left: this one included; what they cannot use is not submitted.
    """
    wanted = min(batch + math.floor(prefetch * batch), steps_left * batch)
    return max(0, wanted - under_way)


def save(folder: Path, tasks: Sequence[int]) -> None:
    """Writes tasks into a checkpoint's folder."""
    (folder / _FILE).write_text(json.dumps({"tasks": list(tasks)}))


def load(folder: Path) -> list[int]:
    """Returns the tasks of a checkpoint; none where it was saved before there were any to save."""
    path = folder / _FILE
    return [int(task) for task in json.loads(path.read_text())["tasks"]] if path.is_file() else []


def replay_unfinished(dataset: Any, tasks: deque[int]) -> Iterator[dict[str, Any]]:
    """Yields tasks as verl's data loader does, one at a time, and takes each from `tasks`.

    Raises ValueError if the data set has become smaller.
    """
    while tasks:
        if tasks[0] >= len(dataset):
            raise ValueError(
                f"{_FILE} of the checkpoint names task {tasks[0]}, but there are {len(dataset)} training tasks: "
                "resume with as many as it was saved with, or set trainer.resume_mode=disable"
            )
        yield collate_fn([dataset[tasks.popleft()]])
