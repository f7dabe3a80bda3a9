"""Adapters in vLLM for CPU: one matrix product for all tokens of an adapter. Imported only in vLLM's processes.

vLLM's own (`vllm.lora.ops.torch_ops`) copies the adapter's matrices for every token: for 4,096 tokens and an output of
1,536 features that is 400 MB a layer, which took five times as long as the layer itself.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Group = tuple[int, slice | torch.Tensor]
"""An adapter's slot, and rows in the batch that have it."""
LONG = 64
"""Mean rows of a run from which on a product for each is faster than picking rows and adding to them by index."""


def groups_of(slots: torch.Tensor) -> list[Group]:
    """Returns the rows of every adapter: as runs where they are long or its only ones, else as indices.

    `slots`: [rows], the slot of each row's adapter; -1 for none.
    """
    found, lengths = (each.tolist() for each in torch.unique_consecutive(slots, return_counts=True))
    if len(slots) >= LONG * len(found) or len(found) == len(set(found)):
        ends = itertools.accumulate(lengths)
        runs = ((slot, slice(end - length, end)) for slot, length, end in zip(found, lengths, ends, strict=True))
        return [(slot, rows) for slot, rows in runs if slot >= 0]
    return [(slot, (slots == slot).nonzero().squeeze(1)) for slot in sorted(set(found)) if slot >= 0]


class GroupedPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's, with grouped products; and a row without an adapter gets none, where vLLM gives it the last slot's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokens: list[Group] = []
        self._samples: list[Group] = []

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Groups the rows of the batch that comes next."""
        super().update_metadata(*args, **kwargs)
        self._tokens, self._samples = groups_of(self.token_lora_indices), groups_of(self.sampler_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Adds the adapters' part of a linear layer to its output `y`: [tokens, features], in place.

        Its slices, such as those of q, k and v, are side by side, `output_slices` features each. `x`: [tokens,
        inputs]. For each slice `lora_a_stacked`: [slots, 1, rank, inputs], and `lora_b_stacked`: [slots, 1, features
        of the slice, rank].
        """
        _add(self._tokens, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        """Adds the adapters' part of the head to the logits [samples, vocabulary], in place."""
        groups = _without_zeros(self._samples, lora_b_stacked)
        _add(groups, y, x, (lora_a_stacked,), (lora_b_stacked,), scale, (lora_b_stacked.shape[-2],))

    def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, **_: Any) -> None:
        """Adds the adapters' part of the embeddings [tokens, features], in place; `x`: [tokens, rank]."""
        for slot, rows in _without_zeros(self._tokens, lora_b_stacked):
            _add_product(y, rows, x[rows], lora_b_stacked[slot, 0])


def _without_zeros(groups: list[Group], up: torch.Tensor) -> list[Group]:
    """Leaves out adapters that have nothing in this layer: vLLM wraps head and embedding whether or not any has."""
    return [group for group in groups if up[group[0]].any()]


def _add_product(y: torch.Tensor, rows: slice | torch.Tensor, inputs: torch.Tensor, up: torch.Tensor) -> None:
    inputs, up = inputs.to(y.dtype), up.to(y.dtype).t()
    if isinstance(rows, slice):
        y[rows].addmm_(inputs, up)
    else:
        y.index_add_(0, rows, inputs @ up)


def _add(
    groups: list[Group],
    y: torch.Tensor,
    x: torch.Tensor,
    down: tuple[torch.Tensor, ...],
    up: tuple[torch.Tensor, ...],
    scale: float,
    slices: tuple[int, ...],
) -> None:
    y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
    for slot, rows in groups:
        # As vLLM does, the small product in float32 and the large one in the output's dtype.
        inputs = x[rows].float()
        first = 0
        for a, b, size in zip(down, up, slices, strict=True):
            _add_product(y[:, first : first + size], rows, inputs @ a[slot, 0].float().t() * scale, b[slot, 0])
            first += size
