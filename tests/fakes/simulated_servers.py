"""Fake servers for the client without Ray: actors are objects of this process; the balancer is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar
from uuid import uuid4

import ray
from fakes.simulated_cluster import LocalStream
from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.train.serving.balancer import AvoidingBalancer
from verl_atgrpo.train.serving.client import DecisionClient
from verl_atgrpo.train.serving.requests import Gate, PatientClient
from verl_atgrpo.train.serving.server import GroupResponses

RESPONSE = [102 + number for number in range(10)]
"""The response to `Servers.sample`."""


class Call:
    """An actor's method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        async def run() -> Any:
            result = self._function(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.ensure_future(run())


class StreamingCall:
    """An actor's streaming method."""

    def __init__(self, function: Callable[..., AsyncIterator[Any]]) -> None:
        self._function = function

    def options(self, num_returns: str) -> StreamingCall:
        assert num_returns == "streaming"
        return self

    def remote(self, **kwargs: Any) -> LocalStream:
        return LocalStream(self._function(**kwargs))


class Actor:
    """Wraps an object as an actor; a RuntimeError of its methods becomes Ray's error."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return getattr(self._target, name)(*args, **kwargs)
            except RuntimeError as error:
                raise ray.exceptions.RayError(str(error)) from error

        return Call(call)


class Server(GroupResponses):
    """Generates a token every `pace` seconds: 100 + the sequence's length so far, up to `max_tokens` or an abort."""

    def __init__(self, name: str, version: int = 1, pace: float = 0.001) -> None:
        self.name = name
        self._actor_id = uuid4().bytes
        self.version = version
        self.pace = pace
        self.error: Exception | None = None
        """Raised by all requests from now on; a RayActorError is the server's death."""
        self.hangs = False
        self.hangs_on: set[int] = set()
        """Seeds of requests that hang."""
        self.cached: int | None = None
        self.calls: list[int] = []
        """Number of requests of every call."""
        self.requests: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled = 0
        self.generated = 0
        """Number of tokens of all requests."""
        self._stops: set[asyncio.Event] = set()
        self.generate = self._generate
        self.generate_group = StreamingCall(self._generate_group)  # type: ignore[assignment]

    def abort_all(self) -> None:
        """Aborts every request, which returns its tokens so far."""
        for stop in self._stops:
            stop.set()

    async def _generate_group(self, **requests: Any) -> AsyncIterator[Any]:
        self.calls.append(len(requests["request_ids"]))
        async for answers in GroupResponses.generate_group(self, **requests):
            if isinstance(self.error, ray.exceptions.RayActorError):
                raise self.error  # a dead server returns nothing
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
                    return self.output_of(tokens, "aborted")
                if self.hangs or sampling_params.get("seed") in self.hangs_on:
                    await asyncio.Event().wait()
                await asyncio.sleep(self.pace)
                if self.error is not None:
                    raise self.error
                tokens.append(100 + len(prompt_ids) + len(tokens))
                self.generated += 1
            return self.output_of(tokens, "aborted" if stop.is_set() else "completed")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
            self._stops.discard(stop)

    def output_of(self, tokens: list[int], stop_reason: str) -> TokenOutput:
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


class Letters:
    """A tokenizer with one token per character."""

    eos_token_id = 0
    all_special_tokens = ()
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return [ord(char) for message in messages for char in message["content"]]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(token) for token in token_ids if token)


class Servers:
    """A policy's servers, their balancer and one client."""

    def __init__(
        self,
        *servers: Server,
        timeout: float = 5.0,
        retries: int = 2,
        slots: int = 900,
        balancer: type[Any] = AvoidingBalancer,
        client: type[DecisionClient] = DecisionClient,
    ) -> None:
        """Creates them; `slots` per server must divide 900, which the workers share."""
        self.servers = {server.name: server for server in servers}
        self.balancer = balancer(self.servers)
        self.client = client(config(workers=900 // slots), load_balancer_handle=Actor(self.balancer))
        self.gate = Gate()
        self.counted: list[str] = []
        self.training = PatientClient(self.client, self.gate, timeout, retries, self.counted.append)
        self.validation = PatientClient(self.client, Gate(), timeout, retries, self.counted.append)

    async def sample(self, request_id: str = "d", *, validate: bool = False, **params: Any) -> TokenOutput:
        """Samples a response to a prompt of two tokens; `RESPONSE` if nothing fails."""
        client = self.validation if validate else self.training
        return await client.generate(
            request_id, prompt_ids=[1, 2], sampling_params={"max_tokens": 10, "seed": 7, **params}
        )

    async def settled(self) -> dict[str, int]:
        """Returns the balancer's requests in flight after all calls to it have arrived."""
        await asyncio.sleep(0.01)
        assert not self.client.leases
        return self.in_flight()

    def in_flight(self) -> dict[str, int]:
        """Returns the balancer's number of requests in flight by server."""
        return dict(self.balancer.get_status()["servers"])

    def occupy(self, server: str, requests: int) -> None:
        """Has the balancer count `requests` other requests at a server."""
        for number in range(requests):
            self.balancer.acquire_server(f"other {number}", avoid=self.servers.keys() - {server})


async def interrupt(servers: Servers, version: int) -> None:
    """Pauses and aborts requests, and sets the servers' version, as a trainer between two steps."""
    servers.gate.pause()
    for server in servers.servers.values():
        server.abort_all()
    await asyncio.sleep(0.01)
    for server in servers.servers.values():
        server.version = version


async def sync_weights(servers: Servers) -> None:
    """Interrupts requests, gives the servers the next version and resumes the requests."""
    await interrupt(servers, version=1 + max(server.version for server in servers.servers.values()))
    servers.gate.resume()
