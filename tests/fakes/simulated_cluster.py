"""Ray actors and a policy's servers in this process, without a model."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import uuid4

import ray
import transfer_queue
from fakes.local_queue import LocalQueue
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.train.serving.server import GroupResponses, Result

Seen = Callable[[str, dict[str, Any], Any], None]
"""Is called with what a caller receives: method, arguments by name, value or exception."""

# ------------------------------------------------------------------ actors


class LocalRef:
    """A fake ObjectRef: cancelling its caller does not cancel the call."""

    def __init__(self, result: Future[Any], seen: Callable[[Any], None]) -> None:
        self.result = result
        self._seen = seen

    def cancel(self) -> None:
        """Cancels the call, as `ray.cancel`."""
        self.result.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            value = yield from asyncio.shield(asyncio.wrap_future(self.result)).__await__()
        except BaseException as error:
            self._seen(error)
            raise
        self._seen(value)
        return value


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


class _Method:
    def __init__(self, remote: Callable[..., LocalRef], stream: Callable[..., LocalStream]) -> None:
        self.remote = remote
        self._stream = stream

    def options(self, num_returns: str) -> Any:
        assert num_returns == "streaming"
        return SimpleNamespace(remote=self._stream)


class LocalActor:
    """Wraps an object as an actor: `actor.method.remote(...)` runs in an event loop.

    Streaming methods must be called in that loop.
    """

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop, seen: Seen = lambda *_: None) -> None:
        self._target, self._loop, self._seen = target, loop, seen
        self._actor_id = uuid4().bytes

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("__"):
            raise AttributeError(name)
        method = getattr(self._target, name)

        async def call(args: Any, kwargs: Any) -> Any:
            try:
                value = method(*args, **kwargs)
                return await value if inspect.isawaitable(value) else value
            except ray.exceptions.RayError:
                raise
            except Exception as error:  # as Ray wraps any error of an actor
                raise ray.exceptions.RayTaskError(name, traceback.format_exc(), error) from error

        def remote(*args: Any, **kwargs: Any) -> LocalRef:
            result = asyncio.run_coroutine_threadsafe(call(args, kwargs), self._loop)
            return LocalRef(result, lambda value: self._seen(name, kwargs, value))

        def stream(**kwargs: Any) -> LocalStream:
            return LocalStream(method(**kwargs), lambda value: self._seen(name, kwargs, value))

        return _Method(remote, stream)


def _cancel(ref: LocalRef | LocalStream) -> None:
    ref.cancel()


def _get(refs: Any, *, timeout: float | None = None) -> Any:
    return refs.result.result(timeout) if isinstance(refs, LocalRef) else [_get(ref, timeout=timeout) for ref in refs]


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yields an event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="actors", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_end_all(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def local_processes(queue: LocalQueue) -> Iterator[None]:
    """Patches Ray for `LocalRef` and TransferQueue with `queue`; `ray.wait` returns immediately."""

    def coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
        async def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return called

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ray, "get", _get))
        patches.enter_context(mock.patch.object(ray, "wait", lambda references, **_: (references, [])))
        patches.enter_context(mock.patch.object(ray, "cancel", _cancel))
        # Other functions of Ray would start a cluster.
        patches.enter_context(mock.patch.object(ray, "init", side_effect=AssertionError("not simulated")))
        for name in "kv_put", "kv_batch_put", "kv_batch_get", "kv_list", "kv_clear":
            patches.enter_context(mock.patch.object(transfer_queue, name, getattr(queue, name)))
            patches.enter_context(mock.patch.object(transfer_queue, f"async_{name}", coroutine(getattr(queue, name))))
        yield


# ------------------------------------------------------------------ servers


@dataclass(frozen=True)
class Faults:
    """Failure rates, as shares of a server's requests."""

    errors: float = 0.0
    """The engine raises an error, which Ray wraps as RayTaskError."""
    hangs: float = 0.0
    """The request hangs until it is cancelled or aborted."""


class SimulatedServer(GroupResponses):
    """One replica, with scripted responses, random latency and faults."""

    def __init__(self, answer: Callable[[list[int], int], list[int]], faults: Faults, seed: int) -> None:
        """`answer` maps a prompt and a request's seed to token ids; `seed` is of latencies and faults."""
        self._answer, self._faults = answer, faults
        self._rng = random.Random(seed)
        self.running: dict[str, asyncio.Future[str]] = {}
        """Requests in flight: id -> set to abort or kill the request."""
        self.dead = False
        self.counts: Counter[str] = Counter()

    async def generate_group(self, **requests: Any) -> AsyncIterator[list[tuple[int, Result]]]:
        """Runs a decision's requests; raises RayActorError once the server is dead."""
        if self.dead:
            self.counts["requests"] += len(requests["request_ids"])
        else:
            async for answers in super().generate_group(**requests):
                if self.dead:
                    break
                yield answers
        if self.dead:
            raise ray.exceptions.RayActorError(error_msg="the server is dead")

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        """Returns a response; raises RuntimeError if the engine fails."""
        self.counts["requests"] += 1
        assert request_id not in self.running, "vLLM refuses an id that is in use"
        chance, seconds = self._rng.random(), self._rng.uniform(0, 0.02)
        if hangs := chance < self._faults.hangs:
            self.counts["hung"] += 1
        fails = not hangs and chance < self._faults.hangs + self._faults.errors
        loop = asyncio.get_running_loop()
        began, ended = loop.time(), loop.create_future()
        self.running[request_id] = ended
        try:
            await asyncio.wait([ended], timeout=None if hangs else seconds)
        finally:
            del self.running[request_id]
        if fails:
            self.counts["errors"] += 1
            raise RuntimeError("the engine failed")
        ids = self._answer(prompt_ids, sampling_params["seed"])[: sampling_params["max_tokens"]]
        if ended.done():
            ids = ids[: 0 if hangs else int(len(ids) * min(0.99, (loop.time() - began) / seconds))]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="aborted" if ended.done() else "completed",
            num_preempted=0,
            extra_fields={"global_steps": 0, "num_cached_tokens": 0},
        )

    def abort_all(self) -> None:
        """Aborts all requests, which return their tokens so far, as verl before a weight sync."""
        for ended in self.running.values():
            _end(ended, "aborted")

    def kill(self) -> None:
        """Kills the server."""
        self.dead = True
        for ended in self.running.values():
            _end(ended, "dead")


def _end(ended: asyncio.Future[str], how: str) -> None:
    if not ended.done():
        ended.set_result(how)
