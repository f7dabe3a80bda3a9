"""Times verl's GRPO advantage and ours on the same rows, including string uids.

python benchmarks/bench_advantage.py [--rows 1000000 --group 8 --response-length 1]
"""

import statistics
import time
import uuid

import numpy as np
import script
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_atgrpo.train.estimators.plain_job import at_grpo_advantage


def build(rows: int, group: int, length: int, shuffle: bool) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.zeros(rows, length)
    rewards[:, -1] = torch.rand(rows, generator=generator)
    names = [str(uuid.UUID(int=number)) for number in range(-(-rows // group))]
    owner = np.arange(rows) // group
    if shuffle:
        owner = np.random.default_rng(0).permutation(owner)
    # As in a batch deserialised row by row, equal uids are distinct objects.
    uids = np.array(["".join(list(names[number])) for number in owner], dtype=object)
    return rewards, torch.ones(rows, length), uids


def main() -> None:
    parser = script.parser(__doc__, rows=1_000_000, group=8, response_length=1, verl_repeats=1)
    parser.add_argument("--repeats", type=int, default=5, help="runs of ours")
    parser.add_argument("--min-ratio", type=float, default=0.0, help="exit 1 below this speed-up")
    parser.add_argument("--shuffle", action="store_true", help="scatter the rows of a group over the batch")
    options = parser.parse_args()
    rewards, mask, uids = build(options.rows, options.group, options.response_length, options.shuffle)

    seconds: dict[str, list[float]] = {"verl": [], "ours": []}
    results: dict[str, torch.Tensor] = {}
    for repeat in range(max(options.repeats, options.verl_repeats)):
        for name, function, repeats in (
            ("ours", at_grpo_advantage, options.repeats),
            ("verl", compute_grpo_outcome_advantage, options.verl_repeats),
        ):
            if repeat < repeats:
                start = time.perf_counter()
                results[name], _ = function(token_level_rewards=rewards, response_mask=mask, index=uids)
                seconds[name].append(time.perf_counter() - start)

    ours, verl = statistics.median(seconds["ours"]), statistics.median(seconds["verl"])
    difference = (results["ours"] - results["verl"]).abs().max().item()
    order = "shuffled" if options.shuffle else "in order"
    print(f"rows {options.rows} {order}, groups of {options.group}, length {options.response_length}")
    print(f"verl compute_grpo_outcome_advantage: median {verl:.3f} s of {len(seconds['verl'])}")
    print(f"ours at_grpo_advantage:              median {ours:.3f} s of {len(seconds['ours'])}")
    print(f"max abs difference: {difference:.2e}")
    print(f"ratio: {verl / ours:.1f}x")
    if not difference < 1e-4:
        raise SystemExit("results disagree")
    if verl / ours < options.min_ratio:
        raise SystemExit(f"ratio below {options.min_ratio}")


if __name__ == "__main__":
    main()
