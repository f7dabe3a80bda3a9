"""verl's loops over the rows of a batch, in a training worker, replaced by operations on many at once.

- `index_select_tensor_dict` takes every field apart into its rows, however few are selected: with n micro-batches n
  times all rows. For a tiny model that was three quarters of the log-probs' CPU time.
- `no_padding_2_padding` cuts every row's response out of the model's output. On a GPU each row waits for the device
  several times, as the places to cut at lie there.
- `logprobs_from_logits_v2`, which is used where flash-attn is missing, takes one row at a time, and without padding a
  row is a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.tensordict_utils import get_non_tensor_data

from verl_atgrpo.train.engine.prefix_tree.forward import MOST
from verl_atgrpo.train.rows.batch import slices

Select = Callable[[TensorDict | None, Sequence[int] | Tensor], TensorDict | None]


def replace(tensordict_utils: ModuleType, losses: ModuleType, torch_functional: ModuleType) -> None:
    """Replaces them in this process, in verl's modules that use them."""
    for module, name, replaced in (
        (tensordict_utils, "index_select_tensor_dict", selecting),
        (losses, "no_padding_2_padding", padding_responses),
        (torch_functional, "logprobs_from_logits_v2", lambda _: log_probs),
    ):
        original = getattr(module, name)
        if not hasattr(original, "replaces"):
            replacement: Any = replaced(original)
            replacement.replaces = original
            setattr(module, name, replacement)


def selecting(original: Select) -> Select:
    """Returns verl's function `original`, but for jagged fields (N, T), whose values are gathered at once."""

    def select(batch: TensorDict | None, indices: Sequence[int] | Tensor) -> TensorDict | None:
        if batch is None:
            return None
        chosen = torch.as_tensor(indices)
        texts = [key for key, value in batch.items() if _is_text(value)]
        selected = original(batch.exclude(*texts), chosen)
        assert selected is not None
        for key in texts:
            field: Any = batch[key]
            offsets = field.offsets()
            rows = chosen.to(offsets.device)
            selected[key] = slices(field.values(), offsets[rows], offsets[rows + 1] - offsets[rows])
        return selected

    return select


def _is_text(field: Any) -> bool:
    return isinstance(field, Tensor) and field.is_nested and field.dim() == 2 and field.layout == torch.jagged


Pad = Callable[[Tensor, TensorDict], Tensor]


def padding_responses(original: Pad) -> Pad:
    """Returns verl's function `original`, but for batches with jagged texts: (T, ...) -> (N, R, ...), padded with 0.

    It takes the responses' part of what the model computes of whole rows, where a token's is at the place of the token
    before it.
    """

    def pad(tensor: Tensor, data: TensorDict) -> Tensor:
        if not (_is_text(data["prompts"]) and _is_text(data["responses"])):
            return original(tensor, data)
        values: Tensor = tensor.values() if tensor.is_nested else tensor
        prompts, lengths = (data[name].offsets().diff() for name in ("prompts", "responses"))
        longest = get_non_tensor_data(data=data, key="max_response_len", default=-1)
        column = torch.arange(int(lengths.max()) if longest < 0 else longest, device=values.device)
        first = (prompts + lengths).cumsum(0) - lengths - 1
        places = (first[:, None] + column).clamp(max=len(values) - 1)
        inside = (column < lengths[:, None]).view(*places.shape, *[1] * (values.dim() - 1))
        found = values.index_select(0, places.flatten()).view(*places.shape, *values.shape[1:])
        return found.where(inside, torch.zeros((), dtype=values.dtype, device=values.device))

    return pad


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probs of labels: (..., V), (...) -> (...), of as many tokens at a time as fit into memory."""
    size = max(1, MOST // logits.shape[-1])
    # `split` has one gradient of all parts, slices have one each.
    parts = zip(torch.split(logits.flatten(0, -2), size), torch.split(labels.flatten(), size), strict=True)
    return torch.cat([_log_probs(*part) for part in parts]).view(labels.shape)


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)
    # The sum is unstable in halves, as verl says.
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
