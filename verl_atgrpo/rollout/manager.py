"""verl's agent-loop manager with workers that play episodes."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from verl_atgrpo.rollout.worker import TeamRolloutWorker, WorkerReport


class TeamRolloutManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """Hands tasks to the rollout workers and collects what they counted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TeamRolloutWorker)

    def drain_report(self) -> WorkerReport:
        """Returns the workers' counts since the last call, added up, and the first error among them."""
        total = WorkerReport()
        for report in ray.get([worker.drain_report.remote() for worker in self.agent_loop_workers]):
            total.counts.update(report.counts)
            total.error = total.error or report.error
        return total
