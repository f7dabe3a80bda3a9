"""verl's agent-loop manager with workers that play episodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from verl_atgrpo.rollout.worker import TeamRolloutWorker, WorkerReport
from verl_atgrpo.serving.health import RolloutFailed, last_line

logger = logging.getLogger(__name__)

_PATIENCE = 30.0
"""Seconds; a worker that is merely busy reports later and is not dead."""


class TeamRolloutManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Hands tasks to the rollout workers and collects what they counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TeamRolloutWorker)
        self._late: dict[int, ray.ObjectRef] = {}

    def pause(self) -> None:
        """Lets no request of a training episode be sent from now on; validation goes on.

        Those under way are not ended: their servers do that, and their candidates then wait for `resume`. Raises
        RolloutFailed if a worker has died.
        """
        with _naming_workers():
            ray.get([worker.pause.remote() for worker in self.agent_loop_workers])

    def resume(self) -> None:
        """Lets requests be sent again; interrupted answers go on from their tokens so far.

        Raises RolloutFailed if a worker has died.
        """
        with _naming_workers():
            ray.get([worker.resume.remote() for worker in self.agent_loop_workers])

    def drain_report(self) -> WorkerReport:
        """Returns the workers' counts since the last call, added up, and the first error among them.

        What a worker does not tell in time comes with a later call. Raises RolloutFailed if one has died.
        """
        asked = {
            number: self._late.pop(number, None) or worker.drain_report.remote()
            for number, worker in enumerate(self.agent_loop_workers)
        }
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_PATIENCE)
        total = WorkerReport()
        for number, report in asked.items():
            if report not in ready:
                logger.warning("rollout worker %d has not reported for %s s", number, _PATIENCE)
                self._late[number] = report
                continue
            with _naming_workers():
                told = ray.get(report)
            total.counts.update(told.counts)
            total.error = total.error or told.error
        return total


@contextmanager
def _naming_workers() -> Iterator[None]:
    try:
        yield
    except ray.exceptions.RayError as error:
        raise RolloutFailed(f"a rollout worker failed: {last_line(error)}") from error
