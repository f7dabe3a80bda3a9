"""Rows in few letters, for the tests of estimators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_atgrpo.estimators.kernel import at_grpo_advantage

ROW_PRESETS = ["at_grpo", "grpo", "dr_grpo", "rloo"]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def estimate(
    uids: list[str], rewards: list[float], config: Any = None, mask: list[int] | None = None, **kwargs: Any
) -> list[float]:
    """Advantages of one-token rows; those whose mask is 0 are padding."""
    column = tensor(*rewards).unsqueeze(-1)
    real = torch.ones_like(column) if mask is None else ids(*mask).unsqueeze(-1)
    advantages, _ = at_grpo_advantage(column, real, config, np.array(uids, dtype=object), **kwargs)
    values: list[float] = advantages.squeeze(-1).tolist()
    return values
