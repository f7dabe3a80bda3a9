"""A critic's scores and its own gradient, both from one number a decision: the log-ratio of critic and base.

For tokens y after a situation x, which may show what the team does not see:

    l(x, y) = mean over y of log p_critic(y | x) - log p_base(y | x)

`value`: x is the prompt of a decision, y one word, and V = sigmoid(l) the probability that the episode succeeds. It is
trained by the cross-entropy with whether it did, a Monte Carlo regression (ArCHer, arXiv 2402.19446, on policy). A
candidate's score is what it changed, summed over the decisions that follow with weights trace ** n:

    d = V of the episode's next prompt - V of its own,     after the last decision: 1 or 0 - V

`likelihood`: y is the candidate and l its score. It is trained by the Bradley-Terry loss -log sigmoid(sum of l over an
episode that succeeded - the same of one of its task that failed), over all such pairs (SWEET-RL, arXiv 2503.15478).

Either gradient is a weight for each row times the gradient of l, so the critic's update is that of a policy with these
weights as advantages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["value", "likelihood"]


def scores(ratios: Tensor, rows: Sequence[Mapping[str, Any]], kind: Kind, trace: float) -> Tensor:
    """Returns the candidates' scores: log-ratios (N,) float64 -> (N,).

    Args:
        ratios: log-ratios of whole episodes.
        rows: their tags: `episode`, `place` (the decision's in it) and `episode_success`.
        kind: of the critic.
        trace: weight of what the next decision changes, of a value; lambda of generalized advantages.
    """
    if kind == "likelihood":
        return ratios
    values, episodes = ratios.sigmoid().tolist(), defaultdict(list)
    for number, tags in enumerate(rows):
        episodes[tags["episode"]].append((tags["place"], number))
    result = torch.zeros_like(ratios)
    for places in episodes.values():
        after, score = float(rows[places[0][1]]["episode_success"]), 0.0
        for _, number in sorted(places, reverse=True):
            score = after - values[number] + trace * score
            result[number], after = score, values[number]
    return result


def gradient_weights(ratios: Tensor, rows: Sequence[Mapping[str, Any]], kind: Kind) -> Tensor:
    """Returns by what the gradient of each candidate's log-ratio is multiplied, to ascend: (N,) float64 -> (N,).

    Args:
        ratios: log-ratios.
        rows: their tags: `episode`, `group` (the task) and `episode_success`.
        kind: of the critic.
    """
    solved = torch.tensor([float(tags["episode_success"]) for tags in rows], dtype=torch.float64)
    if kind == "value":
        return solved - ratios.sigmoid()
    weight = pair_weights({episode: sum(found) for episode, found in _by_episode(ratios, rows).items()}, rows)
    # An update divides by the number of rows, which is no pair's.
    return len(rows) * torch.tensor([weight.get(tags["episode"], 0.0) for tags in rows], dtype=torch.float64)


def pair_weights(sums: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns episode -> the mean over all pairs of the derivative of log sigmoid by the episode's sum.

    Episodes of tasks whose episodes all ended alike are in no pair.
    """
    tasks: dict[str, tuple[dict[str, None], dict[str, None]]] = defaultdict(lambda: ({}, {}))
    for tags in rows:
        tasks[tags["group"]][bool(tags["episode_success"])][tags["episode"]] = None
    found = [pair for failed, solved in tasks.values() for pair in product(solved, failed)]
    weight: dict[str, float] = defaultdict(float)
    for better, worse in found:
        wrong = torch.sigmoid(torch.tensor(sums[worse] - sums[better], dtype=torch.float64)).item()
        weight[better] += wrong / len(found)
        weight[worse] -= wrong / len(found)
    return weight


def agreement(ratios: Tensor, rows: Sequence[Mapping[str, Any]], kind: Kind) -> dict[str, float]:
    """Returns how well scores of episodes that the critic has not learned from foretell their ends.

    `accuracy`: the share of pairs of episodes, one solved and one failed, in which the solved one has the larger mean
    score (ties count half); of `likelihood` pairs of one task. `correlation`: that of a row's value or likelihood with
    success. `brier`: the mean squared error of a value. Nothing for which there is no pair.
    """
    ends = {tags["episode"]: (bool(tags["episode_success"]), tags["group"]) for tags in rows}
    mean = {episode: sum(found) / len(found) for episode, found in _by_episode(ratios, rows).items()}
    pairs = [
        (better, worse)
        for better, worse in product(mean, mean)
        if ends[better][0] and not ends[worse][0] and (kind == "value" or ends[better][1] == ends[worse][1])
    ]
    metrics: dict[str, float] = {}
    if pairs:
        right = sum((mean[better] > mean[worse]) + 0.5 * (mean[better] == mean[worse]) for better, worse in pairs)
        metrics["accuracy"] = right / len(pairs)
    solved = torch.tensor([float(tags["episode_success"]) for tags in rows], dtype=torch.float64)
    found = ratios.sigmoid() if kind == "value" else ratios
    if len(rows) > 1 and found.std() > 0 and solved.std() > 0:
        metrics["correlation"] = torch.corrcoef(torch.stack([found, solved]))[0, 1].item()
    if kind == "value" and len(rows):
        metrics["brier"] = (found - solved).square().mean().item()
    return metrics


def _by_episode(ratios: Tensor, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    numbers: dict[str, list[float]] = defaultdict(list)
    for tags, ratio in zip(rows, ratios.tolist(), strict=True):
        numbers[tags["episode"]].append(ratio)
    return numbers
