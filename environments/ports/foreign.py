"""Calls into other packages: loading functions by name, seeding global generators, errors to expect."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np

from verl_atgrpo.environments.common.options import option_error
from verl_atgrpo.sandbox.runner import without_addresses

FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Exceptions that other packages raise on unexpected options or replies; caught only around their code."""


def load(option: str, name: object, attribute: str | None = None) -> Callable[..., Any]:
    """Returns the function that an option names as "module:function".

    Args:
        option: the option's name, for messages.
        name: the option's value.
        attribute: the function's name if the value is only a module.

    Raises EnvironmentConfigError if there is no such function.
    """
    where = f"{option}={name!r}"
    module, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    function = function or attribute or ""
    if not module or not function:
        raise option_error(f"{where}: 'module:function'")
    try:
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    except ImportError as error:
        raise option_error(f"{where}: {line(error)}") from error
    except AttributeError as error:
        raise option_error(f"{where}: the module {module!r} has no {function!r}") from error


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators of `random` and numpy for a block without `await`, then restores their state.

    Code in the block is deterministic and does not affect random numbers outside of it.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def canonical(value: object, _parents: tuple[int, ...] = ()) -> str:
    """Returns `value` as a text that is equal in every process: sorted, and without addresses."""
    if id(value) in _parents:
        return "..."
    inner = functools.partial(canonical, _parents=(*_parents, id(value)))
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{inner(key)}:{inner(item)}' for key, item in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(map(inner, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(inner, value))}]"
    if isinstance(value, np.ndarray):
        return inner(value.tolist())
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return f"{type(value).__name__}{inner(vars(value))}"
    return without_addresses(repr(value))


def unseeded(game: object, seed: int) -> dict[str, object]:
    """Returns a game's attributes without those that are its seed, by which equal openings would differ."""
    return {name: value for name, value in vars(game).items() if not isinstance(value, Integral) or value != seed}


def line(error: BaseException) -> str:
    """Returns an error as one line, for messages."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
