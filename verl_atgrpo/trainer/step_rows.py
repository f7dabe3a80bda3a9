"""The rows of a step: sampled from the queue, without groups that have no signal, topped up by more tasks."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_atgrpo.config.schema import GroupFilter
from verl_atgrpo.estimators.ids import row_ids
from verl_atgrpo.estimators.kernel import team_advantages
from verl_atgrpo.estimators.spec import EstimatorSpec
from verl_atgrpo.trainer.queue import Rows, Tags, batch_of

logger = logging.getLogger(__name__)

Group = tuple[str, str]
"""Policy and group: a policy's update compares its own rows only."""


def group_of(tags: Tags) -> Group:
    """Returns the group that a row is compared within."""
    return tags["policy"], tags["group"]


def groups_with_signal(rows: Iterable[Tags], spec: EstimatorSpec) -> dict[Group, bool]:
    """Returns for every group whether one of its rows has an advantage other than 0.

    The estimator itself is asked, with a policy's rows as its update hands them over: so groups are what it
    compares, and a group of equal rewards that it does not centre is not dropped. No estimator has a statistic of
    several groups, so the others' advantages stay what they are.

    Args:
        rows: the tags of real rows (see `rollout.rows.training_rows`), groups complete.
        spec: the estimator.
    """
    by_policy: dict[str, list[Tags]] = defaultdict(list)
    for tags in rows:
        by_policy[tags["policy"]].append(tags)
    signal: dict[Group, bool] = {}
    for mine in by_policy.values():
        # In float32, as in an update.
        rewards = torch.tensor([tags["reward"] for tags in mine], dtype=torch.float32)
        advantages = team_advantages(rewards, row_ids(mine, spec), spec)
        for tags, advantage in zip(mine, advantages.tolist(), strict=True):
            group = group_of(tags)
            signal[group] = signal.get(group, False) or advantage != 0
    return signal


def _place(key: str, tags: Tags) -> tuple[Any, ...]:
    uid, session, _ = key.rsplit("_", 2)
    # A task may be there twice: submitted in two steps, or in one step at the turn of an epoch. Of the latter the
    # order is open, but their samples have the same seeds.
    return tags["task"], tags["global_steps"], uid, int(session), tags["agent"], tags["turn"], tags["candidate"]


@dataclass
class StepRows:
    """Everything that was played in a step, and which of its rows are left to train on."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    signal: dict[Group, bool] = field(default_factory=dict)
    """Empty without a filter; a frozen policy's groups are not in it."""
    metrics: dict[str, float] = field(default_factory=dict)

    def sort(self) -> None:
        """Orders rows by task, the step of its submission, episode, agent, turn and candidate: they came in the order
        in which episodes ended.

        Mini-batches are dealt from this order, so equal rollouts give equal updates.
        """
        order = sorted(range(len(self.keys)), key=lambda row: _place(self.keys[row], self.tags[row]))
        self.keys, self.tags = [self.keys[row] for row in order], [self.tags[row] for row in order]

    def left(self) -> list[bool]:
        """Returns for every row whether it was not dropped."""
        if not self.signal:
            return [True] * len(self.tags)
        return [self.signal.get(group_of(tags), True) for tags in self.tags]

    def rows_for(self, policies: Collection[str]) -> Rows:
        """Returns the rows of these policies that were not dropped."""
        return self._rows(policies, True)

    def rows_except(self, policies: Collection[str]) -> Rows:
        """Returns all rows that `rows_for` leaves out."""
        return self._rows(policies, False)

    def _rows(self, policies: Collection[str], theirs: bool) -> Rows:
        rows = [
            row
            for row, (left, tags) in enumerate(zip(self.left(), self.tags, strict=True))
            if (left and tags["policy"] in policies) == theirs
        ]
        return batch_of([self.keys[row] for row in rows], [self.tags[row] for row in rows])


def sample_rows(
    sample: Callable[[int], tuple[Rows, dict[str, float]]],
    add_tasks: Callable[[int], object],
    tasks: int,
    group_filter: GroupFilter | None,
    trainable: Collection[str],
    spec: EstimatorSpec,
) -> StepRows:
    """Returns the rows of a step.

    Args:
        sample: waits for so many tasks, and returns their rows with verl's counts of the waiting.
        add_tasks: hands so many more tasks to the rollout. As many are waited for, so as many are left to the next
            step as before; in an asynchronous mode these may be others.
        tasks: how many of those that the rollout has been handed are waited for at first.
        group_filter: None keeps every row.
        trainable: names of the policies that are trained; the filter leaves the others' rows alone.
        spec: the estimator.
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
        rows.signal.update(groups_with_signal((tags for tags in batch.tags if tags["policy"] in trainable), spec))
        if tasks := tasks_to_add(group_filter, sum(rows.signal.values()), played):
            add_tasks(tasks)
    rows.metrics = dict(counts)
    if group_filter is not None:
        rows.metrics.update(_filter_metrics(rows, group_filter, played))
    return rows


def tasks_to_add(group_filter: GroupFilter, groups: int, played: int) -> int:
    """Returns how many tasks to play on top of those `played`, which left so many groups; 0 ends the top-up.

    As many as the missing groups take at the rate so far, but no more than were played already: the rate of a
    few tasks says little.
    """
    wanted, most = group_filter.min_groups, group_filter.max_tasks
    if wanted is None or most is None or groups >= wanted:
        return 0
    missing = wanted - groups
    expected = -(-missing * played // groups) if groups else played
    return min(expected, played, most - played)


def _filter_metrics(rows: StepRows, group_filter: GroupFilter, played: int) -> dict[str, float]:
    groups, kept, dropped = len(rows.signal), sum(rows.signal.values()), rows.left().count(False)
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
                "%d groups have a signal after %d tasks, fewer than at_grpo.group_filter.min_groups=%d",
                kept,
                played,
                group_filter.min_groups,
            )
    return metrics
