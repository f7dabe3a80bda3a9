"""verl's vLLM server, answering decisions. Imported where a server is started: vLLM configures logging on import."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_atgrpo.compat import freeze_startup_objects
from verl_atgrpo.serving.server import GroupAnswers, name_receiver


class DecisionServer(GroupAnswers, vLLMHttpServer):  # type: ignore[misc]
    """A server for `DecisionClient`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_receiver()  # verl has named it, and starts the engines later

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Starts the engine."""
        await super().launch_server(*args, **kwargs)
        freeze_startup_objects()
