"""What processes of verl's FSDP engines import, which takes seconds: the fork server does so once for all of them."""

from __future__ import annotations

from verl_atgrpo import cpu

cpu.activate()

import peft  # noqa: F401
import transformers  # noqa: F401
import verl.workers.engine_workers
import verl.workers.utils.losses  # noqa: F401

import verl_atgrpo.lab.tiny_models.tiny
import verl_atgrpo.recipes
import verl_atgrpo.train.engine.prefix_tree.engine
import verl_atgrpo.train.serving.workers  # noqa: F401
