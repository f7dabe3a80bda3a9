"""What the loss multiplies a row's tokens by: the row's advantage, and its weight.

The group filter, the metrics and the update all take advantages from here, so that they agree on what has a signal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.spec import EstimatorSpec
from verl_atgrpo.train.rows.batch import Tags


def policy_advantages(rows: Sequence[Tags], spec: EstimatorSpec) -> Tensor:
    """Returns the advantages of one policy's rows before their weights: (N,) float32, as the workers get them.

    Rewards stay float64 until then: in float32 an offset of a million leaves no digits for differences of .01.
    `rows` are the tags of real rows (see `rollout.episode_rows.training_rows`), groups complete. Raises ValueError for
    an advantage beyond float32, and as `team_advantages`.
    """
    rewards = torch.tensor([tags["reward"] for tags in rows], dtype=torch.float64)
    exact = team_advantages(rewards, rows, spec)
    advantages = exact.float()
    if not bool(advantages.isfinite().all()):
        row = int((~advantages.isfinite()).nonzero()[0])
        raise ValueError(
            f"group {rows[row]['group']!r}: the reward {rewards[row].item()} gives an advantage of "
            f"{exact[row].item()}, more than float32 holds; scale the rewards down, or set scale: std"
        )
    return advantages


def rows_with_signal(
    rows: Sequence[Tags], spec: EstimatorSpec, trainable: Collection[str] | None = None
) -> list[bool | None]:
    """Returns, for every row, whether its advantage is other than 0; None for rows of policies that are not trained.

    An update compares only rows of its own policy. `rows` are those of all policies, `trainable` the names of the
    trained ones, None for all. Raises as `policy_advantages`.
    """
    by_policy: dict[str, list[int]] = defaultdict(list)
    for row, tags in enumerate(rows):
        if trainable is None or tags["policy"] in trainable:
            by_policy[tags["policy"]].append(row)
    signal: list[bool | None] = [None] * len(rows)
    for mine in by_policy.values():
        advantages = policy_advantages([rows[row] for row in mine], spec)
        for row, has in zip(mine, (advantages != 0).tolist(), strict=True):
            signal[row] = has
    return signal


def weights_of(rows: Sequence[Tags]) -> Tensor:
    """Returns the rows' weights (`Decision.weight`, divided among a decision's candidates): (N,) float64."""
    return torch.tensor([tags.get("weight", 1.0) for tags in rows], dtype=torch.float64)


def loss_weights(weights: Tensor, tokens: Tensor, loss_agg_mode: str) -> Tensor:
    """Returns the factors that make a loss a weighted mean: verl divides by numbers of tokens or rows.

    With weights w and numbers T of tokens of N rows: w * sum T / sum w T where verl divides by tokens (`token-mean`),
    else w * N / sum w. If all weights are equal, all factors are 1.

    Tokens that `rollout_rs` rejects have no weight, but verl's divisor has them, as in its own trainer.

    Shapes: weights (N,) float64 above 0; tokens (N,) int64, those that were not rejected -> (N,) float64.
    """
    counted = tokens.double() if loss_agg_mode == "token-mean" else torch.ones_like(weights)
    total = (weights * counted).sum()
    return weights * (counted.sum() / total) if total > 0 else weights
