"""Environments that consist of others: what they hand on to the one that a task is of, and whose turn it is."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from verl_atgrpo.play import registry
from verl_atgrpo.play.environment import Environment, RowDefect
from verl_atgrpo.play.environment_check import check_declared, tasks_of
from verl_atgrpo.play.types import EnvironmentConfigError


class Nested(Environment):
    """An environment whose tasks have a `task` of one of its environments, which answers what is asked of it."""

    ordered = True

    @abstractmethod
    def environment_of(self, task: Any) -> Environment:
        """Returns the environment of a task."""

    @property
    @abstractmethod
    def environments(self) -> Sequence[Environment]:
        """Its environments."""

    def fingerprint(self, task: Any) -> str:
        return self.environment_of(task).fingerprint(task.task)

    def task_key(self, task: Any) -> str:
        return self.environment_of(task).task_key(task.task)

    def dedup_text(self, task: Any) -> str | None:
        return self.environment_of(task).dedup_text(task.task)

    async def row_defect(self, task: Any) -> RowDefect | None:
        return await self.environment_of(task).row_defect(task.task)

    def opponents(self, task: Any) -> Sequence[str]:
        return self.environment_of(task).opponents(task.task)

    def hindsight(self, task: Any) -> str:
        return self.environment_of(task).hindsight(task.task)


class Shares:
    """Chooses among numbers: the one that is furthest behind its share is next, at ties the first.

    Of any choices in a row each number has its share to about one at either end. Weights may change between choices;
    what a number is behind or ahead by then stays.
    """

    def __init__(self, credit: Sequence[float]) -> None:
        """Begins with what each number is behind: zeros at first, or the `credit` of earlier choices."""
        self.credit = list(credit)

    def next(self, weights: Sequence[float]) -> int:
        """Returns the next choice; `weights` are at least 0, not all of them 0."""
        total = math.fsum(weights)
        for number, weight in enumerate(weights):
            self.credit[number] += weight / total
        chosen = max((number for number, weight in enumerate(weights) if weight), key=self.credit.__getitem__)
        self.credit[chosen] -= 1
        return chosen


def row_at(place: int, size: int) -> int:
    """Returns the row of a data set that is the `place`-th training task: each once, then all again.

    Not in the order of the file, which may be sorted: steps of about .62 of the file reach all parts of it early.
    """
    step = int(0.618 * size)
    while math.gcd(step, size) != 1:
        step += 1
    return place * step % size


def make_inner(name: str, options: Mapping[str, object], key: str, trained: bool = True) -> Environment:
    """Returns an environment that another one consists of; `key` is its place in the recipe, for messages.

    Raises EnvironmentConfigError as `registry.make` and `check_declared`, if it orders its own tasks (the order is
    that of the outer one), or if it is `trained` and has no tasks for it.
    """
    try:
        made = registry.make(name, **options)
        check_declared(made, name)
    except EnvironmentConfigError as error:
        # An environment does not know its place in the configuration.
        raise EnvironmentConfigError(str(error).replace("at_grpo.environment", key, 1)) from error
    if made.ordered:
        raise EnvironmentConfigError(
            f"{key}.name={name!r} orders its tasks itself, which has no effect within another environment; name "
            "one of its environments"
        )
    if trained and tasks_of(made, "train") == 0:
        raise EnvironmentConfigError(
            f"{key}: {name!r} has no training tasks with these options; change or remove them"
        )
    return made
