"""verl's metrics of rollout correction (`rollout_corr/...`): of the parts of a batch, put together to the whole's."""

from __future__ import annotations

import math
from collections.abc import Sequence

Part = tuple[dict[str, float], int, int]
"""Metrics of a part, its tokens, and its rows with padding."""
_PREFIX = "rollout_corr/"


def merged(parts: Sequence[Part], per_row: bool) -> dict[str, float]:
    """Returns the metrics of all parts together; of one part, what verl computed.

    Means are over tokens, over rows, or largest or smallest, as in verl's `rollout_corr_helper`; spreads are put
    together from means and spreads of the parts.

    Args:
        per_row: whether weights are those of whole rows (`rollout_is: sequence`).
    """
    if len(parts) == 1:
        return parts[0][0]
    return {key: _merge(key.removeprefix(_PREFIX), parts, per_row) for key in parts[0][0]}


def _merge(name: str, parts: Sequence[Part], per_row: bool) -> float:
    values = [metrics[_PREFIX + name] for metrics, _, _ in parts]
    tokens, rows = [part[1] for part in parts], [part[2] for part in parts]
    if name.endswith(("_max", "_max_deviation")):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    if name == "rollout_is_seq_std":
        means = [metrics[_PREFIX + "rollout_is_seq_mean"] for metrics, _, _ in parts]
        mean, total = _mean(means, rows), sum(rows)
        # Of a sample, as torch.std is.
        within = sum(value**2 * (n - 1) for value, n in zip(values, rows, strict=True))
        between = sum(n * (own - mean) ** 2 for own, n in zip(means, rows, strict=True))
        return math.sqrt((within + between) / (total - 1))
    if name in ("rollout_is_std", "rollout_is_eff_sample_size"):
        means = [metrics[_PREFIX + "rollout_is_mean"] for metrics, _, _ in parts]
        mean = _mean(means, tokens)
        if name == "rollout_is_std":
            return math.sqrt(
                _mean([value**2 + (own - mean) ** 2 for value, own in zip(values, means, strict=True)], tokens)
            )
        # It is mean^2 / (mean of squares).
        return mean**2 / _mean([own**2 / value for value, own in zip(values, means, strict=True)], tokens)
    of_rows = "ppl" in name or "seq" in name or (per_row and name.startswith("rollout_is_ratio_fraction"))
    return _mean(values, rows if of_rows else tokens)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
