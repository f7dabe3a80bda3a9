"""A critic's likelihoods and its own gradient, both from one number a decision: the log-ratio of critic and base.

For a candidate's tokens y after a situation x, which may show what the team does not see:

    l(x, y) = mean over y of log p_critic(y | x) - log p_base(y | x)

l is the candidate's score. It is trained by the Bradley-Terry loss -log sigmoid(mean of l over an episode that
succeeded - the same of one of its task that failed), over all such pairs (SWEET-RL, arXiv 2503.15478, which has sums:
where failures are longer, their sums fall with every l, whatever the answers are).

Its gradient is a weight for each row times the gradient of l, so the critic's update is that of a policy with these
weights as advantages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor


def gradient_weights(ratios: Tensor, rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """Returns by what the gradient of each candidate's log-ratio is multiplied, to ascend: (N,) float64 -> (N,).

    Reads the tags `episode`, `group` (the task) and `episode_success`.
    """
    found = _by_episode(ratios, rows)
    weight = pair_weights({episode: fmean(theirs) for episode, theirs in found.items()}, rows)
    of_row = {episode: value / len(found[episode]) for episode, value in weight.items()}
    # An update divides by the number of rows, which is no pair's.
    return len(rows) * torch.tensor([of_row.get(tags["episode"], 0.0) for tags in rows], dtype=torch.float64)


def pair_weights(means: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns episode -> the mean over all pairs of the derivative of log sigmoid by the episode's mean.

    Episodes of tasks whose episodes all ended alike are in no pair.
    """
    tasks = _ends_by_task(rows)
    pairs = sum(len(failed) * len(solved) for failed, solved in tasks)
    weight: dict[str, float] = {}
    for failed, solved in tasks:
        better = torch.tensor([means[one] for one in solved], dtype=torch.float64)
        worse = torch.tensor([means[one] for one in failed], dtype=torch.float64)
        wrong = torch.sigmoid(worse - better.unsqueeze(1)) / pairs
        weight |= dict(zip(solved, wrong.sum(1).tolist(), strict=True))
        weight |= dict(zip(failed, (-wrong.sum(0)).tolist(), strict=True))
    return weight


def has_signal(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether there is anything to learn: two episodes of a task that ended differently."""
    return bool(_ends_by_task(rows))


def agreement(found: Tensor, rows: Sequence[Mapping[str, Any]], end: str = "episode_success") -> dict[str, float]:
    """Returns how well a critic's numbers of episodes that it has not learned from predict their ends.

    `accuracy`: the share of pairs of a task's episodes, one solved and one failed, in which the solved one has the
    larger mean (ties count half). `correlation`: that of a row's number with the tag `end`. Nothing for which there is
    no pair.
    """
    mean = {episode: fmean(theirs) for episode, theirs in _by_episode(found, rows).items()}
    tasks = _ends_by_task(rows)
    pairs = sum(len(failed) * len(solved) for failed, solved in tasks)
    metrics: dict[str, float] = {}
    if pairs:
        right = sum(_larger([mean[one] for one in solved], [mean[one] for one in failed]) for failed, solved in tasks)
        metrics["accuracy"] = right / pairs
    ends = torch.tensor([float(tags[end]) for tags in rows], dtype=torch.float64)
    if len(rows) > 1 and found.std() > 0 and ends.std() > 0:
        metrics["correlation"] = torch.corrcoef(torch.stack([found, ends]))[0, 1].item()
    return metrics


def _larger(these: Sequence[float], those: Sequence[float]) -> float:
    """Returns the number of pairs in which the first is larger, with ties as halves."""
    ours, others = (torch.tensor(some, dtype=torch.float64) for some in (these, those))
    return ((ours[:, None] - others).sign() + 1).sum().item() / 2


def _ends_by_task(rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], list[str]]]:
    """Returns the episodes that failed and those that succeeded, of each task that has both."""
    tasks: dict[str, tuple[dict[str, None], dict[str, None]]] = defaultdict(lambda: ({}, {}))
    for tags in rows:
        tasks[tags["group"]][bool(tags["episode_success"])][tags["episode"]] = None
    return [([*failed], [*solved]) for failed, solved in tasks.values() if failed and solved]


def _by_episode(ratios: Tensor, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for tags, ratio in zip(rows, ratios.tolist(), strict=True):
        numbers[tags["episode"]].append(ratio)
    return numbers
