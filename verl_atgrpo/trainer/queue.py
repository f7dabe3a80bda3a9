"""The queue between rollout and trainer: the only module that knows TransferQueue.

A row has a key, tags (plain values that travel with the key) and fields (tensors, fetched by name). The trainer reads
and writes fields in parts, so that the number of rows does not decide how much memory the driver takes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

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
"""Of the queue: what is not validation."""
TOKENS = 1 << 22
"""Tokens of answers, padded to the longest, that a part holds at most: some 300 MB with what is computed of them."""


def batch_of(keys: list[str], tags: list[dict[str, Any]], partition: str = PARTITION) -> Rows:
    """Returns rows as verl hands them about, with these very tags: its constructor makes a deep copy of them all."""
    batch = Rows(partition_id=partition)
    batch.keys, batch.tags, batch._size = keys, tags, len(keys)
    return batch


def is_padding(tags: Tags) -> bool:
    """Returns whether verl added the row to make their number even."""
    return bool(tags.get("is_padding", False))


def response_lengths(rows: Sequence[Tags]) -> Tensor:
    """Returns the rows' tokens of answers, padding's one included: (N,) int64."""
    return torch.tensor([tags["response_len"] for tags in rows], dtype=torch.int64)


def real_rows(rows: Sequence[Tags]) -> Tensor:
    """Returns which rows are not padding: (N,) bool."""
    return torch.tensor([not is_padding(tags) for tags in rows])


def parts(rows: Sequence[Tags], tokens: int | None = None) -> list[list[int]]:
    """Splits rows into parts of at most `tokens` (`TOKENS`) padded tokens of answers; each has its share of real rows.

    A part of padding alone would have no mean of anything, so there are no more parts than real rows.
    """
    order = sorted(range(len(rows)), key=lambda row: is_padding(rows[row]))
    longest = max(tags["response_len"] for tags in rows)
    wanted = -(-len(rows) * longest // (TOKENS if tokens is None else tokens))
    number = max(1, min(wanted, sum(not is_padding(tags) for tags in rows)))
    return [order[part::number] for part in range(number)]


def fetched(keys: Sequence[str], fields: Sequence[str], partition: str = PARTITION) -> TensorDict:
    """Returns the fields of rows, (n, T) jagged each."""
    return tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=list(fields))


def put(batch: Rows, part: Sequence[int], fields: Mapping[str, Tensor]) -> None:
    """Writes fields of some of the rows, (n, T) jagged each."""
    keys = [batch.keys[row] for row in part]
    tq.kv_batch_put(
        keys=keys, partition_id=batch.partition_id, fields=TensorDict(dict(fields), batch_size=[len(keys)])
    )


def remove(batch: Rows) -> None:
    """Takes rows out of the queue."""
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


def announce(uids: Sequence[str], tags: Sequence[Tags]) -> None:
    """Writes the tags of tasks that are about to be submitted: all that a restart needs to know."""
    tq.kv_batch_put(keys=list(uids), partition_id=PARTITION, tags=list(tags))


def listed() -> list[Tags]:
    """Returns the tags of everything in the queue that is not validation, tasks and rows."""
    return list((tq.kv_list(PARTITION) or {}).get(PARTITION, {}).values())


async def set_status(uid: str, partition: str, status: str) -> None:
    """Writes how far a task is: `running`, `finished` or `failure`, which verl's replay buffer waits for."""
    await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})


async def write(keys: Sequence[str], fields: TensorDict, tags: Sequence[Tags], partition: str) -> None:
    """Writes the rows of an episode."""
    await tq.async_kv_batch_put(keys=list(keys), fields=fields, tags=list(tags), partition_id=partition)


def each(batch: Rows, fields: Sequence[str]) -> Iterator[tuple[list[int], TensorDict]]:
    """Yields the rows in parts, with their fields."""
    for part in parts(batch.tags):
        yield part, fetched([batch.keys[row] for row in part], fields, batch.partition_id)


def for_workers(batch: Rows, **extra_info: Any) -> Rows:
    """Returns the rows as workers need them, without their tags: these would be copied and sent several times."""
    view = copy.copy(batch)
    view.tags = [{}] * len(batch)  # one and the same, so that a deep copy of all is one of it
    view.extra_info = extra_info
    return view


PAUSE = 4.0
"""Pause after a look, in times of what the look took: looking takes a fifth of the trainer's time at most."""
CHECK = 30.0
"""Seconds between two looks at the rollout workers: verl waits for the rows of a worker that has died."""


def pace(buffer: ReplayBuffer, interval: float, check: Callable[[], None]) -> None:
    """Has a replay buffer look every so many seconds, and less often where a look takes long.

    Every look copies the tags of all rows that are in the queue, through a process that also takes the rows in: some
    25 us a row, 2.7 s of 100,000 rows.

    Args:
        buffer: verl's.
        interval: seconds between two looks.
        check: is called while the trainer waits, every `CHECK` seconds.
    """
    look = buffer._sync_metadata_from_transfer_queue
    checked = time.monotonic()

    def paced() -> None:
        nonlocal checked
        if time.monotonic() - checked > CHECK:
            check()
            checked = time.monotonic()
        started = time.perf_counter()
        look()
        buffer.poll_interval = max(interval, PAUSE * (time.perf_counter() - started))

    buffer._sync_metadata_from_transfer_queue = paced
