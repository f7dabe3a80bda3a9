"""A critic's scores and gradient: by hand, and against torch's own derivatives of the losses."""

from __future__ import annotations

import math
from statistics import correlation
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_atgrpo.train.estimators.critic import Bounds, agreement, gradient_weights, has_signal, pair_weights, scores


def rows(*made: tuple[str, str, bool]) -> list[dict[str, Any]]:
    """Tags of rows: (task, episode, solved)."""
    return [
        {"agent": "a", "group": task, "episode": episode, "episode_success": solved, "episode_reward": float(solved)}
        for task, episode, solved in made
    ]


def in_turn(tags: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, of decisions one after the other."""
    return [{**one, "order": number, "place": number, "after": number} for number, one in enumerate(tags)]


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
    assert gradient_weights(RATIOS, ROWS, "value", Bounds()).tolist() == pytest.approx(expected.tolist())


def test_a_likelihood_is_the_ratio_and_has_the_gradient_of_the_mean_pair() -> None:
    def loss(ratios: Tensor) -> Tensor:
        a0, a1, a2 = (ratios[0] + ratios[1]) / 2, ratios[2], ratios[3]
        c0, c1 = (ratios[6] + ratios[7]) / 2, ratios[8]
        pairs = torch.stack([a0 - a1, a2 - a1, c1 - c0])
        return -torch.nn.functional.logsigmoid(pairs).mean()

    assert scores(RATIOS, ROWS, "likelihood", 0.9, Bounds()) is RATIOS
    weights = gradient_weights(RATIOS, ROWS, "likelihood", Bounds())
    # An update divides by its nine rows.
    assert weights.tolist() == pytest.approx((-9 * derivative(loss)).tolist())
    assert weights[4:6].tolist() == [0.0, 0.0], "episodes that ended alike are no pair"
    # Were they sums, the loss would fall with every l where failures are longer, whatever the answers are.
    assert weights.sum().item() == pytest.approx(0)


def test_a_critic_that_has_not_learned_adds_nothing_to_the_outcome() -> None:
    """The off switch `optim: {lr: 0}`: no likelihood, and of values the outcome, weighted by the distance to it."""
    ends = {"a0": [0.25, 0.5], "a1": [-0.5], "a2": [0.5], "b0": [-0.5], "b1": [-0.5], "c0": [-0.25, -0.5], "c1": [0.5]}
    found = scores(torch.zeros(9).double(), in_turn(ROWS), "value", 0.5, Bounds())
    assert found.tolist() == [one for of in ends.values() for one in of]
    assert scores(torch.zeros(9).double(), in_turn(ROWS), "value", 1.0, Bounds()).abs().tolist() == [0.5] * 9
    assert not scores(torch.zeros(9).double(), in_turn(ROWS), "likelihood", 0.9, Bounds()).any()


def test_a_value_predicts_the_team_reward_and_not_only_success() -> None:
    """A win, a draw and a loss, of which the first two are successes; and a failure that came half of the way."""
    ends = in_turn(rows(("a", "w", True), ("a", "d", True), ("a", "l", False)))
    games = [{**tags, "episode_reward": reward} for tags, reward in zip(ends, (1, 0, -1), strict=True)]
    bounds = Bounds().with_rewards(games)
    assert bounds.of_parts == {"": (-1, 1)} and bounds.with_rewards(ROWS) == bounds
    nothing = torch.zeros(3, dtype=torch.float64)
    assert scores(nothing, games, "value", 0.9, bounds).tolist() == [1.0, 0.0, -1.0]
    # To ascend: a win is the largest reward, a draw is half of the way.
    assert gradient_weights(nothing, games, "value", bounds).tolist() == [0.5, 0.0, -0.5]
    half = [{**games[0], "episode_success": False, "episode_reward": 0.5}]
    assert scores(nothing[:1], half, "value", 0.9, Bounds()).tolist() == [0.0]
    assert agreement(nothing[:1], half, "value", Bounds()) == {"brier": 0.0}


def test_parts_of_a_mixture_have_bounds_of_their_own() -> None:
    """Rewards of one part that are a hundred times as large leave another's gradient as it is."""
    made = rows(("a", "a0", True), ("b", "b0", True), ("b", "b1", False))
    for tags, agent, reward in zip(made, ("walk.guide", "game.guide", "game.guide"), (1.0, 100, -100), strict=True):
        tags |= {"agent": agent, "episode_reward": reward}
    bounds, nothing = Bounds().with_rewards(made), torch.zeros(3, dtype=torch.float64)
    assert gradient_weights(nothing, made, "value", bounds).tolist() == [0.5, 0.5, -0.5]
    assert scores(nothing, in_turn(made), "value", 1.0, bounds).tolist() == [0.5, 100, -100]


@pytest.mark.parametrize("left_first", [True, False])
def test_the_value_after_an_answer_is_that_of_the_first_prompt_that_can_show_it(left_first: bool) -> None:
    """Two agents answer at the same time, twice: whoever ends first, scores are the same."""
    one, two = (0, 1) if left_first else (1, 0)
    made = rows(*[("a", "a0", True)] * 4)
    for tags, order, place, after in zip(made, range(4), (one, two, 2 + one, 2 + two), (0, 0, 2, 2), strict=True):
        tags |= {"order": order, "place": place, "after": after}
    values = torch.tensor([0.2, 0.4, 0.5, 0.7], dtype=torch.float64)
    shuffled = [2, 0, 3, 1]
    found = scores(values.logit()[shuffled], [made[number] for number in shuffled], "value", 0.5, Bounds())
    last = [0.5, 0.3]  # 1 less the value
    first = [0.5 - 0.2 + 0.5 * last[0], 0.5 - 0.4 + 0.5 * last[0]]
    assert found.tolist() == pytest.approx([last[0], first[0], last[1], first[1]])


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
    assert agreement(ratios, made, "likelihood", Bounds())["accuracy"] == pytest.approx(right / len(pairs))


def test_without_a_pair_nothing_is_learned() -> None:
    alike = rows(("a", "a0", True), ("a", "a1", True), ("b", "b0", False))
    assert not gradient_weights(torch.ones(3, dtype=torch.float64), alike, "likelihood", Bounds()).any()
    assert agreement(torch.ones(3, dtype=torch.float64), alike, "likelihood", Bounds()) == {}
    assert not has_signal(alike, "likelihood") and has_signal(alike, "value") and has_signal(ROWS, "likelihood")


def test_agreement_counts_pairs_of_episodes_by_their_mean_score() -> None:
    found = agreement(RATIOS, ROWS, "likelihood", Bounds())
    # Means: a0 .125, a1 1, a2 0; c0 .4, c1 -.4: no pair of a task is in order.
    solved = [float(tags["episode_success"]) for tags in ROWS]
    assert found == {"accuracy": 0.0, "correlation": pytest.approx(correlation(RATIOS.tolist(), solved))}
    found = agreement(-RATIOS, ROWS, "value", Bounds())
    # Each solved episode is above the failed ones of its own task: how hard a task is counts nothing.
    assert found["accuracy"] == 1.0
    found = agreement(RATIOS, ROWS, "value", Bounds())
    values = RATIOS.sigmoid()
    assert found["brier"] == pytest.approx(float(((values - torch.tensor(solved)) ** 2).mean()))
    assert found["correlation"] == pytest.approx(correlation(values.tolist(), solved))
    ties = rows(("a", "a0", True), ("a", "a1", False))
    assert agreement(torch.zeros(2, dtype=torch.float64), ties, "likelihood", Bounds()) == {"accuracy": 0.5}
