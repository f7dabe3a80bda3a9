"""Several environments in one run: each step plays tasks of each of them, as many as its weight says.

A mixture is an environment: its agents are its parts' as `<part>.<agent>`, its tasks are theirs. So whatever is said
of agents, splits, validation and evaluation holds of a mixture as of one environment.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.environment_check import tasks_of
from verl_atgrpo.play.nested import Nested, Shares, make_inner, row_at
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.types import EnvironmentConfigError, Outcome, Split

if TYPE_CHECKING:
    from verl_atgrpo.play.endpoints import CallScore, Endpoint

_KEY = "at_grpo.environment"
_OWN = ("name", "val_tasks", "weight")
"""Keys of a part beside the options of its environment."""


@dataclass(frozen=True)
class Part:
    """An environment of a mixture."""

    name: str
    environment: Environment
    weight: float
    val_tasks: int
    """Validation tasks."""


@dataclass(frozen=True)
class Task:
    """A task of a mixture."""

    part: str
    task: Any
    """Its environment's."""


class Mixture(Nested):
    """Several environments by weight.

    Training tasks come in an order in which every environment has its share (`Shares`). Validation tasks are each
    environment's own, one after another.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Makes the environments.

        Args:
            parts: a name of your own -> `weight` (1), the environment's `name` (the part's name), `val_tasks` (100, or
                all that it has if they are fewer; 0: it is not validated), and its options.

        Raises EnvironmentConfigError for a refused weight, name or option.
        """
        if not isinstance(parts, Mapping) or not parts:
            raise EnvironmentConfigError(
                f"{_KEY}.parts={parts!r:.200}: environments by name, such as {{walk: {{weight: 2}}, sudoku: {{}}}}"
            )
        self.parts = {str(name): _part(str(name), {} if own is None else own) for name, own in parts.items()}
        weights = [part.weight for part in self.parts.values()]
        if not any(weights):
            raise EnvironmentConfigError(f"{_KEY}.parts: all weights are 0; give one of them a weight above 0")
        self.agents = tuple(  # type: ignore[misc]  # of the parts
            f"{part.name}.{agent}" for part in self.parts.values() for agent in part.environment.agents
        )
        self.schemes = {  # type: ignore[misc]
            f"{part.name}.{agent}": schemes
            for part in self.parts.values()
            for agent, schemes in part.environment.schemes.items()
        }
        self._order: list[tuple[Part, int]] = []
        """Training tasks so far: a part, and how many of its tasks came before."""
        self._counts = dict.fromkeys(self.parts, 0)
        self._shares = Shares([0.0] * len(self.parts))

    def _place(self, split: Split, index: int) -> tuple[Part, int]:
        """Returns the part of a task, and the task's index there."""
        if split == "val":
            for part in self.parts.values():
                if index < part.val_tasks:
                    return part, index
                index -= part.val_tasks
            raise IndexError(f"a mixture has {self.num_tasks('val')} validation tasks")
        parts = list(self.parts.values())
        while len(self._order) <= index:
            part = parts[self._shares.next([one.weight for one in parts])]
            self._order.append((part, self._counts[part.name]))
            self._counts[part.name] += 1
        part, before = self._order[index]
        size = tasks_of(part.environment, "train")
        return part, before if size is None else row_at(before, size)

    def part_of(self, split: Split, index: int) -> str:
        """Returns the name of a task's part."""
        return self._place(split, index)[0].name

    def task(self, split: Split, index: int) -> Task:
        """Returns a part's task."""
        part, place = self._place(split, index)
        return Task(part.name, part.environment.task(split, place))

    @property
    def environments(self) -> Sequence[Environment]:
        return [part.environment for part in self.parts.values()]

    def environment_of(self, task: Task) -> Environment:
        """Returns the task's part."""
        return self.parts[task.part].environment

    def fingerprint(self, task: Task) -> str:
        """Returns its part's, with the environment's class: parts of one class may have the same problem."""
        return f"{self._class_of(task)}: {super().fingerprint(task)}"

    def task_key(self, task: Task) -> str:
        """Returns its part's, with the environment's class."""
        return f"{self._class_of(task)}: {super().task_key(task)}"

    def _class_of(self, task: Task) -> str:
        kind = type(self.environment_of(task))
        return f"{kind.__module__}.{kind.__qualname__}"

    def opponents(self, task: Task) -> Sequence[str]:
        """Returns its part's, under their names here."""
        return [f"{task.part}.{agent}" for agent in super().opponents(task)]

    def num_tasks(self, split: Split) -> int | None:
        """Returns the tasks of all parts; for training as many as have each part's data once, None for no end."""
        if split == "val":
            return sum(part.val_tasks for part in self.parts.values())
        trained = [part for part in self.parts.values() if part.weight]
        sizes, total = [tasks_of(part.environment, "train") for part in trained], sum(part.weight for part in trained)
        needed = [math.ceil(size * total / part.weight) for size, part in zip(sizes, trained, strict=True) if size]
        return None if None in sizes else max(needed)

    def data_sets(self, split: Split) -> Mapping[str, int]:
        """Returns the parts, or a part's data sets as `<part>.<data set>`, with their validation tasks."""
        if split == "train":
            return {}
        found: dict[str, int] = {}
        for part in self.parts.values():
            left = part.val_tasks
            for name, size in part.environment.data_sets("val").items():
                if used := min(size, left):
                    found[f"{part.name}.{name}"] = used
                left -= used
            if left:
                found[part.name] = left
        return found

    async def run(self, task: Task, team: Team) -> Outcome:
        """Plays the task in its environment, whose agents have their own names there."""
        environment = self.environment_of(task)
        return await environment.run(task.task, cast(Team, PartTeam(team, task.part, environment.agents)))


class PartTeam:
    """A team as the environment of a part sees it: `team.navigator` is the agent `walk.navigator`."""

    def __init__(self, team: Team, part: str, agents: Sequence[str]) -> None:
        """Needs the team, the part's name and its agents."""
        self._team = team
        self._names = {agent: f"{part}.{agent}" for agent in agents}

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("_names", {})
        return self._team[names[name]] if name in names else getattr(self._team, name)

    def __getitem__(self, name: str) -> Any:
        return self._team[self._names[name]]

    def serve(
        self, score: CallScore | None = None, *, agents: Sequence[str] | None = None, **limits: Any
    ) -> AbstractAsyncContextManager[Mapping[str, Endpoint]]:
        """Opens endpoints for the part's agents, under their names there; see `Team.serve`."""
        short = {name: agent for agent, name in self._names.items()}
        chosen = self._names if agents is None else {agent: self._names[agent] for agent in agents}

        own = None if score is None else lambda agent, *reply: score(short[agent], *reply)

        @asynccontextmanager
        async def served() -> AsyncIterator[Mapping[str, Endpoint]]:
            async with self._team.serve(own, agents=list(chosen.values()), **limits) as endpoints:
                yield {short[name]: endpoint for name, endpoint in endpoints.items()}

        return served()


def _part(name: str, options: Mapping[str, Any]) -> Part:
    key = f"{_KEY}.parts.{name}"
    if not name.isidentifier():
        raise EnvironmentConfigError(f"{key}: use letters, digits and underscores for a name")
    if name == "all":
        raise EnvironmentConfigError(f"{key}: taken, at_grpo.agents means all agents by it; use another name")
    if not isinstance(options, Mapping):
        raise EnvironmentConfigError(f"{key}={options!r:.200}: a section, such as {{weight: 2}}")
    weight, most = options.get("weight", 1), options.get("val_tasks", 100)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise EnvironmentConfigError(f"{key}.weight={weight!r}: a number of at least 0")
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise EnvironmentConfigError(f"{key}.val_tasks={most!r}: a whole number of at least 0")
    if not weight and not most:
        raise EnvironmentConfigError(f"{key}: with weight=0 and val_tasks=0 it has no effect; remove it")
    own = {option: value for option, value in options.items() if option not in _OWN}
    chosen = options.get("name", name)
    if not isinstance(chosen, str):
        raise EnvironmentConfigError(f"{key}.name={chosen!r}: the name of an environment")
    environment = make_inner(chosen, own, key, trained=weight > 0)
    available = tasks_of(environment, "val")
    return Part(name, environment, float(weight), most if available is None else min(most, available))
