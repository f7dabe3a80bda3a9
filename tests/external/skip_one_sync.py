"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: the weight sync after step 2 does nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_atgrpo.import_hooks import when_imported


def _skip(trainer_sync: ModuleType) -> None:
    on_step_end = trainer_sync.PPOTrainerSync.on_step_end

    def on_step_end_without_sync(self: Any) -> None:
        if self.global_steps != 2:
            on_step_end(self)

    trainer_sync.PPOTrainerSync.on_step_end = on_step_end_without_sync


when_imported("verl.trainer.ppo.v1.trainer_sync", _skip)
