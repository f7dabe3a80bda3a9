"""verl's agent-loop manager with workers that play episodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from verl_atgrpo.train.config.schema import SECTION
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.rollout.worker import TeamRolloutWorker, WorkerReport
from verl_atgrpo.train.serving.health import RolloutFailed, last_line

logger = logging.getLogger(__name__)

_REPORT_TIMEOUT = 30.0
"""Seconds to wait for workers' reports; a busy worker reports with a later call."""


class TeamRolloutManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Sends tasks to the rollout workers and collects their counts."""

    _begun = False
    """Whether the workers have started; that may take long, as their environments read data sets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TeamRolloutWorker)
        self._late: dict[int, tuple[ray.ObjectRef, float]] = {}
        """Worker -> its report that has not arrived yet, and when it was asked for."""
        self._most_silent = read_section(self.config).request_timeout
        """Seconds. A worker that is blocked for longer cannot meet any request's time-out."""

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Sends tasks to the workers, as verl's; raises RolloutFailed if one has died or does not take them."""
        chunks = prompts.chunk(len(self.agent_loop_workers))
        workers = zip(self.agent_loop_workers, chunks, strict=False)
        self._answers([worker.generate_sequences.remote(chunk) for worker, chunk in workers])
        self._begun = True

    def pause(self) -> None:
        """Pauses new requests of training episodes, not validation's; raises RolloutFailed if a worker has died."""
        self._answers([worker.pause.remote() for worker in self.agent_loop_workers])

    def resume(self) -> None:
        """Resumes requests; raises RolloutFailed if a worker has died."""
        self._answers([worker.resume.remote() for worker in self.agent_loop_workers])

    def drain_report(self) -> WorkerReport:
        """Returns the sum of the workers' counts since the last call, and the first error among them.

        The report of a worker that is late is included in a later call. Raises RolloutFailed if a worker has died, or
        has not reported for `at_grpo.request_timeout`.
        """
        now = time.monotonic()
        pending = {
            number: self._late.pop(number) if number in self._late else (worker.drain_report.remote(), now)
            for number, worker in enumerate(self.agent_loop_workers)
        }
        asked = [report for report, _ in pending.values()]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_REPORT_TIMEOUT)
        total = WorkerReport()
        for number, (report, since) in pending.items():
            if report not in ready:
                silent = time.monotonic() - since
                if self._begun and silent > self._most_silent:
                    raise RolloutFailed(f"rollout worker {number} has not reported for {silent:.0f} s{self._silent}")
                logger.warning("rollout worker %d has not reported for %.0f s", number, silent)
                self._late[number] = report, since
                continue
            (received,) = self._answers([report])
            total.counts.update(received.counts)
            total.error = total.error or received.error
        return total

    @property
    def _silent(self) -> str:
        return (
            f", longer than {SECTION}.request_timeout={self._most_silent:g}: the environment's code blocks or has "
            "ended its event loop; await what takes long, or run it in a thread or process"
        )

    def _answers(self, calls: Sequence[ray.ObjectRef]) -> list[Any]:
        """Returns what the workers answer; raises RolloutFailed if one has died or does not answer."""
        try:
            return list(ray.get(calls, timeout=self._most_silent if self._begun else None))
        except ray.exceptions.GetTimeoutError:
            raise RolloutFailed(f"a rollout worker does not answer{self._silent}") from None
        except ray.exceptions.RayError as error:
            raise RolloutFailed(f"a rollout worker failed: {last_line(error)}") from error
