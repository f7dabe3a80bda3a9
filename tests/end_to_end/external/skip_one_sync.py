"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: the weight sync after step 3 does nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_atgrpo.compat import when_imported


def _skip(schedule: ModuleType) -> None:
    step_end = schedule.Schedule.step_end

    def step_end_without_sync(self: Any, servers: Any, rollout: Any, global_steps: int) -> None:
        if global_steps != 3:
            step_end(self, servers, rollout, global_steps)

    schedule.Schedule.step_end = step_end_without_sync


when_imported("verl_atgrpo.train.trainer.schedule", _skip)
