"""The stream of an actor's streaming method, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray


class LocalStream:
    """A fake ObjectRefGenerator: the method runs whether or not a caller waits."""

    def __init__(self, values: AsyncIterator[Any], seen: Callable[[Any], None] = lambda _: None) -> None:
        """Starts the method; `seen` is called with what the caller receives: a value or an exception."""
        self._ready: asyncio.Queue[tuple[Any, BaseException | None] | None] = asyncio.Queue()
        self._making = asyncio.ensure_future(self._make(values))
        self._seen = seen

    async def _make(self, values: AsyncIterator[Any]) -> None:
        try:
            async for value in values:
                self._ready.put_nowait((value, None))
        except ray.exceptions.RayError as error:
            self._ready.put_nowait((None, error))
        self._ready.put_nowait(None)

    def cancel(self) -> None:
        """Cancels the method, as `ray.cancel`."""
        self._making.cancel()

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> asyncio.Future[Any]:
        try:
            made = await self._ready.get()
        except asyncio.CancelledError as error:
            self.cancel()
            self._seen(error)
            raise
        if made is None:
            raise StopAsyncIteration
        answer, (value, error) = asyncio.get_running_loop().create_future(), made
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
        self._seen(value if error is None else error)
        return answer
