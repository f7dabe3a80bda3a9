"""verl's server client with one routing decision for all candidates of a decision point."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from verl.workers.rollout.llm_server import LLMServerClient


@dataclass
class TeamClient:
    """The clients of all policies, as one thing for verl to hand to the rollout workers."""

    clients: dict[str, DecisionClient]
    """Policy name -> client."""
    tokenizer: Any = None
    """Where verl leaves its tokenizer for `trace.token2text`; every client gets its policy's own."""


Server = tuple[str, ray.actor.ActorHandle]


@dataclass
class _Lease:
    """A server held for a request id while `users` requests with that id are under way."""

    server: asyncio.Future[Server]
    users: int = 0


class DecisionClient(LLMServerClient):  # type: ignore[misc]
    """Asks the load balancer once for all requests with the same id.

    The K candidates of a decision share an id, so they go to one replica, whose prefix cache then holds
    their prompt, and the balancer (one actor for the whole job) sees K times fewer calls.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leases: dict[str, _Lease] = {}

    async def _acquire_server(self, request_id: str, **extra: Any) -> Server:
        lease = self._leases.get(request_id)
        if lease is None:
            acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
            lease = self._leases[request_id] = _Lease(acquiring)
        lease.users += 1
        try:
            # Shielded: a cancelled candidate must not take the server from its siblings.
            return await asyncio.shield(lease.server)
        except BaseException:
            self._leave(request_id, lease)
            raise

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        lease = self._leases.get(request_id or "")
        if lease is None:
            raise RuntimeError(f"request {request_id!r} gives back server {server_id!r}, which it does not hold")
        self._leave(request_id or "", lease)

    def _leave(self, request_id: str, lease: _Lease) -> None:
        lease.users -= 1
        if lease.users == 0:
            del self._leases[request_id]
            lease.server.add_done_callback(lambda acquired: self._give_back(request_id, acquired))

    def _give_back(self, request_id: str, acquired: asyncio.Future[Server]) -> None:
        if not acquired.cancelled() and acquired.exception() is None:
            super()._release_server(acquired.result()[0], request_id=request_id)
