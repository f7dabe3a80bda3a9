"""Metrics of a step: verl's own, the team's, and staleness.

All are computed from tags, which are on the driver anyway, where verl's trainer fetches all tokens again.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics

from verl_atgrpo.play.types import part_of
from verl_atgrpo.train.estimators.dr_mas import inflation_factors
from verl_atgrpo.train.estimators.labels import factorise
from verl_atgrpo.train.rows.batch import Tags, is_padding
from verl_atgrpo.train.rows.step_rows import group_of

logger = logging.getLogger(__name__)

PROBS_DIFF = "training/rollout_probs_diff_max"
"""verl's largest difference between a token's probabilities under server and actor."""
_SAME = 1e-6
"""Rewards that differ by less are the same: they are sums of products."""


Signal = Sequence[bool | None]
"""For every row whether its advantage is other than 0, None where its policy is not trained."""


class _Columns:
    """The rows' numeric tags as tensors."""

    def __init__(self, rows: Sequence[Tags], signal: Signal) -> None:
        keys = {"response_length": "response_len", "response_clipped": "truncated"}
        self.means = {
            name: _column(rows, keys.get(name, name)) for name in ("reward", "team_reward", "local_reward", *keys)
        }
        self.reward = self.means["reward"]
        self.signal = torch.tensor([bool(has) for has in signal], dtype=torch.float64)
        self.trained = torch.tensor([has is not None for has in signal])
        self._groups = factorise([group_of(tags) for tags in rows])[0]

    def without_signal(self, labels: Tensor, total: int) -> Tensor:
        """Returns the share of each label's groups in which no row has a signal: (total,), NaN if none is trained."""
        trained = torch.bincount(labels, self.trained.double(), minlength=total) > 0
        label, any_signal = self.groups(labels, self.signal)
        without = torch.bincount(label, (any_signal == 0).double(), minlength=total)
        return (without / torch.bincount(label, minlength=total)).where(trained, torch.nan)

    def groups(self, labels: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        """Returns the label of every group of a label, and each column's highest values in it: (groups,) each."""
        bound = int(self._groups.max()) + 1
        pairs, pair = torch.unique(labels * bound + self._groups, return_inverse=True)
        none = torch.zeros(len(pairs), dtype=torch.float64)
        highest = (none.scatter_reduce(0, pair, column, "amax", include_self=False) for column in columns)
        return pairs // bound, *highest

    def by(self, labels: Tensor, prefixes: Sequence[str]) -> dict[str, float]:
        """Returns means over the rows of each label, named by the label's prefix."""
        total = len(prefixes)
        rows = torch.bincount(labels, minlength=total)
        figures = {key: torch.bincount(labels, values, minlength=total) / rows for key, values in self.means.items()}
        figures["zero_variance_groups"] = self.without_signal(labels, total)
        figures["rows"] = rows.double()
        return {
            f"{prefix}/{key}": value
            for label, prefix in enumerate(prefixes)
            for key, values in figures.items()
            if not math.isnan(value := values[label].item())
        }


def step_metrics(rows: Sequence[Tags], signal: Signal) -> dict[str, float]:
    """Returns the metrics of one training step.

    `zero_variance_groups` is the share of groups in which no row has an advantage other than 0, of those of trained
    policies: the team's share is that of the groups that the group filter drops. For an agent its own rows of the
    groups count. `agent/<name>/inflation_factor` is Dr. MAS' gradient-inflation factor (arXiv 2602.08847).
    """
    columns = _Columns(rows, signal)
    episodes = {tags["episode"]: tags for tags in rows}.values()
    parts: dict[str, list[Tags]] = defaultdict(list)
    for tags in episodes:
        parts[part_of(tags["agent"])].append(tags)
    agents = [tags["agent"] for tags in rows]
    agent_of_row, names = factorise(agents)
    turn_of_row, prefixes = factorise([f"agent/{tags['agent']}/turn_{tags['turn']}" for tags in rows])
    of_frozen = (~columns.trained).long()
    tasks, _ = factorise([tags["group"].partition(".")[0] for tags in rows])
    inflated = inflation_factors(columns.reward, agents, tasks)
    return {
        **_ends("team", episodes),
        **{
            key: value
            for part, theirs in parts.items()
            if part
            for key, value in _ends(f"part/{part}", theirs).items()
        },
        "team/rows_per_episode": len(rows) / len(episodes),
        "team/zero_variance_groups": columns.without_signal(of_frozen, 2)[0].item(),
        **columns.by(agent_of_row, [f"agent/{agent}" for agent in names]),
        **columns.by(turn_of_row, [str(prefix) for prefix in prefixes]),
        **{f"agent/{agent}/inflation_factor": factor for agent, factor in inflated.items()},
        **_entropies(rows),
    }


def _ends(prefix: str, episodes: Collection[Tags]) -> dict[str, float]:
    """Returns how many episodes of a team, or of a part of a mixture, ended how."""
    return {
        f"{prefix}/episodes": float(len(episodes)),
        f"{prefix}/success": fmean(tags["episode_success"] for tags in episodes),
        f"{prefix}/episode_reward": fmean(tags["episode_reward"] for tags in episodes),
    }


def _entropies(rows: Sequence[Tags]) -> dict[str, float]:
    """Returns the mean entropy of each agent's tokens, over the rows that went through the model."""
    sums: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    for tags in rows:
        if "entropy" in tags:
            sums[tags["agent"]] += tags["entropy"] * tags["response_len"]
            tokens[tags["agent"]] += tags["response_len"]
    return {f"agent/{agent}/entropy": sums[agent] / tokens[agent] for agent in sums}


class AgentProgress:
    """Follows each agent's rewards over the steps, and warns of one that has collapsed.

    A group teaches nothing if it has no signal. It is stuck if its candidates are wrong as well: their local
    scores are in the lower half of the agent's range so far (a right answer may cost a little, as with further words).
    Where local scores make up less than a third of the range of rewards, as one for the form of an answer does, the
    candidates are wrong if the episode is not solved.
    """

    STUCK_SHARE, STUCK_STEPS = 0.8, 10

    def __init__(self) -> None:
        self._reward: dict[str, tuple[float, float]] = {}
        self._local: dict[str, tuple[float, float]] = {}
        self._stuck: dict[str, int] = defaultdict(int)

    def metrics(self, rows: Sequence[Tags], signal: Signal) -> dict[str, float]:
        """Returns the metrics of a step; arguments as in `step_metrics`.

        `highest_reward_share` is the share of an agent's candidates that earned the highest reward that the agent
        has earned since the run began (or was resumed); `stuck_groups` is the share of its groups that are stuck, if
        it is trained.
        """
        columns = _Columns(rows, signal)
        reward, local_reward = columns.reward, columns.means["local_reward"]
        agent_of_row, names = factorise([tags["agent"] for tags in rows])
        solved = _column(rows, "episode_success")
        label, *highest = columns.groups(agent_of_row, columns.signal, local_reward, solved)
        metrics = {}
        for number, agent in enumerate(map(str, names)):
            any_signal, local, any_solved = (column[label == number] for column in highest)
            rewards, locals_ = (column[agent_of_row == number] for column in (reward, local_reward))
            worst, best = self._reward[agent] = _range(rewards, self._reward.get(agent))
            least, most = self._local[agent] = _range(locals_, self._local.get(agent))
            metrics[f"agent/{agent}/highest_reward_share"] = (rewards >= best - _SAME).double().mean().item()
            if not bool(columns.trained[agent_of_row == number].any()):
                continue
            telling = most - least > max(_SAME, (best - worst) / 3)
            wrong = local < (least + most) / 2 if telling else any_solved == 0
            stuck = ((any_signal == 0) & wrong).double().mean().item()
            metrics[f"agent/{agent}/stuck_groups"] = stuck
            self._count(agent, stuck)
        return metrics

    def _count(self, agent: str, stuck: float) -> None:
        self._stuck[agent] = self._stuck[agent] + 1 if stuck >= self.STUCK_SHARE else 0
        if self._stuck[agent] == self.STUCK_STEPS:
            logger.warning(
                f"agent {agent!r} has collapsed: for {self.STUCK_STEPS} steps, in at least {self.STUCK_SHARE:.0%} of "
                "its groups, all candidates were wrong and none had an advantage "
                f"(agent/{agent}/stuck_groups); see docs/small_models.md"
            )


def _range(values: Tensor, known: tuple[float, float] | None) -> tuple[float, float]:
    """Returns the lowest and the highest of values and of those known before."""
    least, most = known or (math.inf, -math.inf)
    return min(least, values.min().item()), max(most, values.max().item())


def policy_metrics(by_policy: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics of the policies' updates: with one policy under verl's names, else under `policy/<name>/`.

    `training/rollout_probs_diff_max` keeps its name in any case, as the maximum over all policies.
    """
    if len(by_policy) == 1:
        return dict(next(iter(by_policy.values())))
    metrics = {
        f"policy/{name}/{key.removeprefix('actor/').removeprefix('team/')}": value
        for name, mine in by_policy.items()
        for key, value in mine.items()
    }
    if differences := [mine[PROBS_DIFF] for mine in by_policy.values() if PROBS_DIFF in mine]:
        metrics[PROBS_DIFF] = max(differences)
    return metrics


def every_episode_failed(validation: Mapping[str, float]) -> bool:
    """Returns whether every validation episode failed: the engine is down, or every prompt is too long."""
    failed = [share for name, share in validation.items() if "/failed/mean@" in name]
    return bool(failed) and min(failed) == 1.0


_COUNTS = (
    "episodes_failed", "candidates", "tokens", "requests_retried", "requests_resumed", "score_errors",
    "sandbox_restarts", "sandbox_reruns", "tool_calls_parsed", "tool_calls_unparsed",
    "dialogue_turns", "dialogue_turns_broken", "prompts_shortened", "endpoint_requests_refused",
)  # fmt: skip


def rollout_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Returns the metrics of the rollout workers' counts of one step."""
    failed = [key for key in counts if key.startswith("failed/")]
    return {
        **{f"rollout/{key}": float(counts.get(key, 0)) for key in (*_COUNTS, *failed)},
        "rollout/prompt_cached_share": counts.get("cached_prompt_tokens", 0) / max(1, counts.get("prompt_tokens", 0)),
    }


def versions(tags: Tags) -> tuple[int, int]:
    """Returns the versions of the weights that sampled a row's first and last token."""
    return tags["min_global_steps"], tags["max_global_steps"]


def staleness_metrics(rows: Sequence[Tags], global_steps: int) -> dict[str, float]:
    """Returns the staleness metrics of a step whose candidates may have been sampled with older weights.

    A candidate's staleness is the number of weight syncs between its first token and the step, which starts with
    weights of version `global_steps - 1`: 0 if all of it was sampled with these. `rows` are those of trained policies.
    """
    if not rows:
        return {}
    behind = [global_steps - 1 - versions(tags)[0] for tags in rows]
    groups: dict[Any, set[int]] = defaultdict(set)
    for tags in rows:
        groups[group_of(tags)].update(versions(tags))
    return {
        "team/staleness_mean": sum(behind) / len(behind),
        "team/staleness_max": float(max(behind)),
        "team/candidates_resumed_share": sum(tags["resumed"] > 0 for tags in rows) / len(rows),
        "team/groups_mixed_versions_share": sum(len(found) > 1 for found in groups.values()) / len(groups),
    }


def training_metrics(
    rows: Sequence[Tags], timing: Mapping[str, float], global_steps: int, epoch: int, gpus: int
) -> dict[str, float]:
    """Returns the metrics of verl's `PPOTrainer._compute_metrics`, of real rows only, after `write_advantages`.

    verl counts padding's prompts of 127 tokens in the length that `prompt_length/clip_ratio` compares with, and in the
    throughput. `timing` has the seconds of every stage, `step` among them.
    """
    real = [tags for tags in rows if not is_padding(tags)]
    return {
        "training/global_step": global_steps,
        "training/epoch": epoch,
        **_verls(real, timing, gpus),
        **_off_policy(real, global_steps),
    }


def _column(rows: Sequence[Tags], key: str) -> Tensor:
    return torch.tensor([tags[key] for tags in rows], dtype=torch.float64)


def _verls(real: Sequence[Tags], timing: Mapping[str, float], gpus: int) -> dict[str, float]:
    def width(key: str) -> torch.Tensor:
        # verl takes the longest row's length from a shape: an expanded view needs no memory.
        return torch.zeros(1, 1).expand(len(real), max(tags[key] for tags in real))

    advantages, tokens = _column(real, "advantage"), _column(real, "trained_tokens")
    rewards = _column(real, "reward")[:, None]
    data = {
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
        "advantages": advantages[:, None],
        "returns": advantages[:, None],
        "response_mask": (tokens > 0)[:, None],
        "prompts": width("prompt_len"),
        "responses": width("response_len"),
        "prompt_length": _column(real, "prompt_len"),
        "response_length": _column(real, "response_len"),
    }
    batch = DataProto(
        batch=TensorDict(data, batch_size=[len(real)]),
        non_tensor_batch={"__num_turns__": np.array([tags["num_turns"] for tags in real])},
        meta_info={"global_token_num": [tags["seq_len"] for tags in real]},
    )
    metrics = compute_data_metrics(batch, use_critic=False)
    # verl's mean is over tokens, and each row is a single one above.
    mean = ((advantages * tokens).sum() / tokens.sum()).item()
    return {
        **metrics,
        **{f"training/num_turns/{key}": metrics[f"num_turns/{key}"] for key in ("mean", "max", "min")},
        "critic/advantages/mean": mean,
        "critic/returns/mean": mean,
        **compute_timing_metrics(batch, dict(timing)),
        **compute_throughout_metrics(batch, dict(timing), gpus),
    }


def _off_policy(real: Sequence[Tags], global_steps: int) -> dict[str, float]:
    first, last = np.array([versions(tags) for tags in real], dtype=int).T
    figures = {
        "trajectory_spans": last - first + 1,
        "trajectory_staleness": global_steps - 1 - last,
        "trajectory_staleness_worst": global_steps - 1 - first,
    }
    return {
        f"training/off_policy/{name}/{key}": figure
        for name, values in figures.items()
        for key, figure in (("mean", values.mean()), ("max", values.max()), ("min", values.min()))
    }
