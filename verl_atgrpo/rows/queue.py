"""The queue between rollout and trainer: the only module that uses TransferQueue.

A row has a key, tags (plain values, sent with the key) and fields (tensors, fetched by name). The trainer reads and
writes fields in parts, so that the driver's memory for tokens does not grow with the number of rows.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

if TYPE_CHECKING:  # its package registers our trainer, which imports this module
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

Tags = Mapping[str, Any]
Rows: TypeAlias = KVBatchMeta
"""Keys and tags of rows, as verl's trainer and workers take and return them."""
PARTITION = "train"
"""TransferQueue's partition of training rows."""
VALIDATION = "val"
"""verl's partition of validation rows."""
TOKENS = 1 << 22
"""Most response tokens of a part, padded to the longest row: about 300 MB with what is computed from them."""


FIELDS = ("prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids")
"""What verl's engines read of rows of text from a rollout; `ppo_loss` reads what is written before it (`put`)."""


def batch_of(keys: list[str], tags: list[dict[str, Any]], partition: str = PARTITION) -> Rows:
    """Returns rows as verl passes them, without the deep copy of all tags that the constructor makes."""
    batch = Rows(partition_id=partition)
    batch.keys, batch.tags, batch._size = keys, tags, len(keys)
    return batch


def is_padding(tags: Tags) -> bool:
    """Returns whether verl added the row as padding, to make the number of rows divisible."""
    return bool(tags.get("is_padding", False))


def response_lengths(rows: Sequence[Tags]) -> Tensor:
    """Returns the rows' response lengths, padding included (1 token each): (N,) int64."""
    return torch.tensor([tags["response_len"] for tags in rows], dtype=torch.int64)


def real_rows(rows: Sequence[Tags]) -> Tensor:
    """Returns a mask of the rows that are not padding: (N,) bool."""
    return torch.tensor([not is_padding(tags) for tags in rows])


def parts(rows: Sequence[Tags]) -> list[list[int]]:
    """Splits row indices into parts of at most `TOKENS` padded response tokens.

    Real rows and padding are spread evenly. There are no more parts than real rows: means over a part of padding alone
    would be undefined.
    """
    order = sorted(range(len(rows)), key=lambda row: is_padding(rows[row]))
    longest = max(tags["response_len"] for tags in rows)
    wanted = -(-len(rows) * longest // TOKENS)
    number = max(1, min(wanted, sum(not is_padding(tags) for tags in rows)))
    return [order[part::number] for part in range(number)]


def fetch(keys: Sequence[str], fields: Sequence[str], partition: str = PARTITION) -> TensorDict:
    """Returns fields of rows, each (n, T) jagged."""
    return tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=list(fields))


def put(batch: Rows, part: Sequence[int], fields: Mapping[str, Tensor]) -> None:
    """Writes fields of the rows with indices `part`, each (n, T) jagged; adds them to those that workers get."""
    batch.fields = [*dict.fromkeys([*(batch.fields or FIELDS), *fields])]
    keys = [batch.keys[row] for row in part]
    tq.kv_batch_put(
        keys=keys, partition_id=batch.partition_id, fields=TensorDict(dict(fields), batch_size=[len(keys)])
    )


def remove(batch: Rows) -> None:
    """Removes rows from the queue."""
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


def put_tasks(uids: Sequence[str], tasks: Sequence[Any], global_steps: int) -> None:
    """Writes verl's tags of tasks, and their index, before they are submitted: a restart needs nothing else."""
    tags = [
        {"is_prompt": True, "status": "pending", "global_steps": global_steps, "task": int(task)} for task in tasks
    ]
    tq.kv_batch_put(keys=list(uids), partition_id=PARTITION, tags=tags)


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


def fetch_parts(batch: Rows, fields: Sequence[str]) -> Iterator[tuple[list[int], TensorDict]]:
    """Yields the rows in parts: row indices and their fields."""
    for part in parts(batch.tags):
        yield part, fetch([batch.keys[row] for row in part], fields, batch.partition_id)


def for_workers(batch: Rows, **extra_info: Any) -> Rows:
    """Returns the rows as workers get them: without what they do not need, and verl would copy and send several times.

    That is all tags, and all fields but `FIELDS` and those that were `put`.
    """
    view = copy.copy(batch)
    view.tags = [{}] * len(batch)  # one shared dict, so that a deep copy copies one
    view.fields = list(batch.fields or FIELDS)
    view.extra_info = extra_info
    return view


def actors() -> list[ray.actor.ActorHandle]:
    """Returns the actors that hold the rows and their metadata."""
    return [
        ray.get_actor(actor["name"], namespace=actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("TransferQueue")
    ]


POLL_PAUSE = 4.0
"""Pause after a poll, as a multiple of the poll's duration: polling takes at most a fifth of the trainer's time."""
CHECK_INTERVAL = 30.0
"""Seconds between two checks of the rollout workers: verl would wait forever for the rows of one that has died."""


def pace(buffer: ReplayBuffer, interval: float, check: Callable[[], None]) -> None:
    """Sets a replay buffer's polling interval, longer where a poll takes long.

    Every poll copies the tags of all rows in the queue through the process that also receives new rows: about 25 us a
    row.

    Args:
        buffer: verl's.
        interval: seconds between two polls.
        check: is called while the trainer waits, every `CHECK_INTERVAL` seconds.
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


def on_validation_sample(buffer: ReplayBuffer, callback: Callable[[Rows], None]) -> None:
    """Has a replay buffer call `callback` with every validation batch that is sampled, before verl decodes it."""
    sample = buffer.sample

    def sampled(*args: Any, **kwargs: Any) -> tuple[Rows, dict[str, Any]]:
        batch, metrics = sample(*args, **kwargs)
        if batch.partition_id == VALIDATION:
            callback(batch)
        return batch, metrics

    buffer.sample = sampled
