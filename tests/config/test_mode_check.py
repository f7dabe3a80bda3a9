"""The modes: what asynchronous training cannot work with, and what would have no effect, ends on the driver."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf, open_dict

from verl_atgrpo import recipes
from verl_atgrpo.config.mode_check import check_mode
from verl_atgrpo.config.schema import AtGrpoConfig, ConfigError

CORRECTION = "algorithm.rollout_correction"
WARMUP = "trainer.v1.colocate_async.num_warmup_batches"
THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
STRATEGY = "trainer.v1.sampler.max_off_policy_strategy"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BYPASS = f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is=null"


@functools.cache
def composed(recipe: str) -> Any:
    return recipes.compose(recipe)


def check(recipe: str, *overrides: str) -> None:
    config = copy.deepcopy(composed(recipe))
    for key, value in OmegaConf.from_dotlist([override.lstrip("+") for override in overrides]).items():
        with open_dict(config):
            config[key] = OmegaConf.merge(config[key], value)
    settings = AtGrpoConfig.from_config(config)
    check_mode(config, settings.mode, {"actor_rollout_ref": config.actor_rollout_ref})


def refusal(recipe: str, overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(recipe, *overrides.split())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        f"{CORRECTION}.rollout_is=sequence",
        BYPASS,
        f"{WARMUP}=0.5 {THRESHOLD}=2",
        f"{WARMUP}=1.5 {THRESHOLD}=3",
        f"{CORRECTION}.rollout_rs=token_k1 {CORRECTION}.rollout_rs_threshold=2.0",
        "at_grpo.group_filter.min_groups=8 at_grpo.group_filter.max_tasks=64",
    ],
)
def test_what_works_asynchronously_is_accepted(overrides: str) -> None:
    check("plan_path_cpu_async", *overrides.split())


@pytest.mark.parametrize(
    ("overrides", "beginning", "remedy"),
    [
        (f"{CORRECTION}.rollout_is=null", f"{CORRECTION}.rollout_is=null", "token or sequence"),
        (f"{CORRECTION}.rollout_is=tokens", f"{CORRECTION}.rollout_is=tokens", "token or sequence"),
        (f"{LOSS}=bypass_mode", f"{LOSS}=bypass_mode ignores", "vanilla"),
        (f"{BYPASS} {LOSS}=gpg", f"{LOSS}=gpg", "rollout_is to token"),
        (f"{STRATEGY}=drop", f"{STRATEGY}=drop throws away", "wait"),
        (f"{THRESHOLD}=null", f"{THRESHOLD}=null", "at least 2"),
        (f"{THRESHOLD}=1", f"{THRESHOLD}=1", "at least 2"),
        (f"{THRESHOLD}=2.5", f"{THRESHOLD}=2.5", "at least 2"),
        (f"{WARMUP}=1.5 {THRESHOLD}=2", f"{THRESHOLD}=2", "at least 3"),
        (f"{WARMUP}=0", f"{WARMUP}=0", "at_grpo.mode=sync"),
        (f"{WARMUP}=-1", f"{WARMUP}=-1", "above 0"),
        (f"{WARMUP}=many", f"{WARMUP}=many", "above 0"),
        ("actor_rollout_ref.rollout.full_determinism=true", "actor_rollout_ref.rollout.full_determinism=true", "sync"),
        (
            "actor_rollout_ref.rollout.disaggregation.enabled=true",
            "actor_rollout_ref.rollout.disaggregation.enabled=true",
            "set it to false",
        ),
        # What another mode would read.
        ("trainer.v1.separate_async.parameter_sync_step=2", "trainer.v1.separate_async.parameter_sync_step=2", "sync"),
        (f"at_grpo.mode=sync {THRESHOLD}=8", f"{STRATEGY}=wait has no effect with at_grpo.mode=sync", "remove it"),
    ],
)
def test_what_does_not_is_refused(overrides: str, beginning: str, remedy: str) -> None:
    message = refusal("plan_path_cpu_async", overrides)
    assert message.startswith(beginning)
    assert remedy in message


@pytest.mark.parametrize(
    ("overrides", "beginning"),
    [
        (f"{WARMUP}=2", f"{WARMUP}=2 has no effect with at_grpo.mode=sync"),
        (f"{THRESHOLD}=3", f"{THRESHOLD}=3 has no effect with at_grpo.mode=sync"),
        (f"+{WARMUP}s=2", f"{WARMUP}s=2 has no effect"),
        ("trainer.v1.separate_async.num_warmup_batches=2", "trainer.v1.separate_async.num_warmup_batches=2"),
    ],
)
def test_asynchronous_keys_are_refused_in_sync_mode(overrides: str, beginning: str) -> None:
    assert refusal("plan_path_cpu", overrides).startswith(beginning)


@pytest.mark.parametrize("recipe", ["plan_path_cpu", "plan_path_cpu_async"])
@pytest.mark.parametrize(
    ("overrides", "beginning", "remedy"),
    [
        (
            f"{CORRECTION}.bypass_mode=true {CORRECTION}.rollout_is=token",
            f"{CORRECTION}.rollout_is=token is ignored",
            "bypass_mode to false",
        ),
        (f"{BYPASS} {CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs=token_k1 is ignored", "null"),
    ],
)
def test_what_no_mode_heeds_is_refused_in_every_mode(recipe: str, overrides: str, beginning: str, remedy: str) -> None:
    message = refusal(recipe, overrides)
    assert message.startswith(beginning)
    assert remedy in message
