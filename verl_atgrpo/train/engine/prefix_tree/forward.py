"""A packed prefix tree through a transformers model: inputs, mask, and what the model predicts of every row.

Nothing of the model changes: positions are depths, and the mask lets a token see its ancestors alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl_atgrpo.train.engine.prefix_tree.tree import Tree

SLIDING = "sliding_attention"
FULL = "full_attention"
MOST = 1 << 28
"""Probabilities of distributions that are in memory at once, 1 GiB of float32: of 1,766 nodes with Qwen3's tokens."""
FLEX = "flex_attention"
"""The attention implementation of transformers that skips blocks of which nothing is visible."""


@dataclass(frozen=True)
class Packed:
    """A tree's tensors on the model's device."""

    tokens: Tensor
    """[L], as all of the next three."""
    depths: Tensor
    ends: Tensor
    predictors: Tensor
    """Where each response token is predicted, as an index into `nodes`, [M]."""
    nodes: Tensor
    """The tokens at which anything is predicted, ascending, [N]: `lm_head` runs on these."""
    labels: Tensor
    """[M]."""
    counts: Sequence[int]
    """Response tokens of each row."""

    @classmethod
    def of(cls, tree: Tree, device: torch.device | str) -> Packed:
        """Moves a tree to a device."""
        nodes, predictors = torch.from_numpy(tree.predictors).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        arrays = (tree.tokens, tree.depths, tree.ends, tree.labels)
        tokens, depths, ends, labels = (torch.from_numpy(one).to(device) for one in arrays)
        return cls(tokens, depths, ends, predictors.to(device), nodes.to(device), labels, tree.counts.tolist())


def dense_mask(packed: Packed, window: int | None = None) -> Tensor:
    """Returns which tokens see which, [1, 1, L, L] of bool: themselves and ancestors, `window` places back."""
    index = torch.arange(len(packed.tokens), device=packed.tokens.device)
    visible = (index <= index[:, None]) & (index[:, None] < packed.ends)
    if window is not None:
        visible &= packed.depths[:, None] - packed.depths < window
    return visible[None, None]


def block_mask(packed: Packed, window: int | None = None) -> Any:
    """Returns the same as FlexAttention's block mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends, depths = packed.ends, packed.depths

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < ends[key])
        return seen if window is None else seen & (depths[query] - depths[key] < window)

    size = len(packed.tokens)
    return create_block_mask(visible, None, None, size, size, device=str(packed.tokens.device))


def model_inputs(packed: Packed, config: Any) -> dict[str, Any]:
    """Returns a causal language model's keyword arguments; raises ValueError for attention that takes no such mask."""
    text = config.get_text_config()
    implementation = text._attn_implementation
    if implementation not in ("sdpa", "eager", FLEX):
        raise ValueError(f"attention implementation {implementation!r} takes no tree's mask: sdpa, eager or {FLEX} do")

    def mask(window: int | None) -> Any:
        if implementation == FLEX:
            return block_mask(packed, window)
        visible = dense_mask(packed, window)
        if implementation == "sdpa":
            return visible
        return torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, torch.finfo(torch.float32).min)

    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or [FULL if window is None else SLIDING])
    if not kinds <= {FULL, SLIDING}:
        raise ValueError(f"layers of the kinds {sorted(kinds - {FULL, SLIDING})} know no tree")
    masks = {kind: mask(window if kind == SLIDING else None) for kind in kinds}
    # For fewer than 128 tokens FlexAttention would choose a kernel for decoding, which takes no symbolic sizes.
    options = {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}} if implementation == FLEX else {}
    return {
        **options,
        "input_ids": packed.tokens[None],
        "position_ids": packed.depths[None],
        "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
        "logits_to_keep": packed.nodes,
    }


def log_probs(
    logits: Tensor, packed: Packed, temperature: float | Tensor = 1.0, entropy: bool = False
) -> dict[str, Tensor]:
    """Returns every response token's log-probability, and with `entropy` that of its distribution in nats.

    Shapes: logits at `packed.nodes`, [N, vocabulary]; temperature of all rows, or of each, [rows]. Returned are
    `log_probs` and `entropy`, [M] of float32.
    """
    if not isinstance(temperature, Tensor):
        made = _in_parts(logits, packed.predictors, packed.labels, temperature, entropy)
    else:
        counts = torch.tensor(packed.counts, device=logits.device)
        of_tokens = temperature.to(logits.device).flatten().repeat_interleave(counts)
        made = logits.new_zeros(len(packed.labels), 1 + entropy, dtype=torch.float32)
        # A node that rows of different temperatures share is computed at each of them, the others once.
        for each in sorted(set(of_tokens.tolist())):
            (mine,) = torch.nonzero(of_tokens == each, as_tuple=True)
            nodes, places = packed.predictors[mine].unique(return_inverse=True)  # type: ignore[no-untyped-call]
            made = made.index_put((mine,), _in_parts(logits[nodes], places, packed.labels[mine], each, entropy))
    return dict(zip(("log_probs", "entropy"), made.unbind(-1), strict=False))


def _in_parts(logits: Tensor, places: Tensor, labels: Tensor, temperature: float, entropy: bool) -> Tensor:
    """Returns [m, 1 or 2] values of tokens, by the places of their distributions and their labels.

    `MOST` probabilities at a time: in float32 those of a whole micro-batch, several at once, would be larger than a
    GPU, 25 GB each of 42,000 nodes and 152,000 tokens. With gradients they are computed again in the backward pass.
    """

    def part(some: Tensor, places: Tensor, labels: Tensor) -> Tensor:
        scaled = some.float() / temperature if temperature != 1.0 else some.float()
        logs = scaled.log_softmax(-1)
        found = [logs[places, labels]]
        if entropy:
            found.append(-(logs.exp() * logs).sum(-1)[places])
        return torch.stack(found, -1)

    size = max(1, MOST // logits.shape[1])
    if len(logits) <= size:
        return part(logits, places, labels)
    again = functools.partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
    compute = again if logits.requires_grad and torch.is_grad_enabled() else part
    order = places.argsort(stable=True)
    # The places of a part are in a row then. `split` has one gradient of all parts, slices have one each.
    sizes = torch.bincount(places // size, minlength=-(-len(logits) // size)).tolist()
    of_parts = zip(
        torch.split(logits, size), torch.split(places[order], sizes), torch.split(labels[order], sizes), strict=True
    )
    values = [compute(some, own - number * size, theirs) for number, (some, own, theirs) in enumerate(of_parts)]
    return torch.cat(values)[order.argsort()]
