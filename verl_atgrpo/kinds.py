"""Types with bounds, written as annotations: which values fit them, and what they accept in words.

The schema of `at_grpo:`, the table of verl's keys, estimators and the constructors of environments are annotated with
these; error messages and docs/configuration.md are made from the words.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

# Else imported when a value is checked: `import verl_atgrpo` has these types, and stays light.
if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter

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
    """Metadata of a text in which a pattern must be found."""

    pattern: str
    words: str
    """What such a text is."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        from pydantic import StringConstraints

        return handler.generate_schema(Annotated[source, StringConstraints(pattern=self.pattern)])


Text = Annotated[str, Match(r"\S", "a text that is not empty")]


def whole(low: int, high: int) -> Any:
    """Returns the type of whole numbers from `low` to `high`."""
    return Annotated[int, Ge(low), Le(high)]


def one_of(choices: Iterable[Any]) -> Any:
    """Returns the type of some values."""
    return Literal[tuple(choices)]  # type: ignore[valid-type]


def fits(hint: Any, value: object) -> bool:
    """Returns whether a value of YAML is of a type and within its bounds. A bool is no number, a number no text.

    The type may be bool, int, float (finite), str, None, Literal, a list, a mapping, a union of them, or one of them
    annotated with bounds, a length or `Match`.
    """
    from pydantic import ValidationError

    try:
        validated = _adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return _unchanged(validated, value)


def _unchanged(validated: object, value: object) -> bool:
    # A Literal returns its own value for an equal one: 4 for 4.0, True for 1. A whole number is a number, too.
    if isinstance(validated, list) and isinstance(value, list):
        return all(map(_unchanged, validated, value))
    return type(validated) is type(value) or isinstance(validated, float)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def words(hint: Any, metadata: Sequence[Any] = ()) -> str:
    """Returns what a type accepts, such as "a whole number, at least 2", "one of a, b", "a section, or null"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return words(arguments[0], [*arguments[1:], *metadata])
    if origin in (typing.Union, types.UnionType):
        null = ", or null" if type(None) in arguments else ""
        return " or ".join(words(part, metadata) for part in arguments if part is not type(None)) + null
    if origin is Literal:
        names = ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in arguments)
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
    if origin is dict and typing.get_origin(arguments[1]) is Annotated:
        return f"a section (each: {words(arguments[1])})"
    return "a section"


def _limits(bounds: Sequence[Any]) -> str:
    low = high = ""
    for bound in bounds:
        match bound:
            case Ge(ge=int() | float() as limit) if abs(limit) < _HUGE:
                low = f"at least {limit:,}"
            case Gt(gt=limit):
                low = f"above {limit:,}"
            case Le(le=int() | float() as limit) if limit < _HUGE:
                high = f"at most {limit:,}"
            case Lt(lt=limit):
                high = f"below {limit:,}"
    both = " and ".join(part for part in (low, high) if part)
    return both and (f" {both}" if low.startswith("above") else f", {both}")
