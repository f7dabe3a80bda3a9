"""Environments that consist of others: what they hand on to the one that a task is of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from verl_atgrpo.play import registry
from verl_atgrpo.play.environment import Environment, RowDefect
from verl_atgrpo.play.environment_check import check_declared
from verl_atgrpo.play.types import EnvironmentConfigError


class Nested(Environment):
    """An environment whose tasks have a `task` of one of its environments."""

    ordered = True

    @abstractmethod
    def environment_of(self, task: Any) -> Environment:
        """Returns the environment of a task."""

    def fingerprint(self, task: Any) -> str:
        """Returns its environment's."""
        return self.environment_of(task).fingerprint(task.task)

    def task_key(self, task: Any) -> str:
        """Returns its environment's."""
        return self.environment_of(task).task_key(task.task)

    def dedup_text(self, task: Any) -> str | None:
        """Returns its environment's."""
        return self.environment_of(task).dedup_text(task.task)

    async def row_defect(self, task: Any) -> RowDefect | None:
        """Returns its environment's."""
        return await self.environment_of(task).row_defect(task.task)

    def opponents(self, task: Any) -> Sequence[str]:
        """Returns its environment's."""
        return self.environment_of(task).opponents(task.task)

    def hindsight(self, task: Any) -> str:
        """Returns its environment's."""
        return self.environment_of(task).hindsight(task.task)


def make_inner(name: str, options: Mapping[str, object], key: str) -> Environment:
    """Returns an environment that another one consists of; `key` is its place in the recipe, for messages.

    Raises EnvironmentConfigError as `registry.make` and `check_declared`, or if it orders its own tasks: the order is
    that of the outer one.
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
    return made
