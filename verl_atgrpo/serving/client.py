"""verl's server client with one routing decision, and one call, for all candidates of a decision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Collection, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_atgrpo.serving.server import Answer

_RETURN = 30.0
"""Seconds beyond the requests' time after which a call is given up; a server that lives has ended it before."""


class TooLate(Exception):
    """A server has not answered in time; another one may."""


class Request(NamedTuple):
    """What a candidate asks for beside the prompt."""

    request_id: str
    token_ids: list[int]
    """Its answer so far."""
    sampling_params: dict[str, Any]


@dataclass
class _Call:
    """Requests that are sent together."""

    sending: asyncio.Task[None] = field(init=False)
    requests: list[Request] = field(default_factory=list)
    answers: list[asyncio.Future[TokenOutput]] = field(default_factory=list)
    callers: int = 0
    """Those who still wait for an answer."""


class GroupCalls:
    """Sends requests of a decision that are made in the same round of the event loop as one call."""

    def __init__(self) -> None:
        self._collecting: dict[Hashable, _Call] = {}

    async def ask(
        self, server: ray.actor.ActorHandle, decision: str, prompt_ids: list[int], request: Request, timeout: float
    ) -> TokenOutput:
        """Returns the answer to a request.

        A caller that is cancelled leaves its siblings their call: its request ends in the server with theirs, or at
        once if nobody waits any more.

        Raises TooLate if the answer did not come within `timeout` seconds, and what Ray raises for a server that
        failed.
        """
        key = server, decision, tuple(prompt_ids), timeout
        call = self._collecting.get(key)
        if call is None:
            call = self._collecting[key] = _Call()
            # Runs when all that is ready has run, and before a caller that is cancelled meanwhile.
            call.sending = asyncio.ensure_future(self._send(key, call))
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        call.requests.append(request)
        call.answers.append(answer)
        call.callers += 1
        try:
            return await answer
        finally:
            call.callers -= 1
            if not call.callers:
                call.sending.cancel()

    async def _send(self, key: tuple[ray.actor.ActorHandle, str, tuple[int, ...], float], call: _Call) -> None:
        """Sends what has been collected and hands out the answers as they come."""
        del self._collecting[key]
        server, _, prompt_ids, timeout = key
        stream = server.generate_group.options(num_returns="streaming").remote(
            prompt_ids=list(prompt_ids),
            request_ids=[request.request_id for request in call.requests],
            token_ids=[request.token_ids for request in call.requests],
            sampling_params=[request.sampling_params for request in call.requests],
            timeout=timeout,
        )
        receiving = asyncio.ensure_future(_receive(stream, call.answers))
        failure: Exception = TooLate()
        try:
            # Not wait_for, which before Python 3.12 forgets a cancellation that meets the answer.
            await asyncio.wait((receiving,), timeout=timeout + _RETURN)
            if receiving.done():
                receiving.result()
        except ray.exceptions.RayError as error:
            failure = error
        finally:
            if not receiving.done():
                receiving.cancel()
                # Ends the call in the server's actor, upon which vLLM ends the requests. verl's own `abort_request`
                # looks for the id that was sent, but vLLM files a request under that id with a random ending.
                ray.cancel(stream)
            for answer in call.answers:
                if not answer.done():
                    answer.set_exception(failure)


async def _receive(
    stream: AsyncIterable[Awaitable[list[tuple[int, Answer]]]], answers: Sequence[asyncio.Future[TokenOutput]]
) -> None:
    """Returns when every request has got its answer, or the reason why there is none."""
    left = len(answers)
    async for batch in stream:
        for number, answer in await batch:
            left -= 1
            if answers[number].done():  # whoever asked for it has gone
                continue
            if answer is None:
                answers[number].set_exception(TooLate())
            elif isinstance(answer, ray.exceptions.RayTaskError):
                answers[number].set_exception(answer.as_instanceof_cause())  # as Ray raises it
            else:
                answers[number].set_result(answer)
        if not left:
            return


class AvoidingBalancer(GlobalRequestLoadBalancer):  # type: ignore[misc]
    """Sends a request that failed at some servers to another one."""

    def require_acquire_fields(self) -> list[str]:
        """Tells verl's client to send `avoid` and `known`."""
        return ["avoid", "known"]

    def acquire_server(
        self, request_id: str, avoid: Sequence[str] = (), known: Collection[str] = ()
    ) -> tuple[str, Any]:
        """Returns id and handle of a server that is not to be avoided.

        Args:
            request_id: Team's decision id.
            avoid: server ids.
            known: actors whose handles the client has: it gets None instead of another one, which would be hundreds
                of objects to it.

        Raises RuntimeError if there is none.
        """
        hidden = {server: self._inflight_requests.pop(server) for server in avoid if server in self._inflight_requests}
        try:
            server_id, server = super().acquire_server(request_id)
        finally:
            self._inflight_requests.update(hidden)
        return server_id, None if known and actor_id(server) in known else server


def actor_id(server: Any) -> str:
    """Returns Ray's id of an actor: unlike its address, a server that is started anew does not take it over."""
    identity: str = server._actor_id.hex()
    return identity


def balancer_class(rollout: Any) -> type[AvoidingBalancer] | None:
    """Returns the balancer for a policy's servers; None leaves verl to make its own.

    Args:
        rollout: `actor_rollout_ref.rollout`; a router of the user's is not replaced, nor is routing by the request's
            id (`full_determinism`), which verl offers in its own class only.
    """
    return None if rollout.get("router_config_path") or rollout.get("full_determinism") else AvoidingBalancer


@dataclass
class TeamClient:
    """The clients of all policies, as one thing for verl to hand to the rollout workers."""

    clients: dict[str, DecisionClient]
    """Policy name -> client."""
    tokenizer: Any = None
    """Where verl leaves its tokenizer for `trace.token2text`; every client gets its policy's own."""


Server = tuple[str, ray.actor.ActorHandle]


class NoServer(Exception):
    """There is no server to ask, or none but those that are to be avoided."""


@dataclass
class _Lease:
    """A server held for a request id while `users` requests with that id are under way."""

    server: asyncio.Future[Server]
    users: int = 0


def slots_per_server(max_num_seqs: int, workers: int) -> int:
    """Returns how many requests a rollout worker may have in flight at one server.

    A server's actor runs `max(1000, max_num_seqs + 16)` calls at a time (verl's `RolloutReplica.max_concurrency`). If
    requests took all of them, the call that ends them for a weight update would wait for an answer to come. What waits
    here instead waits outside the request's clock, and is not sent when requests are held.

    Args:
        max_num_seqs: how many requests the engine decodes at a time; it is never bounded below that.
        workers: rollout workers, which share the server's calls equally.
    """
    return max(1, max(900, max_num_seqs) // workers)


class DecisionClient(LLMServerClient):  # type: ignore[misc]
    """Asks the load balancer once for all requests with the same id, sends them as one call, and bounds how many
    requests a server has.

    The K candidates of a decision share an id, so they go to one replica, whose prefix cache then holds
    their prompt, and the balancer (one actor for the whole job) sees K times fewer calls, as does the server.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rollout = self.config.actor_rollout_ref.rollout
        self._slots_per_server = slots_per_server(rollout.max_num_seqs, rollout.agent.num_workers)
        self._leases: dict[tuple[str, frozenset[str]], _Lease] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._known: dict[str, tuple[str, ray.actor.ActorHandle]] = {}
        self._calls = GroupCalls()

    @asynccontextmanager
    async def serving(self, request_id: str, avoid: frozenset[str] = frozenset()) -> AsyncIterator[Server]:
        """Holds a place at the server for requests with this id: requests that avoid the same servers share one.

        Args:
            request_id: Team's decision id.
            avoid: servers at which a request with this id has failed.

        Raises NoServer if the balancer has none left.
        """
        key = request_id, avoid
        lease = self._leases.get(key)
        if lease is None:
            acquiring = asyncio.ensure_future(self._acquire_server(request_id, avoid=sorted(avoid)))
            lease = self._leases[key] = _Lease(acquiring)
        lease.users += 1
        try:
            server_id, server = await self._acquired(lease)
            if server_id in avoid:  # a balancer that knows nothing of avoiding
                raise NoServer(f"no server but {', '.join(sorted(avoid))}")
            async with self._slots.setdefault(server_id, asyncio.Semaphore(self._slots_per_server)):
                yield server_id, server
        finally:
            lease.users -= 1
            if lease.users == 0:
                del self._leases[key]
                lease.server.add_done_callback(lambda acquired: self._give_back(request_id, acquired))

    async def _acquire_server(self, request_id: str, **extra: Any) -> Server:
        """Returns id and handle of a server; the balancer sends a handle once."""
        known = [identity for identity, _ in self._known.values()]
        server_id, server = await super()._acquire_server(request_id, known=known, **extra)
        if server is None:
            return server_id, self._known[server_id][1]
        self._known[server_id] = actor_id(server), server
        return server_id, server

    async def _acquired(self, lease: _Lease) -> Server:
        try:
            # Shielded: a cancelled candidate must not take the server from its siblings.
            return await asyncio.shield(lease.server)
        except ray.exceptions.RayError as error:
            raise NoServer(f"the load balancer gave no server: {error}") from error

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
        """Sends one request, together with its siblings of the same moment, and returns its answer; a request that is
        late, or for which nobody waits any more, ends in the server, too.

        Args:
            server: who shall answer.
            request_id: Team's decision id.
            prompt_ids: the decision's prompt.
            token_ids: the candidate's answer so far.
            sampling_params: verl's.
            timeout: seconds that the server has.

        Raises TooLate after `timeout` seconds, and what Ray raises for a server that failed.
        """
        request = Request(self._vllm_request_id(request_id), token_ids, sampling_params)
        return await self._calls.ask(server, request_id, prompt_ids, request, timeout)

    def remove(self, server_id: str) -> None:
        """Takes a dead server out of the balancer, for every client: it fails at once, so it always has the fewest
        requests in flight and would be given all others."""
        self._load_balancer.remove_servers.remote(server_ids=[server_id])
