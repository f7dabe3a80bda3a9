"""Composing a recipe at a fraction of the time: hundreds of tests do, and most of them differ in one value."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import omegaconf.base
import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl

HYDRAS = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list


@contextmanager
def composed_once() -> Iterator[None]:
    """While it is entered, Hydra merges the files of a packaged recipe and its groups once, then unpickles the result.

    The values of the command line are applied by Hydra each time. A recipe in a folder of its own is composed anew.
    """
    choose, merge = HYDRAS
    chosen: dict[object, Any] = {}
    merged: dict[object, bytes] = {}

    def packaged(repo: Any) -> bool:
        return all(source.scheme() in ("pkg", "structured") for source in repo.get_sources())

    def choose_once(repo: Any, config_name: str, overrides_list: list[Any], **options: Any) -> Any:
        if not packaged(repo):
            return choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **options)
        groups, values = [], []
        for override in overrides_list:
            is_value = isinstance(override.value(), dict) or not repo.group_exists(override.key_or_group)
            (values if is_value else groups).append(override)
        key = config_name, *(override.input_line for override in groups), *options.items()
        if key not in chosen:
            chosen[key] = choose(repo=repo, config_name=config_name, overrides_list=groups, **options)
        return dataclasses.replace(chosen[key], config_overrides=values)

    def merge_once(self: Any, defaults: list[Any], repo: Any) -> Any:
        if not packaged(repo):
            return merge(self, defaults=defaults, repo=repo)
        key = repr(defaults)
        if key not in merged:
            merged[key] = pickle.dumps(merge(self, defaults=defaults, repo=repo))
        return pickle.loads(merged[key])  # several times faster than a deep copy

    with replaced(choose_once, merge_once) as patch:
        patch.setattr(omegaconf.base, "parse", functools.cache(omegaconf.base.parse))
        yield


@contextmanager
def replaced(choose: Any, merge: Any) -> Iterator[pytest.MonkeyPatch]:
    """Replaces Hydra's two functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_loader_impl, "create_defaults_list", choose)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge)
        yield patch
