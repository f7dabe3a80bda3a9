"""The rows of a step: sampled from the queue, filtered by group signal, topped up with more tasks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import compress
from typing import Any

from verl_atgrpo.train.config.schema import GroupFilter
from verl_atgrpo.train.estimators.spec import EstimatorSpec
from verl_atgrpo.train.rows.batch import Batch, Rows, Tags
from verl_atgrpo.train.rows.row_advantages import rows_with_signal

logger = logging.getLogger(__name__)

Group = tuple[str, str]
"""(policy, group): an update compares only rows of its own policy."""


def group_of(tags: Tags) -> Group:
    """Returns a row's group."""
    return tags["policy"], tags["group"]


def groups_with_signal(rows: Iterable[Tags], spec: EstimatorSpec) -> dict[Group, bool]:
    """Returns, for every group, whether one of its rows has an advantage other than 0.

    Computes the advantages as the policy's update does, so a group of equal rewards counts if the estimator does not
    centre. Dropping a group leaves the others' advantages unchanged: `by_task`, the only statistic over several
    groups, leaves out groups without signal.
    """
    every = list(rows)
    signal: dict[Group, bool] = {}
    for tags, has in zip(every, rows_with_signal(every, spec), strict=True):
        signal[group_of(tags)] = signal.get(group_of(tags), False) or bool(has)
    return signal


class StepRows(Batch):
    """All rows of a step, and which of them are trained on."""

    def __init__(self, keys: Iterable[str] = (), tags: Iterable[Any] = (), signal: dict[Group, bool] | None = None):
        """Takes the rows so far, and for each group whether it has a signal: none without a filter."""
        super().__init__(keys, tags)
        self.signal = signal or {}
        """Does not contain the groups of frozen policies."""
        self.untrained = Batch()
        """Rows of decisions that are not trained on, whatever their policy; not among the rows."""
        self.of_critic = Batch()
        """Rows of the critic; not among the rows."""
        self.metrics: dict[str, float] = {}

    def add(self, batch: Rows) -> list[dict[str, Any]]:
        """Adds sampled rows; returns the tags of those that may be trained on."""
        start = len(self)
        for key, tags in zip(batch.keys, batch.tags, strict=True):
            rows = self.of_critic if "critic" in tags else self if tags.get("trained", True) else self.untrained
            rows.keys.append(key)
            rows.tags.append(tags)
        return self.tags[start:]

    def sort(self) -> None:
        """Sorts rows, and the critic's, by task, submission, episode, scope, agent, turn and candidate.

        They arrive in the order in which episodes end, and mini-batches follow the order of rows: sorted, equal
        rollouts give equal updates.
        """

        def place(key: str, tags: Tags) -> tuple[Any, ...]:
            # A task may be submitted twice: in two steps, or in one in which a new epoch begins.
            _, session, _ = key.rsplit("_", 2)
            of_task = tags["task"], tags["global_steps"], tags["submission"], int(session)
            return *of_task, tags["scope"], tags["agent"], tags["turn"], tags["candidate"]

        for rows in (self, self.of_critic):
            places = list(map(place, rows.keys, rows.tags))
            rows.reorder(sorted(range(len(rows)), key=places.__getitem__))

    def kept(self) -> list[bool]:
        """Returns, for every row, whether the filter keeps it."""
        return [self.signal.get(group_of(tags), True) for tags in self.tags]

    def tokens_dropped_share(self, policy: str) -> float:
        """Returns the share of a policy's response tokens that the filter drops, each with its row's weight.

        With `loss_agg_mode: token-mean` the update's gradient is larger by 1 / (1 - this share).
        """
        played = dropped = 0.0
        for kept, tags in zip(self.kept(), self.tags, strict=True):
            if tags["policy"] == policy:
                tokens = tags["response_len"] * tags.get("weight", 1.0)
                played += tokens
                dropped += 0.0 if kept else tokens
        return dropped / played if played else 0.0

    def rows_for(self, policies: Collection[str], others: bool = False) -> Batch:
        """Returns the rows of these policies that the filter keeps; with `others`, all other rows."""
        wanted = [
            (kept and tags["policy"] in policies) != others for kept, tags in zip(self.kept(), self.tags, strict=True)
        ]
        return Batch(compress(self.keys, wanted), compress(self.tags, wanted))

    def close(self, trained: Mapping[str, Batch]) -> Batch:
        """Removes from the queue the rows that no policy was trained on; returns the others.

        verl removes what is returned, and stops at a step without rows: if no policy was trained, it gets all of them.
        `trained` is policy -> the rows of its update, with padding.
        """
        unused = self.rows_for(trained, others=True)
        if not trained:
            self.untrained.remove()
            return unused
        (self.untrained + unused).remove()
        return sum(trained.values(), Batch())


def sample_rows(
    sample: Callable[[int], tuple[Rows, dict[str, float]]],
    add_tasks: Callable[[int], object],
    tasks: int,
    group_filter: GroupFilter | None,
    trainable: Collection[str],
    spec: EstimatorSpec,
) -> StepRows:
    """Returns the rows of a step: of `tasks` tasks, and of those that a filter of groups without signal adds.

    `sample` waits for a number of tasks, and returns their rows and verl's metrics of the wait. `add_tasks` submits a
    number of further ones; as many are sampled in addition, so the next step has as many in flight as without a
    filter (in an asynchronous mode they may be others). Rows of policies that are not `trainable` are never dropped.
    """
    rows = StepRows()
    counts: Counter[str] = Counter()
    played = 0
    while tasks:
        batch, counted = sample(tasks)
        counts.update(counted)
        new = rows.add(batch)
        played += tasks
        if group_filter is None:
            break
        rows.signal.update(groups_with_signal((tags for tags in new if tags["policy"] in trainable), spec))
        if tasks := tasks_to_add(group_filter, sum(rows.signal.values()), played):
            add_tasks(tasks)
    rows.metrics = dict(counts)
    if group_filter is not None:
        rows.metrics.update(_filter_metrics(rows, group_filter, played, trainable))
    return rows


def tasks_to_add(group_filter: GroupFilter, groups: int, played: int) -> int:
    """Returns how many tasks to add after `played` tasks gave `groups` groups with signal; 0 ends the top-up.

    The number follows from the rate so far, but is at most `played`: a rate from a few tasks is unreliable.
    """
    wanted, most = group_filter.min_groups, group_filter.max_tasks
    if wanted is None or most is None or groups >= wanted:
        return 0
    missing = wanted - groups
    expected = -(-missing * played // groups) if groups else played
    return min(expected, played, most - played)


def _filter_metrics(
    rows: StepRows, group_filter: GroupFilter, played: int, trainable: Collection[str]
) -> dict[str, float]:
    groups, kept, dropped = len(rows.signal), sum(rows.signal.values()), rows.kept().count(False)
    may_be_dropped = sum(tags["policy"] in trainable for tags in rows.tags)
    metrics = {
        "team/tasks": float(played),
        "team/groups_kept": float(kept),
        "team/groups_dropped": float(groups - kept),
        "team/groups_dropped_share": (groups - kept) / max(1, groups),
        "team/rows_dropped": float(dropped),
        "team/rows_dropped_share": dropped / max(1, may_be_dropped),
    }
    if group_filter.min_groups is not None:
        missing = max(0, group_filter.min_groups - kept)
        metrics["team/groups_missing"] = float(missing)
        if missing:
            fewer = f"fewer than at_grpo.group_filter.min_groups={group_filter.min_groups}"
            logger.warning("%d groups have a signal after %d tasks, %s", kept, played, fewer)
    return metrics
