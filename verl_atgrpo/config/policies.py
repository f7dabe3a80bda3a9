"""The section `at_grpo.policies`: what each policy of a team changes about the job's `actor_rollout_ref`.

A policy's settings are laid over the job's while its interpolations are still open, so that verl's derived
keys (token budgets, the served model's name, ...) follow from the policy's own values.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

logger = logging.getLogger(__name__)

SHARED = "shared"
"""The policy's name where the recipe lists none: the job's `actor_rollout_ref` as it stands."""
EXPANDED = "at_grpo_policies"
"""Where the driver leaves every policy's resolved `actor_rollout_ref` for the trainer and the workers."""
POLICIES_FILE = "policies.json"
"""In every complete checkpoint: trained policy -> its folder there."""
_LORA = {"rank": "lora_rank", "alpha": "lora_alpha", "target_modules": "target_modules"}
_FULL_MODEL = "hf_model"
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "n",
    "name",
    "mode",
    "val_kwargs",
    "agent",
    "trace",
)


class PolicyConfigError(ValueError):
    """A policy's block cannot work; the message is one line with the key, the value and the remedy."""


@dataclass(frozen=True)
class PolicySettings:
    """One block of `at_grpo.policies`."""

    model: dict[str, Any] = field(default_factory=dict)
    """Laid over `actor_rollout_ref.model`."""
    optim: dict[str, Any] = field(default_factory=dict)
    """Laid over `actor_rollout_ref.actor.optim`."""
    lora: dict[str, Any] = field(default_factory=dict)
    """`rank`, `alpha`, `target_modules`: an adapter instead of full training."""
    actor: dict[str, Any] = field(default_factory=dict)
    """Laid over `actor_rollout_ref.actor`."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """Laid over `actor_rollout_ref.rollout`; how answers are sampled is the job's, not a policy's."""
    trainable: bool = True
    """False: the policy answers, and never changes."""
    gpus: int | None = None
    """Devices of its own on every node, with `placement: split`."""

    @classmethod
    def from_mapping(cls, name: str, block: Mapping[str, Any] | None) -> PolicySettings:
        """Reads a block; raises PolicyConfigError for what it does not know or cannot accept."""
        where = f"at_grpo.policies.{name}"
        if not name.isidentifier():
            raise PolicyConfigError(f"{where}: use letters, digits and underscores for a policy's name")
        known = [item.name for item in dataclasses.fields(cls)]
        for key, value in (block or {}).items():
            if key not in known:
                raise PolicyConfigError(f"{where}.{key} is not a known key: use one of {', '.join(known)}")
            if key == "trainable":
                if not isinstance(value, bool):
                    raise PolicyConfigError(f"{where}.trainable={value!r}: true or false")
            elif key == "gpus":
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise PolicyConfigError(f"{where}.gpus={value!r}: a whole number above 0")
            elif not isinstance(value, Mapping):
                raise PolicyConfigError(f"{where}.{key}={value!r}: a section with keys of its own")
        values: dict[str, Any] = {
            key: dict(value) if isinstance(value, Mapping) else value for key, value in (block or {}).items()
        }
        settings = cls(**values)
        settings._check(where)
        return settings

    def _check(self, where: str) -> None:
        for key in self.lora:
            if key not in _LORA:
                raise PolicyConfigError(f"{where}.lora.{key} is not a known key: use one of {', '.join(_LORA)}")
        if self.lora and not (isinstance(self.lora.get("rank"), int) and self.lora["rank"] > 0):
            raise PolicyConfigError(f"{where}.lora.rank={self.lora.get('rank')!r}: a whole number above 0")
        for key in _SAMPLING:
            if key in self.rollout:
                raise PolicyConfigError(
                    f"{where}.rollout.{key}: the same for every policy of a job; set actor_rollout_ref.rollout.{key}"
                )
        if not self.trainable:
            for key in ("lora", "optim"):
                if getattr(self, key):
                    raise PolicyConfigError(f"{where}.{key} has no effect on a frozen policy: remove it")


def expanded(config: DictConfig, policies: Mapping[str, PolicySettings]) -> DictConfig:
    """Returns policy -> its whole `actor_rollout_ref`; `config` must not be resolved yet, unless expanded before.

    Raises PolicyConfigError if a block has a key that verl's section does not.
    """
    if EXPANDED in config:
        known: DictConfig = config[EXPANDED]
        return known
    return OmegaConf.create({name: _actor_rollout_ref(config, name, settings) for name, settings in policies.items()})


def _actor_rollout_ref(config: DictConfig, name: str, settings: PolicySettings) -> Any:
    job = copy.deepcopy(config)
    if settings.gpus is not None:
        job.trainer.n_gpus_per_node = settings.gpus  # what its servers' sizes derive from
    lora = {_LORA[key]: value for key, value in settings.lora.items()}
    for section, block in (
        ("model", {**settings.model, **lora}),
        ("actor", settings.actor),
        ("actor.optim", settings.optim),
        ("rollout", settings.rollout),
    ):
        _lay_over(OmegaConf.select(job.actor_rollout_ref, section), block, f"at_grpo.policies.{name}.{section}")
    leave_out_full_model(name, job.actor_rollout_ref)
    return OmegaConf.to_container(job.actor_rollout_ref, resolve=True)


def leave_out_full_model(name: str, policy: DictConfig) -> None:
    """Takes the Hugging Face model out of what is saved of a policy with an adapter.

    verl would write the base model under the adapter's names, which nothing can load.
    """
    checkpoint = policy.actor.checkpoint
    if policy.model.lora_rank > 0 and _FULL_MODEL in checkpoint.save_contents:
        checkpoint.save_contents = [item for item in checkpoint.save_contents if item != _FULL_MODEL]
        logger.warning(
            "policy %r has an adapter: its checkpoints hold no Hugging Face model (%s); verl-atgrpo export makes one",
            name,
            _FULL_MODEL,
        )


def _lay_over(section: DictConfig, block: Mapping[str, Any], where: str) -> None:
    for key, value in block.items():
        if key not in section:
            raise PolicyConfigError(f"{where}.{key} is not a key of verl's section; it has {', '.join(section)}")
        if isinstance(value, Mapping) and isinstance(section[key], DictConfig) and len(section[key]):
            _lay_over(section[key], value, f"{where}.{key}")
        else:
            section[key] = value


def job_of(config: DictConfig, name: str) -> DictConfig:
    """Returns the job's configuration as policy `name` sees it: its own `actor_rollout_ref`, all else shared."""
    job: DictConfig = copy.deepcopy(config)
    with open_dict(job):
        if EXPANDED in job:
            job.actor_rollout_ref = job[EXPANDED][name]
    return job
