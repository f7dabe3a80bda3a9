"""The environments by name: those of the package, of installed packages, and those that `register` adds."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from verl_atgrpo.play.environment import Environment
from verl_atgrpo.play.types import EnvironmentConfigError
from verl_atgrpo.play.user_code import asking

ENTRY_POINTS = "verl_atgrpo.environments"
"""Group of entry points with which installed packages register environments: a name and "module:Class"."""

_REGISTRY: dict[str, str | Callable[..., Environment]] = {
    "code": "verl_atgrpo.environments.code:Code",
    "code_single": "verl_atgrpo.environments.code:SingleCode",
    "connect_four": "verl_atgrpo.environments.in_a_row:ConnectFour",
    "curriculum": "verl_atgrpo.play.curriculum:Curriculum",
    "math": "verl_atgrpo.environments.math:Math",
    "math_debate": "verl_atgrpo.environments.math:MathDebate",
    "math_drafts": "verl_atgrpo.environments.math:MathDrafts",
    "math_ensemble": "verl_atgrpo.environments.math:MathEnsemble",
    "math_judged": "verl_atgrpo.environments.math:MathJudged",
    "math_refined": "verl_atgrpo.environments.math:MathRefined",
    "math_single": "verl_atgrpo.environments.math:SingleMath",
    "mixture": "verl_atgrpo.play.mixture:Mixture",
    "number_search": "verl_atgrpo.environments.number_search:NumberSearch",
    "number_search_single": "verl_atgrpo.environments.number_search:SingleNumberSearch",
    "openenv": "verl_atgrpo.environments.ports.openenv:OpenEnvGame",
    "pettingzoo": "verl_atgrpo.environments.ports.pettingzoo:PettingZooGame",
    "plan_path": "verl_atgrpo.environments.plan_path:PlanPath",
    "plan_path_single": "verl_atgrpo.environments.plan_path:SinglePlanPath",
    "reasoning_gym": "verl_atgrpo.environments.ports.reasoning_gym:ReasoningGym",
    "reasoning_gym_single": "verl_atgrpo.environments.ports.reasoning_gym:SingleReasoningGym",
    "sokoban": "verl_atgrpo.environments.sokoban:Sokoban",
    "sokoban_single": "verl_atgrpo.environments.sokoban:SingleSokoban",
    "sudoku": "verl_atgrpo.environments.sudoku:Sudoku",
    "sudoku_single": "verl_atgrpo.environments.sudoku:SingleSudoku",
    "textarena": "verl_atgrpo.environments.ports.textarena:TextArenaGame",
    "tic_tac_toe": "verl_atgrpo.environments.in_a_row:TicTacToe",
    "verifiers": "verl_atgrpo.environments.ports.verifiers:VerifiersEnvironment",
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
            missing = (error.__cause__.name or "") if isinstance(error.__cause__, ModuleNotFoundError) else ""
            own = missing and f"{module_name}.".startswith(f"{missing}.")
            hint = "; put the folder that it is in on the path: export PYTHONPATH=<folder>" if own else ""
            raise EnvironmentConfigError(
                f"at_grpo.environment.name={name!r}: {error.__cause__}{hint}"
            ) from error.__cause__
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
