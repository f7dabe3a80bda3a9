"""verl's server client, with one routing step and one actor call for all candidates of a decision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.train.serving.balancer import AvoidingBalancer, actor_id
from verl_atgrpo.train.serving.server import Result

GRACE = 30.0
"""Seconds after the requests' timeout until a call is given up; a healthy server has ended it before."""


class TooLate(Exception):
    """A server has not responded within the timeout; another one may."""


class Request(NamedTuple):
    """A candidate's request, without the prompt."""

    request_id: str
    token_ids: list[int]
    """The response so far."""
    sampling_params: dict[str, Any]


@dataclass
class _Call:
    """Requests that are sent in one call."""

    sending: asyncio.Task[None] = field(init=False)
    requests: list[Request] = field(default_factory=list)
    responses: list[asyncio.Future[TokenOutput]] = field(default_factory=list)
    callers: int = 0
    """Number of callers still waiting for a response."""


class GroupCalls:
    """Sends requests of a decision that are made in the same iteration of the event loop as one call."""

    def __init__(self) -> None:
        self.collecting: dict[Hashable, _Call] = {}

    async def send(
        self, server: ray.actor.ActorHandle, decision: str, prompt_ids: list[int], request: Request, timeout: float
    ) -> TokenOutput:
        """Returns the response; raises TooLate after `timeout` seconds without one, and Ray's error of the server.

        Cancelling one caller does not cancel its siblings' call: its request ends in the server together with theirs,
        or immediately if no caller is left.
        """
        key = server, decision, tuple(prompt_ids), timeout
        call = self.collecting.get(key)
        if call is None:
            call = self.collecting[key] = _Call()
            # Runs after all tasks that are ready now, and before a caller that one of them cancels.
            call.sending = asyncio.ensure_future(self._send(key, call))
        response: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        call.requests.append(request)
        call.responses.append(response)
        call.callers += 1
        try:
            return await response
        finally:
            call.callers -= 1
            if not call.callers:
                call.sending.cancel()

    async def _send(self, key: tuple[ray.actor.ActorHandle, str, tuple[int, ...], float], call: _Call) -> None:
        """Sends the collected requests and distributes the responses as they arrive."""
        del self.collecting[key]
        server, _, prompt_ids, timeout = key
        stream = server.generate_group.options(num_returns="streaming").remote(
            prompt_ids=list(prompt_ids),
            request_ids=[request.request_id for request in call.requests],
            token_ids=[request.token_ids for request in call.requests],
            sampling_params=[request.sampling_params for request in call.requests],
            timeout=timeout,
        )
        receiving = asyncio.ensure_future(_receive(stream, call.responses))
        failure: Exception = TooLate()
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that coincides with the result.
            await asyncio.wait((receiving,), timeout=timeout + GRACE)
            if receiving.done():
                receiving.result()
        except ray.exceptions.RayError as error:
            failure = error
        finally:
            if not receiving.done():
                receiving.cancel()
                # Cancels the call in the server's actor, whereupon vLLM aborts the requests. verl's `abort_request`
                # has no effect: it uses the id that was sent, to which vLLM appends a random suffix.
                ray.cancel(stream)
            for response in call.responses:
                if not response.done():
                    response.set_exception(failure)


async def _receive(
    stream: AsyncIterable[Awaitable[list[tuple[int, Result]]]], responses: Sequence[asyncio.Future[TokenOutput]]
) -> None:
    """Returns when every request has its response or error."""
    left = len(responses)
    async for batch in stream:
        for number, result in await batch:
            left -= 1
            if responses[number].done():  # its caller was cancelled
                continue
            if result is None:
                responses[number].set_exception(TooLate())
            elif isinstance(result, ray.exceptions.RayTaskError):
                responses[number].set_exception(result.as_instanceof_cause())  # the error that Ray would raise
            else:
                responses[number].set_result(result)
        if not left:
            return


def balancer_class(rollout: Any) -> type[AvoidingBalancer] | None:
    """Returns the balancer class for the servers of a section `actor_rollout_ref.rollout`, or None for verl's own.

    A user's router is not replaced, nor is routing by request id (`full_determinism`), which only verl's own supports.
    """
    return None if rollout.get("router_config_path") or rollout.get("full_determinism") else AvoidingBalancer


@dataclass
class TeamClient:
    """The clients of all policies, in one object that verl can pass to the rollout workers."""

    clients: dict[str, DecisionClient]
    """Policy name -> client."""
    tokenizer: Any = None
    """Set by verl for `trace.token2text`; every client gets its policy's own instead."""


Server = tuple[str, ray.actor.ActorHandle]


class NoServer(Exception):
    """There is no server, or none that is not to be avoided."""


@dataclass
class _Lease:
    """A server acquired for a request id, kept while `users` requests with that id are in flight."""

    server: asyncio.Future[Server]
    users: int = 0


def slots_per_server(max_num_seqs: int, workers: int) -> int:
    """Returns how many requests a rollout worker may have in flight at one server.

    A server's actor runs `max(1000, max_num_seqs + 16)` calls at a time (verl's `RolloutReplica.max_concurrency`). If
    requests took all of them, the call that aborts them for a weight sync would wait for one to finish. Requests that
    wait here are outside their timeout, and are not sent while requests are paused. The rollout workers share the
    server's calls equally.
    """
    return max(1, max(900, max_num_seqs) // workers)


class DecisionClient(LLMServerClient):  # type: ignore[misc]
    """Routes all requests with the same id to one replica, sends them as one call, and bounds requests per server.

    The K candidates of a decision share an id. So the replica's prefix cache has their prompt, and balancer (one actor
    for the whole job) and server receive K times fewer calls.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        self._slots_per_server = slots_per_server(rollout.max_num_seqs, rollout.agent.num_workers)
        self.leases: dict[tuple[str, frozenset[str]], _Lease] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._known: dict[str, ray.actor.ActorHandle] = {}
        self.calls = GroupCalls()

    @asynccontextmanager
    async def serving(self, request_id: str, avoid: frozenset[str] = frozenset()) -> AsyncIterator[Server]:
        """Acquires a server, and a slot on it, for a request; raises NoServer if the balancer has none left.

        Requests of a decision, which is their id, that have failed on the same servers (`avoid`) share the server.
        """
        key = request_id, avoid
        lease = self.leases.get(key)
        if lease is None:
            acquiring = asyncio.ensure_future(self._acquire_server(request_id, avoid=sorted(avoid)))
            lease = self.leases[key] = _Lease(acquiring)
        lease.users += 1
        try:
            try:
                # Shielded: cancelling a candidate must not release its siblings' server.
                server_id, server = await asyncio.shield(lease.server)
            except ray.exceptions.RayError as error:
                raise NoServer(f"the load balancer gave no server: {error}") from error
            if server_id in avoid:  # a balancer that ignores `avoid`
                raise NoServer(f"no server but {', '.join(sorted(avoid))}")
            async with self._slots.setdefault(server_id, asyncio.Semaphore(self._slots_per_server)):
                yield server_id, server
        finally:
            lease.users -= 1
            if lease.users == 0:
                del self.leases[key]
                lease.server.add_done_callback(lambda acquired: self._give_back(request_id, acquired))

    async def _acquire_server(self, request_id: str, **extra: Any) -> Server:
        """Returns id and handle of a server; the balancer sends each handle once."""
        known = [actor_id(server) for server in self._known.values()]
        server_id, server = await super()._acquire_server(request_id, known=known, **extra)
        if server is not None:
            self._known[server_id] = server
        return server_id, self._known[server_id]

    def _give_back(self, request_id: str, acquired: asyncio.Future[Server]) -> None:
        if not acquired.cancelled() and acquired.exception() is None:
            self._release_server(acquired.result()[0], request_id=request_id)

    async def attempt(
        self,
        server: ray.actor.ActorHandle,
        request_id: str,
        prompt_ids: list[int],
        token_ids: list[int],
        sampling_params: dict[str, Any],
        timeout: float,
    ) -> TokenOutput:
        """Sends one request, in one call with its concurrent siblings, and returns its response.

        `token_ids` are the response so far. A request that times out or whose caller is cancelled is aborted in the
        server, too. Raises TooLate after `timeout` seconds, and Ray's error if the server fails.
        """
        request = Request(self._vllm_request_id(request_id), token_ids, sampling_params)
        return await self.calls.send(server, request_id, prompt_ids, request, timeout)

    def remove(self, server_id: str) -> None:
        """Removes a dead server from the balancer, for every client.

        Its requests fail immediately, so it would always have the fewest in flight and be sent all others.
        """
        self._load_balancer.remove_servers.remote(server_ids=[server_id])
