"""The batch of a step: rows with their tags here, and their values in TransferQueue.

A row has a key, tags (plain values, sent with the key) and fields (tensors, fetched by name). Nothing else of the
trainer reads or writes values, so what verl's next data plane changes is here and in `queue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

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


def jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Splits values into rows of these lengths, int64 (N,): a jagged tensor (N, T)."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    # With bounds, as torch.nested.as_nested_tensor sets them: without, padding would be to the sum of all lengths.
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )


def slices(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns slices of `values`, without a loop over them: starts, lengths (N,) int64 -> (N, T) jagged."""
    first = lengths.cumsum(0) - lengths
    places = torch.arange(int(lengths.sum()), device=lengths.device)
    return jagged(values[places + torch.repeat_interleave(starts - first, lengths)], lengths)


def is_padding(tags: Tags) -> bool:
    """Returns whether verl added the row as padding, to make the number of rows divisible."""
    return bool(tags.get("is_padding", False))


class Batch:
    """Rows in the queue, in an order.

    The tags are those of the step: what an update adds to them, its metrics and records read. Parts of a batch are
    batches of the same rows: what is written to a part, the batch's workers get.
    """

    def __init__(self, keys: Iterable[str] = (), tags: Iterable[dict[str, Any]] = (), partition_id: str = PARTITION):
        self.keys, self.tags, self.partition_id = list(keys), list(tags), partition_id
        self.extra_info: dict[str, Any] = {}
        """What workers are told of the batch as a whole."""
        self._fields = dict.fromkeys(FIELDS)

    def __len__(self) -> int:
        return len(self.keys)

    def __add__(self, other: Batch) -> Batch:
        return Batch(self.keys + other.keys, self.tags + other.tags, self.partition_id)

    @property
    def lengths(self) -> Tensor:
        """The rows' response lengths, padding included (1 token each): (N,) int64."""
        return self.column("response_len")

    def column(self, tag: str) -> Tensor:
        """Returns a tag of all rows: (N,), int64 or float32."""
        return torch.tensor([tags[tag] for tags in self.tags])

    def tag(self, **columns: Iterable[Any]) -> None:
        """Adds tags to the rows, each with a value for every row."""
        for tag, values in columns.items():
            for tags, value in zip(self.tags, values, strict=True):
                tags[tag] = value

    @property
    def real(self) -> Batch:
        """The rows that are not padding."""
        return self.take([row for row, tags in enumerate(self.tags) if not is_padding(tags)])

    @property
    def padding(self) -> Batch:
        """The rows that verl added."""
        return self.take([row for row, tags in enumerate(self.tags) if is_padding(tags)])

    def parts(self) -> Iterator[Batch]:
        """Yields the rows in parts of at most `TOKENS` padded response tokens, so that values fit into memory.

        Real rows and padding are spread evenly. There are no more parts than real rows: means over a part of padding
        alone would be undefined.
        """
        order = sorted(range(len(self)), key=lambda row: is_padding(self.tags[row]))
        longest = max(tags["response_len"] for tags in self.tags)
        wanted = -(-len(self) * longest // TOKENS)
        number = max(1, min(wanted, sum(not is_padding(tags) for tags in self.tags)))
        for part in range(number):
            yield self.take(order[part::number])

    def take(self, rows: Sequence[int]) -> Batch:
        """Returns the rows of these numbers, as a part of this batch."""
        part = Batch((self.keys[row] for row in rows), (self.tags[row] for row in rows), self.partition_id)
        part._fields = self._fields
        return part

    def fetch(self, *fields: str) -> TensorDict:
        """Returns fields of all rows, each (N, T) jagged."""
        return tq.kv_batch_get(keys=self.keys, partition_id=self.partition_id, select_fields=list(fields))

    def put(self, **fields: Tensor) -> None:
        """Writes fields of all rows, each (N, T) jagged or (N,), and adds them to those that workers get."""
        self._fields |= dict.fromkeys(fields)
        tensors = TensorDict(dict(fields), batch_size=[len(self)])
        tq.kv_batch_put(keys=self.keys, partition_id=self.partition_id, fields=tensors)

    def remove(self) -> None:
        """Removes the rows from the queue."""
        if self.keys:
            tq.kv_clear(keys=self.keys, partition_id=self.partition_id)

    def pad(self, multiple: int, token: int) -> None:
        """Adds verl's rows of padding up to a multiple of rows; `token` is what they say."""
        # verl reads the tags of the first row, and copies all.
        tags = [self.tags[0], *[{}] * (len(self) - 1)]
        padded = upsample_batch_to_divisible_size(Rows(self.keys, tags, self.partition_id), multiple, token)
        self.tags += padded.tags[len(self) :]
        self.keys = padded.keys

    def reorder(self, order: Sequence[int]) -> None:
        """Sorts the rows: `order` has the number of every row once."""
        self.keys, self.tags = [self.keys[row] for row in order], [self.tags[row] for row in order]

    def for_workers(self, **extra_info: Any) -> Rows:
        """Returns the rows as workers get them: without tags, with the fields `FIELDS` and those that were `put`.

        Workers need nothing else, and verl would copy and send it several times.
        """
        tags: list[dict[str, Any]] = [{}] * len(self)  # one shared dict, so that a deep copy copies one
        return Rows(self.keys, tags, self.partition_id, list(self._fields), {**self.extra_info, **extra_info})
