"""verl's entry point (group `verl.plugins`): registers the estimator, the trainer mode and the configuration checks.

docs/how_it_works.md has the walk through the modules from here on.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import time
import traceback
from types import ModuleType
from typing import Any


def register() -> None:
    """Registers estimator, trainer, engine, checks, logs of warnings and, without an accelerator, CPU mode."""
    from verl_atgrpo import compat, platform_choice

    _log_warnings()
    compat.when_imported("hydra._internal.config_repository", compat.explain_recipes)
    compat.when_imported("hydra._internal.config_loader_impl", compat.explain_keys)
    compat.when_imported("verl.trainer.ppo.core_algos", _register_estimator_of_plain_jobs)
    # Both register themselves.
    compat.when_imported("verl.trainer.ppo.v1", lambda _: importlib.import_module("verl_atgrpo.train.trainer.trainer"))
    engine = "verl_atgrpo.train.engine.prefix_tree.engine"
    compat.when_imported("verl.workers.engine", lambda _: importlib.import_module(engine))
    compat.when_imported("verl.utils.config", _check_configurations)
    if platform_choice.wants_cpu():
        from verl_atgrpo import cpu

        cpu.activate()


def _log_warnings() -> None:
    level = os.getenv("VERL_LOGGING_LEVEL", "WARN")
    logger = logging.getLogger(__package__)
    if logger.level == logging.NOTSET:  # not set by our command line
        logger.setLevel(level)
    # A dependency of vLLM sets the root logger and its handlers to this level when it is imported, by default ERROR.
    os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", level)


def _register_estimator_of_plain_jobs(core_algos: ModuleType) -> None:
    from verl_atgrpo.train.estimators import plain_job

    core_algos.register_adv_est("at_grpo")(plain_job.at_grpo_advantage)


def _check_configurations(config_module: ModuleType) -> None:
    from verl_atgrpo.compat import call_before

    # verl's own checks end with a traceback, which names no key.
    call_before(config_module, "validate_config", _check_and_announce)


def _check_and_announce(config: Any, **_: Any) -> None:
    """Checks a run; has the last words of one that saves name the checkpoint, also after SIGINT or SIGTERM."""
    from verl_atgrpo.train.config.run_check import check_run_or_exit

    job = check_run_or_exit(config)
    if job is not None and job.trainer.save_freq > 0 and not job.trainer.val_only:
        from verl_atgrpo.train.trainer import checkpoints

        atexit.register(checkpoints.announce, job.trainer, time.time(), job.steps)


try:
    register()
except Exception:
    # verl logs a plugin's exception at DEBUG level and continues without the plugin. All our imports are inside
    # functions, so that none of them fails silently.
    sys.stderr.write(f"verl-atgrpo: the plugin could not be loaded:\n{traceback.format_exc()}")
    raise
