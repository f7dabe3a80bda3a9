"""The packaged recipes, and a function that composes one without starting a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig


def compose(recipe: str, overrides: Sequence[str] = (), folder: Path | None = None) -> DictConfig:
    """Returns the configuration that `main_ppo --config-name=<recipe> <overrides>` composes.

    Args:
        recipe: its name.
        overrides: as on the command line.
        folder: a further folder with recipes, as with `--config-dir`.

    Raises:
        ValueError: Hydra cannot compose it.
    """
    import hydra
    from hydra.errors import HydraException

    package = "verl.trainer.config"
    try:
        if folder is None:
            with hydra.initialize_config_module(package, version_base=None):
                return hydra.compose(recipe, overrides=list(overrides))
        # Hydra reads `hydra.searchpath` after it has found the recipe, so the recipe's folder is the primary one.
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            return hydra.compose(recipe, overrides=[f"hydra.searchpath=[pkg://{package}]", *overrides])
    except HydraException as error:
        raise ValueError(f"the recipe {recipe!r} cannot be composed: {error}") from error
