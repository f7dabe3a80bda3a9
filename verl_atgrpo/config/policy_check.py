"""What a policy's `actor_rollout_ref` must be where one key of it counts together with another."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from verl_atgrpo.config.schema import ConfigError

_CLIP_RATIO = 0.2
"""verl's default of `clip_ratio`, which counts for nothing beside the two others."""
_PER_MICRO_BATCH = ("geo_mean",)
"""Policy losses of verl's that are a mean over each micro-batch, which is as large as rows happen to fit in."""
_SERVER = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def check_policy(key: str, policy: DictConfig, data: DictConfig, devices: int | None) -> None:
    """Raises ConfigError if a policy's settings contradict each other or what the job deals out.

    Args:
        key: of the policy's section, for messages.
        policy: what `actor_rollout_ref` has.
        data: the job's `data`.
        devices: on which the policy is trained and served; None if its servers have devices of their own.
    """
    _check_steps(key, policy, data)
    _check_clipping(key, policy.actor)
    _check_loss(key, policy)
    _check_lengths(key, policy, data)
    if devices is not None:
        _check_server_size(key, policy.rollout, devices)


def _check_steps(key: str, policy: DictConfig, data: DictConfig) -> None:
    rows, tasks = policy.actor.ppo_mini_batch_size, data.train_batch_size
    if tasks % rows:
        raise ConfigError(
            f"{key}.actor.ppo_mini_batch_size={rows} does not divide data.train_batch_size={tasks}: their ratio is "
            "the number of optimizer steps"
        )


def _check_clipping(key: str, actor: DictConfig) -> None:
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    # Where one of them is null, verl takes clip_ratio for it.
    if None not in (low, high) and actor.clip_ratio not in (_CLIP_RATIO, low, high):
        raise ConfigError(
            f"{key}.actor.clip_ratio={actor.clip_ratio} has no effect beside clip_ratio_low={low} and "
            f"clip_ratio_high={high}: set those to {actor.clip_ratio}"
        )


def _check_loss(key: str, policy: DictConfig) -> None:
    actor, loss = policy.actor, policy.actor.policy_loss.loss_mode
    mode, factor = actor.loss_agg_mode, actor.loss_scale_factor
    if mode == "seq-mean-token-sum-norm" and factor is None:
        raise ConfigError(
            f"{key}.actor.loss_agg_mode={mode}: without actor.loss_scale_factor verl divides by the longest answer of "
            "each micro-batch, so an answer's weight depends on those it is packed with; set loss_scale_factor to a "
            "constant, such as data.max_response_length"
        )
    if loss in _PER_MICRO_BATCH:
        raise ConfigError(
            f"{key}.actor.policy_loss.loss_mode={loss} is a mean over each micro-batch, padding included, so an "
            "answer's weight depends on those it is packed with; set it to gspo, or vanilla"
        )
    if loss == "sapo" and mode != "seq-mean-token-mean":
        raise ConfigError(
            f"{key}.actor.loss_agg_mode={mode} has no effect with policy_loss.loss_mode=sapo: set it to "
            "seq-mean-token-mean"
        )
    if loss == "dro" and actor.policy_loss.dro_beta is None:
        raise ConfigError(f"{key}.actor.policy_loss.dro_beta=null: loss_mode=dro needs it, a number above 0")
    if policy.model.external_lib is None:  # a worker may import losses from there
        known = importlib.import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
        if loss not in known:
            raise ConfigError(
                f"{key}.actor.policy_loss.loss_mode={loss} is no policy loss of verl's: use one of "
                f"{', '.join(sorted(set(known) - {*_PER_MICRO_BATCH}))}"
            )


def _check_lengths(key: str, policy: DictConfig, data: DictConfig) -> None:
    """Raises ConfigError if a prompt and an answer that `data` allows have no room in the engine or in an update."""
    row = data.max_prompt_length + data.max_response_length
    needed = (
        f"data.max_prompt_length={data.max_prompt_length} and data.max_response_length={data.max_response_length} "
        f"make rows of up to {row} tokens"
    )
    room = policy.rollout.max_model_len
    if room is not None and room < row:
        raise ConfigError(
            f"{key}.rollout.max_model_len={room}: {needed}; set it to at least that, or shorten them: the server "
            "would cut answers off early, or refuse long prompts"
        )
    ranks = max(policy.actor.ulysses_sequence_parallel_size, policy.actor.fsdp_config.ulysses_sequence_parallel_size)
    budgets: Mapping[str, Any] = {
        "actor.ppo_max_token_len_per_gpu": policy.actor.ppo_max_token_len_per_gpu,
        "rollout.log_prob_max_token_len_per_gpu": policy.rollout.log_prob_max_token_len_per_gpu,
        "ref.log_prob_max_token_len_per_gpu": policy.ref.log_prob_max_token_len_per_gpu,
    }
    for name, budget in budgets.items():
        if budget is None or budget * ranks < row:
            shown = "null" if budget is None else budget
            raise ConfigError(
                f"{key}.{name}={shown}: {needed}, and a micro-batch holds whole rows; set it to at least "
                f"{-(-row // ranks)}"
            )


def _check_server_size(key: str, rollout: DictConfig, devices: int) -> None:
    sizes = {name: rollout[name] for name in _SERVER}
    size = 1
    for value in sizes.values():
        size *= value
    if devices % size:
        raise ConfigError(
            f"{key}.rollout.{_SERVER[0]}={sizes[_SERVER[0]]}: the policy has {devices} devices, which servers of "
            f"{size} ({' * '.join(_SERVER)}) do not divide among them; choose one that does"
        )
    together = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if rollout.expert_parallel_size not in (1, together):
        raise ConfigError(
            f"{key}.rollout.expert_parallel_size={rollout.expert_parallel_size}: set it to 1, or to {together} "
            f"({' * '.join(_SERVER[:2])})"
        )


def check_context(key: str, rollout: DictConfig, data: DictConfig, longest: int) -> None:
    """Raises ConfigError if the model's own limit, which `max_model_len: null` stands for, leaves rows no room.

    Args:
        key: of the policy's section.
        rollout: its `rollout`.
        data: the job's `data`.
        longest: how many positions the model has.
    """
    row = data.max_prompt_length + data.max_response_length
    if longest < row:
        raise ConfigError(
            f"{key}.model.path: the model has {longest} positions, data.max_prompt_length={data.max_prompt_length} "
            f"and data.max_response_length={data.max_response_length} make rows of up to {row} tokens; shorten them"
        )
    if rollout.max_model_len is not None and rollout.max_model_len > longest:
        raise ConfigError(
            f"{key}.rollout.max_model_len={rollout.max_model_len}: the model has {longest} positions; set it to at "
            f"most that"
        )
