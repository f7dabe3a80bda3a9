"""Figures of a training step, per team, agent and turn, from the rows' tags.

Padding rows are left out by the caller. Names: `team/...`, `agent/<name>/...`, `agent/<name>/turn_<t>/...`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from verl_atgrpo.advantage import inflation_factors
from verl_atgrpo.uid import split_uid

Tags = Mapping[str, Any]
_PROBS_DIFF = "training/rollout_probs_diff_max"


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def zero_variance_share(rows: Sequence[Tags]) -> float:
    """Returns the share of comparison groups whose rewards are all equal: they teach nothing."""
    rewards: dict[str, set[float]] = defaultdict(set)
    for tags in rows:
        rewards[split_uid(tags["group"]).group].add(tags["reward"])
    return _mean(len(values) == 1 for values in rewards.values())


def _row_means(rows: Sequence[Tags], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}/reward": _mean(tags["reward"] for tags in rows),
        f"{prefix}/team_reward": _mean(tags["team_reward"] for tags in rows),
        f"{prefix}/local_reward": _mean(tags["local_reward"] for tags in rows),
        f"{prefix}/response_length": _mean(tags["response_len"] for tags in rows),
        f"{prefix}/response_clipped": _mean(tags["truncated"] for tags in rows),
        f"{prefix}/zero_variance_groups": zero_variance_share(rows),
        f"{prefix}/rows": float(len(rows)),
    }


def step_metrics(rows: Sequence[Tags]) -> dict[str, float]:
    """Returns the metrics of one training step.

    Args:
        rows: the tags of the real rows (see `rollout.rows.training_rows`); not empty.

    `agent/<name>/inflation_factor` is Dr. MAS' gradient-inflation factor (arXiv 2602.08847).
    """
    episodes = {tags["episode"]: tags for tags in rows}.values()
    metrics = {
        "team/episodes": float(len(episodes)),
        "team/success": _mean(tags["episode_success"] for tags in episodes),
        "team/episode_reward": _mean(tags["episode_reward"] for tags in episodes),
        "team/rows_per_episode": len(rows) / len(episodes),
        "team/zero_variance_groups": zero_variance_share(rows),
    }
    by_agent: dict[str, list[Tags]] = defaultdict(list)
    by_turn: dict[tuple[str, int], list[Tags]] = defaultdict(list)
    for tags in rows:
        by_agent[tags["agent"]].append(tags)
        by_turn[tags["agent"], tags["turn"]].append(tags)
    for agent, mine in by_agent.items():
        metrics.update(_row_means(mine, f"agent/{agent}"))
    for (agent, turn), mine in sorted(by_turn.items()):
        metrics.update(_row_means(mine, f"agent/{agent}/turn_{turn}"))
    rewards = torch.tensor([tags["reward"] for tags in rows], dtype=torch.float64)
    for agent, factor in inflation_factors(rewards, [tags["agent"] for tags in rows]).items():
        metrics[f"agent/{agent}/inflation_factor"] = factor
    return metrics


def policy_metrics(by_policy: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns what the policies' updates reported; under `policy/<name>/` where there are several.

    With one policy, verl's own names stay. `training/rollout_probs_diff_max` is there in any case: the
    largest over all policies.
    """
    if len(by_policy) == 1:
        return dict(next(iter(by_policy.values())))
    metrics = {
        f"policy/{name}/{key.removeprefix('actor/').removeprefix('team/')}": value
        for name, mine in by_policy.items()
        for key, value in mine.items()
    }
    differences = [mine[_PROBS_DIFF] for mine in by_policy.values() if _PROBS_DIFF in mine]
    if differences:
        metrics[_PROBS_DIFF] = max(differences)
    return metrics


def every_episode_failed(validation: Mapping[str, float]) -> bool:
    """Returns whether no validation episode came to an end: the engine is down, or every prompt is too long."""
    failed = [share for name, share in validation.items() if "/failed/mean@" in name]
    return bool(failed) and min(failed) == 1.0


def rollout_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Returns the metrics of what the rollout workers counted in one step."""
    failed = {key: value for key, value in counts.items() if key.startswith("failed/")}
    return {
        "rollout/episodes_failed": float(counts.get("episodes_failed", 0)),
        "rollout/candidates": float(counts.get("candidates", 0)),
        "rollout/candidates_failed": float(sum(failed.values())),
        "rollout/tokens": float(counts.get("tokens", 0)),
        **{f"rollout/{key}": float(value) for key, value in failed.items()},
    }
