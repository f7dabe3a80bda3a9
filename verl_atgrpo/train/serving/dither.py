"""Dithered weights: small updates reach a policy that is computed in bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_COARSE = (torch.bfloat16, torch.float16)
_PART = 2**22
"""Weights that are placed at a time: what that needs besides them is 0.2 GB."""


@torch.no_grad()
def dither(weights: Iterable[Tensor], dtype: torch.dtype, seed: int) -> int:
    """Moves each weight that is a number of `dtype` to a random place among those that round to it, in place.

    A checkpoint's weights are numbers of bfloat16. Each lies in the middle of what rounds to it, so updates do not
    reach what is computed in bfloat16 before they have moved a weight by half of the spacing. From a place drawn
    evenly, updates arrive in the mean over weights from the first step on, and what is computed at the start is the
    same to the bit. Weights between two numbers of `dtype` stay where they are.

    Args:
        weights: this rank's, of any shapes; those that are not float32 stay.
        dtype: the dtype in which the policy is computed.
        seed: another one for each shard.

    Returns how many weights moved: none for float32.
    """
    if dtype not in _COARSE:
        return 0
    moved = 0
    for weight in weights:
        generator = torch.Generator(weight.device).manual_seed(seed)
        seed += 1
        for part in torch.split(weight.view(-1), _PART) if weight.dtype == torch.float32 else ():
            moved += _place(part, dtype, generator)
    return moved


def _place(weight: Tensor, dtype: torch.dtype, generator: torch.Generator) -> int:
    rounded = weight.to(dtype)
    size = rounded.abs()
    number = size.view(torch.int16)
    above, below = ((number + step).view(dtype).float() for step in (1, -1))
    low, high = (size.float() + below) / 2, (size.float() + above) / 2
    drawn = torch.rand(len(weight), generator=generator, device=weight.device)
    placed = torch.copysign(low + drawn * (high - low), weight)
    # Bounds are shared with the next numbers; beyond the largest one and below 0 there is none.
    inside = (rounded.float() == weight) & (placed.to(dtype) == rounded) & (number > 0)
    weight.copy_(torch.where(inside, placed, weight))
    return int(inside.sum())
