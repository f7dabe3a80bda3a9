"""Which server answers: verl's server client with one routing decision for all candidates of a decision point."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.serving.balancer import actor_id
from verl_atgrpo.serving.group_calls import GroupCalls, Request


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
