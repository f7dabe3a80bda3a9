"""Advantages of a policy's rows, from their tags, and rollout correction, part by part.

An advantage is one number a row. verl computes it from rewards and masks of all tokens, padded to the longest row, and
its rollout correction from all log-probs at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.workers.utils.padding import response_to_nested

from verl_atgrpo.estimators.kernel import at_grpo_advantage
from verl_atgrpo.trainer.correction_metrics import merged
from verl_atgrpo.trainer.row_parts import fetched, parts, put, real_rows, response_lengths

_FIELDS = ("response_mask", "old_log_probs", "rollout_log_probs")


def write_advantages(batch: KVBatchMeta, algorithm: Any) -> dict[str, float]:
    """Writes the rows' advantages (and what rollout correction makes of them) to the queue and into their tags.

    A row's tags gain `advantage`, and `trained_tokens`, those that rejection left.

    Args:
        batch: rows with padding; groups complete.
        algorithm: verl's `algorithm` section.
    """
    lengths, real = response_lengths(batch.tags), real_rows(batch.tags)
    tokens = lengths * real
    correction = algorithm.get("rollout_correction", None)
    metrics: dict[str, float] = {}
    rejects = False
    if correction is not None and not correction.get("bypass_mode", False):
        rejects = correction.get("rollout_rs", None) is not None
        metrics, tokens = _correct(batch, correction, rejects, tokens)
    # As verl hands them over, but one token a row; in float32, as a row's rm_scores are.
    rewards = torch.tensor([[tags["reward"]] for tags in batch.tags], dtype=torch.float32)
    uids = np.array([tags["group"] for tags in batch.tags], dtype=object)
    advantages = at_grpo_advantage(rewards, (tokens > 0).long()[:, None], algorithm, uids)[0].squeeze(-1)
    for tags, advantage, trained in zip(batch.tags, advantages.tolist(), tokens.tolist(), strict=True):
        tags.update(advantage=advantage, trained_tokens=trained)
    for part in parts(batch.tags):
        values = torch.repeat_interleave(advantages[part], lengths[part])
        if rejects:
            values = values * fetched(batch, part, ["response_mask"])["response_mask"].values()
        put(batch, part, {"advantages": _jagged(values, lengths[part])})
    return metrics


def _correct(batch: KVBatchMeta, correction: Any, rejects: bool, tokens: Tensor) -> tuple[dict[str, float], Tensor]:
    """Computes what the correction's section asks for; returns metrics and the tokens left of every row."""
    # Weights with a mean of 1 over the batch, and spreads of what is rejected, are no sums over rows.
    at_once = rejects or correction.get("rollout_is_batch_normalize", False)
    collected = []
    left = tokens.clone()
    for part in [list(range(len(batch)))] if at_once else parts(batch.tags):
        data = fetched(batch, part, _FIELDS)
        shape = data["response_mask"]
        rows, metrics = compute_rollout_correction_and_add_to_batch(
            DataProto(batch=data.to_padded_tensor(0)), correction
        )
        written = {"rollout_is_weights"} & set(rows.batch.keys())
        if rejects:
            written.add("response_mask")
            left[part] = rows.batch["response_mask"].sum(dim=-1)
        if written:
            put(batch, part, {field: response_to_nested(rows.batch[field], shape) for field in sorted(written)})
        collected.append((metrics, int(tokens[part].sum()), len(part)))
    return merged(collected, per_row=correction.get("rollout_is", None) == "sequence"), left


def _jagged(values: Tensor, lengths: Tensor) -> Tensor:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
    )
