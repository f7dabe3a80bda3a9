"""A critic's scores and gradient: by hand, and against torch's own derivatives of the losses."""

from __future__ import annotations

from statistics import correlation
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_atgrpo.train.estimators.critic import agreement, gradient_weights, scores


def rows(*made: tuple[str, str, bool]) -> list[dict[str, Any]]:
    """Tags of rows: (task, episode, solved)."""
    return [{"group": task, "episode": episode, "episode_success": solved} for task, episode, solved in made]


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


def test_a_value_is_a_probability_and_has_the_gradient_of_the_cross_entropy() -> None:
    solved = torch.tensor([float(tags["episode_success"]) for tags in ROWS], dtype=torch.float64)
    expected = -derivative(
        lambda ratios: torch.nn.functional.binary_cross_entropy_with_logits(ratios, solved, reduction="sum")
    )
    assert gradient_weights(RATIOS, ROWS, "value").tolist() == pytest.approx(expected.tolist())


def test_a_likelihood_is_the_ratio_and_has_the_gradient_of_the_mean_pair() -> None:
    def loss(ratios: Tensor) -> Tensor:
        a0, a1, a2 = ratios[0] + ratios[1], ratios[2], ratios[3]
        c0, c1 = ratios[6] + ratios[7], ratios[8]
        pairs = torch.stack([a0 - a1, a2 - a1, c1 - c0])
        return -torch.nn.functional.logsigmoid(pairs).mean()

    assert scores(RATIOS, ROWS, "likelihood", 0.9) is RATIOS
    weights = gradient_weights(RATIOS, ROWS, "likelihood")
    # An update divides by its nine rows.
    assert weights.tolist() == pytest.approx((-9 * derivative(loss)).tolist())
    assert weights[4:6].tolist() == [0.0, 0.0], "episodes that ended alike are no pair"
    assert weights.sum().item() != 0, "an episode of two decisions has its weight at each"


def test_a_critic_that_has_not_learned_adds_nothing_to_the_outcome() -> None:
    """The off switch `optim: {lr: 0}`: no likelihood, and of values the outcome, weighted by the distance to it."""
    ends = {"a0": [0.25, 0.5], "a1": [-0.5], "a2": [0.5], "b0": [-0.5], "b1": [-0.5], "c0": [-0.25, -0.5], "c1": [0.5]}
    rows = [{**tags, "place": number} for number, tags in enumerate(ROWS)]
    assert scores(torch.zeros(9).double(), rows, "value", 0.5).tolist() == [one for of in ends.values() for one in of]
    assert scores(torch.zeros(9).double(), rows, "value", 1.0).abs().tolist() == [0.5] * 9
    assert not scores(torch.zeros(9).double(), rows, "likelihood", 0.9).any()


def test_without_a_pair_nothing_is_learned() -> None:
    alike = rows(("a", "a0", True), ("a", "a1", True), ("b", "b0", False))
    assert gradient_weights(torch.ones(3, dtype=torch.float64), alike, "likelihood").tolist() == [0.0, 0.0, 0.0]
    assert agreement(torch.ones(3, dtype=torch.float64), alike, "likelihood") == {}


def test_agreement_counts_pairs_of_episodes_by_their_mean_score() -> None:
    found = agreement(RATIOS, ROWS, "likelihood")
    # Means: a0 .125, a1 1, a2 0; c0 .4, c1 -.4: no pair of a task is in order.
    solved = [float(tags["episode_success"]) for tags in ROWS]
    assert found == {"accuracy": 0.0, "correlation": pytest.approx(correlation(RATIOS.tolist(), solved))}
    found = agreement(RATIOS, ROWS, "value")
    # Solved .125, 0, -.4 against failed 1, .3, -2, .4 of all tasks: each is above -2 alone.
    assert found["accuracy"] == pytest.approx(3 / 12)
    values = RATIOS.sigmoid()
    assert found["brier"] == pytest.approx(float(((values - torch.tensor(solved)) ** 2).mean()))
    assert found["correlation"] == pytest.approx(correlation(values.tolist(), solved))
    ties = rows(("a", "a0", True), ("a", "a1", False))
    assert agreement(torch.zeros(2, dtype=torch.float64), ties, "likelihood") == {"accuracy": 0.5}
