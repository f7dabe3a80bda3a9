"""The order of training tasks by their own success: those that are just hard enough come first.

Every other task is a new one, until all were tried. The others are chosen among those that were tried: each has a
Beta distribution of its success so far, one success is drawn from each of them (Thompson sampling), and the task whose
draw is nearest to one half is submitted. So half solved tasks come often, those always or never solved rarely. Use it
with `at_grpo.group_filter`, which drops groups without signal: together they gained more than the filter alone (marin,
issue 8765; the share of new tasks is ours: of thousands of unknown tasks one is always nearest to one half).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from verl_atgrpo.play.seeds import stable_hash

_KEPT = 0.9
"""What remains of a task's results when a new one comes: the policy changes."""


class HalfSolvedFirst:
    """Chooses training tasks by Thompson sampling of their success."""

    def __init__(self, tasks: int, seed: int) -> None:
        """Begins without results, of the tasks with indices below `tasks`."""
        self._seed = seed
        self._new = np.random.default_rng(stable_hash(seed, "new tasks")).permutation(tasks)
        """All tasks in the order in which they are tried."""
        self._tried = self._submitted = 0
        """Numbers of tasks: tried ones, and submissions."""
        self._results = np.zeros((tasks, 2))
        """Solved and failed episodes of each task, the older the less."""
        self._in_flight = np.zeros(tasks, dtype=bool)
        self._chances: list[float] = []
        """Of the tried tasks chosen since the last call of `metrics`: their mean success so far."""

    def next(self) -> int:
        """Returns the index of the next training task: one that is not in flight, as long as there is any."""
        self._submitted += 1
        new = self._tried < len(self._new)
        task = None if new and self._submitted % 2 else self._half_solved()
        if task is None:
            # Where all tasks are in flight, they come again in the same order.
            task = int(self._new[(self._tried if new else self._submitted) % len(self._new)])
            self._tried += new
        self._in_flight[task] = True
        return task

    def _half_solved(self) -> int | None:
        tried = self._new[: self._tried]
        free = tried[~self._in_flight[tried]]
        if not len(free):
            return None
        solved, failed = self._results[free].T
        rng = np.random.default_rng(stable_hash(self._seed, "half solved", self._submitted))
        chosen = int(np.argmin(np.abs(rng.beta(1 + solved, 1 + failed) - 0.5)))
        self._chances.append(float((1 + solved[chosen]) / (2 + solved[chosen] + failed[chosen])))
        return int(free[chosen])

    def set_in_flight(self, tasks: Iterable[int]) -> None:
        """Says which tasks are being played; others whose episodes failed are free again.

        That counts as not solved, or a task that always fails would stay unknown, and come again and again.
        """
        failed = self._in_flight.copy()
        self._in_flight[:] = False
        self._in_flight[list(tasks)] = True
        self._results[failed & ~self._in_flight, 1] += 1

    def learn(self, results: Iterable[tuple[int, bool]]) -> None:
        """Adds the results of a step's episodes: tasks, and whether they were solved."""
        for task, success in results:
            self._in_flight[task] = False
            self._results[task] = _KEPT * self._results[task] + (success, not success)

    def _known(self) -> list[int]:
        """Returns the tasks with results."""
        return list(map(int, np.flatnonzero(self._results.sum(axis=1))))

    def metrics(self) -> dict[str, float]:
        """Returns the share of tasks with results, and the success so far of those chosen since the last call."""
        found = {"tasks/tried_share": len(self._known()) / len(self._new)}
        if self._chances:
            found["tasks/expected_success"] = float(np.mean(self._chances))
        self._chances = []
        return found

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint needs."""
        return {
            "tasks": len(self._new),
            "results": {task: tuple(self._results[task].tolist()) for task in self._known()},
            "tried": self._tried,
            "submitted": self._submitted,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state; raises ValueError if it is of another number of tasks, or of no order."""
        if state.get("tasks") != len(self._new):
            raise ValueError(
                f"at_grpo.task_order=half_solved: the checkpoint has no such order of {len(self._new)} training "
                "tasks; use the one that it was saved with, or set trainer.resume_mode=disable"
            )
        self._results[:] = 0
        for task, found in state["results"].items():
            self._results[task] = found
        self._tried, self._submitted = state["tried"], state["submitted"]
