"""The order of training tasks by their own success: those that are just hard enough come first.

Each task has a Beta distribution of its success so far. One success is drawn from each of them (Thompson sampling),
and the tasks whose draws are nearest to one half are submitted, before all are drawn again. So tasks that were half
solved come often, those never tried now and then, those always or never solved rarely. Use it with
`at_grpo.group_filter`, which drops groups without signal: together they gained more than the filter alone (marin,
issue 8765).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_atgrpo.play.seeds import stable_hash

_KEPT = 0.9
"""What remains of a task's results when a new one comes: the policy changes."""
_DRAWN_AT_ONCE = 16
"""Tasks that are chosen by one draw: with a million tasks a draw takes a tenth of a second."""


class HalfSolvedFirst:
    """Chooses training tasks by Thompson sampling of their success."""

    def __init__(self, tasks: int, seed: int) -> None:
        """Begins without results, of the tasks with indices below `tasks`."""
        self._solved, self._failed = np.zeros(tasks), np.zeros(tasks)
        self._waiting = np.zeros(tasks, dtype=np.int64)
        """Submissions of each task without a result so far; one whose episodes failed keeps its."""
        self._seed, self._drawn = seed, 0
        self._next: list[int] = []
        """Tasks chosen by the last draw, the last one first."""
        self._chances: list[float] = []
        """Of the tasks chosen since the last call of `metrics`: their mean success so far."""

    def next(self) -> int:
        """Returns the index of the next training task: one that is not in flight, as long as there is any."""
        if not self._next:
            self._next = self._draw()
        task = self._next.pop()
        self._waiting[task] += 1
        self._chances.append(float((1 + self._solved[task]) / (2 + self._solved[task] + self._failed[task])))
        return task

    def _draw(self) -> list[int]:
        rng = np.random.default_rng(stable_hash(self._seed, "half solved", self._drawn))
        self._drawn += 1
        far = np.abs(rng.beta(1 + self._solved, 1 + self._failed) - 0.5) + self._waiting
        few = min(_DRAWN_AT_ONCE, len(far), max(1, len(far) // 4))
        nearest = np.argpartition(far, few - 1)[:few]
        return [int(task) for task in nearest[np.argsort(far[nearest])][::-1]]

    def add(self, task: int, success: bool) -> None:
        """Adds the result of an episode."""
        self._waiting[task] = 0
        self._solved[task] = _KEPT * self._solved[task] + success
        self._failed[task] = _KEPT * self._failed[task] + (not success)

    def metrics(self) -> dict[str, float]:
        """Returns the share of tasks that have results, and the success so far of those chosen since the last call."""
        found = {"tasks/tried_share": float(np.mean(self._solved + self._failed > 0))}
        if self._chances:
            found["tasks/expected_success"] = float(np.mean(self._chances))
        self._chances = []
        return found

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint needs; tasks in flight are submitted again."""
        return {
            "solved": self._solved.copy(),
            "failed": self._failed.copy(),
            "drawn": self._drawn,
            "next": list(self._next),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state; raises ValueError if it is of another number of tasks, or of no order."""
        if "solved" not in state or len(state["solved"]) != len(self._solved):
            raise ValueError(
                f"at_grpo.task_order=half_solved: the checkpoint has no such order of {len(self._solved)} training "
                "tasks; use the one that it was saved with, or set trainer.resume_mode=disable"
            )
        self._solved, self._failed, self._drawn = state["solved"].copy(), state["failed"].copy(), state["drawn"]
        self._next = list(state["next"])
