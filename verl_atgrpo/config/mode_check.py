"""What `at_grpo.mode` and verl's keys about asynchronous training must be, checked before Ray starts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo.config.key_check import leaves, verls_defaults
from verl_atgrpo.config.schema import MODES, SECTION, ConfigError
from verl_atgrpo.config.separate_check import check_separate, check_shared

_CORRECTION = "algorithm.rollout_correction"
_SAMPLER = "trainer.v1.sampler"


def check_mode(config: DictConfig, mode: str, policies: Mapping[str, DictConfig]) -> None:
    """Raises ConfigError for a key that the mode cannot work with, or that would have no effect in it.

    Args:
        config: the job's configuration.
        mode: `at_grpo.mode`, one of `config.MODES`.
        policies: key of a policy's section -> the section, with what `actor_rollout_ref` has.
    """
    _check_bypass(config)
    ignored = [other for other in MODES if other != mode] + (["sampler.max_off"] if mode == "sync" else [])
    for name, value in itertools.chain(*(_changed(config, beginning) for beginning in ignored)):
        raise ConfigError(
            f"trainer.v1.{name}={value} has no effect with {SECTION}.mode={mode}: remove it, or use another mode"
        )
    if mode == "separate_async":
        check_separate(config, policies)
    else:
        check_shared(mode, policies)
    if mode == "sync":
        return
    _check_staleness(config, mode)
    for key, policy in policies.items():
        _check_correction(config, mode, key, policy)
        if OmegaConf.select(policy, "rollout.full_determinism"):
            raise ConfigError(
                f"{key}.rollout.full_determinism=true: what is interrupted when depends on time, so {SECTION}.mode="
                f"{mode} cannot be reproduced; set it to false, or use {SECTION}.mode=sync"
            )
        if OmegaConf.select(policy, "rollout.disaggregation.enabled"):
            raise ConfigError(
                f"{key}.rollout.disaggregation.enabled=true: a prefill server's requests cannot be interrupted; set "
                f"it to false, or use {SECTION}.mode=sync"
            )


def _changed(config: DictConfig, beginning: str) -> Iterator[tuple[str, Any]]:
    """Yields keys below trainer.v1 that are not verl's defaults, to which they may have been set unseen."""
    section: Any = OmegaConf.to_container(config.trainer.v1, resolve=True)
    for key, value in leaves(section):
        default = f"trainer.v1.{key}"
        if key.startswith(beginning) and (default not in verls_defaults() or value != verls_defaults()[default]):
            yield key, value


def _check_bypass(config: DictConfig) -> None:
    correction = OmegaConf.select(config, _CORRECTION) or {}
    for name in ("rollout_is", "rollout_rs"):
        if correction.get("bypass_mode") and (value := correction.get(name)) is not None:
            raise ConfigError(
                f"{_CORRECTION}.{name}={value} is ignored by verl's V1 trainer with bypass_mode=true: set it to null, "
                "or bypass_mode to false"
            )


def _check_correction(config: DictConfig, mode: str, key: str, policy: DictConfig) -> None:
    """Raises ConfigError unless the loss reads with which probabilities a candidate was sampled."""
    correction = OmegaConf.select(config, _CORRECTION) or {}
    loss = OmegaConf.select(policy, "actor.policy_loss.loss_mode") or "vanilla"
    if correction.get("bypass_mode"):
        if loss != "vanilla":
            raise ConfigError(
                f"{key}.actor.policy_loss.loss_mode={loss} with {_CORRECTION}.bypass_mode=true: only the ratio of "
                f"loss_mode=vanilla is known to correct for older weights; set that, or bypass_mode to false and "
                "rollout_is to token"
            )
        return
    choice = correction.get("rollout_is")
    if choice not in ("token", "sequence"):
        shown = "null" if choice is None else choice
        raise ConfigError(
            f"{_CORRECTION}.rollout_is={shown}: with {SECTION}.mode={mode} candidates come from older weights, and "
            "their log-probs would not be used; set it to token or sequence"
        )
    if loss == "bypass_mode":
        raise ConfigError(
            f"{key}.actor.policy_loss.loss_mode=bypass_mode ignores {_CORRECTION}.rollout_is={choice}: set it to "
            "vanilla"
        )


def _check_staleness(config: DictConfig, mode: str) -> None:
    key = f"trainer.v1.{mode}.num_warmup_batches"
    warmup = _number(config, key)
    if warmup is None or not 0 < warmup < math.inf:
        raise ConfigError(
            f"{key}={OmegaConf.select(config, key)}: above 0, or no task is under way beside a step's own and "
            f"nothing is gained over {SECTION}.mode=sync"
        )
    strategy = OmegaConf.select(config, f"{_SAMPLER}.max_off_policy_strategy")
    if strategy != "wait":
        raise ConfigError(
            f"{_SAMPLER}.max_off_policy_strategy={strategy} throws away the episodes that took long, so the policy "
            "would be trained on short ones; set it to wait"
        )
    least = 1 + math.ceil(warmup)
    threshold = _number(config, f"{_SAMPLER}.max_off_policy_threshold")
    if threshold is None or threshold < least or threshold != int(threshold):
        shown = OmegaConf.select(config, f"{_SAMPLER}.max_off_policy_threshold")
        raise ConfigError(
            f"{_SAMPLER}.max_off_policy_threshold={'null' if shown is None else shown}: with {SECTION}.mode={mode} a "
            f"number of steps, at least {least} (1 + {key}), which bounds how old an episode may be"
        )


def _number(config: DictConfig, key: str) -> float | None:
    value: Any = OmegaConf.select(config, key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
