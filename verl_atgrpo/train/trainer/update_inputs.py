"""The driver's part of a policy's update: log-probs, advantages, rollout correction, mini-batches.

Functions that read or write tokens work on parts of a batch (`Batch.parts`), where verl's trainer loads all rows
padded: a million rows of up to 1,024 tokens would take gigabytes per field. They call verl's functions on every part;
what is not a sum over parts is combined here from sums (`merged`, `ProbsDifference`).
tests/trainer/test_row_parts.py compares all of it with verl's own trainer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance
from verl.workers.utils.padding import response_to_nested

from verl_atgrpo.train.estimators.spec import EstimatorSpec
from verl_atgrpo.train.rows.batch import Batch, is_padding, jagged, slices
from verl_atgrpo.train.rows.row_advantages import loss_weights, policy_advantages, weights_of
from verl_atgrpo.train.trainer.metrics import PROBS_DIFF, versions

Part = tuple[dict[str, float], int, int]
"""Metrics of a part, its number of tokens, and its number of rows."""
_PREFIX = "rollout_corr/"


def merged(parts: Sequence[Part], per_row: bool) -> dict[str, float]:
    """Combines verl's rollout correction metrics of parts into those of all rows.

    A metric is a mean over tokens or rows, a maximum or a minimum, as in verl's `rollout_corr_helper`; standard
    deviations are combined from the parts' means and standard deviations. `per_row` says whether importance weights
    are per row (`rollout_is: sequence`).
    """
    if len(parts) == 1:
        return parts[0][0]
    return {key: _merge(key.removeprefix(_PREFIX), parts, per_row) for key in parts[0][0]}


def _merge(name: str, parts: Sequence[Part], per_row: bool) -> float:
    def column(name: str) -> Any:
        return np.array([metrics[_PREFIX + name] for metrics, _, _ in parts])

    values, (tokens, rows) = column(name), np.array([part[1:] for part in parts]).T
    if name.endswith(("_max", "_max_deviation")):
        return float(values.max())
    if name.endswith("_min"):
        return float(values.min())
    if name == "rollout_is_seq_std":
        means = column("rollout_is_seq_mean")
        apart = means - np.average(means, weights=rows)
        # Sample standard deviation, as torch.std.
        return float(np.sqrt(((rows - 1) * values**2 + rows * apart**2).sum() / (rows.sum() - 1)))
    if name in ("rollout_is_std", "rollout_is_eff_sample_size"):
        means = column("rollout_is_mean")
        mean = np.average(means, weights=tokens)
        if name == "rollout_is_std":
            return float(np.sqrt(np.average(values**2 + (means - mean) ** 2, weights=tokens)))
        # Defined as mean^2 / (mean of squares).
        return float(mean**2 / np.average(means**2 / values, weights=tokens))
    of_rows = "ppl" in name or "seq" in name or (per_row and name.startswith("rollout_is_ratio_fraction"))
    return float(np.average(values, weights=rows if of_rows else tokens))


def deal(
    rows: Sequence[Mapping[str, Any]], ranks: int, mini_batches: int, seed: int, shared: bool
) -> tuple[list[int], dict[str, float]]:
    """Deals rows to optimizer steps, and those of a step to ranks, so that the candidates of a decision stay together.

    Which rows are in a step depends on `seed` (of the order of decisions, which mixes agents) and the rows alone, not
    on ranks or prefix trees (but for padding, of which ranks need different numbers). Candidates of a decision are
    parted only where all of them do not fit. Padding is dealt evenly. `shared` says whether the workload of a
    decision's prompt counts once (prefix trees) or for every row.

    Returns row numbers, and verl's metrics of the ranks' balance. Rank r owns the r-th of equal slices; of that, step
    s takes the s-th of equal slices. Raises ValueError if the rows cannot be dealt evenly.
    """
    size, rest = divmod(len(rows), ranks * mini_batches)
    if rest:
        raise ValueError(f"{len(rows)} rows do not divide into {ranks} ranks x {mini_batches} mini-batches")
    pads = [row for row, tags in enumerate(rows) if is_padding(tags)]
    decisions: dict[tuple[Any, ...], list[int]] = {}
    for row, tags in enumerate(rows):
        if not is_padding(tags):
            decisions.setdefault((tags["episode"], tags["scope"], tags["agent"], tags["turn"]), []).append(row)
    shuffled = list(decisions.values())
    random.Random(seed).shuffle(shuffled)
    of_ranks: list[list[list[int]]] = [[] for _ in range(ranks)]  # rank, step, rows
    for step in range(mini_batches):
        padding = pads[step::mini_batches]
        taken = _take(shuffled, ranks * size - len(padding))
        for of_rank, of_step in zip(of_ranks, _to_ranks(rows, taken, padding, ranks, size, shared), strict=True):
            of_rank.append(of_step)
    flat = [[row for of_step in of_rank for row in of_step] for of_rank in of_ranks]
    metrics: dict[str, float] = log_seqlen_unbalance([tags["seq_len"] for tags in rows], flat, prefix="global_seqlen")
    return [row for of_rank in flat for row in of_rank], metrics


def _take(decisions: list[list[int]], count: int) -> list[list[int]]:
    """Removes `count` rows from the end of `decisions` and returns them, by decision."""
    taken = []
    while count:
        if len(decisions[-1]) <= count:
            taken.append(decisions.pop())
        else:
            decisions[-1], part = decisions[-1][count:], decisions[-1][:count]
            taken.append(part)
        count -= len(taken[-1])
    return taken


def _to_ranks(
    rows: Sequence[Mapping[str, Any]],
    decisions: Sequence[list[int]],
    padding: Sequence[int],
    ranks: int,
    size: int,
    shared: bool,
) -> list[list[int]]:
    """Returns `size` rows for every rank: the largest decision first, to the rank with the least work so far."""

    def work(decision: Sequence[int]) -> int:
        prompt: int = calculate_workload(rows[decision[0]]["prompt_len"])
        whole: int = sum(calculate_workload(rows[row]["seq_len"]) for row in decision)
        return whole - prompt * (len(decision) - 1) if shared else whole

    dealt: list[list[int]] = [list(padding[rank::ranks]) for rank in range(ranks)]
    load = [0] * ranks
    waiting = sorted(decisions, key=work)
    while waiting:
        decision = waiting.pop()
        fits = [rank for rank in range(ranks) if size - len(dealt[rank]) >= len(decision)]
        rank = min(fits, key=load.__getitem__) if fits else min(range(ranks), key=lambda rank: len(dealt[rank]))
        room = size - len(dealt[rank])
        if decision[room:]:
            waiting.append(decision[room:])
        dealt[rank] += decision[:room]
        load[rank] += work(decision[:room])
    return dealt


def write_temperatures(batch: Batch) -> None:
    """Tells workers the temperature of all rows; where rows differ, it is a field, `temperature`, (N,) float32."""
    every = {tags["temperature"] for tags in batch.real.tags}
    if len(every) == 1:
        batch.extra_info["temperature"] = every.pop()
        return
    for part in batch.parts():
        part.put(temperature=part.column("temperature"))


class ProbsDifference:
    """Sums over parts what `verl.utils.debug.metrics.calculate_debug_metrics` computes at once."""

    def __init__(self) -> None:
        self._tokens = 0
        self._sums = torch.zeros(7, dtype=torch.float64)
        self._largest: Tensor | None = None

    def add(self, actor: Tensor, server: Tensor, fresh: Tensor) -> None:
        """Adds the probabilities of at least one token, each (T,) float32; the largest is over `fresh`, (T,) bool."""
        difference = (actor - server).abs()
        if bool(fresh.any()):
            # torch's, as Python's would lose NaN.
            largest = difference[fresh].max()
            self._largest = largest if self._largest is None else largest.maximum(self._largest)
        self._tokens += len(actor)
        a, s, d = actor.double(), server.double(), difference.double()
        self._sums += torch.stack([x.sum() for x in (a, s, a * a, s * s, a * s, d, d * d)])

    def metrics(self) -> dict[str, float]:
        """Returns verl's metrics, the largest difference only if there was a fresh token."""
        n = self._tokens
        a, s, aa, ss, as_, d, dd = self._sums
        return {
            "training/rollout_probs_diff_valid": 1,
            **({} if self._largest is None else {PROBS_DIFF: self._largest.item()}),
            "training/rollout_probs_diff_mean": (d / n).item(),
            "training/rollout_probs_diff_std": ((dd - d * d / n).clamp(min=0) / (n - 1)).sqrt().item(),
            "training/rollout_actor_probs_pearson_corr": (
                (as_ - a * s / n) / ((aa - a * a / n) * (ss - s * s / n)).sqrt()
            ).item(),
        }


def of_responses(whole: Tensor, lengths: Tensor) -> Tensor:
    """Returns the responses' part of a field of whole rows; verl keeps a token's at the place of the token before it.

    As verl's `response_from_nested`, without its loop over rows.

    Shapes: whole (N, T) jagged, lengths of the responses (N,) int64 -> (N, R) jagged.
    """
    ends: Tensor = whole.offsets()[1:]  # type: ignore[attr-defined]
    return slices(whole.values(), ends - 1 - lengths, lengths)


def bypass_old_log_probs(batch: Batch) -> None:
    """Uses the servers' log-probs as the actor's (`algorithm.rollout_correction.bypass_mode`)."""
    for part in batch.parts():
        part.put(old_log_probs=part.fetch("rollout_log_probs")["rollout_log_probs"])


def write_old_log_probs(batch: Batch, actor: DictConfig, version: int | None = None) -> dict[str, float]:
    """Writes the responses' part of the log-probs of whole rows; returns verl's metrics of them and of the entropies.

    Adds a tag to every row: `entropy`, the mean over its response tokens. `actor` is verl's section. Rows of other
    weights than `version` are expected to differ and are not in `PROBS_DIFF`; None for all rows.
    """
    # Totals of all rows, so that the parts' values add up. Every response token of a real row counts.
    real = batch.real
    rows, tokens, longest = len(real), int(real.lengths.sum()), int(batch.lengths.max())
    entropy, difference = 0.0, ProbsDifference()
    for part in batch.parts():
        data, lengths = part.fetch("entropy", "log_probs", "response_mask", "rollout_log_probs"), part.lengths
        log_probs, entropies = (of_responses(data[field], lengths) for field in ("log_probs", "entropy"))
        part.put(old_log_probs=log_probs)
        part.tag(entropy=torch.segment_reduce(entropies.values(), "mean", lengths=lengths).tolist())
        mask = data["response_mask"].to_padded_tensor(0)
        entropy += agg_loss(
            loss_mat=entropies.to_padded_tensor(0),
            loss_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            batch_num_tokens=tokens,
            global_batch_size=rows,
            loss_scale_factor=actor.loss_scale_factor or longest,
        ).item()
        counted = data["response_mask"].values().bool()
        fresh = torch.tensor([version is None or versions(tags) == (version, version) for tags in part.tags])
        difference.add(
            log_probs.values()[counted].exp(),
            data["rollout_log_probs"].values()[counted].exp(),
            torch.repeat_interleave(fresh, lengths)[counted],
        )
    return {"actor/entropy": entropy, **difference.metrics()}


def write_ref_log_probs(batch: Batch) -> None:
    """Writes the responses' part of the reference log-probs of whole rows."""
    for part in batch.parts():
        part.put(ref_log_prob=of_responses(part.fetch("log_probs")["log_probs"], part.lengths))


def write_advantages(
    batch: Batch, spec: EstimatorSpec, loss_agg_mode: str, correction: Any = None
) -> dict[str, float]:
    """Writes the rows' advantages times their weights, after rollout correction, to the queue and into their tags.

    Adds two tags to a row: `advantage`, and `trained_tokens`, the response tokens that were not rejected. Groups are
    complete. Rows are weighted by verl's `loss_agg_mode` (`row_advantages.loss_weights`); `correction` is verl's
    section `algorithm.rollout_correction`, or None.
    """
    for tags in batch.tags:
        tags.update(advantage=0.0, trained_tokens=0 if is_padding(tags) else tags["response_len"])
    corrected = correction is not None and not correction.get("bypass_mode", False)
    rejects = corrected and correction.get("rollout_rs", None) is not None
    metrics = _correct(batch, correction, rejects) if corrected else {}
    # Padding and rejected rows are in no group statistic; rejected rows count as rows of the loss.
    real = batch.real
    tokens = real.column("trained_tokens")
    advantages = policy_advantages([tags for tags in real.tags if tags["trained_tokens"]], spec)
    advantages = torch.zeros(len(real)).masked_scatter_(tokens > 0, advantages)
    factors = loss_weights(weights_of(real.tags), tokens, loss_agg_mode)
    real.tag(advantage=(advantages * factors).float().tolist())
    for part in batch.parts():
        lengths = part.lengths
        values = torch.repeat_interleave(part.column("advantage"), lengths)
        if rejects:
            values = values * part.fetch("response_mask")["response_mask"].values()
        part.put(advantages=jagged(values, lengths))
    return metrics


def _correct(batch: Batch, correction: Any, rejects: bool) -> dict[str, float]:
    """Applies rollout correction and takes rejected tokens from the tags; returns its metrics, of real rows alone."""
    # Weights normalised over the batch, and statistics of rejected rows, cannot be combined from parts.
    at_once = rejects or correction.get("rollout_is_batch_normalize", False)
    collected = []
    for part in [batch.real] if at_once else batch.real.parts():
        data = part.fetch("response_mask", "old_log_probs", "rollout_log_probs")
        shape, tokens = data["response_mask"], int(part.lengths.sum())
        rows, metrics = compute_rollout_correction_and_add_to_batch(
            DataProto(batch=data.to_padded_tensor(0)), correction
        )
        written = {"rollout_is_weights"} & set(rows.batch.keys())
        if rejects:
            written.add("response_mask")
            part.tag(trained_tokens=rows.batch["response_mask"].sum(dim=-1).long().tolist())
        if written:
            part.put(**{field: response_to_nested(rows.batch[field], shape) for field in sorted(written)})
        collected.append((metrics, tokens, len(part)))
    padding = batch.padding
    if padding and "rollout_is_weights" in written:
        # Every row of a batch needs the field.
        padding.put(rollout_is_weights=jagged(torch.ones(int(padding.lengths.sum())), padding.lengths))
    return merged(collected, per_row=correction.get("rollout_is", None) == "sequence")
