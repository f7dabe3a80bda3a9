"""Recipes that are no YAML: one line with file and line, also from `main_ppo`."""

from __future__ import annotations

import importlib
from pathlib import Path

import hydra
import pytest
from hydra.errors import CompactHydraException

from verl_atgrpo import compat, recipes

SOURCE = "hydra._internal.config_repository"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has imported verl, and left as it was."""
    module = importlib.import_module(SOURCE)
    monkeypatch.setattr(module.ConfigRepository, "load_config", module.ConfigRepository.load_config)
    compat.explain_recipes(module)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"a: 1\n\tb: 2\n", ":2: "),
        (b"a: 1\nb: 2\na: 3\n", ":3: "),
        (b"a: [1, 2\nb: 3\n", ":2: "),
        (b"a: 1\n  b: 2\n", ":2: "),
        (b'a: "x\n', ": "),
        (b"a: \xff\n", ": "),
        (b"a: \x00\n", ": "),
        (b"a: *nowhere\n", ":1: "),
    ],
)
def test_a_recipe_that_is_no_yaml_is_named_in_one_line(text: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(text)
    with hydra.initialize_config_dir(str(tmp_path), version_base=None), pytest.raises(CompactHydraException) as caught:
        hydra.compose("mine")
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith("mine") and line in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^the recipe .* cannot be composed: .*mine") as told:
        recipes.compose("mine", (), tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.usefixtures("named")
def test_a_recipe_that_is_yaml_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        assert hydra.compose("mine") == {"a": 1}
