"""Sums for verifiers: a finite or infinite taskset with two rewards. The reply raise, nan or inf spoils one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.7)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("no number")
        return float(trace.last_reply == str(task.answer))

    @vf.reward(weight=0.3)
    async def near(self, task: SumData, trace: vf.Trace) -> float:
        said = trace.last_reply
        if said in ("nan", "inf"):
            return float(said)
        return 1 / (1 + abs(int(said) - task.answer)) if said.isascii() and said.isdigit() else 0.0

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    first: int = 100
    size: int | None = 40


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    @property
    def bounded(self) -> bool:
        return self._bounded if self._bounded is not None else self.config.size is not None

    def load(self) -> Iterator[SumTask]:
        first, size = self.config.first, self.config.size
        for number in itertools.count(first) if size is None else range(first, first + size):
            prompt = f"Please tell me what you think the sum of these two is: {number} + {number} . Only the number."
            yield SumTask(SumData(prompt=prompt, answer=2 * number, name=f"sum {number}"), self.config.task)
