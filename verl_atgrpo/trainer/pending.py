"""Tasks that were handed to the rollout and not yet trained on: counted, saved, and dealt again after a restart.

TransferQueue itself says which they are: a task's key is there from its submission until its rows are sampled, or it
failed and another took its place.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.utils.dataset.rl_dataset import collate_fn

from verl_atgrpo.trainer.step_rows import PARTITION

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


def under_way() -> list[int]:
    """Returns the tasks in TransferQueue, by the step of their submission: being played, played, or failed."""
    listed = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
    prompts = [tags for tags in listed.values() if tags.get("is_prompt")]
    return [tags["task"] for tags in sorted(prompts, key=lambda tags: tags["global_steps"])]


def missing(under_way: int, batch: int, prefetch: float, steps_left: int) -> int:
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


def again(dataset: Any, tasks: deque[int]) -> Iterator[dict[str, Any]]:
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
