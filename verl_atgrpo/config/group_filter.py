"""The section `at_grpo.group_filter`: groups that teach nothing are dropped, and the step is topped up by more tasks.

Which groups those are, `trainer.step_rows` asks the estimator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WHERE = "at_grpo.group_filter"


class GroupFilterError(ValueError):
    """The section cannot work; the message is one line with the key, the value and the remedy."""


@dataclass(frozen=True)
class GroupFilter:
    """What a step does about comparison groups in which every advantage is 0: it drops them."""

    min_groups: int | None = None
    """Groups that a step shall have after the dropping, over all trainable policies; tasks are added until it has
    them. None: no top-up."""
    max_tasks: int | None = None
    """Tasks that a step plays at most, those of `data.train_batch_size` included."""

    @classmethod
    def from_mapping(cls, block: Mapping[str, Any] | None) -> GroupFilter | None:
        """Reads the section, None for no filter; raises GroupFilterError for what it cannot accept."""
        if block is None:
            return None
        if not isinstance(block, Mapping):
            raise GroupFilterError(
                f"{_WHERE}={block!r}: use null, {{}} to drop groups, or {{min_groups: ..., max_tasks: ...}} to "
                "top the step up as well"
            )
        known = [item.name for item in dataclasses.fields(cls)]
        for key, value in block.items():
            if key not in known:
                raise GroupFilterError(f"{_WHERE}.{key} is not a known key: use one of {', '.join(known)}")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise GroupFilterError(f"{_WHERE}.{key}={value!r}: a whole number above 0, or null")
        settings = cls(**block)
        if settings.min_groups is not None and settings.max_tasks is None:
            raise GroupFilterError(
                f"{_WHERE}.min_groups={settings.min_groups}: a policy that is always right never has them; say with "
                "max_tasks how many tasks a step plays at most"
            )
        if settings.min_groups is None and settings.max_tasks is not None:
            raise GroupFilterError(
                f"{_WHERE}.max_tasks={settings.max_tasks} has no effect without min_groups; set that, or remove it"
            )
        return settings

    def check_tasks(self, train_batch_size: int, train_tasks: int) -> None:
        """Raises GroupFilterError if `max_tasks` leaves no room for a top-up, or would deal a task out twice."""
        if self.max_tasks is None:
            return
        if self.max_tasks <= train_batch_size:
            raise GroupFilterError(
                f"{_WHERE}.max_tasks={self.max_tasks}: the step plays data.train_batch_size={train_batch_size} tasks "
                "anyway; set it higher, or remove it with min_groups"
            )
        if self.max_tasks > train_tasks:
            raise GroupFilterError(
                f"{_WHERE}.max_tasks={self.max_tasks}: there are {train_tasks} training tasks, and one played twice "
                "in a step gives the same rows twice; lower it, or raise at_grpo.train_tasks"
            )

    def tasks_to_add(self, groups: int, played: int) -> int:
        """Returns how many tasks to play on top of those `played`, which left so many groups; 0 ends the top-up.

        As many as the missing groups take at the rate so far, but no more than were played already: the rate of a
        few tasks says little.
        """
        if self.min_groups is None or self.max_tasks is None or groups >= self.min_groups:
            return 0
        missing = self.min_groups - groups
        expected = -(-missing * played // groups) if groups else played
        return min(expected, played, self.max_tasks - played)
