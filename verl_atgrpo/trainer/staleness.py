"""By how many updates a step's candidates are behind the policy that is trained on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_atgrpo.trainer.metrics import PROBS_DIFF
from verl_atgrpo.trainer.row_parts import Tags, batch_of, each, is_padding
from verl_atgrpo.trainer.step_rows import groups_of


def _versions(tags: Tags) -> tuple[int, int]:
    return tags["min_global_steps"], tags["max_global_steps"]


def staleness_metrics(rows: Sequence[Tags], global_steps: int) -> dict[str, float]:
    """Returns the figures of a step whose candidates may have been drawn with older weights.

    A candidate's staleness is the number of weight syncs between its first token and the step: 0 where all of it was
    drawn with the weights that the step began with.

    Args:
        rows: the tags of the trainable policies' real rows.
        global_steps: the step, which begins with the weights of version `global_steps - 1`.
    """
    if not rows:
        return {}
    behind = [global_steps - 1 - _versions(tags)[0] for tags in rows]
    groups: dict[Any, set[int]] = defaultdict(set)
    for tags, group in zip(rows, groups_of(rows, {}), strict=True):
        groups[group].update(_versions(tags))
    return {
        "team/staleness_mean": sum(behind) / len(behind),
        "team/staleness_max": float(max(behind)),
        "team/candidates_resumed_share": sum(tags["resumed"] > 0 for tags in rows) / len(rows),
        "team/groups_mixed_versions_share": sum(len(versions) > 1 for versions in groups.values()) / len(groups),
    }


def fresh_probs_diff(batch: KVBatchMeta, global_steps: int) -> dict[str, float]:
    """Returns the largest difference of a token's probability between server and actor, over rows that were drawn
    with the weights that the step began with: others differ rightly. No figure where there are none.

    Args:
        batch: rows in the queue, with `old_log_probs`.
        global_steps: the step.
    """
    version = global_steps - 1
    fresh = [
        (key, tags)
        for key, tags in zip(batch.keys, batch.tags, strict=True)
        if not is_padding(tags) and _versions(tags) == (version, version)
    ]
    if not fresh:
        return {}
    rows = batch_of([key for key, _ in fresh], [tags for _, tags in fresh], batch.partition_id)
    largest = 0.0
    for _, data in each(rows, ["old_log_probs", "rollout_log_probs"]):
        actor, server = _tokens(data["old_log_probs"]), _tokens(data["rollout_log_probs"])
        largest = max(largest, float((actor.exp() - server.exp()).abs().max()))
    return {PROBS_DIFF: largest}


def _tokens(column: Tensor) -> Tensor:
    return column.values() if column.is_nested else column.flatten()
