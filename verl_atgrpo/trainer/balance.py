"""Which rank gets which rows: each equally many, and about as much work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance


def balanced(lengths: Sequence[int], ranks: int) -> tuple[list[int], dict[str, float]]:
    """Returns an order of rows of so many tokens in which every rank's run is as much work, and verl's metrics of it.

    As `PPOTrainer._balance_batch` does, which hands over a tensor: Python's sums of its elements take twenty times as
    long as sums of numbers. The number of rows must be a multiple of `ranks`.
    """
    runs = [list(range(len(lengths)))]
    if ranks > 1:
        work = calculate_workload(torch.tensor(lengths, dtype=torch.int64)).tolist()
        runs = get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
    metrics: dict[str, float] = log_seqlen_unbalance(list(lengths), runs, prefix="global_seqlen")
    return [row for run in runs for row in run], metrics
