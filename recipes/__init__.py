"""The packaged recipes, and a function that composes one without starting a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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

    package = "verl.trainer.config"
    with readable(recipe, folder):
        if folder is None:
            with hydra.initialize_config_module(package, version_base=None):
                return hydra.compose(recipe, overrides=list(overrides))
        # Hydra reads `hydra.searchpath` after it has found the recipe, so the recipe's folder is the primary one.
        with hydra.initialize_config_dir(str(folder.absolute()), version_base=None):
            return hydra.compose(recipe, overrides=[f"hydra.searchpath=[pkg://{package}]", *overrides])


@contextlib.contextmanager
def readable(recipe: str, folder: Path | None = None) -> Iterator[None]:
    """Turns errors of Hydra, OmegaConf and YAML into a ValueError: one line that names the recipe, or file and line.

    OmegaConf resolves interpolations when a value is read, so the block holds whatever reads the configuration.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    named = repr(recipe) if folder is None else str(folder / f"{recipe}.yaml")
    try:
        yield
    except RecursionError as error:
        raise ValueError(f"the recipe {named} cannot be composed: nested too deeply") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the recipe {named} cannot be composed: {yaml_fault(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        # Hydra appends its search path, OmegaConf the key, each on lines of their own.
        message = str(error).strip() or str(error.__cause__ or type(error).__name__)
        reason = " ".join(message.partition("\n\nConfig search path")[0].split()).removeprefix("verl-atgrpo: ")
        raise ValueError(f"the recipe {named} cannot be composed: {reason}") from error


def yaml_fault(error: Exception, file: str = "") -> str:
    """Returns what is wrong with a file that is no YAML, in one line: with its name and line if the error has them."""
    from yaml import MarkedYAMLError

    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        file = file if mark is None else f"{mark.name}:{mark.line + 1}"
        error = ValueError(error.problem or error.context)
    return " ".join(f"{file}: {error}".removeprefix(": ").split())
