"""What an environment is: a task source and one async function in which a team solves a task.

Nothing here knows of verl, models or training. A new environment subclasses `Environment`, names its
agents, makes tasks from (split, index) and plays one task in `run`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from verl_atgrpo.team import Team

Split = Literal["train", "val"]
Message = Mapping[str, str]
"""One chat message: `{"role": ..., "content": ...}`."""


class EnvironmentConfigError(ValueError):
    """An environment's options do not make sense; the message names the key and what would do."""


@dataclass(frozen=True)
class Score:
    """What one candidate is worth: the team's part and the agent's own part (paper, Sec. 4.2)."""

    team: float = 0.0
    """The effect on the shared goal. It must follow from the state and the reply alone."""
    local: float = 0.0
    """How well this agent did its own job."""

    def mixed(self, alpha: float, local_weight: float = 1.0) -> float:
        """Returns r = alpha * team + local_weight * local."""
        return alpha * self.team + local_weight * self.local


@dataclass(frozen=True)
class Outcome:
    """How an episode ended."""

    success: bool
    """Solved, and by nothing else than solving: running out of turns is not success."""
    team_reward: float = 0.0
    """The episode's shared reward, given to every row in the parallel sampling scheme."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the episode, averaged over episodes in the logs."""


class Environment(ABC):
    """A family of tasks and the workflow in which a team of agents solves one of them."""

    agents: ClassVar[tuple[str, ...]]
    """Names of the agents, as used in `team.<agent>.act(...)` and in `at_grpo.agents`."""

    @abstractmethod
    def task(self, split: Split, index: int) -> Any:
        """Returns task `index` of `split`; the same arguments give the same task in every process."""

    @abstractmethod
    def fingerprint(self, task: Any) -> str:
        """Returns a text that is equal for two tasks exactly if they are the same problem."""

    def task_key(self, task: Any) -> str:
        """Returns what no move of an episode changes, say the walls of a grid and not the walker; splits share none.

        By default the fingerprint, which is right only where an episode never comes to the start of another task.
        """
        return self.fingerprint(task)

    @abstractmethod
    async def run(self, task: Any, team: Team) -> Outcome:
        """Plays one episode of `task` with `team` and returns how it ended."""

    def dedup_text(self, task: Any) -> str | None:
        """Returns the problem's own words, without what every task says, or None if it has none.

        Validation tasks in nearly the words of a training task are refused (`contamination`). Generated puzzles,
        whose drawings are alike by nature, have no text: their fingerprints tell all.
        """
        return None

    def num_tasks(self, split: Split) -> int | None:
        """Returns how many tasks `split` has, or None if they are generated without end."""
        return None

    def data_sets(self, split: Split) -> Mapping[str, int]:
        """Returns the data sets that the tasks of `split` are from: name -> number of tasks, in the order of tasks.

        Validation reports each by its name, and tasks that none of them covers by the environment's.
        """
        return {}


def stable_hash(*parts: object) -> int:
    """Returns a 63-bit integer of `parts` that is the same in every process and Python version.

    `hash()` of a string changes with PYTHONHASHSEED, so seeds are never derived from it.
    """
    text = "\x1f".join(repr(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


ENTRY_POINTS = "verl_atgrpo.environments"
"""The group of entry points by which installed packages bring environments: a name, and "module:Class"."""

_REGISTRY: dict[str, str | Callable[..., Environment]] = {
    "code": "verl_atgrpo.environments.code:Code",
    "code_single": "verl_atgrpo.environments.code:SingleCode",
    "math": "verl_atgrpo.environments.math:Math",
    "math_debate": "verl_atgrpo.environments.math:MathDebate",
    "math_ensemble": "verl_atgrpo.environments.math:MathEnsemble",
    "math_single": "verl_atgrpo.environments.math:SingleMath",
    "pettingzoo": "verl_atgrpo.environments.adapters.pettingzoo:PettingZooGame",
    "plan_path": "verl_atgrpo.environments.plan_path:PlanPath",
    "plan_path_single": "verl_atgrpo.environments.plan_path:SinglePlanPath",
    "reasoning_gym": "verl_atgrpo.environments.adapters.reasoning_gym:ReasoningGym",
    "reasoning_gym_single": "verl_atgrpo.environments.adapters.reasoning_gym:SingleReasoningGym",
    "sokoban": "verl_atgrpo.environments.sokoban:Sokoban",
    "sokoban_single": "verl_atgrpo.environments.sokoban:SingleSokoban",
    "sudoku": "verl_atgrpo.environments.sudoku:Sudoku",
    "sudoku_single": "verl_atgrpo.environments.sudoku:SingleSudoku",
    "textarena": "verl_atgrpo.environments.adapters.textarena:TextArenaGame",
}


def register(name: str, entry_point: str | Callable[..., Environment]) -> None:
    """Makes an environment known under `name`; `entry_point` is "module:Class" or the class itself.

    Raises ValueError if `name` is taken by another entry point.
    """
    known = {**_REGISTRY, **_installed()}.get(name)
    if known is not None and known != entry_point:
        raise ValueError(f"environment {name!r} is already registered as {known!r}; choose another name")
    _REGISTRY[name] = entry_point


@functools.cache
def _installed() -> Mapping[str, str]:
    """Returns name -> entry point of the environments that installed packages bring.

    Raises EnvironmentConfigError for a name that is taken.
    """
    found: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        taken = {**_REGISTRY, **found}.get(point.name)
        if taken is not None and taken != point.value:
            raise EnvironmentConfigError(
                f"at_grpo.environment.name={point.name!r}: the entry point {point.value!r} (group {ENTRY_POINTS}) has "
                f"the name of {taken!r}; uninstall one of the packages"
            )
        found[point.name] = point.value
    return found


def registered() -> tuple[str, ...]:
    """Returns the names `make` knows, sorted."""
    return tuple(sorted({*_REGISTRY, *_installed()}))


def _load(name: str) -> Callable[..., Environment]:
    entry_point = {**_installed(), **_REGISTRY}.get(name, name)
    if not isinstance(entry_point, str):
        return entry_point
    module_name, separator, attribute = entry_point.partition(":")
    if not separator:
        raise EnvironmentConfigError(
            f"at_grpo.environment.name={name!r} is unknown: use one of {', '.join(registered())} or 'module:Class'"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EnvironmentConfigError(f"at_grpo.environment.name={name!r}: {error}") from error
    try:
        return getattr(module, attribute)  # type: ignore[no-any-return]
    except AttributeError as error:
        raise EnvironmentConfigError(
            f"at_grpo.environment.name={name!r}: module {module_name!r} has no class {attribute!r}"
        ) from error


def make(name: str, **options: Any) -> Environment:
    """Builds the environment `name` (registered, or "module:Class") with its options.

    An option that it does not take may be null: so a recipe takes back what the one it builds upon has set.

    Raises EnvironmentConfigError for an unknown name, an unknown option or an option value that the
    environment refuses.
    """
    factory = _load(name)
    accepted = inspect.signature(factory).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        options = {option: value for option, value in options.items() if option in accepted or value is not None}
        for option in options:
            if option not in accepted:
                raise EnvironmentConfigError(
                    f"at_grpo.environment.{option} is not an option of {name!r}: "
                    f"it takes {', '.join(sorted(accepted))}"
                )
    return factory(**options)
