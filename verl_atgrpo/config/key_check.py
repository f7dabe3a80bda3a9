"""Refuses, by `key_table`, what is set of verl without an effect, or with another one than it seems to have."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_atgrpo.config.key_table import DEFAULT, TABLE, Default, Given, Like, Positive, Row
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
def _compiled() -> tuple[dict[str, str], list[tuple[int, str, re.Pattern[str]]]]:
    exact = {pattern: pattern for pattern in rows() if "*" not in pattern}
    return exact, sorted(
        ((len(pattern.replace("*", "")), pattern, _regex(pattern)) for pattern in rows() if "*" in pattern),
        key=lambda item: -item[0],
    )


def _regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern)
    text = re.sub(r"\\\.\\\*\\\*$", r"(\\..+)?", text)
    return re.compile(text.replace(r"\*\*", ".+").replace(r"\*", r"[^.]+"))


@functools.cache
def pattern_of(key: str) -> str | None:
    """Returns the most specific pattern that a key fits, or None."""
    exact, patterns = _compiled()
    if key in exact:
        return key
    fitting = [(letters, pattern) for letters, pattern, regex in patterns if regex.fullmatch(key)]
    if len(fitting) > 1 and fitting[0][0] == fitting[1][0]:
        raise ValueError(f"key_table: {key} fits both {fitting[0][1]} and {fitting[1][1]}")
    return fitting[0][1] if fitting else None


def row_of(key: str) -> Row | None:
    """Returns what the table says of a key."""
    pattern = pattern_of(key)
    return None if pattern is None else rows()[pattern]


def leaves(
    section: Mapping[str, Any], prefix: str = "", whole: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of what is no section; an empty section is a value, and so are those in `whole`."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in whole:
            yield from leaves(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


@functools.cache
def verls_defaults() -> dict[str, Any]:
    """Returns verl's whole configuration, `ppo_trainer`: key -> value, interpolations open."""
    import verl

    composed = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    return dict(leaves(OmegaConf.to_container(composed, resolve=False)))  # type: ignore[arg-type]


@functools.cache
def _handed_on() -> frozenset[str]:
    """Keys that verl takes from another key: once resolved, what is there may be a section."""
    return frozenset(key for key, value in verls_defaults().items() if isinstance(value, str) and "${" in value)


@functools.cache
def _sections() -> frozenset[str]:
    """verl's keys of the first level; others are a user's own, for interpolations."""
    return frozenset(key.partition(".")[0] for key in [*verls_defaults(), "model_engine"])


def check_keys(config: DictConfig, policy: str | None = None) -> None:
    """Raises ConfigError for a key of verl's whose value the table refuses, or that verl does not have.

    Args:
        config: the job's configuration; one policy's, with its own `actor_rollout_ref`, if `policy` says which.
        policy: what the policy's section is called in messages; only `actor_rollout_ref` is looked at then. None: all
            but that.
    """
    view = _View(config)
    for key, written in leaves(view.written, whole=_handed_on()):
        if key.partition(".")[0] in _sections() and key.startswith(f"{POLICY}.") == (policy is not None):
            _check_key(view, key, written, policy or POLICY)


def _check_key(view: _View, key: str, written: Any, shown: str) -> None:
    name = key.replace(POLICY, shown, 1) if key.startswith(f"{POLICY}.") else key
    row = row_of(key)
    if row is None:
        close = difflib.get_close_matches(key, [*verls_defaults(), *rows()], n=1)
        hint = f", or did you mean {close[0].replace(POLICY, shown, 1)}?" if close else ""
        raise ConfigError(
            f"{name}={shown_as(view.value(key, written))}: verl's configuration has no such key, so nobody would read "
            f"it, remove it{hint}"
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
    other, counts = row.beside
    now = view.value(other, None)
    if not any(_counts(now, accepted) for accepted in counts):
        raise ConfigError(
            f"{name}={shown_as(value)} has no effect beside {other.replace(POLICY, shown, 1)}={shown_as(now)}: set it "
            f"to {view.shown_default(key)}, or that to {' or '.join(map(shown_as, counts))}"
        )


def _counts(value: Any, accepted: Any) -> bool:
    if isinstance(accepted, Given):
        return value is not None
    if isinstance(accepted, Positive):
        return isinstance(value, int | float) and value > 0
    return _same(value, accepted)


def _remedy(row: Row, view: _View, key: str) -> str:
    if row.remedy:
        return row.remedy
    choices = [view.shown_default(key) if isinstance(value, Default) else shown_as(value) for value in row.values]
    return f"set it to {' or '.join(choices)}"


class _View:
    """A configuration with its open interpolations, and what verl's defaults come to in it."""

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
        """Returns verl's default of a key, as it would come to here."""
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
        """Returns whether a key has one of the values that its row accepts."""
        if isinstance(accepted, Default):
            return _same(written, verls_defaults().get(key, _ABSENT)) or _same(
                self.value(key, written), self.default(key)
            )
        if isinstance(accepted, Like):
            return _same(self.value(key, written), self.value(accepted.key, None))
        return _same(self.value(key, written), accepted)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def shown_as(value: Any) -> str:
    """Returns a value as a command line would have it, and what stands for several in words."""
    if isinstance(value, Given):
        return "anything but null"
    if isinstance(value, Positive):
        return "a number above 0"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
