"""Recipes, and how to read one without starting a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig


def compose(recipe: str, overrides: Sequence[str] = (), folder: Path | None = None) -> DictConfig:
    """Returns a recipe as `main_ppo --config-name=<recipe> <overrides>` composes it.

    Args:
        recipe: its name.
        overrides: as on the command line.
        folder: where else to look, as `--config-dir` says.

    Raises ValueError for what Hydra cannot compose.
    """
    import hydra
    from hydra.errors import HydraException

    package = "verl.trainer.config"
    try:
        if folder is None:
            with hydra.initialize_config_module(package, version_base=None):
                return hydra.compose(recipe, overrides=list(overrides))
        # Hydra's search path comes after its first place only, where the recipe itself has to be.
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            return hydra.compose(recipe, overrides=[f"hydra.searchpath=[pkg://{package}]", *overrides])
    except HydraException as error:
        raise ValueError(f"the recipe {recipe!r} cannot be composed: {error}") from error
