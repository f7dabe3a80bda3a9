"""Counts of the rollout workers; too many failed episodes, a defect or a dead worker end the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_atgrpo.train.config.schema import SECTION
from verl_atgrpo.train.rows.queue import unfinished_tasks
from verl_atgrpo.train.trainer.metrics import rollout_metrics
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit

if TYPE_CHECKING:
    from verl_atgrpo.train.rollout.manager import TeamRolloutManager


class RolloutWatch:
    """Sums the rollout workers' counts since the last step."""

    def __init__(self, units: Sequence[PolicyUnit], most_failed: int, episodes: int) -> None:
        """Takes the policies, how many episodes may fail between two steps, and the most episodes of a task."""
        self._units, self._most_failed, self._episodes = units, most_failed, episodes
        self._counts: Counter[str] = Counter()
        self._excused = 0

    def collect(self, manager: TeamRolloutManager, step: int) -> None:
        """Adds the workers' counts since the last call.

        Raises RuntimeError after a defect in a worker or too many failed episodes, RolloutFailed if a worker has died,
        and PolicyFailed if a policy has no server left and none can be started.
        """
        report = manager.drain_report()
        self._counts.update(report.counts)
        if report.error is not None:
            raise RuntimeError(f"the rollout stopped on a defect: {report.error}")
        if self._failed <= self._most_failed:
            return
        self.check_servers()
        if self._failed > self._most_failed:
            raise RuntimeError(
                f"{self._failed} episodes of step {step} failed ({dict(self._counts)}), more than "
                f"{SECTION}.max_failed_episodes={self._most_failed}; the rollout workers' log says why"
            )

    def check_servers(self) -> None:
        """Restarts the servers of policies that have none left; raises PolicyFailed if that fails."""
        if any([unit.revive() for unit in self._units]):
            # Episodes that have failed with the servers, or are still in flight and will fail, do not count.
            self._excused = self._counts["episodes_failed"] + self._episodes * len(unfinished_tasks())

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of the counts, and resets them."""
        metrics = rollout_metrics(self._counts)
        self._counts.clear()
        self._excused = 0
        return metrics

    @property
    def _failed(self) -> int:
        """Failed episodes, except those that failed because a policy had no server left."""
        return self._counts["episodes_failed"] - self._excused
