"""Rows of data that teach something wrong: their own solution fails, anything passes, or their answer is none."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from verl_atgrpo.play.curriculum import Curriculum
from verl_atgrpo.play.environment import Environment, RowDefect
from verl_atgrpo.play.environment_check import tasks_of
from verl_atgrpo.play.mixture import Mixture
from verl_atgrpo.play.nested import Nested
from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.types import Split

SAMPLE = 32
"""Rows that the start of a training grades. With a bound of .25, data of which 8% are bad are refused one time in
1,500, and data of which half are bad pass three times in 1,000."""
_IN_FLIGHT = 8
_UNCHECKED: RowDefect = "it has no solution to check"


@dataclass(frozen=True)
class RowCheck:
    """What grading rows of one split showed."""

    split: Split
    graded: int
    """Rows that were graded."""
    defects: dict[int, RowDefect] = field(default_factory=dict)
    """Index of a task -> what is wrong with it, in the order of tasks."""
    unchecked: int = 0
    """Rows without a solution of their own, of which only the empty reply was graded."""

    @property
    def share(self) -> float:
        """Share of the graded rows that have a defect."""
        return len(self.defects) / self.graded if self.graded else 0.0

    def __str__(self) -> str:
        kinds = Counter(self.defects.values())
        what = ", ".join(f"{count:,}: {kind}" for kind, count in sorted(kinds.items())) or "no defect"
        without = f"; {self.unchecked:,} have no solution of their own" if self.unchecked else ""
        return f"{self.graded:,} {self.split} rows graded, {self.share:.1%} with a defect ({what}){without}"


def has_rows(env: Environment) -> bool:
    """Returns whether an environment can say what is wrong with its tasks."""
    if isinstance(env, Nested):
        return any(map(has_rows, env.environments))
    return type(env).row_defect is not Environment.row_defect


def with_rows(env: Environment, sizes: Mapping[Split, int]) -> Iterator[tuple[str, Environment, Mapping[Split, int]]]:
    """Yields what is graded by itself: an environment with rows, or each such part of a mixture or level.

    Its place below `at_grpo.environment`, itself, and its numbers of tasks; those of the run are `sizes`.
    """
    if isinstance(env, Curriculum):
        *_, last = env.levels
        for number, level in enumerate(env.levels):
            if has_rows(level):
                train = tasks_of(level, "train")
                most = sizes["train"] if train is None else train
                validated: dict[Split, int] = {"val": sizes["val"]} if level is last else {}
                yield f"levels[{number}].", level, {"train": most, **validated}
        return
    if not isinstance(env, Mixture):
        if has_rows(env):
            yield "", env, sizes
        return
    for part in env.parts.values():
        if has_rows(part.environment):
            train = tasks_of(part.environment, "train")
            most = sizes["train"] if train is None else train  # those of a run are spread over all of them
            trained: dict[Split, int] = {"train": most} if part.weight else {}
            yield f"parts.{part.name}.", part.environment, {**trained, "val": part.val_tasks}


def sample(env: Environment, split: Split, size: int) -> list[int]:
    """Returns the indices of at most `SAMPLE` of the first `size` tasks of a split, ascending.

    Every data set has an equal share of them, rounded up.
    """
    ends = [*itertools.accumulate(env.data_sets(split).values(), initial=0), size]
    parts = [part for first, last in itertools.pairwise(ends) if (part := range(first, min(last, size)))]
    rng = random.Random(stable_hash("data check", split, size))
    each = -(-SAMPLE // max(1, len(parts)))
    return sorted(index for part in parts for index in rng.sample(part, min(each, len(part))))


def check_rows(env: Environment, split: Split, indices: Sequence[int]) -> RowCheck:
    """Grades rows of a split as replies are graded: a math answer takes some 20 ms, a program as long as its tests."""

    async def all_of_them() -> list[RowDefect | None]:
        slots = asyncio.Semaphore(_IN_FLIGHT)

        async def one(index: int) -> RowDefect | None:
            async with slots:
                return await env.row_defect(env.task(split, index))

        return await asyncio.gather(*map(one, indices))

    found = dict(zip(indices, asyncio.run(all_of_them()), strict=True))
    defects = {index: what for index, what in found.items() if what is not None and what != _UNCHECKED}
    unchecked = sum(what == _UNCHECKED for what in found.values())
    return RowCheck(split, len(found), defects, unchecked)


def report(env: Environment, sizes: dict[Split, int], bound: float, shown: int = 20) -> tuple[str, bool]:
    """Grades every row of a run, whose numbers of tasks are `sizes`; of parts and levels all that there are.

    Returns a line for each of the first `shown` rows with a defect and a summary, split by split, and whether a share
    of defects is above the `bound` of a training (`at_grpo.max_bad_rows`); no line if the tasks are generated.
    """
    lines, failed = [], False
    for where, one, of_one in with_rows(env, sizes):
        for split, size in of_one.items():
            check = check_rows(one, split, range(size))
            listed = list(check.defects.items())[:shown]
            lines += [f"{where}{split} row {index}: {what}" for index, what in listed]
            if len(check.defects) > shown:
                lines.append(f"... and {len(check.defects) - shown:,} more")
            lines.append(f"{where.removesuffix('.')}: {check}".removeprefix(": "))
            failed |= check.share > bound
    return "\n".join(lines), failed
