"""verl's vLLM server with group calls and adapters. Imported only in server processes: importing vLLM configures
logging."""

from __future__ import annotations

import argparse
import contextvars
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.lora.request import LoRARequest

from verl_atgrpo.compat import freeze_startup_objects
from verl_atgrpo.train.config.policies import ADAPTERS, PAST
from verl_atgrpo.train.serving.server import ADAPTER, GroupResponses, adapter_request, name_receiver

_ADAPTER: contextvars.ContextVar[int] = contextvars.ContextVar("adapter")
"""Of the request that the running task generates."""


class VllmServer(GroupResponses, vLLMHttpServer):  # type: ignore[misc]
    """A replica of a policy, in the actor `DecisionServer`."""

    engine: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name_receiver()  # after verl has set the name, before it starts the engines

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """Starts the engine."""
        await super().launch_server(*args, **kwargs)
        freeze_startup_objects()

    @property
    def _adapters(self) -> int:
        """How many adapters are served, past selves included; 0 if verl's single one is on the model, or none."""
        lora = self.model_config.lora or {}
        served = [one for one in (lora.get(ADAPTERS) or {}).values() if one["served"]]
        return len(served) + int(lora.get(PAST) or 0)

    def _get_worker_extension_cls(self) -> str:
        return "verl_atgrpo.train.serving.vllm_worker.AdapterWorkerExtension"

    async def run_server(self, args: argparse.Namespace) -> None:
        """Starts the engine with room for all adapters."""
        await super().run_server(self._with_room(args))
        if self._adapters:
            self.engine = _WithAdapters(self.engine)

    async def run_headless(self, args: argparse.Namespace) -> None:
        """Starts the engine's part on a further node, with room for all adapters."""
        await super().run_headless(self._with_room(args))

    def _with_room(self, args: argparse.Namespace) -> argparse.Namespace:
        if self._adapters:
            args.max_loras = self._adapters
        return args

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **options: Any
    ) -> Any:
        """As verl's; with the adapter that the sampling parameters name, where several share the model."""
        if ADAPTER in sampling_params:
            sampling_params = dict(sampling_params)
            _ADAPTER.set(sampling_params.pop(ADAPTER))
        return await super().generate(prompt_ids, sampling_params, request_id, **options)


class _WithAdapters:
    """vLLM's engine, which gets every request with the adapter of its task.

    There is no request without one: in an engine with adapters it came out as another adapter's on the CPU.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def list_loras(self) -> set[int]:
        """Returns nothing: verl asks the engine before every request whether its only adapter is loaded."""
        return set()

    def generate(self, **request: Any) -> Any:
        """Returns the engine's stream of answers."""
        lora = LoRARequest(**adapter_request(_ADAPTER.get()))
        return self._engine.generate(**{**request, "lora_request": lora})
