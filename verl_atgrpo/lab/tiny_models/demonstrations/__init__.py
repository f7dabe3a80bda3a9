"""Demonstrations for the supervised fine-tuning of tiny models, one demonstrator per environment. No torch here."""

import importlib

from verl_atgrpo.lab.tiny_models.demonstrations.demonstrator import Demonstrator
from verl_atgrpo.lab.tiny_models.demonstrations.in_a_row import TIC_TAC_TOE
from verl_atgrpo.lab.tiny_models.demonstrations.plan_path import PLAN_PATH
from verl_atgrpo.lab.tiny_models.demonstrations.sudoku import SUDOKU

DEMONSTRATORS = {one.environment: one for one in (PLAN_PATH, SUDOKU, TIC_TAC_TOE)}
"""Environment -> its demonstrator."""


def demonstrator_of(name: str) -> Demonstrator:
    """Returns the demonstrator of an environment of the package, or one by "module:NAME"; raises ValueError."""
    if name in DEMONSTRATORS:
        return DEMONSTRATORS[name]
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ValueError(f"--environment {name}: use one of {', '.join(DEMONSTRATORS)}, or 'module:NAME'")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"--environment {name}: {error}") from error
    if not isinstance(found, Demonstrator):
        raise ValueError(f"--environment {name}: the module {module} has no Demonstrator {attribute}")
    return found
