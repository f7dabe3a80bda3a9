"""verl's load balancer, told where not to send a request again, and whose handles its client has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer


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
