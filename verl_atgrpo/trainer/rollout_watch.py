"""What the rollout workers count: too many failed episodes, a defect or a worker that died end the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_atgrpo.config.schema import SECTION
from verl_atgrpo.trainer import schedule
from verl_atgrpo.trainer.metrics import rollout_metrics
from verl_atgrpo.trainer.policy_unit import PolicyUnit

if TYPE_CHECKING:
    from verl_atgrpo.rollout.manager import TeamRolloutManager


class RolloutWatch:
    """Adds up what the rollout workers counted since the last step."""

    def __init__(self, units: Sequence[PolicyUnit], most_failed: int, episodes: int) -> None:
        """Watches the rollout of a team.

        Args:
            units: its policies.
            most_failed: episodes that may fail between two steps.
            episodes: episodes of a task.
        """
        self._units = units
        self._most_failed = most_failed
        self._episodes = episodes
        self._counts: Counter[str] = Counter()
        self._excused = 0

    def collect(self, manager: TeamRolloutManager, step: int) -> None:
        """Adds up what the workers counted.

        Raises RuntimeError if one of them met a defect, or too much failed, RolloutFailed if one has died, and
        PolicyFailed if a policy has no server left and gets none.
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
        """Brings back a policy that has no server left; raises PolicyFailed if that is not to be."""
        if any([unit.revive() for unit in self._units]):
            # Every episode under way fails with it: those do not count, nor do those that already have.
            self._excused = self._counts["episodes_failed"] + self._episodes * len(schedule.unfinished_tasks())

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of what was counted, and starts over."""
        metrics = rollout_metrics(self._counts)
        self._counts.clear()
        self._excused = 0
        return metrics

    @property
    def _failed(self) -> int:
        """Failed episodes, but those that failed with all servers of a policy."""
        return self._counts["episodes_failed"] - self._excused
