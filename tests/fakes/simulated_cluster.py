"""Ray actors, TransferQueue and a policy's servers in this process: what the product calls, without a model."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock
from uuid import uuid4

import ray
import torch
import transfer_queue
from fakes.local_stream import LocalStream
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.serving.server import Answer, GroupAnswers

Seen = Callable[[str, dict[str, Any], Any], None]
"""Is told what a waiting caller got: method, arguments by name, value or exception."""

# ------------------------------------------------------------------ actors


class LocalRef:
    """Stands in for an ObjectRef: who stops waiting for it does not end the call."""

    def __init__(self, result: Future[Any], seen: Callable[[Any], None]) -> None:
        self.result = result
        self._seen = seen

    def cancel(self) -> None:
        """Ends the call, as `ray.cancel` does."""
        self.result.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            value = yield from asyncio.shield(asyncio.wrap_future(self.result)).__await__()
        except BaseException as error:
            self._seen(error)
            raise
        self._seen(value)
        return value


class _Method:
    def __init__(self, remote: Callable[..., LocalRef], stream: Callable[..., LocalStream]) -> None:
        self.remote = remote
        self._stream = stream

    def options(self, num_returns: str) -> Any:
        assert num_returns == "streaming"
        return SimpleNamespace(remote=self._stream)


class LocalActor:
    """An object whose methods are called as an actor's, `actor.method.remote(...)`, and run in an event loop.

    A streaming one is called in that loop.
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
            except Exception as error:  # whatever it is: Ray hands it on as this
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
    """Yields an event loop that runs in a thread of its own, until the end."""
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


# ------------------------------------------------------------------ TransferQueue


class LocalQueue:
    """TransferQueue's key-value interface over dictionaries; `put` is told the keys, fields and tags of new rows."""

    def __init__(self, put: Callable[[Sequence[str], Any, Sequence[dict[str, Any]]], None] = lambda *_: None) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self._fields: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
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
                    self._fields[partition_id][key][name] = value
            mine = [dict(self.tags[partition_id][key]) for key in keys]
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=mine)

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """Returns those of the fields that all rows have; raises ValueError for a row that is not there."""
        with self._lock:
            missing = [key for key in keys if key not in self.tags[partition_id]]
            if missing:
                raise ValueError(f"not in the queue: {missing[:3]}")
            rows = [self._fields[partition_id][key] for key in keys]
        wanted = list(rows[0]) if select_fields is None else select_fields
        there = [name for name in wanted if all(name in row for row in rows)]
        return TensorDict({name: _packed([row[name] for row in rows]) for name in there}, batch_size=len(keys))

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Returns copies of the tags."""
        with self._lock:
            return {
                partition: {key: dict(tag) for key, tag in tags.items()}
                for partition, tags in self.tags.items()
                if partition_id in (None, partition)
            }

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        """Removes rows; raises KeyError for one that is not there: it was cleared before, or never put."""
        with self._lock:
            for key in keys:
                del self.tags[partition_id][key]
                self._fields[partition_id].pop(key, None)


def _values(fields: TensorDict, name: str) -> Sequence[Any]:
    column = fields.get(name)
    if isinstance(column, torch.Tensor):
        return column.unbind()
    return [getattr(value, "data", value) for value in column]


def _packed(values: list[Any]) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return NonTensorStack(*values)
    return torch.nested.as_nested_tensor(values, layout=torch.jagged) if values[0].dim() else torch.stack(values)


@contextmanager
def local_processes(queue: LocalQueue) -> Iterator[None]:
    """Has `ray.get`, `ray.wait` (which leaves the waiting to `get`) and `ray.cancel` know `LocalRef`, and everybody's
    TransferQueue be this queue."""

    def coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
        async def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return called

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ray, "get", _get))
        patches.enter_context(mock.patch.object(ray, "wait", lambda references, **_: (references, [])))
        patches.enter_context(mock.patch.object(ray, "cancel", _cancel))
        # Everything else of Ray would start one.
        patches.enter_context(mock.patch.object(ray, "init", side_effect=AssertionError("not simulated")))
        for name in "kv_put", "kv_batch_put", "kv_batch_get", "kv_list", "kv_clear":
            patches.enter_context(mock.patch.object(transfer_queue, name, getattr(queue, name)))
            patches.enter_context(mock.patch.object(transfer_queue, f"async_{name}", coroutine(getattr(queue, name))))
        yield


# ------------------------------------------------------------------ servers


@dataclass(frozen=True)
class Faults:
    """How often a server fails, as shares of its requests."""

    errors: float = 0.0
    """The engine raises: Ray hands its error on as RayTaskError."""
    hangs: float = 0.0
    """No answer comes until the request is cancelled or aborted."""


class SimulatedServer(GroupAnswers):
    """One replica: answers from a script after a while, if it answers."""

    def __init__(
        self, answer: Callable[[list[int], int], list[int]], faults: Faults, seed: int, seconds: float = 0.01
    ) -> None:
        """Takes what it answers (prompt, seed of the draw -> token ids) and how often it does not."""
        self._answer, self._faults, self._seconds = answer, faults, seconds
        self._rng = random.Random(seed)
        self.running: dict[str, asyncio.Future[str]] = {}
        """Requests under way: how they end other than by themselves."""
        self.dead = False
        self.counts: Counter[str] = Counter()

    async def generate_group(self, **requests: Any) -> AsyncIterator[list[tuple[int, Answer]]]:
        """Answers a decision's requests; raises RayActorError once it is dead."""
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
        """Answers; raises RuntimeError where the engine fails."""
        self.counts["requests"] += 1
        assert request_id not in self.running, "vLLM refuses an id that is in use"
        chance, seconds = self._rng.random(), self._rng.uniform(0, 2 * self._seconds)
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
        """Ends all requests with their tokens so far, as verl does before it changes the weights."""
        for ended in self.running.values():
            _end(ended, "aborted")

    def kill(self) -> None:
        """Ends the server as the death of its process does."""
        self.dead = True
        for ended in self.running.values():
            _end(ended, "dead")


def _end(ended: asyncio.Future[str], how: str) -> None:
    if not ended.done():
        ended.set_result(how)
