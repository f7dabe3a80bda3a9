"""Checks of environments' options; each error names the key, the value and what is allowed."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from verl_atgrpo.environment import EnvironmentConfigError
from verl_atgrpo.sandbox import runner
from verl_atgrpo.sandbox.launcher import LEVELS

logger = logging.getLogger(__name__)

MATHEMATICS = ("sympy", "numpy")
"""Packages that programs for mathematics may import by default, if they are installed."""


def check_installed(module: str, package: str, extra: str) -> None:
    """Raises EnvironmentConfigError if a package that an environment needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise EnvironmentConfigError(
            f"at_grpo.environment.name: {package} is not installed: pip install 'verl-atgrpo[{extra}]'"
        )


def check_whole_numbers(**values: tuple[object, int]) -> None:
    """Raises EnvironmentConfigError unless every option is a whole number of at least its lower bound.

    Args:
        values: option -> (value, lower bound).
    """
    for name, (value, low) in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise EnvironmentConfigError(f"at_grpo.environment.{name}={value!r}: a whole number, at least {low}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises EnvironmentConfigError unless an option is one of `choices`."""
    if value not in choices:
        raise EnvironmentConfigError(f"at_grpo.environment.{name}={value!r}: use {' or '.join(choices)}")


def check_wall_density(value: object) -> None:
    """Raises EnvironmentConfigError unless a cell's probability to be a wall is between 0 and 0.6."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 0.6:
        raise EnvironmentConfigError(f"at_grpo.environment.wall_density={value!r}: a number between 0 and 0.6")


def check_isolation(require_isolation: object) -> None:
    """Raises EnvironmentConfigError if programs cannot be run, or not as isolated as is required.

    For environments that run programs. Logs the isolation level once, as a warning if it is not the strongest.

    Args:
        require_isolation: True requires the strongest level, False none; None a level at which programs can neither
            read nor change this process's memory, for environments that pay by hidden tests.
    """
    if not isinstance(require_isolation, bool | None):
        raise EnvironmentConfigError(f"at_grpo.environment.require_isolation={require_isolation!r}: true or false")
    strongest = LEVELS[0]
    try:
        level = runner.isolation()
    except RuntimeError as error:
        raise EnvironmentConfigError(
            f"at_grpo.environment: programs cannot be run on this machine: {error}; see docs/sandbox.md"
        ) from error
    log_isolation(level)
    if require_isolation and level != strongest:
        raise EnvironmentConfigError(
            f"at_grpo.environment.require_isolation=true: programs run at level {level} here, not {strongest}; "
            "let the job create user namespaces (docs/sandbox.md), or set it to false"
        )

    # Root's programs run as users of their own.
    if require_isolation is None and level in ("seccomp", "rlimits") and os.getuid() != 0:
        raise EnvironmentConfigError(
            f"at_grpo.environment.require_isolation=null: programs run at level {level} here, where they can read and "
            "change the golden tests in this job's memory; see docs/sandbox.md for a stronger level, or set it to "
            "false"
        )


def check_libraries(libraries: object, limits: runner.Limits) -> tuple[str, ...]:
    """Returns the packages that programs may import beside the standard library.

    Args:
        libraries: names of packages; None for those of `MATHEMATICS` that programs can import.
        limits: limits of the programs, applied to a trial run for each package.

    Raises EnvironmentConfigError for a package that programs cannot import.
    """
    limits = replace(limits, wall_seconds=600.0)  # a busy machine must not change the prompts
    if libraries is None:
        return tuple(name for name in MATHEMATICS if not runner.importable(name, limits))
    where = f"at_grpo.environment.libraries={libraries!r}"
    if isinstance(libraries, str) or not isinstance(libraries, Sequence):
        raise EnvironmentConfigError(f"{where}: a list of packages, as [sympy, numpy], or []")
    for name in libraries:
        if not isinstance(name, str) or not name.isidentifier():
            raise EnvironmentConfigError(f"{where}: {name!r} is not the name of a package")
        if why := runner.importable(name, limits):
            raise EnvironmentConfigError(f"{where}: programs cannot import {name}: {why}; install it or leave it out")
    return tuple(libraries)


@functools.cache
def log_isolation(level: str) -> None:
    """Logs the isolation level and what limits memory, the first time it is called."""
    severity = logging.INFO if level == LEVELS[0] else logging.WARNING
    whole = "the whole program" if runner.cgroup() else "each of its processes, for lack of a delegated cgroup"
    message = "programs that models write run at isolation level %s, with the limit on memory for %s (docs/sandbox.md)"
    logger.log(severity, message, level, whole)


def check_number(**values: object) -> None:
    """Raises EnvironmentConfigError unless every option is a finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EnvironmentConfigError(f"at_grpo.environment.{name}={value!r}: a finite number")


def check_mapping(name: str, value: object) -> None:
    """Raises EnvironmentConfigError unless an option is a mapping whose keys are strings."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise EnvironmentConfigError(f"at_grpo.environment.{name}={value!r}: a mapping from names to values")
