"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Compose = Callable[..., object]


@pytest.fixture
def compose() -> Compose:
    """Returns a function that composes a recipe as `main_ppo --config-name=<recipe> <overrides>` does."""
    pytest.importorskip("verl")
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    def build(recipe: str, *overrides: str) -> object:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return hydra_compose(recipe, overrides=list(overrides))

    return build
