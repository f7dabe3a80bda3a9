"""What `at_grpo.mode` and verl's keys about asynchronous training must be, checked before Ray starts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo.config import MODES, SECTION, ConfigError
from verl_atgrpo.separate_check import check_separate, check_shared

_CORRECTION = "algorithm.rollout_correction"
_SAMPLER = "trainer.v1.sampler"


def check_mode(config: DictConfig, mode: str, policies: Mapping[str, DictConfig]) -> None:
    """Raises ConfigError for a key that the mode cannot work with, or that would have no effect in it.

    Args:
        config: the job's configuration.
        mode: `at_grpo.mode`, one of `config.MODES`.
        policies: key of a policy's section -> the section, with what `actor_rollout_ref` has.
    """
    for name in ("path", "name"):
        if (value := OmegaConf.select(config, f"{_SAMPLER}.custom_sampler.{name}")) is not None:
            raise ConfigError(
                f"{_SAMPLER}.custom_sampler.{name}={value}: the trainer relies on verl's own sampler to replace "
                "failed episodes, set it to null"
            )
    if OmegaConf.select(config, "skip.rollout_tq.enable"):
        raise ConfigError(
            "skip.rollout_tq.enable=true: the trainer submits tasks itself, so no rollout would be skipped; set it to "
            "false"
        )
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


@functools.cache
def _verls_defaults() -> dict[str, Any]:
    """verl's own trainer.v1, which a job's starts from."""
    import verl

    loaded = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "ppo_trainer.yaml")
    return dict(_leaves(OmegaConf.select(loaded, "trainer.v1")))


def _leaves(section: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, DictConfig):
            yield from _leaves(value, f"{prefix}{key!s}.")
        else:
            yield f"{prefix}{key!s}", value


def _changed(config: DictConfig, beginning: str) -> Iterator[tuple[str, Any]]:
    """Yields keys below trainer.v1 that are not verl's defaults, to which they may have been set unseen."""
    for key, value in _leaves(config.trainer.v1):
        if key.startswith(beginning) and (key not in _verls_defaults() or value != _verls_defaults()[key]):
            yield key, value


def _check_bypass(config: DictConfig) -> None:
    correction = OmegaConf.select(config, _CORRECTION) or {}
    for name in ("rollout_is", "rollout_rs"):
        if correction.get("bypass_mode") and (value := correction.get(name)) is not None:
            raise ConfigError(
                f"{_CORRECTION}.{name}={value} is ignored by verl's V1 trainer with bypass_mode=true: set it to null, "
                "or bypass_mode to false"
            )
    # Read in bypass mode alone, where the V1 trainer does not hand it over.
    if (loss := correction.get("loss_type", "ppo_clip")) != "ppo_clip":
        raise ConfigError(f"{_CORRECTION}.loss_type={loss} is ignored by verl's V1 trainer: set it to ppo_clip")


def _check_correction(config: DictConfig, mode: str, key: str, policy: DictConfig) -> None:
    """Raises ConfigError unless the loss reads with which probabilities a candidate was drawn."""
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
