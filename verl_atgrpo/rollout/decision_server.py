"""verl's vLLM server, answering decisions. Imported where a server is started: vLLM configures logging on import."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from verl_atgrpo.rollout.group_answers import GroupAnswers


class DecisionServer(GroupAnswers, vLLMHttpServer):  # type: ignore[misc]
    """A server for `DecisionClient`."""
