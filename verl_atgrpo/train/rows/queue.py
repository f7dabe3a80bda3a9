"""Tasks in TransferQueue, the rows that the rollout writes, and verl's buffer, which waits for both.

What the trainer does with the rows of a step is in `batch`. No other module uses TransferQueue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
import transfer_queue as tq
from tensordict import TensorDict

from verl_atgrpo.train.rows.batch import PARTITION, VALIDATION, Batch, Rows, Tags

if TYPE_CHECKING:  # its package registers our trainer, which imports this module
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


def put_tasks(uids: Sequence[str], tasks: Sequence[Any], global_steps: int) -> None:
    """Writes verl's tags of tasks, and their index, before they are submitted: a restart needs nothing else."""
    of_all = {"is_prompt": True, "status": "pending", "global_steps": global_steps}
    tq.kv_batch_put(keys=list(uids), partition_id=PARTITION, tags=[{**of_all, "task": int(task)} for task in tasks])


def unfinished_tasks() -> list[int]:
    """Returns the tasks in the queue (running, finished or failed) by the step of their submission."""
    everything = (tq.kv_list(PARTITION) or {}).get(PARTITION, {}).values()
    prompts = [tags for tags in everything if tags.get("is_prompt")]
    return [tags["task"] for tags in sorted(prompts, key=lambda tags: tags["global_steps"])]


async def set_status(uid: str, partition: str, status: str) -> None:
    """Writes a task's status, `running`, `finished` or `failure`, which verl's replay buffer polls."""
    await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})


async def write(keys: Sequence[str], fields: TensorDict, tags: Sequence[Tags], partition: str) -> None:
    """Writes the rows of an episode."""
    await tq.async_kv_batch_put(keys=list(keys), fields=fields, tags=list(tags), partition_id=partition)


def actors() -> list[ray.actor.ActorHandle]:
    """Returns the actors that hold the rows and their metadata."""
    return [
        ray.get_actor(actor["name"], namespace=actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("TransferQueue")
    ]


POLL_INTERVAL = 0.05
"""Seconds between the trainer's polls for finished episodes (verl's default is 2)."""
POLL_PAUSE = 4.0
"""Pause after a poll, as a multiple of the poll's duration: polling takes at most a fifth of the trainer's time."""
CHECK_INTERVAL = 30.0
"""Seconds between two checks of the rollout workers: verl would wait forever for the rows of one that has died."""


def pace(buffer: ReplayBuffer, interval: float, check: Callable[[], None]) -> None:
    """Sets a replay buffer's polling interval, longer where a poll takes long.

    Every poll copies the tags of all rows in the queue through the process that also receives new rows: about 25 us a
    row. `check` is called while the trainer waits, every `CHECK_INTERVAL` seconds.
    """
    poll = buffer._sync_metadata_from_transfer_queue
    checked = time.monotonic()

    def paced() -> None:
        nonlocal checked
        if time.monotonic() - checked > CHECK_INTERVAL:
            check()
            checked = time.monotonic()
        started = time.perf_counter()
        poll()
        buffer.poll_interval = max(interval, POLL_PAUSE * (time.perf_counter() - started))

    buffer._sync_metadata_from_transfer_queue = paced


def on_validation_sample(buffer: ReplayBuffer, callback: Callable[[Batch], None]) -> None:
    """Has a replay buffer call `callback` with every validation batch that is sampled, before verl decodes it."""
    sample = buffer.sample

    def sampled(*args: Any, **kwargs: Any) -> tuple[Rows, dict[str, Any]]:
        batch, metrics = sample(*args, **kwargs)
        if batch.partition_id == VALIDATION:
            callback(Batch(batch.keys, batch.tags, VALIDATION))
        return batch, metrics

    buffer.sample = sampled
