"""The entry point verl loads (group `verl.plugins`): what is registered where, and that warnings are heard.

Read on from here: recipe (`recipes/`) -> `config.py` -> `environment.py` -> `team.py` -> `rollout/` ->
`advantage.py` -> `trainer/`.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from types import ModuleType


def register() -> None:
    """Registers the estimator, the trainer, the configuration check and, without an accelerator, CPU mode.

    Sees to it that warnings of the package are heard.
    """
    from verl_atgrpo import platform_choice
    from verl_atgrpo.compat import when_imported

    _log_warnings()
    when_imported("verl.trainer.ppo.core_algos", _register_estimator)
    when_imported("verl.trainer.ppo.v1", _register_trainer)
    when_imported("verl.utils.config", _check_configurations)
    if platform_choice.wants_cpu():
        from verl_atgrpo import cpu

        cpu.activate()


def _log_warnings() -> None:
    level = os.getenv("VERL_LOGGING_LEVEL", "WARN")
    logger = logging.getLogger(__package__)
    if logger.level == logging.NOTSET:  # the command line has set its own
        logger.setLevel(level)
    # A dependency of vLLM's sets the root logger and its handlers to this level when it is imported, by default ERROR.
    os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", level)


def _register_estimator(core_algos: ModuleType) -> None:
    from verl_atgrpo.estimators import kernel

    core_algos.register_adv_est("at_grpo")(kernel.at_grpo_advantage)


def _register_trainer(_: ModuleType) -> None:
    import verl_atgrpo.trainer.trainer  # noqa: F401  (registers itself)


def _check_configurations(config_module: ModuleType) -> None:
    from verl_atgrpo.compat import call_after
    from verl_atgrpo.config.run_check import check_run_or_exit

    call_after(config_module, "validate_config", check_run_or_exit)


try:
    register()
except Exception:
    # verl logs a plugin's exception at DEBUG level only, and would go on without the plugin. Every import
    # of ours is inside, so that none of them can fail unheard.
    sys.stderr.write(f"verl-atgrpo: the plugin could not be loaded:\n{traceback.format_exc()}")
    raise
