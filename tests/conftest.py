"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Compose = Callable[..., object]


@pytest.fixture
def compose() -> Compose:
    """Returns a function that composes a recipe as `main_ppo --config-name=<recipe> <overrides>` does."""
    pytest.importorskip("verl")
    from verl_atgrpo import recipes

    def build(recipe: str, *overrides: str) -> object:
        return recipes.compose(recipe, overrides)

    return build
