"""What the C library does with freed memory in CPU mode, by the size of the models.

It keeps it (`verl_atgrpo.cpu`), which makes tiny models a fifth faster. Two policies of SmolLM2 would fill 24 GB in 20
steps so.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_atgrpo.train.config.policies import job_of
from verl_atgrpo.train.config.schema import AtGrpoConfig

LARGE = 64 << 20
"""Bytes of weights on disk from which on a model's processes return what they free."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_ARENA_MAX": "2"}
"""Blocks of 4 MiB and more."""
_WHERE = "ray_kwargs.ray_init.runtime_env.env_vars"


def return_large_blocks(config: DictConfig, settings: AtGrpoConfig) -> None:
    """Sets RETURNED for all processes of a job with a large model, where the job does not set them itself."""
    models = {job_of(config, name).actor_rollout_ref.model.path for name in settings.policy_settings()}
    if max(map(_bytes, models)) < LARGE:
        return
    with open_dict(config):
        OmegaConf.update(config, _WHERE, {**RETURNED, **(OmegaConf.select(config, _WHERE) or {})}, force_add=True)


def _bytes(model: str) -> int:
    if not Path(model).is_dir():  # of a hub, which has no tiny ones
        return LARGE
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
