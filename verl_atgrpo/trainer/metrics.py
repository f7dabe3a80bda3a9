"""Figures of a training step, per team, agent and turn, from the rows' tags.

Padding rows are left out by the caller. Names: `team/...`, `agent/<name>/...`, `agent/<name>/turn_<t>/...`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from verl_atgrpo.estimators.kernel import inflation_factors
from verl_atgrpo.estimators.uid import encode_groups, factorise, split_uid
from verl_atgrpo.trainer.row_parts import Tags

PROBS_DIFF = "training/rollout_probs_diff_max"
"""verl's largest difference of a token's probability between server and actor."""


class _Columns:
    """The rows' figures as arrays, read from their tags once."""

    def __init__(self, rows: Sequence[Tags]) -> None:
        self._rows = rows
        self.reward = self._read("reward")
        self.means = {
            "reward": self.reward,
            "team_reward": self._read("team_reward"),
            "local_reward": self._read("local_reward"),
            "response_length": self._read("response_len"),
            "response_clipped": self._read("truncated"),
        }
        uids, names = factorise([tags["group"] for tags in rows])
        # Rows of one group may have uids of their own; a uid is split once, not once a row.
        self._groups = encode_groups([split_uid(str(name)).group for name in names])[uids]

    def _read(self, key: str) -> Tensor:
        values = np.fromiter((tags[key] for tags in self._rows), dtype=np.float64, count=len(self._rows))
        return torch.from_numpy(values)

    def zero_variance(self, labels: Tensor, total: int) -> Tensor:
        """Returns for each of `total` labels the share of its groups whose rewards are all equal: (total,)."""
        bound = int(self._groups.max()) + 1
        pairs, pair = torch.unique(labels * bound + self._groups, return_inverse=True)
        lowest, highest = (
            self.reward.new_zeros(len(pairs)).scatter_reduce_(0, pair, self.reward, which, include_self=False)
            for which in ("amin", "amax")
        )
        label = pairs // bound
        equal = (lowest == highest).double()
        return torch.bincount(label, equal, minlength=total) / torch.bincount(label, minlength=total)

    def by(self, labels: Tensor, prefixes: Sequence[str]) -> dict[str, float]:
        """Returns the means of the rows of each label, under the label's prefix."""
        total = len(prefixes)
        rows = torch.bincount(labels, minlength=total)
        figures = {key: torch.bincount(labels, values, minlength=total) / rows for key, values in self.means.items()}
        figures["zero_variance_groups"] = self.zero_variance(labels, total)
        figures["rows"] = rows.double()
        return {
            f"{prefix}/{key}": values[label].item()
            for label, prefix in enumerate(prefixes)
            for key, values in figures.items()
        }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def step_metrics(rows: Sequence[Tags]) -> dict[str, float]:
    """Returns the metrics of one training step.

    Args:
        rows: the tags of the real rows (see `rollout.rows.training_rows`); not empty.

    `agent/<name>/inflation_factor` is Dr. MAS' gradient-inflation factor (arXiv 2602.08847).
    """
    columns = _Columns(rows)
    episodes = {tags["episode"]: tags for tags in rows}.values()
    agents = [tags["agent"] for tags in rows]
    agent_of_row, names = factorise(agents)
    turn_of_row, prefixes = factorise([f"agent/{tags['agent']}/turn_{tags['turn']}" for tags in rows])
    metrics = {
        "team/episodes": float(len(episodes)),
        "team/success": _mean(tags["episode_success"] for tags in episodes),
        "team/episode_reward": _mean(tags["episode_reward"] for tags in episodes),
        "team/rows_per_episode": len(rows) / len(episodes),
        "team/zero_variance_groups": columns.zero_variance(torch.zeros_like(agent_of_row), 1).item(),
        **columns.by(agent_of_row, [f"agent/{agent}" for agent in names]),
        **columns.by(turn_of_row, [str(prefix) for prefix in prefixes]),
    }
    for agent, factor in inflation_factors(columns.reward, agents).items():
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
    differences = [mine[PROBS_DIFF] for mine in by_policy.values() if PROBS_DIFF in mine]
    if differences:
        metrics[PROBS_DIFF] = max(differences)
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
        "rollout/requests_retried": float(counts.get("requests_retried", 0)),
        "rollout/requests_resumed": float(counts.get("requests_resumed", 0)),
        "rollout/prompt_cached_share": counts.get("cached_prompt_tokens", 0) / max(1, counts.get("prompt_tokens", 0)),
        **{f"rollout/{key}": float(value) for key, value in failed.items()},
        **{f"rollout/{key}": float(counts.get(key, 0)) for key in ("sandbox_restarts", "sandbox_reruns")},
    }
