"""Jagged tensors: the values of rows of different lengths, one after another."""

from __future__ import annotations

import torch
from torch import Tensor


def jagged(values: Tensor, lengths: Tensor) -> Tensor:
    """Splits values into rows of these lengths, int64 (N,): a jagged tensor (N, T)."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    # With bounds, as torch.nested.as_nested_tensor sets them: without, padding would be to the sum of all lengths.
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )


def slices(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns slices of `values`, without a loop over them: starts, lengths (N,) int64 -> (N, T) jagged."""
    first = lengths.cumsum(0) - lengths
    places = torch.arange(int(lengths.sum()), device=lengths.device)
    return jagged(values[places + torch.repeat_interleave(starts - first, lengths)], lengths)
