"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: saves the estimator's inputs and outputs."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch

from verl_atgrpo.compat import when_imported


def _record(core_algos: ModuleType) -> None:
    from verl_atgrpo.train.estimators import plain_job

    original = plain_job.at_grpo_advantage

    @functools.wraps(original)
    def recording(**kwargs: Any) -> Any:
        advantages, returns = original(**kwargs)
        kept = {name: kwargs[name] for name in ("token_level_rewards", "response_mask", "index")}
        torch.save({**kept, "advantages": advantages}, os.environ["ADVANTAGES_FILE"])
        return advantages, returns

    plain_job.at_grpo_advantage = recording


# Before the plugin registers the function: external modules are loaded first.
when_imported("verl.trainer.ppo.core_algos", _record)
