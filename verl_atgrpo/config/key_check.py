"""Refuses values of verl's keys that would have no effect in a team's job, or an unexpected one (`key_table`)."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_atgrpo.config.key_table import DEFAULT, TABLE, Default, Like, Row, without_braces
from verl_atgrpo.config.kinds import fits, words
from verl_atgrpo.config.schema import EXPANDED, SECTION, AtGrpoConfig, ConfigError

POLICY = "actor_rollout_ref"
_ABSENT = object()


@functools.cache
def rows() -> dict[str, Row]:
    """Returns pattern -> row, patterns with their section's prefix and without braces."""
    found: dict[str, Row] = {}
    for prefix, row in ((prefix, row) for prefix, section in TABLE.items() for row in section):
        for pattern in without_braces(f"{prefix}.{row.pattern}".lstrip(".")):
            if pattern in found:
                raise ValueError(f"key_table: {pattern} has two rows")
            found[pattern] = row
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


@functools.cache
def kind_of(key: str) -> Any:
    """Returns what a key of verl's accepts, as an annotation; None if any value may work."""
    pattern = pattern_of(key)
    if pattern is None or (pattern.endswith(".**") and key != pattern.removesuffix(".**")):
        return None
    return rows()[pattern].kind


def leaves(section: Mapping[str, Any], prefix: str = "", whole: Container[str] = ()) -> Iterator[tuple[str, Any]]:
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
    """verl's sections, on all levels. Other top-level sections are a user's own, for interpolations."""
    parts = (key.split(".") for key in verls_defaults())
    return frozenset(".".join(key[:end]) for key in parts for end in range(1, len(key)))


class View:
    """The leaves of a configuration, as they are written and resolved, and verl's defaults resolved in it."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        written: Any = OmegaConf.to_container(config, resolve=False)
        self.written = dict(leaves(written, whole=_interpolated()))

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The same keys with resolved values; raises ConfigError for an interpolation that cannot be resolved."""
        try:
            resolved: Any = OmegaConf.to_container(self.config, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{error.full_key or 'the configuration'}: {str(error).splitlines()[0]}") from error
        return dict(leaves(resolved, whole=self.written))

    def default(self, key: str) -> Any:
        """Returns verl's default of a key, its interpolations resolved in this configuration."""
        default = verls_defaults().get(key)
        if key not in _interpolated():
            return default
        section, _, name = key.rpartition(".")
        changed = copy.copy(OmegaConf.select(self.config, section))  # shallow: the other keys stay where they are
        with open_dict(changed):
            changed[name] = default
        value = changed[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    def accepts(self, key: str, accepted: Any) -> bool:
        """Returns whether a key has one value that its row accepts."""
        value = self.values[key]
        if isinstance(accepted, Default):
            default = verls_defaults().get(key, _ABSENT)
            return same(self.written[key], default) or same(value, self.default(key))
        return same(value, self.values.get(accepted.key) if isinstance(accepted, Like) else accepted)


def check_types(view: View, policy: str | None = None) -> None:
    """Raises ConfigError for a value of verl's keys that has another type than the key, or is beyond its bounds.

    Args:
        view: the job's configuration, with the policy's own `actor_rollout_ref` if `policy` is given.
        policy: name of the policy's section in messages. Only `actor_rollout_ref` is checked then; with None,
            all keys.
    """
    keys = [key for key in view.written if policy is None or key.startswith(f"{POLICY}.")]
    derived = {key for key in keys if "${" in str(view.written[key])}
    # A derived value may only repeat the fault of one that is written out.
    for key in sorted(keys, key=lambda key: key in derived):
        value = view.values[key] if key in derived else view.written[key]
        kind = dict if key in _sections() else kind_of(key)
        if kind is not None and not fits(kind, value):
            raise ConfigError(f"{_shown_key(key, policy)}={shown_as(value)}: {words(kind)}")


def check_keys(view: View, policy: str | None = None) -> None:
    """Raises ConfigError for a key of verl whose value the table refuses, or that verl does not have.

    Args:
        view: the job's configuration, with the policy's own `actor_rollout_ref` if `policy` is given.
        policy: name of the policy's section in messages. Only `actor_rollout_ref` is checked then; with None,
            everything else.
    """
    verls = _tops()
    if policy is None:
        _check_tops(view)
    for key in view.written:
        if key.partition(".")[0] in verls and key.startswith(f"{POLICY}.") == (policy is not None):
            check_key(view, key, policy)


@functools.cache
def _tops() -> frozenset[str]:
    """verl's keys at the top level."""
    return frozenset(key.partition(".")[0] for key in verls_defaults()) | {"model_engine"}


def _check_tops(view: View) -> None:
    """Raises ConfigError for a key at the top level, or one with a dot, that nothing reads.

    Nothing but verl's keys and ours is read, except by interpolations: a recipe may have sections of its own for them.
    """
    written: Any = OmegaConf.to_container(view.config, resolve=False)
    for name, value in written.items():
        key = str(name)
        if key in _tops() or key in (SECTION, EXPANDED):
            if dotted := next(_dotted(value, f"{key}."), None):
                raise ConfigError(
                    f"{dotted}: a key with a dot is another one than the nested key, and nothing reads it; write its "
                    "parts on lines of their own"
                )
            continue
        others = (text for other, texts in written.items() if other != name for text in _texts(texts))
        if not any("${" in text and re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", text) for text in others):
            shown = shown_as(value) if not isinstance(value, Mapping) else "..."
            raise ConfigError(
                f"{key}={shown:.100}: neither verl nor the section {SECTION} has such a key at the top level, and no "
                f"interpolation names it, so it would be ignored; remove it{_meant(key, value)}"
            )


def _dotted(value: Any, prefix: str) -> Iterator[str]:
    """Yields the keys of nested sections that have a dot, other than in sections whose keys are anybody's."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            key = f"{prefix}{name}"
            if "." in str(name) and (key in verls_defaults() or key.removeprefix(f"{SECTION}.") in _ours()):
                yield key
            yield from _dotted(inner, f"{key}.")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


@functools.cache
def _ours() -> frozenset[str]:
    """Keys of the section `at_grpo`."""
    return frozenset(AtGrpoConfig.model_fields)


def _meant(key: str, value: Any) -> str:
    """Returns the end of a message with the key that may be meant by one at the top level."""
    plain = key.lower().replace("-", "_")
    places = {name: name for name in (*_tops(), SECTION)}
    places = {full.rpartition(".")[2]: full for full in reversed(verls_defaults())} | places
    places |= {name: f"{SECTION}.{name}" for name in _ours()}
    places |= {full: full for full in (*verls_defaults(), *(f"{SECTION}.{name}" for name in _ours()))}
    close = difflib.get_close_matches(plain, places, n=1, cutoff=0.75)
    return f", or did you mean {places[close[0]]}?" if close else ""


def check_present(view: View) -> None:
    """Raises ConfigError for a key of verl's with a type that has been removed."""
    for key in verls_defaults():
        kind = kind_of(key)
        if key not in view.written and kind is not None and not fits(kind, None) and not fits(kind, {}):
            raise ConfigError(f"{key} is missing: {words(kind)}")


def check_key(view: View, key: str, policy: str | None = None) -> None:
    """Raises ConfigError if the table refuses one key.

    Args:
        view: the configuration.
        key: dotted, with `actor_rollout_ref` for any policy.
        policy: name of the policy's section in messages.
    """
    value = shown_as(view.values[key])
    shown = f"{_shown_key(key, policy)}={value}"
    row = row_of(key)
    if row is None:
        close = difflib.get_close_matches(key, [*verls_defaults(), *rows()], n=1)
        hint = f", or did you mean {_shown_key(close[0], policy)}?" if close else ""
        raise ConfigError(f"{shown}: verl's configuration has no such key, so it would be ignored, remove it{hint}")
    if row.values and not any(view.accepts(key, accepted) for accepted in row.values):
        pause = " " if row.text.startswith("has no effect") else ": "
        choices = (view.default(key) if isinstance(one, Default) else one for one in row.values)
        remedy = row.remedy or f"set it to {' or '.join(map(shown_as, choices))}"
        raise ConfigError(f"{shown}{pause}{row.text}, {remedy}")
    if row.beside is None or view.accepts(key, DEFAULT):
        return
    other, kind = row.beside
    found = view.values.get(other)
    if not fits(kind, found):
        raise ConfigError(
            f"{shown} has no effect beside {_shown_key(other, policy)}={shown_as(found)}: set it to "
            f"{shown_as(view.default(key))}, or that to {words(kind)}"
        )


def _shown_key(key: str, policy: str | None) -> str:
    if not key.startswith(f"{POLICY}."):
        return key
    own = key.removeprefix(POLICY)
    # A policy of its own has `optim` beside `actor`.
    return f"{POLICY}{own}" if policy in (None, POLICY) else f"{policy}{own.replace('.actor.optim', '.optim', 1)}"


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; a bool equals no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def shown_as(value: Any) -> str:
    """Returns a value in the command line's syntax."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
