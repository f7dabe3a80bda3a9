"""Dithered weights compute the same at the start, and small updates arrive from the first step on."""

from __future__ import annotations

import pytest
import torch

from verl_atgrpo.train.engine.arrival import dither

COARSE = [torch.bfloat16, torch.float16]


def checkpoint(dtype: torch.dtype, number: int = 200_000, scale: float = 0.1) -> torch.Tensor:
    """Returns float32 weights as a checkpoint has them: numbers of the dtype."""
    drawn = torch.randn(number, generator=torch.Generator().manual_seed(1)) * scale
    return drawn.to(dtype).float()


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0, 100.0])
def test_what_is_computed_stays_the_same_to_the_bit(dtype: torch.dtype, scale: float) -> None:
    before = checkpoint(dtype, scale=scale)
    weights = before.clone()
    assert dither([weights], dtype, 0) > 0.999 * (before != 0).sum()
    assert torch.equal(weights.to(dtype), before.to(dtype))
    # Evenly within the spacing: 1/12 of its square is the variance, and the mean is that of the checkpoint.
    spacing = torch.ldexp(torch.ones_like(before), torch.frexp(before)[1]) * torch.finfo(dtype).eps / 2
    # Below the smallest normal number the spacing does not shrink any more.
    moved = ((weights - before) / spacing)[before.abs() >= torch.finfo(dtype).smallest_normal]
    if scale >= 0.02:
        assert moved.abs().max() <= 0.5
        assert float(moved.mean()) == pytest.approx(0, abs=0.01)
        assert float(moved.var()) == pytest.approx(1 / 12, rel=0.03)


@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, 1.0, -1.0, 2.0**-14, 2.0**-24, 65504.0, -65504.0, float("inf"), float("-inf")],
)
@pytest.mark.parametrize("dtype", COARSE)
def test_edges_of_the_dtype_stay_what_they_are(dtype: torch.dtype, value: float) -> None:
    weights = torch.full((1000,), value).to(dtype).float()
    before = weights.clone()
    dither([weights], dtype, 3)
    assert torch.equal(weights.to(dtype), before.to(dtype))
    assert torch.equal(torch.signbit(weights), torch.signbit(before))
    if abs(value) in (0.0, float("inf")):
        assert torch.equal(weights, before)


def test_a_weight_that_is_no_number_stays() -> None:
    weights = torch.tensor([float("nan"), 1.0])
    dither([weights], torch.bfloat16, 0)
    assert weights[0].isnan()


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_an_update_smaller_than_the_spacing_arrives_in_the_mean(dtype: torch.dtype, share: float) -> None:
    before = checkpoint(dtype)
    spacing = torch.ldexp(torch.ones_like(before), torch.frexp(before)[1]) * torch.finfo(dtype).eps / 2
    signs = torch.randn(before.shape, generator=torch.Generator().manual_seed(2)).sign()
    update = share * spacing * signs

    def arrives(weights: torch.Tensor) -> float:
        """Returns how much of the update arrives: the rounded change's projection on it, in units of its length."""
        change = (weights + update).to(dtype).float() - weights.to(dtype).float()
        return float((change * update).sum() / (update * update).sum())

    dithered = before.clone()
    dither([dithered], dtype, 0)
    assert arrives(before) < 0.05
    assert arrives(dithered) == pytest.approx(1, abs=0.1)


def test_weights_between_numbers_and_finer_dtypes_are_left_alone() -> None:
    between = checkpoint(torch.bfloat16) * (1 + 2.0**-12)
    weights = between.clone()
    assert dither([weights], torch.bfloat16, 0) == 0 and torch.equal(weights, between)
    weights = checkpoint(torch.bfloat16)
    assert dither([weights], torch.float32, 0) == 0
    rounded = weights.bfloat16()
    assert dither([rounded], torch.bfloat16, 0) == 0


def test_draws_are_the_seeds_and_differ_between_tensors() -> None:
    first, again, other = (checkpoint(torch.bfloat16).reshape(400, 500) for _ in range(3))
    second = first.clone()
    dither([first, second], torch.bfloat16, 7)
    dither([again], torch.bfloat16, 7)
    dither([other], torch.bfloat16, 8)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(second, other)  # shards draw from seeds that lie further apart than they have tensors
