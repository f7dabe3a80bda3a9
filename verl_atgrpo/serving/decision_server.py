"""verl's vLLM server with group calls. Imported only in server processes: importing vLLM configures logging."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_atgrpo.compat import freeze_startup_objects
from verl_atgrpo.serving.server import GroupAnswers, name_receiver


class DecisionServer(GroupAnswers, vLLMHttpServer):  # type: ignore[misc]
    """The server of `DecisionClient`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_receiver()  # after verl has set the name, before it starts the engines

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Starts the engine."""
        await super().launch_server(*args, **kwargs)
        freeze_startup_objects()
