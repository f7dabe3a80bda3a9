"""The estimator of a plain verl job, `algorithm.adv_estimator=at_grpo`, in verl's signature; `plugin` registers it."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_atgrpo.train.estimators.advantages import group_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.labels import factorise


def at_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    index: npt.NDArray[Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Computes the advantages of a plain job's batch, with verl's signature of an advantage estimator.

    Reads `at_grpo_estimator` from `config`, verl's `algorithm` section (DictConfig, dataclass or None). Raises
    ValueError for wrong shapes, an estimator that needs more than groups, and as `resolve_spec` and
    `group_advantages`.

    Shapes: token_level_rewards (N, L), summed to the reward of the row; response_mask (N, L), zeros in a row of
    padding; index (N,) labels of groups, verl's `uid` -> advantages and returns, the same tensor (N, L).
    """
    rewards, mask = token_level_rewards.detach(), response_mask
    if index is None:
        raise ValueError("index: missing; groups are formed by verl's 'uid' field")
    if rewards.dim() != 2 or mask.shape != rewards.shape or len(index) != len(rewards):
        raise ValueError(
            f"token_level_rewards {tuple(rewards.shape)}, response_mask {tuple(mask.shape)} and index "
            f"({len(index)},): expected (N, L), (N, L) and (N,)"
        )
    # `get` for DictConfig and verl's dataclasses: both lack our key unless the user added it.
    read = config.get if hasattr(config, "get") else functools.partial(getattr, config)
    spec = resolve_spec(read("at_grpo_estimator", "at_grpo"))
    if spec.needs:
        raise ValueError(
            f"algorithm.at_grpo_estimator={spec.name!r} needs {', '.join(sorted(spec.needs))}, but a plain job's rows "
            "have groups only; set trainer.v1.trainer_mode=at_grpo"
        )
    valid = mask.bool().any(dim=-1)
    row_rewards = rewards.sum(dim=-1, dtype=torch.float64)
    groups = factorise(np.asarray(index, dtype=object)[valid.numpy(force=True)].tolist())[0].to(rewards.device)
    real = group_advantages(row_rewards[valid], groups, spec)
    advantages = torch.zeros_like(row_rewards).masked_scatter_(valid, real).to(rewards.dtype)
    per_token = advantages.unsqueeze(-1) * mask.to(rewards.dtype)
    return per_token, per_token
