"""The section `at_grpo.record`: what a training writes for its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RecordSettings:
    """The section `at_grpo.record`."""

    train_tasks: int = 4
    """Tasks of every step whose episodes are recorded: those with the lowest numbers in the batch."""
    val_tasks: int = 4
    """Tasks of every validation whose episodes are recorded: the first ones, so the same ones every time."""
    max_megabytes: float = 64.0
    """How much episodes may take on disk; the oldest go first. Metrics are not counted and never deleted."""

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> RecordSettings:
        """Reads the section; raises ValueError for what it does not know or cannot accept."""
        known = [item.name for item in dataclasses.fields(cls)]
        for key, value in section.items():
            if key not in known:
                raise ValueError(f"at_grpo.record.{key} is not a known key: use one of {', '.join(known)}")
            whole = key != "max_megabytes"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"at_grpo.record.{key}={value!r}: a {'whole ' * whole}number")
            if value < 0 or (not whole and value == 0):
                raise ValueError(f"at_grpo.record.{key}={value}: {'0 or more' if whole else 'above 0'}")
        return cls(**section)
