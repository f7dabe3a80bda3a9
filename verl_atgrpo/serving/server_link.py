"""The way of a worker's weights to its server, which may be dead, or die meanwhile."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import ray
import zmq
from verl.workers.rollout.utils import ensure_async_iterator

from verl_atgrpo.serving.ray_errors import last_line

ANSWER = 120.0
"""Seconds that a server may take for one bucket of weights."""


def bound_waiting() -> None:
    """Bounds how long sockets that are opened from now on wait, verl's sender's among them.

    A server that fails on its side never answers, or never even connects, and the sender would wait for ever.
    """
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        zmq.Context.instance().setsockopt(option, int(ANSWER * 1000))


def too_late(replica: int) -> str:
    """Returns what is said of a replica whose server did not answer the sender in time."""
    return f"replica {replica} did not take the weights within {ANSWER} s; its log says why"


class ServerLink:
    """Stands in for verl's rollout adapter during one weight sync.

    All workers gather a parameter together, whoever it is for. A worker that stopped because its own server is dead
    would leave the others waiting, so it takes its part in the rest, and sends none of it.
    """

    def __init__(self, adapter: Any, serves: bool) -> None:
        """Leads to the server of `adapter`, or, if that does not serve, to nowhere."""
        self._adapter = adapter
        self._open = serves
        self.failure: str | None = None
        """Why the server did not take the weights, if it was expected to."""

    @property
    def sleep_level(self) -> int:
        """How deep the server sleeps; verl sets it for adapters."""
        level: int = self._adapter.sleep_level
        return level

    @sleep_level.setter
    def sleep_level(self, level: int) -> None:
        self._adapter.sleep_level = level

    async def resume(self, tags: list[str]) -> None:
        """Wakes that part of the server."""
        if self._open:
            await self._attempt(self._adapter.resume(tags=tags))

    async def update_weights(self, weights: Any, **options: Any) -> None:
        """Sends `weights`, an iterator of (name, tensor); takes all of them out of it in any case."""
        if self._open:
            await self._attempt(self._adapter.update_weights(weights, **options))
        if not self._open:
            async for _ in ensure_async_iterator(weights):
                pass

    async def _attempt(self, call: Coroutine[Any, Any, Any]) -> None:
        replica = self._adapter.replica_rank
        try:
            await call
        except zmq.Again:
            self._open = False
            self.failure = too_late(replica)
        except ray.exceptions.RayError as error:
            self._open = False
            self.failure = f"replica {replica} did not take the weights: {last_line(error)}"
