"""verl's load balancer, told where not to send a request again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.workers.rollout.router import GlobalRequestLoadBalancer


class AvoidingBalancer(GlobalRequestLoadBalancer):  # type: ignore[misc]
    """Sends a request that failed at some servers to another one."""

    def require_acquire_fields(self) -> list[str]:
        """Tells verl's client to send `avoid`."""
        return ["avoid"]

    def acquire_server(self, request_id: str, avoid: Sequence[str] = ()) -> tuple[str, Any]:
        """Returns id and handle of a server that is not to be avoided.

        Raises RuntimeError if there is none.
        """
        hidden = {server: self._inflight_requests.pop(server) for server in avoid if server in self._inflight_requests}
        try:
            acquired: tuple[str, Any] = super().acquire_server(request_id)
        finally:
            self._inflight_requests.update(hidden)
        return acquired


def balancer_class(rollout: Any) -> type[AvoidingBalancer] | None:
    """Returns the balancer for a policy's servers; None leaves verl to make its own.

    Args:
        rollout: `actor_rollout_ref.rollout`; a router of the user's is not replaced, nor is routing by the request's
            id (`full_determinism`), which verl offers in its own class only.
    """
    return None if rollout.get("router_config_path") or rollout.get("full_determinism") else AvoidingBalancer
