"""What processes of verl's FSDP engines import, which takes seconds: the fork server does so once for all of them."""

from __future__ import annotations

from verl_atgrpo import cpu

cpu.activate()

import peft  # noqa: E402, F401
import transformers  # noqa: E402, F401
import verl.workers.engine_workers  # noqa: E402, F401
import verl.workers.utils.losses  # noqa: E402, F401

import verl_atgrpo.lab.tiny_models.tiny  # noqa: E402, F401
import verl_atgrpo.recipes  # noqa: E402
import verl_atgrpo.train.engine.prefix_tree.engine  # noqa: E402, F401
import verl_atgrpo.train.serving.workers  # noqa: E402, F401
