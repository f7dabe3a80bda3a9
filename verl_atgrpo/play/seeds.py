"""Seeds that are the same in every process."""

from __future__ import annotations

import hashlib
from typing import Literal


def stable_hash(*parts: object) -> int:
    """Returns a 63-bit integer of `parts` that is the same in every process and Python version.

    Unlike `hash()`, which depends on PYTHONHASHSEED, it can be used to derive seeds.
    """
    text = "\x1f".join(repr(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def episode_seed(
    seed: int,
    split: Literal["train", "val"],
    step: int | Literal["val"],
    index: int,
    session: int,
    earlier: int = 0,
) -> int:
    """Returns the seed of an episode's samples.

    Training samples differ between steps. Validation (`step="val"`) always has the same seeds, so that its curve
    shows changes of the policy only.

    Args:
        seed: the run's, `at_grpo.seed`.
        split: the task's split.
        step: the training step.
        index: of the task in its split.
        session: index of the episode among the task's.
        earlier: how often the task was submitted before in the same step, which happens when a data set starts again.
    """
    return stable_hash(seed, split, step, index, session, *([earlier] if earlier else []))
