"""Checks what an environment declares, and that it makes tasks: its defects are one line before a worker starts."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.team import check_agents
from verl_atgrpo.play.types import EnvironmentConfigError, Split, plain_of
from verl_atgrpo.play.user_code import asking

_SPLITS: tuple[Split, ...] = typing.get_args(Split)


def check_declared(env: Environment, name: object) -> None:
    """Raises EnvironmentConfigError unless an environment, by its name in a recipe, declares what can be played."""
    where, kind = f"at_grpo.environment.name={name!r}", type(env).__name__
    with asking(name, "reading agents"):
        agents = env.agents
    try:
        check_agents(agents)
    except ValueError as error:
        raise EnvironmentConfigError(f"{where}: {kind}.{error}") from None
    if not inspect.iscoroutinefunction(inspect.unwrap(env.run)):
        raise EnvironmentConfigError(f"{where}: {kind}.run is not async: write async def run(self, task, team)")
    if inspect.iscoroutinefunction(env.task):
        raise EnvironmentConfigError(f"{where}: {kind}.task is async: write def task(self, split, index)")
    for split in _SPLITS:
        with asking(name, f"num_tasks({split!r})"):
            tasks_of(env, split)
        with asking(name, f"data_sets({split!r})"):
            sets = env.data_sets(split)
        if not isinstance(sets, Mapping) or not all(isinstance(size, int) for size in sets.values()):
            raise EnvironmentConfigError(f"{where}: {kind}.data_sets({split!r}) is {sets!r:.200}: name -> number")


def check_first_tasks(env: Environment, name: object) -> None:
    """Raises EnvironmentConfigError if an environment cannot make, name and compare the first task of a split."""
    for split in _SPLITS:
        if tasks_of(env, split) == 0:
            continue
        with asking(name, f"task({split!r}, 0)"):
            task, again = env.task(split, 0), env.task(split, 0)
        for method in ("fingerprint", "task_key", "dedup_text"):
            with asking(name, f"{method} of task ({split}, 0)"):
                text = getattr(env, method)(task)
            if not isinstance(text, str) and (method, text) != ("dedup_text", None):
                raise EnvironmentConfigError(
                    f"at_grpo.environment.name={name!r}: {type(env).__name__}.{method} of task ({split}, 0) is "
                    f"{text!r:.200}: return a text"
                )
            with asking(name, f"{method} of task ({split}, 0)"):
                same = getattr(env, method)(again) == text
            if not same:
                raise EnvironmentConfigError(
                    f"at_grpo.environment.name={name!r}: {type(env).__name__}.{method} of task ({split}, 0) is "
                    f"{text!r:.80}, and another text when the task is made again: draw from random.Random("
                    "stable_hash(split, index)), and name what the task consists of"
                )


def tasks_of(env: Environment, split: Split) -> int | None:
    """Returns the number of tasks of a split, None without end; raises EnvironmentConfigError for anything else."""
    number = plain_of(env.num_tasks(split))
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        raise EnvironmentConfigError(
            f"at_grpo.environment: {type(env).__name__}.num_tasks({split!r}) is {number!r:.80}: return a whole "
            "number, or None for tasks without end"
        )
    return number
