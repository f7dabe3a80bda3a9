"""TransferQueue in this process."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta


class LocalQueue:
    """TransferQueue's key-value interface in dictionaries; `put` is called with keys, fields and tags of new rows."""

    def __init__(self, put: Callable[[Sequence[str], Any, Sequence[dict[str, Any]]], None] = lambda *_: None) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self.fields: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
        """Partition -> key -> field -> value."""
        self._lock = threading.Lock()
        self._put = put

    def kv_put(
        self, key: str, partition_id: str, fields: Any = None, tag: dict[str, Any] | None = None
    ) -> KVBatchMeta:
        """Puts one row, or the tag of one."""
        return self.kv_batch_put([key], partition_id, fields, None if tag is None else [tag])

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        """Puts rows, adds fields to rows, or updates tags."""
        with self._lock:
            if fields is not None and tags is not None:
                self._put(keys, fields, tags)
            for number, key in enumerate(keys):
                self.tags[partition_id].setdefault(key, {}).update(tags[number] if tags else {})
            for name in fields.keys() if fields is not None else ():
                for key, value in zip(keys, _values(fields, name), strict=True):
                    self.fields[partition_id][key][name] = value
            mine = [dict(self.tags[partition_id][key]) for key in keys]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=mine)

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """Returns those of the fields that all rows have; raises ValueError for a row that is not in the queue."""
        with self._lock:
            missing = [key for key in keys if key not in self.tags[partition_id]]
            if missing:
                raise ValueError(f"not in the queue: {missing[:3]}")
            rows = [self.fields[partition_id][key] for key in keys]
        wanted = list(rows[0]) if select_fields is None else select_fields
        present = [name for name in wanted if all(name in row for row in rows)]
        return TensorDict({name: _packed([row[name] for row in rows]) for name in present}, batch_size=len(keys))

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Returns copies of the tags."""
        with self._lock:
            return {
                partition: {key: dict(tag) for key, tag in tags.items()}
                for partition, tags in self.tags.items()
                if partition_id in (None, partition)
            }

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        """Removes rows; raises KeyError for one that is not in the queue."""
        with self._lock:
            for key in keys:
                del self.tags[partition_id][key]
                self.fields[partition_id].pop(key, None)


def _values(fields: TensorDict, name: str) -> Sequence[Any]:
    column = fields.get(name)
    if isinstance(column, torch.Tensor):
        return column.unbind()
    return [getattr(value, "data", value) for value in column]


def _packed(values: list[Any]) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return NonTensorStack(*values)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged) if values[0].dim() else torch.stack(values)
