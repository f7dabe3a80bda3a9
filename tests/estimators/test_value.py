"""Values by regression: against weighted least squares by torch, and scores by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from verl_atgrpo.train.estimators.value import Moments, scores


def in_turn(rewards: list[float], episode: str = "e") -> list[dict[str, Any]]:
    """Tags of an episode's decisions, one after the other."""
    return [
        {"episode": episode, "order": number, "place": number, "after": number, "episode_reward": reward}
        for number, reward in enumerate(rewards)
    ]


def drawn(rows: int, seed: int, dimension: int = 5) -> tuple[Tensor, Tensor]:
    """Situations of features with other sizes and means, and rewards that follow from two of them."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, dimension, generator=generator)
    y = (z[:, 0] + 0.5 * z[:, 1] + 0.3 * torch.randn(rows, generator=generator) > 0).float()
    return z * torch.tensor([1.0, 20, 0.1, 3, 1]) + torch.tensor([0.0, 7, -3, 0, 100]), y


def by_least_squares(steps: list[tuple[Tensor, Tensor]], weights: list[float], at: Tensor) -> Tensor:
    """The same by torch's solver, of rows that are scaled by hand and one row more for each feature's penalty."""
    x, y = (torch.cat([step[part] for step in steps]).double() for part in (0, 1))
    weight = torch.cat([torch.full((len(step[0]),), one) for step, one in zip(steps, weights, strict=True)]).double()
    total = weight.sum()
    mean, level = (weight[:, None] * x).sum(0) / total, (weight * y).sum() / total
    spread = ((weight[:, None] * (x - mean) ** 2).sum(0) / total).sqrt()
    size = x.shape[1]
    rows = torch.cat([weight.sqrt()[:, None] * (x - mean) / spread, size**0.5 * torch.eye(size).double()])
    found = torch.linalg.lstsq(rows, torch.cat([weight.sqrt() * (y - level), torch.zeros(size).double()])[:, None])
    return level + (((at.double() - mean) / spread) @ found.solution)[:, 0]


def test_a_regression_is_that_of_all_steps_with_their_weights() -> None:
    steps, (at, _) = [drawn(40, 0), drawn(7, 1), drawn(30, 2)], drawn(20, 3)
    seen = Moments.of(*steps[0])
    for step in steps[1:]:
        seen = seen.then(Moments.of(*step), 0.5)
    expected = by_least_squares(steps, [0.25, 0.5, 1.0], at).clamp(0, 1)
    torch.testing.assert_close(seen.values(at), expected, atol=1e-9, rtol=0)
    forgotten = Moments.of(*steps[0]).then(Moments.of(*steps[1]), 0.0)
    torch.testing.assert_close(forgotten.values(at), Moments.of(*steps[1]).values(at))


def test_values_predict_new_situations() -> None:
    seen, (x, y) = Moments.of(*drawn(400, 0)), drawn(400, 1)
    values = seen.values(x)
    assert float(torch.corrcoef(torch.stack([values, y.double()]))[0, 1]) > 0.6
    assert values.min() >= 0 and values.max() <= 1, "none is beyond what was seen"


def test_features_that_say_nothing_are_left_out() -> None:
    """A constant one, whose standard deviation is rounding, and one decision alone."""
    x, y = drawn(50, 0)
    constant = torch.cat([x, torch.full((50, 1), 1234.5)], 1)
    (at, _), values = drawn(10, 1), Moments.of(constant, y).values
    other = [values(torch.cat([at, torch.full((10, 1), 1234.5 + shift)], 1)) for shift in (0.0, 1.0)]
    torch.testing.assert_close(*other)
    assert Moments.of(x[:1], y[:1]).values(at).tolist() == y[:1].tolist() * 10


def test_a_constant_value_discounts_the_outcome() -> None:
    """What lambda does without anything learned: the outcome, less where more decisions follow."""
    won, lost = in_turn([1.0] * 3), in_turn([0.0] * 2, "f")
    values = torch.full((5,), 0.5, dtype=torch.float64)
    assert scores(values, [*won, *lost], 0.5).tolist() == [0.125, 0.25, 0.5, -0.25, -0.5]
    assert scores(values, [*won, *lost], 1.0).tolist() == [0.5] * 3 + [-0.5] * 2


@pytest.mark.parametrize("left_first", [True, False])
def test_the_value_after_an_answer_is_that_of_the_first_prompt_that_can_show_it(left_first: bool) -> None:
    """Two agents answer at the same time, twice: whoever ends first, scores are the same."""
    one, two = (0, 1) if left_first else (1, 0)
    made = in_turn([1.0] * 4)
    for tags, order, place, after in zip(made, range(4), (one, two, 2 + one, 2 + two), (0, 0, 2, 2), strict=True):
        tags |= {"order": order, "place": place, "after": after}
    values = torch.tensor([0.2, 0.4, 0.5, 0.7], dtype=torch.float64)
    shuffled = [2, 0, 3, 1]
    found = scores(values[shuffled], [made[number] for number in shuffled], 0.5)
    last = [0.5, 0.3]  # 1 less the value
    first = [0.5 - 0.2 + 0.5 * last[0], 0.5 - 0.4 + 0.5 * last[0]]
    assert found.tolist() == pytest.approx([last[0], first[0], last[1], first[1]])
