"""The section `at_grpo.policies`: what each policy changes about the job's `actor_rollout_ref`.

A policy's settings are merged into the job's before interpolations are resolved, so that verl's derived keys (token
budgets, the served model's name, ...) follow from the policy's own values.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_atgrpo.train.config.schema import EXPANDED, SHARED, AtGrpoConfig, ConfigError, PolicySettings
from verl_atgrpo.train.config.verl_keys import is_known
from verl_atgrpo.train.config.view import ACTOR

logger = logging.getLogger(__name__)

POLICIES_FILE = "policies.json"
"""In every complete checkpoint: trained policy -> its folder there."""
ADAPTER = "lora_adapter"
"""Folder of an adapter in a checkpoint, in peft's format."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTERS = "adapters"
"""Key of verl's section `model.lora` under which workers and servers find the policies of a shared base, by name:
`trainable`, `served`, `rank`, `alpha`, `target_modules`, `exclude_modules` and `optim`."""
PAST = "past_selves"
"""Key of the same section: for how many past selves of a policy the servers have room beside those adapters."""
_FULL_MODEL = "hf_model"
_OF_LORA = {"rank": "lora_rank", "alpha": "lora_alpha"}
"""Keys of `lora` that verl's `model` has under another name."""


def expand_policies(config: DictConfig, settings: AtGrpoConfig) -> None:
    """Writes every policy's own `actor_rollout_ref` into a job that names several; raises as `unresolved_job`."""
    if not settings.policies:
        leave_out_full_model(SHARED, config.actor_rollout_ref)
        return
    expanded = {}
    for name, policy in settings.policy_settings().items():
        own = unresolved_job(config, name, policy).actor_rollout_ref
        leave_out_full_model(name, own)
        expanded[name] = OmegaConf.to_container(own, resolve=True)
    with open_dict(config):
        config[EXPANDED] = expanded


def unresolved_job(config: DictConfig, name: str, settings: PolicySettings) -> DictConfig:
    """Returns a copy of a job that is not resolved yet, with policy `name`'s own `actor_rollout_ref`.

    Raises ConfigError if a block has a key that verl's section does not.
    """
    job: DictConfig = copy.deepcopy(config)
    if settings.gpus is not None:
        job.trainer.n_gpus_per_node = settings.gpus  # the servers' sizes derive from it
    lora = {} if settings.lora is None else settings.lora.model_dump(exclude_none=True)
    adapter = {_OF_LORA.get(key, key): value for key, value in lora.items()}
    blocks = {"model": {**settings.model, **adapter}, "actor": settings.actor, "actor.optim": settings.optim}
    for section, block in {**blocks, "rollout": settings.rollout}.items():
        _merge(OmegaConf.select(job.actor_rollout_ref, section), block, f"at_grpo.policies.{name}.{section}")
    return job


def _merge(section: DictConfig, block: Mapping[str, Any], where: str) -> None:
    for key, value in block.items():
        if key not in section and not is_known(f"{ACTOR}.{where.split('.', 3)[3]}.{key}"):
            raise ConfigError(f"{where}.{key} is not a key of verl's section; it has {', '.join(section)}")
        if isinstance(value, Mapping) and isinstance(section[key], DictConfig) and len(section[key]):
            _merge(section[key], value, f"{where}.{key}")
        else:
            with open_dict(section):  # sections such as engine_kwargs.vllm have further keys
                section[key] = value


def config_of_host(config: DictConfig, settings: AtGrpoConfig, host: str) -> DictConfig:
    """Returns the job of a policy whose workers and servers are to have the adapters of all that share its base.

    They are in `actor_rollout_ref.model.lora.adapters`, which verl passes on to workers and servers. As
    `config_of_policy` for a policy with a model of its own.
    """
    job = config_of_policy(config, host)
    names = settings.bases()[host]
    if settings.policy_settings()[host].base is None:
        return job
    adapters = {}
    for name in names:
        own = config_of_policy(config, name).actor_rollout_ref
        adapters[name] = {
            "trainable": settings.policy_settings()[name].trainable,
            "served": settings.critic is None or name != settings.critic.policy,
            "rank": own.model.lora_rank,
            "alpha": own.model.lora_alpha,
            "target_modules": own.model.target_modules,
            "exclude_modules": own.model.exclude_modules,
            "optim": own.actor.optim,
        }
    past = settings.opponents.size if settings.opponents is not None and settings.self_played in names else 0
    with open_dict(job):
        job.actor_rollout_ref.model.lora[PAST] = past
        job.actor_rollout_ref.model.lora_rank = max(adapter["rank"] for adapter in adapters.values())
        job.actor_rollout_ref.model.lora[ADAPTERS] = adapters
    return job


def leave_out_full_model(name: str, policy: DictConfig) -> None:
    """Removes the Hugging Face model from the checkpoint contents of a policy with an adapter.

    verl would save the base model under the adapter's parameter names, which nothing can load.
    """
    checkpoint = policy.actor.checkpoint
    if policy.model.lora_rank > 0 and _FULL_MODEL in checkpoint.save_contents:
        checkpoint.save_contents = [item for item in checkpoint.save_contents if item != _FULL_MODEL]
        told = (
            "policy %r has an adapter: its checkpoints hold no Hugging Face model (%s); verl-atgrpo export makes one"
        )
        logger.warning(told, name, _FULL_MODEL)


def config_of_policy(config: DictConfig, name: str) -> DictConfig:
    """Returns a copy of the job's configuration with policy `name`'s own `actor_rollout_ref`."""
    job: DictConfig = copy.deepcopy(config)
    with open_dict(job):
        if EXPANDED in job:
            job.actor_rollout_ref = job[EXPANDED][name]
    return job
