"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: saves the first step's rows and their log-probs."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from verl_atgrpo.compat import when_imported

FIELDS = ("prompts", "responses", "old_log_probs", "ref_log_prob")


def _keep(update_inputs: ModuleType) -> None:
    original = update_inputs.write_advantages

    def keeping(batch: Any, *given: Any) -> Any:
        file = Path(os.environ["KEPT_FOLDER"]) / f"{batch.tags[0]['policy']}.pt"
        if not file.exists():
            rows = [
                {name: data[name][number].clone() for name in FIELDS}
                for part in batch.real.parts()
                for data in [part.fetch(*FIELDS)]
                for number in range(len(part))
            ]
            torch.save(rows, file)
        return original(batch, *given)

    update_inputs.write_advantages = keeping


when_imported("verl_atgrpo.train.trainer.update_inputs", _keep)
