"""A critic's scores and its own gradient, both from one number a decision: the log-ratio of critic and base.

For tokens y after a situation x, which may show what the team does not see:

    l(x, y) = mean over y of log p_critic(y | x) - log p_base(y | x)

`value`: x is the prompt of a decision, y one word, and V = low + (high - low) sigmoid(l) the episode's team reward, of
which low and high are the bounds in its environment. It is trained by the cross-entropy with that reward as a share of
the way from low to high, a Monte Carlo regression (ArCHer, arXiv 2402.19446, on policy). A candidate's score is its
generalised advantage (arXiv 1506.02438, gamma 1), over the decisions k from its own on:

    A = sum of lam^k d_k,     d = V of the next prompt - V of its own,     after the last: the team reward - V

The next prompt is the first of a decision that started after this one had ended: agents that act at the same time do
not see each other's answers.

`likelihood`: y is the candidate and l its score. It is trained by the Bradley-Terry loss -log sigmoid(mean of l over
an episode that succeeded - the same of one of its task that failed), over all such pairs (SWEET-RL, arXiv 2503.15478,
which has sums: where failures are longer, their sums fall with every l, whatever the answers are).

Either gradient is a weight for each row times the gradient of l, so the critic's update is that of a policy with these
weights as advantages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from verl_atgrpo.play.types import part_of

Kind = Literal["value", "likelihood"]


@dataclass(frozen=True)
class Bounds:
    """The least and the largest team reward of each part of a mixture, between which values are; 0 and 1 at first."""

    of_parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def with_rewards(self, rows: Iterable[Mapping[str, Any]]) -> Bounds:
        """Returns the bounds that include the team rewards of these rows as well."""
        found = dict(self.of_parts)
        for tags in rows:
            part, reward = part_of(tags["agent"]), tags["episode_reward"]
            low, high = found.get(part, _FIRST)
            found[part] = min(low, reward), max(high, reward)
        return Bounds(found)

    def values(self, ratios: Tensor, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Returns the team rewards that the rows' log-ratios predict: (N,) -> (N,)."""
        low, high = self._of(rows)
        return low + (high - low) * ratios.sigmoid()

    def shares(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Returns the rows' team rewards as shares of the way from the least to the largest: (N,) float64."""
        low, high = self._of(rows)
        return (_of_rows(rows, "episode_reward") - low) / (high - low)

    def _of(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
        found = [self.of_parts.get(part_of(tags["agent"]), _FIRST) for tags in rows]
        return tuple(torch.tensor(found, dtype=torch.float64).reshape(-1, 2).unbind(1))  # type: ignore[return-value]


_FIRST = (0.0, 1.0)


def scores(ratios: Tensor, rows: Sequence[Mapping[str, Any]], kind: Kind, lam: float, bounds: Bounds) -> Tensor:
    """Returns the candidates' scores: log-ratios of whole episodes (N,) float64 -> (N,).

    Reads the tags `agent`, `episode`, `order` (how many of its decisions had started before), `place` (how many had
    ended before it ended), `after` (how many had ended when it started) and `episode_reward`. `lam` is for values.
    """
    if kind == "likelihood":
        return ratios
    values, episodes = bounds.values(ratios, rows).tolist(), defaultdict(list)
    for number, tags in enumerate(rows):
        episodes[tags["episode"]].append(number)
    result = torch.zeros_like(ratios)
    for numbers in episodes.values():
        for number in sorted(numbers, key=lambda one: rows[one]["place"], reverse=True):
            later = [other for other in numbers if rows[other]["after"] > rows[number]["place"]]
            if later:
                following = min(later, key=lambda other: rows[other]["order"])
                change = values[following] - values[number] + lam * result[following]
            else:
                change = rows[number]["episode_reward"] - values[number]
            result[number] = change
    return result


def gradient_weights(ratios: Tensor, rows: Sequence[Mapping[str, Any]], kind: Kind, bounds: Bounds) -> Tensor:
    """Returns by what the gradient of each candidate's log-ratio is multiplied, to ascend: (N,) float64 -> (N,).

    Reads the tags `agent`, `episode`, `group` (the task), `episode_reward` and `episode_success`.
    """
    if kind == "value":
        return bounds.shares(rows) - ratios.sigmoid()
    found = _by_episode(ratios, rows)
    weight = pair_weights({episode: fmean(theirs) for episode, theirs in found.items()}, rows)
    of_row = {episode: value / len(found[episode]) for episode, value in weight.items()}
    # An update divides by the number of rows, which is no pair's.
    return len(rows) * torch.tensor([of_row.get(tags["episode"], 0.0) for tags in rows], dtype=torch.float64)


def pair_weights(means: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns episode -> the mean over all pairs of the derivative of log sigmoid by the episode's mean.

    Episodes of tasks whose episodes all ended alike are in no pair.
    """
    tasks = _ends_by_task(rows).values()
    pairs = sum(len(failed) * len(solved) for failed, solved in tasks)
    weight: dict[str, float] = {}
    for failed, solved in tasks:
        if failed and solved:
            better = torch.tensor([means[one] for one in solved], dtype=torch.float64)
            worse = torch.tensor([means[one] for one in failed], dtype=torch.float64)
            wrong = torch.sigmoid(worse - better.unsqueeze(1)) / pairs
            weight |= dict(zip(solved, wrong.sum(1).tolist(), strict=True))
            weight |= dict(zip(failed, (-wrong.sum(0)).tolist(), strict=True))
    return weight


def has_signal(rows: Sequence[Mapping[str, Any]], kind: Kind) -> bool:
    """Returns whether there is anything to learn: of `likelihood` two episodes of a task that ended differently."""
    return bool(rows) if kind == "value" else any(failed and solved for failed, solved in _ends_by_task(rows).values())


def agreement(ratios: Tensor, rows: Sequence[Mapping[str, Any]], kind: Kind, bounds: Bounds) -> dict[str, float]:
    """Returns how well scores of episodes that the critic has not learned from predict their ends.

    `accuracy`: the share of pairs of a task's episodes, one solved and one failed, in which the solved one has the
    larger mean score (ties count half). `correlation`: that of a row's value with the team reward, or of its
    likelihood with success. `brier`: the mean squared error of a value, both as shares of the way between the bounds.
    Nothing for which there is no pair.
    """
    mean = {episode: fmean(found) for episode, found in _by_episode(ratios, rows).items()}
    tasks = list(_ends_by_task(rows).values())
    pairs = sum(len(failed) * len(solved) for failed, solved in tasks)
    metrics: dict[str, float] = {}
    if pairs:
        right = sum(_larger([mean[one] for one in solved], [mean[one] for one in failed]) for failed, solved in tasks)
        metrics["accuracy"] = right / pairs
    found, ends = ratios, _of_rows(rows, "episode_success")
    if kind == "value":
        found, ends = ratios.sigmoid(), bounds.shares(rows)
    if len(rows) > 1 and found.std() > 0 and ends.std() > 0:
        metrics["correlation"] = torch.corrcoef(torch.stack([found, ends]))[0, 1].item()
    if kind == "value" and len(rows):
        metrics["brier"] = (found - ends).square().mean().item()
    return metrics


def _larger(these: Sequence[float], those: Sequence[float]) -> float:
    """Returns the number of pairs in which the first is larger, with ties as halves."""
    ordered = torch.tensor(those, dtype=torch.float64).sort().values
    values = torch.tensor(these, dtype=torch.float64)
    below, up_to = (torch.searchsorted(ordered, values, right=right).double().sum().item() for right in (False, True))
    return (below + up_to) / 2


def _ends_by_task(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[dict[str, None], dict[str, None]]]:
    """Returns task -> its episodes that failed and those that succeeded."""
    tasks: dict[str, tuple[dict[str, None], dict[str, None]]] = defaultdict(lambda: ({}, {}))
    for tags in rows:
        tasks[tags["group"]][bool(tags["episode_success"])][tags["episode"]] = None
    return tasks


def _of_rows(rows: Sequence[Mapping[str, Any]], tag: str) -> Tensor:
    return torch.tensor([float(tags[tag]) for tags in rows], dtype=torch.float64)


def _by_episode(ratios: Tensor, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for tags, ratio in zip(rows, ratios.tolist(), strict=True):
        numbers[tags["episode"]].append(ratio)
    return numbers
