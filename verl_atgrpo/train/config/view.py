"""The keys of a configuration: as they are written, resolved, and by verl's default."""

from __future__ import annotations

import copy
import functools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_atgrpo.train.config import ConfigError

ACTOR = "actor_rollout_ref"
DEFAULT = object()
"""Stands for verl's default."""
_ABSENT = object()


@dataclass(frozen=True)
class Like:
    """Stands for the value of another key."""

    key: str


def leaves(section: Mapping[str, Any], prefix: str = "", whole: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of every leaf. Empty sections, and the sections at the keys `whole`, are leaves."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value and f"{prefix}{key}" not in whole:
            yield from leaves(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


@functools.cache
def _verls() -> DictConfig:
    import verl

    composed = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    assert isinstance(composed, DictConfig)
    return composed


@functools.cache
def verls_defaults() -> dict[str, Any]:
    """Returns the leaves of verl's `ppo_trainer`: key -> value, interpolations unresolved."""
    return dict(leaves(OmegaConf.to_container(_verls(), resolve=False)))  # type: ignore[arg-type]


def verls_default(key: str) -> Any:
    """Returns verl's default of a key, resolved in verl's own configuration."""
    return OmegaConf.select(_verls(), key)


@functools.cache
def _interpolated() -> frozenset[str]:
    """Keys that are interpolations in verl's defaults: once resolved, their value may be a section."""
    return frozenset(key for key, value in verls_defaults().items() if isinstance(value, str) and "${" in value)


@functools.cache
def verls_sections() -> frozenset[str]:
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


@dataclass(frozen=True)
class Place:
    """A key in a configuration, of which the rules of verl's keys are asked."""

    view: View
    key: str
    policy: str | None = None
    """Name of the policy's section in messages."""

    @property
    def name(self) -> str:
        """The key as messages have it: below the policy's section if that is given and has such keys."""
        if not self.key.startswith(f"{ACTOR}."):
            return self.key
        own = self.key.removeprefix(ACTOR)
        if self.policy in (None, ACTOR) or own.split(".")[1] not in ("model", "actor", "rollout"):
            return self.key
        # A policy of its own has `optim` beside `actor`.
        return f"{self.policy}{own.replace('.actor.optim', '.optim', 1)}"

    def accepts(self, accepted: Any) -> bool:
        """Returns whether the key has a value: this one, `DEFAULT`, or that of another key (`Like`)."""
        value = self.view.values[self.key]
        if accepted is DEFAULT:
            default = verls_defaults().get(self.key, _ABSENT)
            return same(self.view.written[self.key], default) or same(value, self.view.default(self.key))
        return same(value, self.view.values.get(accepted.key) if isinstance(accepted, Like) else accepted)

    def shown(self, value: Any) -> str:
        """Returns a value, or `DEFAULT`'s, for a message."""
        return shown_as(self.view.default(self.key) if value is DEFAULT else value)

    def of(self, key: str) -> tuple[str, Any]:
        """Returns another key as messages have it, and its value."""
        return Place(self.view, key, self.policy).name, self.view.values.get(key)


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal; a bool equals no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def shown_as(value: Any) -> str:
    """Returns a value in the command line's syntax."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}
_DTYPES |= {"16": "float16", "32": "float32"}


def dtype_name(given: object) -> str:
    """Returns torch's name of a dtype that verl or vLLM knows by another one."""
    name = str(given).removeprefix("torch.")
    return _DTYPES.get(name, name)
