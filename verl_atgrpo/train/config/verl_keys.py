"""Refuses values of verl's keys that would have no effect in a team's job, or an unexpected one (`verl_key_table`)."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le
from omegaconf import OmegaConf

from verl_atgrpo.kinds import Text, fits, words
from verl_atgrpo.train.config.schema import COMMAND, EXPANDED, SECTION, AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.verl_key_table import KEY_RULES, KeyRule
from verl_atgrpo.train.config.view import (
    ACTOR,
    Place,
    View,
    shown_as,
    verls_default,
    verls_defaults,
    verls_sections,
)


def rule_of(key: str) -> KeyRule | None:
    """Returns the rule for a key of verl's: its own, or that of the smallest section with one."""
    if key.endswith("._target_"):
        return KEY_RULES["_target_"]
    return next((KEY_RULES[part] for part in _enclosing(key) if part in KEY_RULES), None)


def is_known(key: str) -> bool:
    """Returns whether verl reads a key: it lists it, a rule names it, or it is in a section with any keys."""
    listed = next((part for part in _enclosing(key) if part in KEY_RULES or part in verls_defaults()), None)
    return key == listed or key.endswith("._target_") or (listed is not None and fits(kind_of(listed), {}))


def _enclosing(key: str) -> Iterator[str]:
    """Yields a key and the sections that it is in, from the inside."""
    while key:
        yield key
        key = key.rpartition(".")[0]


@functools.cache
def kind_of(key: str) -> Any:
    """Returns what a key of verl's accepts, as an annotation: what its rule says, or the type of verl's default."""
    rule = rule_of(key)
    if rule is not None and (rule.kind is Any or (key in KEY_RULES and rule.kind is not None)):
        return rule.kind
    return _kind_like(verls_default(key)) if key in verls_defaults() else Any


def _kind_like(default: Any) -> Any:
    """Returns the type of a value. Numbers are negative only if it is; whole ones 0 only if it is 0 or negative."""
    if default is None:
        return Text | None
    if isinstance(default, bool):
        return bool
    if isinstance(default, int):
        return Annotated[int, Ge(min(default, 1)), Le(10**15)]
    if isinstance(default, float):
        return Annotated[float, Ge(min(default, 0)), Le(1e300)]
    if isinstance(default, str):
        return Text if default else str
    return list[Any] if OmegaConf.is_list(default) else dict[str, Any]


def check_types(view: View, policy: str | None = None) -> None:
    """Raises ConfigError for a value of verl's keys that has another type than the key, or is beyond its bounds.

    With `policy`, the name of a policy's section in messages, only the keys of its `actor_rollout_ref`.
    """
    keys = [key for key in view.written if policy is None or key.startswith(f"{ACTOR}.")]
    derived = {key for key in keys if "${" in str(view.written[key])}
    # A derived value may only repeat the fault of one that is written out.
    for key in sorted(keys, key=lambda key: key in derived):
        value = view.values[key] if key in derived else view.written[key]
        kind = dict if key in verls_sections() else kind_of(key)
        if not fits(kind, value):
            raise ConfigError(f"{Place(view, key, policy).name}={shown_as(value)}: {words(kind)}")


def check_keys(view: View, policy: str | None = None) -> None:
    """Raises ConfigError for a key of verl whose value the table refuses, that verl does not have, or that is missing.

    With `policy`, the name of a policy's section in messages, the keys of its `actor_rollout_ref`; else all others.
    """
    if policy is None:
        _check_tops(view)
        for key in verls_defaults():
            kind = kind_of(key)
            if key not in view.written and not fits(kind, None) and not fits(kind, {}):
                raise ConfigError(f"{key} is missing: {words(kind)}")
    for key in view.written:
        if key.partition(".")[0] in _tops() and key.startswith(f"{ACTOR}.") == (policy is not None):
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
        if key in _tops() or key in (SECTION, EXPANDED, COMMAND):
            if dotted := next(_dotted(value, f"{key}."), None):
                raise ConfigError(
                    f"{dotted}: a key with a dot is another one than the nested key, and nothing reads it; write its "
                    "parts on lines of their own"
                )
            continue
        others = (str(text) for other, text in view.written.items() if other.partition(".")[0] != key)
        # Not a part of another key, as in ${oc.select:actor_rollout_ref.actor.strategy}.
        named = re.compile(rf"(?<![\w-])(?<!\w\.){re.escape(key)}(?![\w-])")
        if not any("${" in text and named.search(text) for text in others):
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


@functools.cache
def _ours() -> frozenset[str]:
    """Keys of the section `at_grpo`."""
    return frozenset(AtGrpoConfig.model_fields)


def _meant(key: str, value: Any) -> str:
    """Returns the end of a message with the key that may be meant by one at the top level."""
    plain = key.lower().replace("-", "_")
    places = {name: name for name in (*_tops(), SECTION)}
    places = {full.rpartition(".")[2]: full for full in reversed(verls_defaults())} | places
    places |= {name: f"{ACTOR}.{name}" for name in ("actor", "rollout", "model", "ref")}
    places |= {name: f"{SECTION}.{name}" for name in _ours()}
    places |= {full: full for full in (*verls_defaults(), *(f"{SECTION}.{name}" for name in _ours()))}
    close = difflib.get_close_matches(plain, places, n=1, cutoff=0.75)
    return f", or did you mean {places[close[0]]}?" if close else ""


def check_key(view: View, key: str, policy: str | None = None) -> None:
    """Raises ConfigError if a rule refuses one key (with `actor_rollout_ref` for any policy), or verl has none."""
    place, rule = Place(view, key, policy), rule_of(key)
    shown = f"{place.name}={shown_as(view.values[key])}"
    if not is_known(key):
        close = difflib.get_close_matches(key, [*verls_defaults(), *KEY_RULES], n=1)
        hint = "".join(f", or did you mean {Place(view, other, policy).name}?" for other in close)
        raise ConfigError(f"{shown}: verl's configuration has no such key, so it would be ignored, remove it{hint}")
    if rule is not None and (why := rule.refused(place)) is not None:
        raise ConfigError(f"{shown}{why}")
