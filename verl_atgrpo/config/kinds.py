"""Types with bounds, written as annotations: which values fit them, and what they accept in words.

The schema of `at_grpo:`, the table of verl's keys and the constructors of environments are annotated with these; error
messages and docs/configuration.md are made from the words.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

Finite = Annotated[float, Ge(-1e300), Le(1e300)]
"""A number that is neither infinite nor nan."""
Count = Annotated[int, Ge(1), Le(1_000_000_000)]
Weight = Annotated[float, Ge(0), Le(1e300)]
Share = Annotated[float, Ge(0), Le(1)]
Seconds = Annotated[float, Gt(0), Le(1e9)]
_HUGE = 1e9
"""Bounds from here on only keep numbers within reason: words leave them out."""


@dataclass(frozen=True)
class Match:
    """Metadata of a text that must match a pattern."""

    pattern: str
    words: str
    """What such a text is."""


Text = Annotated[str, Match(r".*\S.*", "a text that is not empty")]


def whole(low: int, high: int) -> Any:
    """Returns the type of whole numbers from `low` to `high`."""
    return Annotated[int, Ge(low), Le(high)]


def listed(inner: Any) -> Any:
    """Returns the type of lists of a type."""
    return list[inner]


def one_of(choices: Iterable[Any]) -> Any:
    """Returns the type of some values."""
    return Literal[tuple(choices)]  # type: ignore[valid-type]


def fits(hint: Any, value: object) -> bool:
    """Returns whether a value is of a type and within its bounds. A bool is no number, a number no text.

    Args:
        hint: a type of configuration values: bool, int, float (finite), str, None, Literal, a list, a mapping, a union
            of them, or one of them annotated with bounds, a length or `Match`.
        value: the value, as YAML gives it.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return fits(arguments[0], value) and all(_within(bound, value) for bound in arguments[1:])
    if origin in (typing.Union, types.UnionType):
        return any(fits(member, value) for member in arguments)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return fits(int, value) or (isinstance(value, float) and math.isfinite(value))
    if hint is str:
        return isinstance(value, str)
    kind = origin or hint
    if kind in (list, Sequence):
        inner = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(fits(inner, item) for item in value)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return True


def _within(bound: object, value: Any) -> bool:
    if isinstance(bound, Ge):
        return bool(value >= bound.ge)
    if isinstance(bound, Gt):
        return bool(value > bound.gt)
    if isinstance(bound, Le):
        return bool(value <= bound.le)
    if isinstance(bound, Lt):
        return bool(value < bound.lt)
    if isinstance(bound, Len):
        return bound.min_length <= len(value) <= (bound.max_length or math.inf)
    return not isinstance(bound, Match) or re.fullmatch(bound.pattern, value) is not None


def words(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Returns what a type accepts, such as "a whole number, at least 2", "one of a, b", "a section, or null"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return words(arguments[0], [*arguments[1:], *metadata])
    if origin in (typing.Union, types.UnionType):
        null = ", or null" if type(None) in arguments else ""
        return " or ".join(words(part, metadata) for part in arguments if part is not type(None)) + null
    if origin is Literal:
        names = ", ".join("true" if choice is True else str(choice) for choice in arguments)
        return f"one of {names}" if len(arguments) > 1 else names
    bounds = [item for part in metadata for item in getattr(part, "metadata", [part])]
    text = next((bound.words for bound in bounds if isinstance(bound, Match)), "a text")
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: text}
    if hint in kinds:
        return kinds[hint] + _limits(bounds)
    if hint is Any:
        return "anything"
    if (origin or hint) in (list, Sequence):
        length = next((f" of {bound.min_length}" for bound in bounds if isinstance(bound, Len)), "")
        inner = words(arguments[0]) if arguments else "anything"
        return f"a list{length}" + ("" if inner == "anything" else f" (each: {inner})")
    return "a section"


def _limits(bounds: Sequence[Any]) -> str:
    low = high = ""
    for bound in bounds:
        limit: Any = next((getattr(bound, name) for name in ("ge", "gt", "le", "lt") if hasattr(bound, name)), None)
        if isinstance(bound, Ge) and abs(limit) < _HUGE:
            low = f"at least {limit:,}"
        elif isinstance(bound, Gt):
            low = f"above {limit:,}"
        elif isinstance(bound, Le) and limit < _HUGE:
            high = f"at most {limit:,}"
        elif isinstance(bound, Lt):
            high = f"below {limit:,}"
    both = " and ".join(part for part in (low, high) if part)
    return both and (f" {both}" if low.startswith("above") else f", {both}")
