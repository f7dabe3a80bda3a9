"""verl's agent-loop manager with workers that play episodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from verl_atgrpo.rollout.worker import TeamRolloutWorker, WorkerReport
from verl_atgrpo.serving.health import RolloutFailed, in_a_line

logger = logging.getLogger(__name__)

_REPORT_TIMEOUT = 30.0
"""Seconds to wait for workers' reports; a busy worker reports with a later call."""


class TeamRolloutManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Sends tasks to the rollout workers and collects their counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TeamRolloutWorker)
        self._late: dict[int, ray.ObjectRef] = {}

    def pause(self) -> None:
        """Pauses new requests of training episodes; validation continues.

        Requests in flight are aborted by their servers, and their candidates then wait for `resume`. Raises
        RolloutFailed if a worker has died.
        """
        _answers([worker.pause.remote() for worker in self.agent_loop_workers])

    def resume(self) -> None:
        """Resumes requests; interrupted answers continue from their tokens so far.

        Raises RolloutFailed if a worker has died.
        """
        _answers([worker.resume.remote() for worker in self.agent_loop_workers])

    def drain_report(self) -> WorkerReport:
        """Returns the sum of the workers' counts since the last call, and the first error among them.

        The report of a worker that is late is included in a later call. Raises RolloutFailed if a worker has died.
        """
        pending = {
            number: self._late.pop(number, None) or worker.drain_report.remote()
            for number, worker in enumerate(self.agent_loop_workers)
        }
        ready, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=_REPORT_TIMEOUT)
        total = WorkerReport()
        for number, report in pending.items():
            if report not in ready:
                logger.warning("rollout worker %d has not reported for %s s", number, _REPORT_TIMEOUT)
                self._late[number] = report
                continue
            (received,) = _answers([report])
            total.counts.update(received.counts)
            total.error = total.error or received.error
        return total


def _answers(calls: Sequence[ray.ObjectRef]) -> list[Any]:
    """Returns what the workers answer; raises RolloutFailed if one has died."""
    try:
        return list(ray.get(calls))
    except ray.exceptions.RayError as error:
        raise RolloutFailed(f"a rollout worker failed: {in_a_line(error)}") from error
