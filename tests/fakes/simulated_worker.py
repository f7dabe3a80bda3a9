"""The rollout worker without Ray and TransferQueue, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fakes.simulated_engine import Lengths, SimulatedEngine, Turns
from omegaconf import OmegaConf

from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.rollout import worker
from verl_atgrpo.train.rollout.episode_rows import OPPONENT, RECORDED, SUBMISSION
from verl_atgrpo.train.rows import queue as trainer_queue
from verl_atgrpo.train.serving.requests import Gate

Put = Callable[[list[str], list[dict[str, Any]]], None]
_CONFIG = {
    "actor_rollout_ref": {"rollout": {"val_kwargs": {"n": 1}}},
    "data": {"max_prompt_length": 1024, "max_response_length": 1024, "apply_chat_template_kwargs": {}},
}

_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@contextmanager
def without_tensors() -> Iterator[None]:
    """Skips creating the rows' tensors, which is most of a worker's CPU time."""
    with mock.patch.object(SimulatedWorker, "_fields", lambda *_: None):
        yield


class SimulatedWorker(worker.TeamRolloutWorker):  # type: ignore[misc]
    """Plays `Turns` on a simulated engine; calls `put` with keys and tags instead of a queue."""

    def __init__(
        self,
        engine: SimulatedEngine,
        put: Put,
        *,
        turns: int = 4,
        candidates: int = 8,
        put_status: Callable[..., Awaitable[None]] | None = None,
    ) -> None:
        """Sets the attributes that the worker derives from the configuration and verl's servers."""
        self.config = OmegaConf.create(_CONFIG)
        self.processor = None
        self._settings = AtGrpoConfig(
            environment={"name": "fakes.simulated_engine:Turns", "turns": turns}, candidates=candidates
        )
        self._environment = Turns(turns)
        self._policy_of = self._validation_policy_of = self._settings.policies_of(self._environment)
        self._needs = self._settings.spec.needs
        self._chats = {"shared": Chat(Lengths())}
        self._engine_params = {"detokenize": False}
        self._report = worker.WorkerReport()
        self._score_errors = set()
        self._traces = None
        self.llm_client = SimpleNamespace(clients={"shared": engine})
        self._training_clients = self._patient(Gate())
        self._put, self._put_status = put, put_status
        self.writing = 0.0
        """CPU seconds for the rows of finished episodes, without `queueing`."""
        self.queueing = 0.0
        """CPU seconds in `put`."""

    async def _write(self, *args: Any, **kwargs: Any) -> None:
        started, queued = time.process_time(), self.queueing
        await super()._write(*args, **kwargs)
        self.writing += time.process_time() - started - (self.queueing - queued)

    async def play_all(
        self, episodes: int, tasks: int | None = None, recorded: bool = True, opponent: str | None = None
    ) -> None:
        """Plays episodes concurrently, of tasks 0 to `tasks` - 1 repeatedly, and puts their rows.

        Raises RuntimeError after a defect.
        """

        async def ignore(**_: Any) -> None: ...

        async def put_rows(*, keys: list[str], fields: Any, tags: list[dict[str, Any]], partition_id: str) -> None:
            started = time.process_time()
            self._put(keys, tags)
            self.queueing += time.process_time() - started

        def play(number: int) -> Awaitable[None]:
            deal, index = divmod(number, tasks or episodes)
            prompt = {"uid": f"t{number}", "split": "train", "index": index, "global_steps": 1}
            prompt |= {SUBMISSION: deal, RECORDED: recorded, "data_source": "turns"}
            prompt |= {} if opponent is None else {OPPONENT: opponent}
            return self._run_prompt(prompt, dict(_SAMPLING), {"validate": False})

        queue = SimpleNamespace(async_kv_put=self._put_status or ignore, async_kv_batch_put=put_rows)
        with mock.patch.object(trainer_queue, "tq", queue):
            await asyncio.gather(*map(play, range(episodes)))
        if self._report.error is not None:
            raise RuntimeError(self._report.error)
