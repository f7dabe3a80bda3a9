"""The actor that chooses a server for each decision.

It has the interface of verl's load balancers (`RequestLoadBalancer` in `verl.workers.rollout.router`) and imports
nothing of verl: with torch and verl its process would take more memory and time than a small model.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def actor_id(server: Any) -> str:
    """Returns Ray's id of an actor; unlike its address, a restarted server does not inherit it."""
    identity: str = server._actor_id.hex()
    return identity


class AvoidingBalancer:
    """Gives a request the server with the fewest in flight, or the one that earlier requests of its id had.

    A request that has failed on some servers gets another one.
    """

    def __init__(self, servers: Mapping[str, Any], max_cache_size: int = 10_000) -> None:
        """Takes the servers' handles by id, and of how many request ids it remembers the server."""
        self._servers = dict(servers)
        self._in_flight = dict.fromkeys(servers, 0)
        self._last: dict[str, str] = {}
        """Request id -> its server, the latest id last."""
        self._size = max_cache_size

    def acquire_server(
        self, request_id: str, avoid: Sequence[str] = (), known: Collection[str] = ()
    ) -> tuple[str, Any]:
        """Returns id and handle of a server that is not one of the ids to `avoid`; raises RuntimeError without one.

        For the `known` ids of actors, whose handles the client has, the handle is None: unpickling another one would
        create hundreds of objects.
        """
        free = {server: number for server, number in self._in_flight.items() if server not in avoid}
        if not free:
            raise RuntimeError("no server is left")
        server = self._last.pop(request_id, None)
        if server not in free:
            least = min(free.values())
            server = random.choice([one for one, number in free.items() if number == least])
        self._last[request_id] = server
        if len(self._last) > self._size:
            del self._last[next(iter(self._last))]
        self._in_flight[server] += 1
        handle = self._servers[server]
        return server, None if known and actor_id(handle) in known else handle

    def require_acquire_fields(self) -> list[str]:
        """Returns the further arguments that verl's client passes to `acquire_server`."""
        return ["avoid", "known"]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Counts a request of a server as done; it may have been removed."""
        if self._in_flight.get(server_id):
            self._in_flight[server_id] -= 1

    def require_release_fields(self) -> list[str]:
        """Returns the further arguments of `release_server` that it needs: none."""
        return []

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        """Adds servers without requests in flight."""
        self._servers.update(servers)
        self._in_flight.update(dict.fromkeys(servers, 0))

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Removes servers; no request gets them any more."""
        for server in server_ids:
            self._servers.pop(server, None)
            self._in_flight.pop(server, None)

    def get_all_servers(self) -> list[str]:
        """Returns the servers' ids."""
        return list(self._in_flight)

    def get_status(self) -> dict[str, Any]:
        """Returns the requests in flight, by server and in all."""
        return {"servers": dict(self._in_flight), "total_inflight": self.get_total_inflight()}

    def get_total_inflight(self) -> int:
        """Returns the number of requests in flight."""
        return sum(self._in_flight.values())

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forgets which ids had which servers."""
        cleared = len(self._last)
        self._last.clear()
        return {"cleared_entries": cleared, "server_loads": dict(self._in_flight)}
