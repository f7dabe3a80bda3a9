"""Types and checks of environments' options; each error names the key, the value and what is allowed."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le
from typing_extensions import dataclass_transform

from verl_atgrpo import Environment, EnvironmentConfigError
from verl_atgrpo.kinds import fits, words
from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.launcher import LEVELS, users

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=type[Environment])
Turns = Annotated[int, Ge(1), Le(1000)]
"""Turns of an episode, in each of which a prompt is made of the earlier ones."""
Players = Annotated[int, Ge(1), Le(64)]
WallDensity = Annotated[float, Ge(0), Le(0.6)]
"""A cell's probability to be a wall."""

MATHEMATICS = ("sympy", "numpy")
"""Packages that programs for mathematics may import by default, if they are installed."""


def option_error(text: str) -> EnvironmentConfigError:
    """Returns the error of an option; `text` begins with its name, as in `size=3: ...`."""
    return EnvironmentConfigError(f"at_grpo.environment.{text}")


def check_installed(module: str, package: str, extra: str) -> None:
    """Raises EnvironmentConfigError if a package that an environment needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise option_error(f"name: {package} is not installed: pip install 'verl-atgrpo[{extra}]'")


@dataclass_transform(eq_default=False, kw_only_default=True, field_specifiers=(field,))
def with_options(cls: Kind) -> Kind:
    """Decorates an environment whose fields are its options; a value that does not fit its field's type is refused.

    It is a dataclass: `__post_init__` checks what types cannot say, and raises EnvironmentConfigError as well. The
    types are those of `verl_atgrpo.kinds`, with bounds; docs/configuration.md prints them and the fields' docstrings.
    A single agent takes its team's options except those of agents that it has not: these are fields with `init=False`.
    """
    dataclass(eq=False, repr=False, kw_only=True)(cls)
    init: Callable[..., None] = cls.__init__
    signature = inspect.signature(init)
    hints = typing.get_type_hints(cls, include_extras=True)

    @functools.wraps(init)
    def checked(self: Any, **options: Any) -> None:
        for name, value in signature.bind(self, **options).arguments.items():
            if name != "self" and not fits(hints[name], value):
                raise option_error(f"{name}={value!r}: {words(hints[name])}")
        init(self, **options)

    checked.__annotations__ = {name: hints[name] for name in signature.parameters if name != "self"}
    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


def check_isolation(require_isolation: bool | None) -> None:
    """Raises EnvironmentConfigError if programs cannot be run, or not as isolated as is required.

    For environments that run programs. Logs the isolation level once, as a warning if it is not the strongest.

    Args:
        require_isolation: True requires the strongest level, False none; None a level at which programs can neither
            read nor change this process's memory, for environments that pay by hidden tests.
    """
    strongest = LEVELS[0]
    try:
        level = runner.isolation()
    except RuntimeError as error:
        raise EnvironmentConfigError(
            f"at_grpo.environment: programs cannot be run on this machine: {error}; see docs/sandbox.md"
        ) from error
    log_isolation(level)
    if require_isolation and level != strongest:
        raise option_error(
            f"require_isolation=true: programs run at level {level} here, not {strongest}; let the job create user "
            "namespaces (docs/sandbox.md), or set it to false"
        )

    if require_isolation is None and level in ("seccomp", "rlimits") and not users():
        raise option_error(
            f"require_isolation=null: programs run at level {level} here, where they can read and change the golden "
            "tests in this job's memory; see docs/sandbox.md for a stronger level, or set it to false"
        )


def check_libraries(libraries: Sequence[str] | None, limits: runner.Limits) -> tuple[str, ...]:
    """Returns the packages that programs may import beside the standard library.

    Args:
        libraries: names of packages; None for those of `MATHEMATICS` that programs can import.
        limits: limits of the programs, applied to a trial run for each package.

    Raises EnvironmentConfigError for a package that programs cannot import.
    """
    limits = replace(limits, wall_seconds=600.0)  # a busy machine must not change the prompts
    if libraries is None:
        return tuple(name for name in MATHEMATICS if not runner.importable(name, limits))
    where = f"libraries={libraries!r}"
    for name in libraries:
        if not name.isidentifier():
            raise option_error(f"{where}: {name!r} is not the name of a package")
        if why := runner.importable(name, limits):
            raise option_error(f"{where}: programs cannot import {name}: {why}; install it or leave it out")
    return tuple(libraries)


@functools.cache
def log_isolation(level: str) -> None:
    """Logs the isolation level and what limits memory, the first time it is called."""
    severity = logging.INFO if level == LEVELS[0] else logging.WARNING
    whole = "the whole program" if runner.cgroup() else "each of its processes, for lack of a delegated cgroup"
    message = "programs that models write run at isolation level %s, with the limit on memory for %s (docs/sandbox.md)"
    logger.log(severity, message, level, whole)
