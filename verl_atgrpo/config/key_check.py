"""Refuses values of verl's keys that would have no effect in a team's job, or an unexpected one (`key_table`)."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_atgrpo.config.key_table import DEFAULT, TABLE, Default, Given, Like, Positive, Row, without_braces
from verl_atgrpo.config.key_types import TYPES
from verl_atgrpo.config.kinds import fits, words
from verl_atgrpo.config.schema import ConfigError

POLICY = "actor_rollout_ref"
_ABSENT = object()


@functools.cache
def rows() -> dict[str, Row]:
    """Returns pattern -> row, patterns with their section's prefix and without braces."""
    found: dict[str, Row] = {}
    for section in TABLE:
        for row in section.rows:
            for pattern in row.patterns:
                whole = f"{section.prefix}.{pattern}" if section.prefix else pattern
                if whole in found:
                    raise ValueError(f"key_table: {whole} has two rows")
                found[whole] = row
    return found


@functools.cache
def _wildcards() -> list[tuple[int, str, re.Pattern[str]]]:
    """Returns (number of fixed characters, pattern, regex) of the patterns with `*`, the most specific first."""
    found = [(len(pattern.replace("*", "")), pattern, _regex(pattern)) for pattern in rows() if "*" in pattern]
    return sorted(found, key=lambda item: -item[0])


def _regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern)
    text = re.sub(r"\\\.\\\*\\\*$", r"(\\..+)?", text)
    return re.compile(text.replace(r"\*\*", ".+").replace(r"\*", r"[^.]+"))


@functools.cache
def pattern_of(key: str) -> str | None:
    """Returns the most specific pattern that matches a key, or None."""
    if key in rows():
        return key
    matching = [(letters, pattern) for letters, pattern, regex in _wildcards() if regex.fullmatch(key)]
    if len(matching) > 1 and matching[0][0] == matching[1][0]:
        raise ValueError(f"key_table: {key} fits both {matching[0][1]} and {matching[1][1]}")
    return matching[0][1] if matching else None


def row_of(key: str) -> Row | None:
    """Returns the table's row for a key, or None."""
    pattern = pattern_of(key)
    return None if pattern is None else rows()[pattern]


def leaves(
    section: Mapping[str, Any], prefix: str = "", whole: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of every leaf. Empty sections, and the sections at the keys `whole`, are leaves."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in whole:
            yield from leaves(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


@functools.cache
def verls_defaults() -> dict[str, Any]:
    """Returns the leaves of verl's `ppo_trainer`: key -> value, interpolations unresolved."""
    import verl

    composed = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    return dict(leaves(OmegaConf.to_container(composed, resolve=False)))  # type: ignore[arg-type]


@functools.cache
def _interpolated() -> frozenset[str]:
    """Keys that are interpolations in verl's defaults: once resolved, their value may be a section."""
    return frozenset(key for key, value in verls_defaults().items() if isinstance(value, str) and "${" in value)


@functools.cache
def _sections() -> frozenset[str]:
    """verl's top-level sections; others are a user's own, for interpolations."""
    return frozenset(key.partition(".")[0] for key in [*verls_defaults(), "model_engine"])


@functools.cache
def _typed() -> tuple[dict[str, Any], list[tuple[int, re.Pattern[str], Any]]]:
    """Returns key -> type of `TYPES`, and (number of fixed characters, regex, type) of its patterns with `*`."""
    single = {pattern: hint for several, hint in TYPES.items() for pattern in without_braces(several)}
    wild = [(len(pattern), _regex(pattern), hint) for pattern, hint in single.items() if "*" in pattern]
    return single, sorted(wild, key=lambda item: -item[0])


@functools.cache
def type_of(key: str) -> Any:
    """Returns the type of a key of verl's that works, as an annotation; None if any value may work."""
    single, wild = _typed()
    if (row := row_of(key)) is not None and row.status != "works":
        return None
    if key in single:
        return single[key]
    return next((hint for _, regex, hint in wild if regex.fullmatch(key)), None)


@functools.cache
def _inner_sections() -> frozenset[str]:
    """verl's sections, on all levels."""
    parts = (key.split(".") for key in verls_defaults())
    return frozenset(".".join(key[:end]) for key in parts for end in range(1, len(key)))


def check_types(config: DictConfig, policy: str | None = None) -> None:
    """Raises ConfigError for a value of verl's keys that has another type than the key, or is beyond its bounds.

    Args:
        config: the job's configuration, with the policy's own `actor_rollout_ref` if `policy` is given.
        policy: name of the policy's section in messages. Only `actor_rollout_ref` is checked then; with None,
            all keys.
    """
    node, prefix = (config, "") if policy is None else (config[POLICY], f"{POLICY}.")
    written = dict(leaves(OmegaConf.to_container(node, resolve=False), prefix, _interpolated()))  # type: ignore[arg-type]
    derived = {key for key, value in written.items() if "${" in str(value)}
    _check_types({key: value for key, value in written.items() if key not in derived}, policy or POLICY)
    # A derived value may only repeat the fault of one above.
    try:
        resolved: Any = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}") from error
    values = dict(leaves(resolved, prefix, _interpolated()))
    _check_types({key: values[key] for key in derived if key in values}, policy or POLICY)


def _check_types(values: Mapping[str, Any], policy: str) -> None:
    for key, value in values.items():
        hint = dict if key in _inner_sections() else type_of(key)
        if hint is not None and not fits(hint, value):
            name = key.replace(POLICY, policy, 1) if key.startswith(POLICY) else key
            raise ConfigError(f"{name}={shown_as(value)}: {words(hint)}")


def check_present(config: DictConfig) -> None:
    """Raises ConfigError for a key of verl's with a type that has been removed."""
    written: Any = OmegaConf.to_container(config, resolve=False)
    present = dict(leaves(written, whole=_interpolated()))
    for key in verls_defaults():
        hint = type_of(key)
        if key not in present and hint is not None and not fits(hint, None) and not fits(hint, {}):
            raise ConfigError(f"{key} is missing: {words(hint)}")


def check_keys(config: DictConfig, policy: str | None = None) -> None:
    """Raises ConfigError for a key of verl whose value the table refuses, or that verl does not have.

    Args:
        config: the job's configuration, with the policy's own `actor_rollout_ref` if `policy` is given.
        policy: name of the policy's section in messages. Only `actor_rollout_ref` is checked then; with None,
            everything else.
    """
    view = View(config)
    for key, written in leaves(view.written, whole=_interpolated()):
        if key.partition(".")[0] in _sections() and key.startswith(f"{POLICY}.") == (policy is not None):
            check_key(view, key, written, policy or POLICY)


def check_key(view: View, key: str, written: Any, shown: str = POLICY) -> None:
    """Raises ConfigError if the table refuses one key.

    Args:
        view: the configuration.
        key: dotted, with `actor_rollout_ref` for any policy.
        written: its value, interpolations unresolved.
        shown: name of the policy's section in messages.
    """
    name = key.replace(POLICY, shown, 1) if key.startswith(f"{POLICY}.") else key
    row = row_of(key)
    if row is None:
        close = difflib.get_close_matches(key, [*verls_defaults(), *rows()], n=1)
        hint = f", or did you mean {close[0].replace(POLICY, shown, 1)}?" if close else ""
        raise ConfigError(
            f"{name}={shown_as(view.value(key, written))}: verl's configuration has no such key, so it would be "
            f"ignored, remove it{hint}"
        )
    if row.status == "no meaning":
        return
    value = view.value(key, written)
    if row.values and not any(view.equals(key, written, accepted) for accepted in row.values):
        pause = " " if row.text.startswith("has no effect") else ": "
        text = f"{row.text}, " if row.text else ""
        raise ConfigError(f"{name}={shown_as(value)}{pause}{text}{_remedy(row, view, key)}")
    if row.beside is None or view.equals(key, written, DEFAULT):
        return
    other, needed = row.beside
    found = view.value(other, None)
    if not any(_fulfils(found, accepted) for accepted in needed):
        raise ConfigError(
            f"{name}={shown_as(value)} has no effect beside {other.replace(POLICY, shown, 1)}={shown_as(found)}: set "
            f"it to {view.shown_default(key)}, or that to {' or '.join(map(shown_as, needed))}"
        )


def _fulfils(value: Any, accepted: Any) -> bool:
    if isinstance(accepted, Given):
        return value is not None
    if isinstance(accepted, Positive):
        return isinstance(value, int | float) and value > 0
    return same(value, accepted)


def _remedy(row: Row, view: View, key: str) -> str:
    if row.remedy:
        return row.remedy
    choices = [view.shown_default(key) if isinstance(value, Default) else shown_as(value) for value in row.values]
    return f"set it to {' or '.join(choices)}"


class View:
    """A configuration with unresolved interpolations, and verl's defaults resolved in it."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self.written: Mapping[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]

    @functools.cached_property
    def _defaults(self) -> DictConfig:
        return copy.deepcopy(self._config)

    def value(self, key: str, written: Any) -> Any:
        """Returns a key's value with its interpolations resolved."""
        return _plain(OmegaConf.select(self._config, key, default=written))

    def default(self, key: str) -> Any:
        """Returns verl's default of a key, its interpolations resolved in this configuration."""
        default = verls_defaults().get(key)
        if not isinstance(default, str) or "${" not in default:
            return default
        with open_dict(self._defaults):
            OmegaConf.update(self._defaults, key, default, force_add=True)
        return _plain(OmegaConf.select(self._defaults, key))

    def shown_default(self, key: str) -> str:
        """Returns verl's default for a message."""
        return shown_as(self.default(key))

    def equals(self, key: str, written: Any, accepted: Any) -> bool:
        """Returns whether a key has one value that its row accepts."""
        if isinstance(accepted, Default):
            return same(written, verls_defaults().get(key, _ABSENT)) or same(
                self.value(key, written), self.default(key)
            )
        if isinstance(accepted, Like):
            return same(self.value(key, written), self.value(accepted.key, None))
        return same(self.value(key, written), accepted)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; a bool equals no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def shown_as(value: Any) -> str:
    """Returns a value in the command line's syntax; `GIVEN` and `POSITIVE` in words."""
    if isinstance(value, Given):
        return "anything but null"
    if isinstance(value, Positive):
        return "a number above 0"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
