"""A likelihood critic's gradient: by hand, and against torch's own derivative of the loss."""

from __future__ import annotations

import math
from statistics import correlation
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_atgrpo.train.estimators.likelihood import agreement, gradient_weights, has_signal, pair_weights


def rows(*made: tuple[str, str, bool]) -> list[dict[str, Any]]:
    """Tags of rows: (task, episode, solved)."""
    return [
        {"agent": "a", "group": task, "episode": episode, "episode_success": solved, "episode_reward": float(solved)}
        for task, episode, solved in made
    ]


# Task a has two episodes that succeeded and one that failed, task b only failures, task c one of each.
ROWS = rows(
    ("a", "a0", True),
    ("a", "a0", True),
    ("a", "a1", False),
    ("a", "a2", True),
    ("b", "b0", False),
    ("b", "b1", False),
    ("c", "c0", False),
    ("c", "c0", False),
    ("c", "c1", True),
)
RATIOS = torch.tensor([0.5, -0.25, 1.0, 0.0, 0.3, -2.0, 0.7, 0.1, -0.4], dtype=torch.float64)


def derivative(loss: Any) -> Tensor:
    ratios = RATIOS.clone().requires_grad_(True)
    loss(ratios).backward()
    assert ratios.grad is not None
    return ratios.grad


def test_the_gradient_is_that_of_the_mean_pair() -> None:
    def loss(ratios: Tensor) -> Tensor:
        a0, a1, a2 = (ratios[0] + ratios[1]) / 2, ratios[2], ratios[3]
        c0, c1 = (ratios[6] + ratios[7]) / 2, ratios[8]
        pairs = torch.stack([a0 - a1, a2 - a1, c1 - c0])
        return -torch.nn.functional.logsigmoid(pairs).mean()

    weights = gradient_weights(RATIOS, ROWS)
    # An update divides by its nine rows.
    assert weights.tolist() == pytest.approx((-9 * derivative(loss)).tolist())
    assert weights[4:6].tolist() == [0.0, 0.0], "episodes that ended alike are no pair"
    # Were they sums, the loss would fall with every l where failures are longer, whatever the answers are.
    assert weights.sum().item() == pytest.approx(0)


def test_many_episodes_of_a_task_are_compared_at_once() -> None:
    made = rows(*((f"t{number % 2}", f"e{number}", number % 3 == 0) for number in range(60)))
    ratios = torch.linspace(-1, 1, 60, dtype=torch.float64)
    sums = dict(zip((tags["episode"] for tags in made), ratios.tolist(), strict=True))
    weight = pair_weights(sums, made)
    pairs = [
        (one, other)
        for one in made
        for other in made
        if one["episode_success"] and not other["episode_success"] and one["group"] == other["group"]
    ]
    by_hand = dict.fromkeys(sums, 0.0)
    for better, worse in pairs:
        wrong = 1 / (1 + math.exp(sums[better["episode"]] - sums[worse["episode"]])) / len(pairs)
        by_hand[better["episode"]] += wrong
        by_hand[worse["episode"]] -= wrong
    assert weight == pytest.approx(by_hand)
    right = sum(sums[better["episode"]] > sums[worse["episode"]] for better, worse in pairs)
    assert agreement(ratios, made)["accuracy"] == pytest.approx(right / len(pairs))


def test_without_a_pair_nothing_is_learned() -> None:
    alike = rows(("a", "a0", True), ("a", "a1", True), ("b", "b0", False))
    assert not gradient_weights(torch.ones(3, dtype=torch.float64), alike).any()
    assert agreement(torch.ones(3, dtype=torch.float64), alike) == {}
    assert not has_signal(alike) and has_signal(ROWS)


def test_agreement_counts_pairs_of_episodes_by_their_mean_score() -> None:
    found = agreement(RATIOS, ROWS)
    # Means: a0 .125, a1 1, a2 0; c0 .4, c1 -.4: no pair of a task is in order.
    solved = [float(tags["episode_success"]) for tags in ROWS]
    assert found == {"accuracy": 0.0, "correlation": pytest.approx(correlation(RATIOS.tolist(), solved))}
    # Each solved episode is above the failed ones of its own task: how hard a task is counts nothing.
    assert agreement(-RATIOS, ROWS)["accuracy"] == 1.0
    halves = [{**tags, "episode_reward": number / 2} for number, tags in enumerate(ROWS)]
    found = agreement(RATIOS, halves, "episode_reward")
    assert found["correlation"] == pytest.approx(correlation(RATIOS.tolist(), [number / 2 for number in range(9)]))
    ties = rows(("a", "a0", True), ("a", "a1", False))
    assert agreement(torch.zeros(2, dtype=torch.float64), ties) == {"accuracy": 0.5}
