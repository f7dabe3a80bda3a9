"""The actor of a server. Ray imports its class wherever a handle arrives, so only the actor imports vLLM."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

_FORWARDED = (
    *("launch_server", "run_server", "run_headless", "get_master_address", "get_server_address", "get_rollout_config"),
    *("generate", "abort_request", "abort_all_requests", "resume_generation", "wait_for_requests_to_drain"),
    *("resume_engine_generation", "open_submission_gate", "set_pd_peer", "set_global_steps", "collective_rpc"),
    *("sleep", "wake_up", "clear_kv_cache", "release_kv_cache", "resume_kv_cache", "start_profile", "stop_profile"),
)


def _forwarded(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: DecisionServer, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self._server, name)(*args, **kwargs)
        return await found if inspect.isawaitable(found) else found

    call.__name__ = call.__qualname__ = name
    return call


class DecisionServer:
    """The server of `DecisionClient`: has the public methods of a `VllmServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from verl_atgrpo.train.serving.vllm_server import VllmServer

        self._server: Any = VllmServer(*args, **kwargs)

    async def generate_group(self, **call: Any) -> AsyncIterator[Any]:
        """As `GroupResponses.generate_group`."""
        async with aclosing(self._server.generate_group(**call)) as batches:
            async for batch in batches:
                yield batch


for _name in _FORWARDED:
    setattr(DecisionServer, _name, _forwarded(_name))
