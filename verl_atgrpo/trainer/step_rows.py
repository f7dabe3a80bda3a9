"""The rows of a step: drawn from the rollout, without groups that teach nothing, topped up by more tasks."""

from __future__ import annotations

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transfer_queue import KVBatchMeta

from verl_atgrpo.advantage import at_grpo_advantage
from verl_atgrpo.group_filter import GroupFilter
from verl_atgrpo.uid import split_uid

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

Tags = Mapping[str, Any]
PARTITION = "train"
"""TransferQueue's name for what is not validation."""
Group = tuple[str, str]
"""Policy and group: a policy's update compares its own rows only."""


def group_of(tags: Tags) -> Group:
    """Returns the group that a row is compared within, whatever parts of it the estimator tells apart."""
    return tags["policy"], split_uid(tags["group"]).group


def teaching_groups(rows: Iterable[Tags], algorithm: Any) -> dict[Group, bool]:
    """Returns for every group whether one of its rows has an advantage other than 0.

    The estimator itself is asked, with a policy's rows as its update hands them over: so groups are what it
    compares, and a group of equal rewards that it does not centre is not dropped. No estimator has a statistic of
    several groups, so the others' advantages stay what they are.

    Args:
        rows: the tags of real rows (see `rollout.rows.training_rows`), groups complete.
        algorithm: verl's `algorithm` section, which names the estimator.
    """
    by_policy: dict[str, list[Tags]] = defaultdict(list)
    for tags in rows:
        by_policy[tags["policy"]].append(tags)
    teaches: dict[Group, bool] = {}
    for mine in by_policy.values():
        # In float32, as rewards come to the estimator in training.
        rewards = torch.tensor([[tags["reward"]] for tags in mine], dtype=torch.float32)
        uids = np.array([tags["group"] for tags in mine], dtype=object)
        advantages, _ = at_grpo_advantage(rewards, torch.ones_like(rewards), algorithm, uids)
        for tags, advantage in zip(mine, advantages.flatten().tolist(), strict=True):
            group = group_of(tags)
            teaches[group] = teaches.get(group, False) or advantage != 0
    return teaches


def _place(key: str, tags: Tags) -> tuple[Any, ...]:
    session = int(key.rsplit("_", 2)[1])
    return tags["task"], session, tags["agent"], tags["turn"], tags["candidate"]


@dataclass
class StepRows:
    """Everything that was played in a step, and which of its rows are left to train on."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    teaches: dict[Group, bool] = field(default_factory=dict)
    """Empty without a filter; a frozen policy's groups are not in it."""
    metrics: dict[str, float] = field(default_factory=dict)

    def sort(self) -> None:
        """Orders rows by task, episode, agent, turn and candidate: they came in the order in which episodes ended.

        Mini-batches are dealt from this order, so equal rollouts give equal updates.
        """
        order = sorted(range(len(self.keys)), key=lambda row: _place(self.keys[row], self.tags[row]))
        self.keys, self.tags = [self.keys[row] for row in order], [self.tags[row] for row in order]

    def left(self) -> list[bool]:
        """Returns for every row whether it was not dropped."""
        if not self.teaches:
            return [True] * len(self.tags)
        return [self.teaches.get(group_of(tags), True) for tags in self.tags]

    def of(self, policies: Collection[str]) -> KVBatchMeta:
        """Returns the rows of these policies that were not dropped."""
        return self._rows(policies, True)

    def but(self, policies: Collection[str]) -> KVBatchMeta:
        """Returns all rows that `of` leaves out."""
        return self._rows(policies, False)

    def _rows(self, policies: Collection[str], theirs: bool) -> KVBatchMeta:
        rows = [
            row
            for row, (left, tags) in enumerate(zip(self.left(), self.tags, strict=True))
            if (left and tags["policy"] in policies) == theirs
        ]
        return KVBatchMeta(
            partition_id=PARTITION, keys=[self.keys[row] for row in rows], tags=[self.tags[row] for row in rows]
        )


def draw(
    sample: Callable[[int], tuple[KVBatchMeta, dict[str, float]]],
    add_tasks: Callable[[int], object],
    tasks: int,
    group_filter: GroupFilter | None,
    trainable: Collection[str],
    algorithm: Any,
) -> StepRows:
    """Returns the rows of a step.

    Args:
        sample: waits for so many tasks, and returns their rows with verl's counts of the waiting.
        add_tasks: hands so many more tasks to the rollout. All are waited for, so none is left to the next step.
        tasks: those that the rollout has been handed.
        group_filter: None keeps every row.
        trainable: names of the policies that are trained; the filter leaves the others' rows alone.
        algorithm: verl's `algorithm` section.
    """
    rows = StepRows()
    counts: Counter[str] = Counter()
    played = 0
    while tasks:
        batch, counted = sample(tasks)
        counts.update(counted)
        rows.keys += batch.keys
        rows.tags += batch.tags
        played += tasks
        if group_filter is None:
            break
        rows.teaches.update(teaching_groups((tags for tags in batch.tags if tags["policy"] in trainable), algorithm))
        if tasks := group_filter.tasks_to_add(sum(rows.teaches.values()), played):
            add_tasks(tasks)
    rows.metrics = dict(counts)
    if group_filter is not None:
        rows.metrics.update(_filter_metrics(rows, group_filter, played))
    return rows


def _filter_metrics(rows: StepRows, group_filter: GroupFilter, played: int) -> dict[str, float]:
    groups, kept, dropped = len(rows.teaches), sum(rows.teaches.values()), rows.left().count(False)
    metrics = {
        "team/tasks": float(played),
        "team/groups_kept": float(kept),
        "team/groups_dropped": float(groups - kept),
        "team/groups_dropped_share": (groups - kept) / groups if groups else 0.0,
        "team/rows_dropped": float(dropped),
        "team/rows_dropped_share": dropped / len(rows.tags),
    }
    if group_filter.min_groups is not None:
        missing = max(0, group_filter.min_groups - kept)
        metrics["team/groups_missing"] = float(missing)
        if missing:
            logger.warning(
                "%d groups teach something after %d tasks, fewer than at_grpo.group_filter.min_groups=%d",
                kept,
                played,
                group_filter.min_groups,
            )
    return metrics
