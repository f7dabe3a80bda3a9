"""A curriculum: one environment at several levels of difficulty, of which the team trains at those it half solves.

The level rises where success is above a bound and falls where it is below another, as RLAnything adapts its tasks
(arXiv 2602.02488, bounds .2 and .8). Easier levels stay in the mixture, so that nothing is forgotten. Validation is at
the last level from the first step on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import tasks_of
from verl_atgrpo.play.nested import Nested, Shares, make_inner, row_at
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.types import EnvironmentConfigError, Outcome, Split

_KEY = "at_grpo.environment"
_Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True)
class LevelTask:
    """A task of a curriculum."""

    level: int
    task: Any
    """Its environment's."""


class Curriculum(Nested):
    """One environment at several levels."""

    def __init__(
        self,
        of: Mapping[str, Any],
        levels: Sequence[Mapping[str, Any]],
        lower: _Share = 0.2,
        upper: _Share = 0.8,
        window: Annotated[int, Ge(1), Le(1_000_000)] = 32,
        review: _Share = 0.2,
    ) -> None:
        """Makes the environment at each level.

        Args:
            of: the environment: its `name` and the options that all levels share.
            levels: each level's options, merged into those of `of`, from the easiest to the one that is validated.
            lower: success below which the level falls.
            upper: success above which it rises, below 1.
            window: episodes at the level, the last ones, whose success counts; a change of level starts anew.
            review: share of the tasks that are of easier levels.

        Raises EnvironmentConfigError for levels that are none, bounds out of order, or what the environment refuses.
        """
        if not isinstance(levels, Sequence) or isinstance(levels, str) or len(levels) < 2:
            raise EnvironmentConfigError(
                f"{_KEY}.levels={levels!r:.200}: two levels or more, such as [{{size: 4}}, {{size: 6}}]"
            )
        for key, share in (("lower", lower), ("upper", upper), ("review", review)):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise EnvironmentConfigError(f"{_KEY}.{key}={share!r}: a number from 0 to 1")
        if lower >= upper:
            raise EnvironmentConfigError(f"{_KEY}.lower={lower!r} is not below upper={upper!r}")
        if upper == 1:
            raise EnvironmentConfigError(
                f"{_KEY}.upper={upper!r}: no success is above it; set it below 1, such as 0.8"
            )
        if review == 1:
            raise EnvironmentConfigError(f"{_KEY}.review={review!r} leaves no tasks of the level itself; lower it")
        if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= 1_000_000:
            raise EnvironmentConfigError(f"{_KEY}.window={window!r}: a whole number from 1 to 1,000,000")
        self.levels = [_level(number, of, own) for number, own in enumerate(levels)]
        self.agents = self.levels[-1].agents  # type: ignore[misc]  # of the environment
        self.schemes = self.levels[-1].schemes  # type: ignore[misc]
        for number, level in enumerate(self.levels):
            if level.agents != self.agents:
                raise EnvironmentConfigError(
                    f"{_KEY}.levels[{number}] has the agents {', '.join(level.agents)}, the last level has "
                    f"{', '.join(self.agents)}; levels have the same agents"
                )
        self.lower, self.upper, self.window, self.review = float(lower), float(upper), window, float(review)

    def place(self, index: int) -> tuple[int, int]:
        """Returns the level of a training task, and the task's index there."""
        before, level = divmod(index, len(self.levels))
        return level, before

    def task(self, split: Split, index: int) -> LevelTask:
        """Returns a task of the level that a training index names, or of the last level."""
        level, place = (len(self.levels) - 1, index) if split == "val" else self.place(index)
        if split == "train" and (size := tasks_of(self.levels[level], split)) is not None:
            place = row_at(place, size)
        return LevelTask(level, self.levels[level].task(split, place))

    @property
    def environments(self) -> Sequence[Environment]:
        return self.levels

    def environment_of(self, task: LevelTask) -> Environment:
        """Returns the task's level."""
        return self.levels[task.level]

    def num_tasks(self, split: Split) -> int | None:
        """Returns the last level's for validation; for training as many as have all of each level, None for no end."""
        if split == "val":
            return tasks_of(self.levels[-1], "val")
        sizes = [tasks_of(level, "train") for level in self.levels]
        return None if None in sizes else len(sizes) * max(size for size in sizes if size)

    def data_sets(self, split: Split) -> Mapping[str, int]:
        """Returns the last level's for validation."""
        return self.levels[-1].data_sets("val") if split == "val" else {}

    async def run(self, task: LevelTask, team: Team) -> Outcome:
        """Plays the task at its level."""
        return await self.environment_of(task).run(task.task, team)


class LevelOrder:
    """The order of a curriculum's training tasks, which follows the team's success."""

    def __init__(self, curriculum: Curriculum, tasks: int) -> None:
        """Begins at the first level; `tasks` is the number of training tasks of all levels together."""
        number = len(curriculum.levels)
        self._tasks = max(1, tasks // number)
        self._curriculum = curriculum
        self._shares = Shares([0.0] * number)
        self._counts = [0] * number
        """Tasks so far of each level."""
        self._results: list[bool] = []
        """Of episodes at the level, the last `window` of them, or all of the last step if they are more."""
        self._success: float | None = None
        """Of those of the last step that had any, before a change of level."""
        self.level = 0

    def next(self) -> int:
        """Returns the index of the next training task."""
        review = self._curriculum.review if self.level else 0.0
        # All easier levels alike.
        weights = [review / max(1, self.level)] * self.level + [1 - review]
        weights += [0.0] * (len(self._counts) - len(weights))
        level = self._shares.next(weights)
        index = self._counts[level] % self._tasks * len(self._counts) + level
        self._counts[level] += 1
        return index

    def learn(self, results: Iterable[tuple[int, bool]]) -> None:
        """Counts a step's episodes of tasks; then moves to another level if the level's last episodes say so.

        Not after every episode: those of one task follow each other, and a few lucky ones would move it.
        """
        of_step = [success for index, success in results if self._curriculum.place(index)[0] == self.level]
        self._results = [*self._results, *of_step][-max(self._curriculum.window, len(of_step)) :]
        if self._results:
            self._success = rate = sum(self._results) / len(self._results)
        if not of_step or len(self._results) < self._curriculum.window:
            return
        step = (rate > self._curriculum.upper) - (rate < self._curriculum.lower)
        level = min(max(self.level + step, 0), len(self._counts) - 1)
        if level != self.level:
            self.level = level
            self._results = []

    def metrics(self) -> dict[str, float]:
        """Returns the level, counted from 0, and the success by which it was chosen, if there were episodes."""
        success = {} if self._success is None else {"curriculum/success": self._success}
        return {"curriculum/level": float(self.level), **success}

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint needs."""
        return {
            "level": self.level,
            "credit": list(self._shares.credit),
            "counts": list(self._counts),
            "results": list(self._results),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state; raises ValueError if it is of no curriculum, or has other levels."""
        if "level" not in state:
            raise ValueError(
                f"{_KEY}.name=curriculum: the checkpoint's tasks were in another order, of no levels; set "
                "trainer.resume_mode=disable, or use the environment that it was saved with"
            )
        levels = len(state["counts"])
        if levels != len(self._counts):
            raise ValueError(
                f"{_KEY}.levels: the checkpoint has {levels} levels, the recipe {len(self._counts)}; use as many, or "
                "set trainer.resume_mode=disable"
            )
        self.level, self._counts = state["level"], list(state["counts"])
        self._shares = Shares(state["credit"])
        self._results = list(state["results"])


def _level(number: int, of: Mapping[str, Any], own: Mapping[str, Any]) -> Environment:
    key = f"{_KEY}.levels[{number}]"
    if not isinstance(of, Mapping) or not isinstance(of.get("name"), str):
        raise EnvironmentConfigError(f"{_KEY}.of={of!r:.200}: an environment, such as {{name: plan_path}}")
    if not isinstance(own, Mapping) or "name" in own:
        raise EnvironmentConfigError(f"{key}={own!r:.200}: options of {of['name']!r}, such as {{size: 4}}")
    options = _merged(of, own)
    try:
        return make_inner(options.pop("name"), options, key)
    except EnvironmentConfigError as error:
        named = re.match(re.escape(f"{key}.") + r"(\w+)", str(error))
        if named is None or named[1] in own:
            raise
        raise EnvironmentConfigError(str(error).replace(key, f"{_KEY}.of", 1)) from error


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of which those that are mappings on both sides are merged, as in recipes."""
    both = {key for key, value in own.items() if isinstance(value, Mapping) and isinstance(shared.get(key), Mapping)}
    return {**shared, **own, **{key: _merged(shared[key], own[key]) for key in both}}
