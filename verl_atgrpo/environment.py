"""Environments: a source of tasks, and an async function in which a team of agents solves one task.

A new environment subclasses `Environment`, names its agents, makes tasks from (split, index) and plays one task in
`run`. Nothing here depends on verl, models or training.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import math
import numbers
import sys
import sysconfig
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from verl_atgrpo.team import Team

Split = Literal["train", "val"]
Message = Mapping[str, Any]
"""One chat message in OpenAI's form: `{"role": ..., "content": ...}`, perhaps with tool calls, or a tool's result. The
content is a text, or a list of parts `{"type": "text", "text": ...}`."""


RowDefect = Literal[
    "its own solution fails", "the empty reply passes", "its answer cannot be verified", "it has no solution to check"
]
"""What may be wrong with a row of data; the last one says that there is nothing to grade."""


class EnvironmentConfigError(ValueError):
    """An environment refuses its options. The message names the key and what is accepted."""


def plain_of(value: object) -> object:
    """Returns Python's own value of a single number or bool of numpy, torch and the like, else the value itself."""
    item = None if isinstance(value, numbers.Real) else getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):  # an array of several, or no array at all
        return value


def float_of(value: object, name: str) -> float:
    """Returns a real number, of whatever library, as Python's float: records are JSON.

    Raises ValueError for anything else, and for a number beyond floats.

    Args:
        value: the number; it may be infinite or nan.
        name: its field, for messages.
    """
    plain = plain_of(value)
    if not isinstance(plain, numbers.Real | Decimal):
        raise ValueError(f"{name}={value!r:.200} is no number")
    try:
        return float(plain)
    except (OverflowError, ValueError):  # such as a fraction; a signalling nan
        raise ValueError(f"{name}={value!r:.200} is not a finite number") from None


@dataclass(frozen=True)
class Score:
    """The reward of a candidate in two parts: the team's and the agent's own (paper, Sec. 4.2).

    Raises ValueError for a part that is no number. One that is not finite is refused at the decision: it is the fault
    of a single reply, also with `score_all`.
    """

    team: float = 0.0
    """Effect on the shared goal; must depend on the state and the reply only."""
    local: float = 0.0
    """How well this agent did its own part."""

    def __post_init__(self) -> None:
        for name in ("team", "local"):
            object.__setattr__(self, name, float_of(getattr(self, name), f"Score.{name}"))

    def mixed(self, alpha: float, local_weight: float = 1.0) -> float:
        """Returns r = alpha * team + local_weight * local."""
        return alpha * self.team + local_weight * self.local


_OF_VALIDATION = ("acc", "failed", "reward")
"""Names of metrics that validation has itself."""


class OutcomeError(ValueError):
    """An environment's `run` returned no valid outcome."""


@dataclass(frozen=True)
class Outcome:
    """How an episode ended.

    Raises OutcomeError for a success that is no bool, a number that is not finite, or the name of a metric that
    validation has itself.
    """

    success: bool
    """Whether the task was solved; running out of turns is no success."""
    team_reward: float = 0.0
    """The episode's shared reward: that of every row with `scheme: parallel`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the episode; the logs have their means over episodes."""

    def __post_init__(self) -> None:
        success = plain_of(self.success)
        if not isinstance(success, bool):
            raise OutcomeError(f"Outcome.success={self.success!r:.200} is neither True nor False")
        object.__setattr__(self, "success", success)
        object.__setattr__(self, "team_reward", _finite(self.team_reward, "Outcome.team_reward"))
        metrics = {key: _finite(value, f"Outcome.metrics: {key}") for key, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)
        for key in metrics:
            if not isinstance(key, str) or key in _OF_VALIDATION:
                raise OutcomeError(f"Outcome.metrics: {key!r} is no text, or a metric that validation has itself")


def _finite(value: object, name: str) -> float:
    try:
        found = float_of(value, name)
    except ValueError as error:
        raise OutcomeError(str(error)) from None
    if not math.isfinite(found):
        raise OutcomeError(f"{name}={value!r:.200} is not a finite number")
    return found


def check_outcome(environment: Environment, outcome: object) -> None:
    """Raises OutcomeError if what an environment's `run` returned is no outcome."""
    if not isinstance(outcome, Outcome):
        raise OutcomeError(f"{type(environment).__name__}.run returned {outcome!r:.200}: it is no Outcome")


class Ended(RuntimeError):
    """User's code raised what would end the process or the task that runs it, such as `SystemExit`."""


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Lets nothing but exceptions out of user's code: asyncio's loop, and with it a worker, ends at a `SystemExit`.

    Args:
        what: the code, for the message.

    Raises Ended for a `SystemExit` (of argparse, say), a `KeyboardInterrupt` outside the main thread, a
    `CancelledError` though nobody cancels the running task, and further kinds that are no `Exception`.
    """
    task = _running()
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if _is_for_us(error, task):
            raise
        raise Ended(f"{what} raised {type(error).__name__}: {error}") from error


def _running() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


def _is_for_us(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Returns whether user's code only passes an error on, as somebody cancels or closes its task, or interrupts."""
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    if isinstance(error, asyncio.CancelledError):  # Python 3.10 cannot tell
        return task is not None and (sys.version_info < (3, 11) or task.cancelling() > 0)
    # A coroutine is closed by others than its own task.
    return isinstance(error, GeneratorExit) and _running() is not task


@contextmanager
def asking(name: object, doing: str) -> Iterator[None]:
    """Turns what an environment's code raises at a check into one line: its name, what was asked, and the place.

    Args:
        name: as in a recipe.
        doing: what is asked of it, such as "task('train', 0)".

    Raises EnvironmentConfigError.
    """
    try:
        with contained(doing):
            yield
    except EnvironmentConfigError:
        raise
    except Exception as error:
        raised = error.__cause__ if isinstance(error, Ended) and error.__cause__ is not None else error
        frames = traceback.extract_tb(raised.__traceback__)
        # Not where a library that it calls raises, if that can be told.
        own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<", __file__))]
        at = (own or frames)[-1]
        raise EnvironmentConfigError(
            f"at_grpo.environment.name={name!r}: {doing} raised {type(raised).__name__}: {str(raised)[:300]} "
            f"({at.filename}:{at.lineno})"
        ) from error


_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


class Environment(ABC):
    """A family of tasks and the workflow in which a team of agents solves one of them."""

    agents: ClassVar[tuple[str, ...]]
    """Names of the agents, for `team.<agent>.act(...)` and `at_grpo.agents`."""
    schemes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Agent -> values of `at_grpo.scheme` that give it a reward of its own; any, for agents that are not named."""

    @abstractmethod
    def task(self, split: Split, index: int) -> Any:
        """Returns task `index` of `split`: the same task for the same arguments in every process."""

    @abstractmethod
    def fingerprint(self, task: Any) -> str:
        """Returns a text that two tasks share exactly if they are the same problem."""

    def task_key(self, task: Any) -> str:
        """Returns the part of a task that no move changes, such as a grid's walls but not the position.

        No key may be in both splits. The default is the fingerprint, which suffices only if no episode can reach the
        start of another task.
        """
        return self.fingerprint(task)

    @abstractmethod
    async def run(self, task: Any, team: Team) -> Outcome:
        """Plays one episode of `task` with `team` and returns its outcome."""

    def dedup_text(self, task: Any) -> str | None:
        """Returns the problem's text without the parts that all tasks share, or None if it has no such text.

        Validation tasks that are near duplicates of a training task by this text are refused (`contamination`).
        Generated puzzles return None: all of them look alike, and their keys suffice.
        """
        return None

    async def row_defect(self, task: Any) -> RowDefect | None:
        """Returns what is wrong with a task that comes from data, or None.

        Grades the row's own solution or answer, and the empty reply, as replies are graded. Generated tasks have no
        rows to check (`data_check`).
        """
        return None

    def num_tasks(self, split: Split) -> int | None:
        """Returns the number of tasks of `split`, or None if they are generated without end."""
        return None

    def data_sets(self, split: Split) -> Mapping[str, int]:
        """Returns the data sets of `split`, in the order of tasks: name -> number of tasks.

        Validation reports each under its name, and all further tasks under the environment's.
        """
        return {}


def stable_hash(*parts: object) -> int:
    """Returns a 63-bit integer of `parts` that is the same in every process and Python version.

    Unlike `hash()`, which depends on PYTHONHASHSEED, it can be used to derive seeds.
    """
    text = "\x1f".join(repr(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


ENTRY_POINTS = "verl_atgrpo.environments"
"""Group of entry points with which installed packages register environments: a name and "module:Class"."""

_REGISTRY: dict[str, str | Callable[..., Environment]] = {
    "code": "verl_atgrpo.environments.code:Code",
    "code_single": "verl_atgrpo.environments.code:SingleCode",
    "math": "verl_atgrpo.environments.math:Math",
    "math_debate": "verl_atgrpo.environments.math:MathDebate",
    "math_drafts": "verl_atgrpo.environments.math:MathDrafts",
    "math_ensemble": "verl_atgrpo.environments.math:MathEnsemble",
    "math_judged": "verl_atgrpo.environments.math:MathJudged",
    "math_refined": "verl_atgrpo.environments.math:MathRefined",
    "math_single": "verl_atgrpo.environments.math:SingleMath",
    "number_search": "verl_atgrpo.environments.number_search:NumberSearch",
    "number_search_single": "verl_atgrpo.environments.number_search:SingleNumberSearch",
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
    "walk": "verl_atgrpo.environments.walk:Walk",
    "search": "verl_atgrpo.environments.search:Search",
    "search_routed": "verl_atgrpo.environments.search:RoutedSearch",
    "search_single": "verl_atgrpo.environments.search:SingleSearch",
    "walk_single": "verl_atgrpo.environments.walk:SingleWalk",
    "walk_walls": "verl_atgrpo.environments.walk:WalledWalk",
    "walk_walls_single": "verl_atgrpo.environments.walk:SingleWalledWalk",
}


def register(name: str, entry_point: str | Callable[..., Environment]) -> None:
    """Registers an environment under `name`; `entry_point` is "module:Class" or the class itself.

    Raises ValueError if `name` is taken by another entry point.
    """
    known = {**_REGISTRY, **_installed()}.get(name)
    if known is not None and known != entry_point:
        raise ValueError(f"environment {name!r} is already registered as {known!r}; choose another name")
    _REGISTRY[name] = entry_point


@functools.cache
def _installed() -> Mapping[str, str]:
    """Returns name -> entry point of the environments that installed packages register.

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
    """Returns the registered names, sorted."""
    return tuple(sorted({*_REGISTRY, *_installed()}))


def load(name: str) -> Callable[..., Environment]:
    """Returns the class or factory of the environment `name`; raises EnvironmentConfigError for an unknown name."""
    entry_point = {**_installed(), **_REGISTRY}.get(name, name)
    if not isinstance(entry_point, str):
        return entry_point
    module_name, separator, attribute = entry_point.partition(":")
    if not separator or not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise EnvironmentConfigError(
            f"at_grpo.environment.name={name!r} is unknown: use one of {', '.join(registered())} or 'module:Class'"
        )
    try:
        with asking(name, f"importing {module_name}"):
            module = importlib.import_module(module_name)
    except EnvironmentConfigError as error:
        if isinstance(error.__cause__, ImportError):  # says all
            raise EnvironmentConfigError(f"at_grpo.environment.name={name!r}: {error.__cause__}") from error.__cause__
        raise
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise EnvironmentConfigError(
            f"at_grpo.environment.name={name!r}: module {module_name!r} has no class {attribute!r}"
        )
    return factory  # type: ignore[no-any-return]


def make(name: str, **options: Any) -> Environment:
    """Returns the environment `name` (registered, or "module:Class") with its options.

    Drops an option that the environment does not take if it is null, so that a recipe can unset an option of the
    recipe that it is based on.

    Raises EnvironmentConfigError for an unknown name or option, or for a value that the environment refuses.
    """
    factory = load(name)
    try:
        signature = inspect.signature(factory)
    except ValueError as error:  # of some builtins
        raise EnvironmentConfigError(f"at_grpo.environment.name={name!r}: {error}") from error
    accepted = signature.parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        options = {option: value for option, value in options.items() if option in accepted or value is not None}
        for option in options:
            if option not in accepted:
                raise EnvironmentConfigError(
                    f"at_grpo.environment.{option} is not an option of {name!r}: "
                    f"it takes {', '.join(sorted(accepted))}"
                )
    try:
        signature.bind(**options)
    except TypeError as error:
        raise EnvironmentConfigError(f"at_grpo.environment: {name!r} lacks an option: {error}") from error
    with asking(name, "making it"):
        made = factory(**options)
    if not isinstance(made, Environment):
        raise EnvironmentConfigError(
            f"at_grpo.environment.name={name!r}: makes a {type(made).__name__}, which is no Environment"
        )
    return made


def tasks_of(env: Environment, split: Split) -> int | None:
    """Returns the number of tasks of a split, None without end; raises EnvironmentConfigError for anything else."""
    number = plain_of(env.num_tasks(split))
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        raise EnvironmentConfigError(
            f"at_grpo.environment: {type(env).__name__}.num_tasks({split!r}) is {number!r:.80}: return a whole "
            "number, or None for tasks without end"
        )
    return number
