"""Servers as a client sees them, without Ray: actors that are objects of this process, and verl's balancer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import ray
from fakes.local_stream import LocalStream
from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.serving.client import AvoidingBalancer, DecisionClient
from verl_atgrpo.serving.requests import Gate, PatientClient
from verl_atgrpo.serving.server import GroupAnswers

WHOLE = [102 + number for number in range(10)]
"""The answer to `Servers.draw`."""


class Call:
    """A method of an actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        async def run() -> Any:
            result = self._function(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.ensure_future(run())


class StreamingCall:
    """A streaming method of an actor."""

    def __init__(self, function: Callable[..., AsyncIterator[Any]]) -> None:
        self._function = function

    def options(self, num_returns: str) -> StreamingCall:
        assert num_returns == "streaming"
        return self

    def remote(self, **kwargs: Any) -> LocalStream:
        return LocalStream(self._function(**kwargs))


class Actor:
    """An object with its methods as an actor's; what they raise is Ray's error."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return getattr(self._target, name)(*args, **kwargs)
            except RuntimeError as error:
                raise ray.exceptions.RayError(str(error)) from error

        return Call(call)


class Server(GroupAnswers):
    """Answers a token every `pace` seconds: 100, 101, ... from the length of what it was given, until told to stop."""

    def __init__(self, name: str, version: int = 1, pace: float = 0.001) -> None:
        self.name = name
        self._actor_id = uuid4().bytes
        self.version = version
        self.pace = pace
        self.fate: Exception | None = None
        """What the requests meet from now on; the server's own death if it is a RayActorError."""
        self.hangs = False
        self.hangs_on: set[int] = set()
        """Seeds of requests that hang."""
        self.cached: int | None = None
        self.calls: list[int] = []
        """How many requests there were in each call."""
        self.requests: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled = 0
        self.drawn = 0
        """Tokens of all requests."""
        self._stops: set[asyncio.Event] = set()
        self.generate = self._generate
        self.generate_group = StreamingCall(self._generate_group)  # type: ignore[assignment]

    def abort_all(self) -> None:
        """Ends every request with its tokens so far."""
        for stop in self._stops:
            stop.set()

    async def _generate_group(self, **requests: Any) -> AsyncIterator[Any]:
        self.calls.append(len(requests["request_ids"]))
        async for answers in GroupAnswers.generate_group(self, **requests):
            if isinstance(self.fate, ray.exceptions.RayActorError):
                raise self.fate  # a dead server returns nothing
            yield answers

    async def _generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        self.requests.append({"prompt_ids": list(prompt_ids), **sampling_params})
        stop = asyncio.Event()
        self._stops.add(stop)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        tokens: list[int] = []
        try:
            while len(tokens) < sampling_params["max_tokens"]:
                if stop.is_set():
                    return self._output(tokens, "aborted")
                if self.hangs or sampling_params.get("seed") in self.hangs_on:
                    await asyncio.Event().wait()
                await asyncio.sleep(self.pace)
                if self.fate is not None:
                    raise self.fate
                tokens.append(100 + len(prompt_ids) + len(tokens))
                self.drawn += 1
            return self._output(tokens, "aborted" if stop.is_set() else "completed")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
            self._stops.discard(stop)

    def _output(self, tokens: list[int], stop_reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-token / 1000 for token in tokens],
            stop_reason=stop_reason,
            extra_fields={"global_steps": self.version, "num_cached_tokens": self.cached},
        )


def config(max_num_seqs: int = 8, workers: int = 1) -> Any:
    return OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"max_num_seqs": max_num_seqs, "agent": {"num_workers": workers}}}}
    )


class Servers:
    """A policy's servers with their balancer, and one client."""

    def __init__(self, *servers: Server, timeout: float = 5.0, retries: int = 2, slots: int | None = None) -> None:
        self.servers = {server.name: server for server in servers}
        self.balancer = AvoidingBalancer(self.servers)
        self.client = DecisionClient(config(), load_balancer_handle=Actor(self.balancer))
        if slots is not None:
            self.client._slots_per_server = slots
        self.gate = Gate()
        self.counted: list[str] = []
        self.training = PatientClient(self.client, self.gate, timeout, retries, self.counted.append)
        self.validation = PatientClient(self.client, Gate(), timeout, retries, self.counted.append)

    async def draw(self, request_id: str = "d", *, validate: bool = False, **params: Any) -> TokenOutput:
        """Draws an answer to a prompt of two tokens: 102, 103, ... if nothing goes wrong."""
        client = self.validation if validate else self.training
        return await client.generate(
            request_id, prompt_ids=[1, 2], sampling_params={"max_tokens": 10, "seed": 7, **params}
        )

    async def settled(self) -> dict[str, int]:
        """Returns the balancer's counts once everything sent to it has come."""
        await asyncio.sleep(0.01)
        assert not self.client._leases
        return dict(self.balancer._inflight_requests)


async def interrupt(servers: Servers, version: int) -> None:
    """What the trainer does between two steps, but for the update."""
    servers.gate.pause()
    for server in servers.servers.values():
        server.abort_all()
    await asyncio.sleep(0.01)
    for server in servers.servers.values():
        server.version = version


async def renew(servers: Servers) -> None:
    """Interrupts what is under way, gives the servers the next weights, and lets requests go on."""
    await interrupt(servers, version=1 + max(server.version for server in servers.servers.values()))
    servers.gate.resume()
