"""Checkpoint engine `gloo`: sends weights from the trainer to standalone servers on machines without a GPU.

verl's own engines copy through device memory. Set `rollout.checkpoint_engine.backend: gloo` with this module as
`custom_backend_module`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

BACKEND = "gloo"
_ALIGNMENT = 16
"""Bytes, the size of torch's largest element: every tensor in a bucket is aligned and can be viewed in place."""
Rendezvous = tuple[str, int]
"""Host and port of the sender's store, which is created anew for every transfer."""


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Broadcasts buckets of weights from the trainer's first worker to every server's workers.

    Every process allocates one bucket, and temporarily a tensor if it is larger than the bucket.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 300.0) -> None:
        """Opens no connection yet.

        Args:
            bucket_size: bytes per broadcast.
            is_master: whether this process is the trainer's first worker.
            timeout: seconds to wait for processes that hang, or for the next bucket; dead ones are found at once.
                Longer than `workers.BUCKET_TIMEOUT`, so that a server's timeout names the server.
        """
        self.bucket_size = bucket_size
        self._sends = is_master
        self._timeout = timedelta(seconds=timeout)
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None
        self.bucket: torch.Tensor | None = None

    def prepare(self) -> Rendezvous | None:
        """Returns the address of the store if this process is the sender."""
        if not self._sends:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Rendezvous | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns the arguments of `init_process_group` for the trainer's workers and for the receivers.

        Rank 0 is the sender; rank -1 marks the trainer's other workers, which do not take part.
        """
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "size": [size] * len(ranks), "rendezvous": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, size)))

    def init_process_group(self, rank: int, size: int, rendezvous: Rendezvous) -> None:
        """Connects the processes of one transfer; raises ConnectionError on failure."""
        if rank < 0:
            return
        try:
            if not self._sends:
                self._store = TCPStore(*rendezvous, is_master=False, timeout=self._timeout)
            assert self._store is not None
            self._group = ProcessGroupGloo(self._store, rank, size, self._timeout)
        except RuntimeError as error:
            raise ConnectionError(f"the weight transfer did not begin: {error}") from error
        self.bucket = torch.empty(self.bucket_size, dtype=torch.uint8)

    def finalize(self) -> None:
        """Closes the connections and frees the bucket."""
        self._group = self._store = self.bucket = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Sends all weights; raises ConnectionError if a receiver has died or hangs."""
        if self._group is None:
            # All training workers take part in gathering the weights.
            for _ in weights:
                pass
            return
        assert self.bucket is not None
        metas: list[TensorMeta] = []
        end = 0
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            meta.offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            if meta.offset + meta.chunk_size > self.bucket_size:
                await self._send_bucket(metas, end, is_last=False)
                metas, meta.offset = [], 0
            end = meta.offset + meta.chunk_size
            self.bucket[meta.offset : end] = chunk
            metas.append(meta)
        await self._send_bucket(metas, end, is_last=True)

    async def _send_bucket(self, metas: list[TensorMeta], end: int, is_last: bool) -> None:
        assert self.bucket is not None
        described = [{**vars(meta), "dtype": str(meta.dtype).removeprefix("torch.")} for meta in metas]
        text = torch.frombuffer(bytearray(json.dumps([is_last, described]).encode()), dtype=torch.uint8)
        await self._broadcast(torch.tensor([len(text), end]))
        await self._broadcast(text)
        await self._broadcast(self.bucket[:end])

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields names and tensors, each valid until the next one.

        Raises ConnectionError if the sender has died, or after the timeout.
        """
        async for name, weight in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield name, weight

    async def _chunks(self) -> AsyncGenerator[tuple[TensorMeta, torch.Tensor], None]:
        assert self.bucket is not None
        is_last = False
        while not is_last:
            sizes = torch.empty(2, dtype=torch.int64)
            await self._broadcast(sizes)
            text = torch.empty(int(sizes[0]), dtype=torch.uint8)
            await self._broadcast(text)
            await self._broadcast(self.bucket[: int(sizes[1])])
            is_last, described = json.loads(text.numpy().tobytes())
            for item in described:
                meta = TensorMeta(
                    **{**item, "shape": torch.Size(item["shape"]), "dtype": getattr(torch, item["dtype"])}
                )
                yield meta, self.bucket[meta.offset : meta.offset + meta.chunk_size]

    async def _broadcast(self, tensor: torch.Tensor) -> None:
        group = self._group
        assert group is not None
        try:
            # In a thread, so that the worker can serve other calls meanwhile.
            await asyncio.to_thread(lambda: group.broadcast(tensor, 0).wait())  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ConnectionError(f"the weight transfer broke off: {error}") from error
