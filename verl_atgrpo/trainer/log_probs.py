"""The actor's and the reference's log-probs of a policy's rows, part by part: verl's own way for all rows at once
needs the padded tokens of all of them on the driver."""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import agg_loss
from verl.workers.utils.padding import response_from_nested

from verl_atgrpo.trainer.row_parts import each, put, real_rows, response_lengths


class ProbsDifference:
    """How far the probabilities of actor and server are apart, over all tokens that were added.

    The metrics of `verl.utils.debug.metrics.calculate_debug_metrics`, from sums.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._sums = torch.zeros(7, dtype=torch.float64)
        self._largest = 0.0

    def add(self, actor: Tensor, server: Tensor) -> None:
        """Adds tokens: probabilities (T,) float32 each, at least one."""
        difference = (actor - server).abs()
        self._largest = max(self._largest, difference.max().item())
        self._tokens += len(actor)
        a, s, d = actor.double(), server.double(), difference.double()
        self._sums += torch.stack([x.sum() for x in (a, s, a * a, s * s, a * s, d, d * d)])

    def metrics(self) -> dict[str, float]:
        """Returns verl's metrics."""
        n = self._tokens
        a, s, aa, ss, as_, d, dd = self._sums
        return {
            "training/rollout_probs_diff_valid": 1,
            "training/rollout_probs_diff_max": self._largest,
            "training/rollout_probs_diff_mean": (d / n).item(),
            "training/rollout_probs_diff_std": ((dd - d * d / n).clamp(min=0) / (n - 1)).sqrt().item(),
            "training/rollout_actor_probs_pearson_corr": (
                (as_ - a * s / n) / ((aa - a * a / n) * (ss - s * s / n)).sqrt()
            ).item(),
        }


def bypass_old_log_probs(batch: KVBatchMeta) -> None:
    """Takes the server's log-probs for the actor's, as `algorithm.rollout_correction.bypass_mode` asks."""
    for part, data in each(batch, ["rollout_log_probs"]):
        put(batch, part, {"old_log_probs": data["rollout_log_probs"]})


def write_old_log_probs(batch: KVBatchMeta, actor: DictConfig) -> dict[str, float]:
    """Writes the answers' part of what the workers computed of whole rows, and returns verl's metrics of it."""
    real, lengths = real_rows(batch.tags), response_lengths(batch.tags)
    entropy, difference = 0.0, ProbsDifference()
    for part, data in each(batch, ["entropy", "log_probs", "response_mask", "rollout_log_probs"]):
        answers = {
            "old_log_probs": response_from_nested(data["log_probs"], data["response_mask"]),
            "entropy": response_from_nested(data["entropy"], data["response_mask"]),
        }
        put(batch, part, answers)
        mask = data["response_mask"].to_padded_tensor(0)
        entropy += agg_loss(
            loss_mat=answers["entropy"].to_padded_tensor(0),
            loss_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            # Of all rows, not of this part: so the parts add up. Every token of a real row counts, none of padding.
            batch_num_tokens=int(lengths[real].sum()),
            global_batch_size=int(real.sum()),
            loss_scale_factor=actor.loss_scale_factor or int(lengths.max()),
        ).item()
        counted = data["response_mask"].values().bool()
        difference.add(
            answers["old_log_probs"].values()[counted].exp(), data["rollout_log_probs"].values()[counted].exp()
        )
    return {"actor/entropy": entropy, **difference.metrics()}


def write_ref_log_probs(batch: KVBatchMeta) -> None:
    """Writes the answers' part of what the reference computed of whole rows."""
    for part, data in each(batch, ["log_probs", "response_mask"]):
        put(batch, part, {"ref_log_prob": response_from_nested(data["log_probs"], data["response_mask"])})
