"""Rows in a short notation, for the estimators' tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.plain_job import at_grpo_advantage

ROW_PRESETS = ["at_grpo", "grpo", "dr_grpo", "rloo"]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def tags_of(label: str) -> dict[str, Any]:
    """The tags of a row from "GROUP#EPISODE@AGENT~LEFT~ANCHOR"; later parts may be left out."""
    group, _, rest = label.rpartition("#")
    episode, _, rest = rest.partition("@")
    agent, _, rest = rest.partition("~")
    left, _, anchor = rest.partition("~")
    tags = {
        "group": group,
        "episode": f"{group}_{episode}",
        "agent": agent,
        "turn": 0,
        "candidate": 0,
        "left": left and int(left),
        "anchor": anchor,
    }
    return {key: value for key, value in tags.items() if value != ""}


def estimate(
    labels: list[str], rewards: list[float], config: Any = None, mask: list[int] | None = None
) -> list[float]:
    """Advantages of one-token rows; rows with a mask of 0 are padding.

    Labels with a `#` are a team's rows, others those of a plain verl job.
    """
    column = tensor(*rewards)
    real = torch.ones_like(column).bool() if mask is None else ids(*mask).bool()
    if not any("#" in label for label in labels):
        uids = np.array(labels, dtype=object)
        advantages, _ = at_grpo_advantage(column[:, None], real.long()[:, None], config, uids)
        plain: list[float] = advantages.squeeze(-1).tolist()
        return plain
    spec = resolve_spec((config or {}).get("at_grpo_estimator", "at_grpo"))
    rows = [tags_of(label) for label, counts in zip(labels, real.tolist(), strict=True) if counts]
    values: list[float] = (
        torch.zeros_like(column).masked_scatter_(real, team_advantages(column[real], rows, spec)).tolist()
    )
    return values
