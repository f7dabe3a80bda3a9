"""What a step costs in our Python, from a thousand to a million candidates: the worker's part and the driver's.

Worker: the product's, on a simulated engine in virtual time, without Ray and TransferQueue; all episodes at once, so
its memory is that of all answers of the step. Driver: keys and tags as they come from the queue, sorted, split by
policy, asked which groups teach, measured, given advantages (one token a row) and dealt into mini-batches. Every size
and part has a process of its own; memory is that process's peak above what its imports took.

python tests/benchmarks/bench_step_rows.py [--sizes 1000 10000 100000 1000000] [--no-tensors] [--max-bend 2]

Many workers share a step's episodes in training; here one has them all. Status 1 if a candidate of the largest size
costs more than `--max-bend` times one of the second size, in either part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

Costs = dict[str, float]
"""Seconds of every stage, `rows` and `megabytes`."""
AGENTS, TURNS, CANDIDATES = 2, 4, 8


def peak() -> float:
    """Returns the most memory that this process has had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Watch:
    """Books CPU time, which hardly depends on what else the machine does, under stages' names."""

    def __init__(self) -> None:
        self.costs: Costs = {}
        self._since = time.process_time()

    def stage(self, name: str) -> None:
        """Books the time since the last stage under `name`."""
        now = time.process_time()
        self.costs[name] = now - self._since
        self._since = now


def work(rows: int, median_tokens: float, tensors: bool, queue: str) -> Costs:
    """Plays episodes of about so many rows and writes their keys and tags to the file `queue`, an episode a pickle."""
    from simulated_engine import SimulatedEngine, log_normal, run_virtually
    from simulated_worker import SimulatedWorker, without_tensors

    before = peak()
    with open(queue, "wb") as file:
        engine = SimulatedEngine(log_normal(median_tokens, 0.8))
        worker = SimulatedWorker(
            engine, lambda *episode: pickle.dump(episode, file), turns=TURNS, candidates=CANDIDATES
        )
        watch = Watch()
        with nullcontext() if tensors else without_tensors():
            run_virtually(worker.play_all(max(1, round(rows / (AGENTS * TURNS * CANDIDATES)))))
        watch.stage("all")
    playing = watch.costs["all"] - worker.writing - worker.queueing
    return {"rows": len(engine.served), "play": playing, "write": worker.writing, "megabytes": peak() - before}


def drive(queue: str) -> Costs:
    """Does the driver's part of a step with the rows in the file `queue`."""
    import numpy as np
    import torch

    from verl_atgrpo.advantage import at_grpo_advantage
    from verl_atgrpo.trainer.metrics import step_metrics
    from verl_atgrpo.trainer.mini_batches import spread_padding
    from verl_atgrpo.trainer.step_rows import StepRows, teaching_groups

    before = peak()
    rows = StepRows()
    watch = Watch()
    with open(queue, "rb") as file:
        while file.peek():  # type: ignore[attr-defined]
            keys, tags = pickle.load(file)
            rows.keys += keys
            rows.tags += tags
    watch.stage("receive")
    rows.sort()
    watch.stage("sort")
    rows.teaches = teaching_groups(rows.tags, None)
    watch.stage("filter")
    mine, others = rows.of({"shared"}), rows.but({"shared"})
    assert len(mine) + len(others) == len(rows.keys)
    watch.stage("of, but")
    step_metrics(rows.tags)
    watch.stage("metrics")
    rewards = torch.tensor([[tags["reward"]] for tags in mine.tags])
    uids = np.array([tags["group"] for tags in mine.tags], dtype=object)
    at_grpo_advantage(rewards, torch.ones_like(rewards), None, uids)
    watch.stage("advantage")
    ranks = mini_batches = 8
    padded = -(-len(mine) // (ranks * mini_batches)) * ranks * mini_batches
    spread_padding([row >= len(mine) for row in range(padded)], ranks, mini_batches, seed=0)
    watch.stage("deal")
    return {"rows": len(rows.keys), **watch.costs, "megabytes": peak() - before}


def total(costs: Costs) -> float:
    """Returns the seconds of all stages."""
    return sum(costs[name] for name in costs if name not in ("rows", "megabytes"))


def show(part: str, costs: list[Costs]) -> None:
    """Prints a part's costs, a size a line."""
    stages = [name for name in costs[0] if name not in ("rows", "megabytes")]
    heads = "  ".join(f"{name:>9}" for name in stages)
    print(f"\n{part}: seconds of CPU\n{'candidates':>10}  {heads}      total  us/candidate  peak MB  KB/candidate")
    for cost in costs:
        cells = "  ".join(f"{cost[name]:>9.3f}" for name in stages)
        print(
            f"{cost['rows']:>10,}  {cells}  {total(cost):>9.3f}  {total(cost) / cost['rows'] * 1e6:>12.1f}  "
            f"{cost['megabytes']:>7.0f}  {cost['megabytes'] * 1024 / cost['rows']:>12.2f}",
            flush=True,
        )


def alone(function: Callable[..., Costs], *arguments: object) -> Costs:
    """Returns what the function returns in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def main() -> int:
    """Prints both tables; status 1 if a part bends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--median-tokens", type=float, default=16.0)
    parser.add_argument(
        "--no-tensors", dest="tensors", action="store_false", help="leave out the making of the rows' tensors"
    )
    parser.add_argument("--max-bend", type=float, default=2.0)
    options = parser.parse_args()
    parts: dict[str, list[Costs]] = {"worker": [], "driver": []}
    with tempfile.TemporaryDirectory() as folder:
        queue = str(Path(folder) / "queue")
        for rows in options.sizes:
            parts["worker"].append(alone(work, rows, options.median_tokens, options.tensors, queue))
            parts["driver"].append(alone(drive, queue))
    bends = {}
    for part, costs in parts.items():
        show(part, costs)
        each = [total(cost) / cost["rows"] for cost in costs]
        # The smallest size pays for first calls, and says nothing of growth.
        bends[part] = each[-1] / (each[1] if len(each) > 2 else each[0])
    print()
    for part, bend in bends.items():
        print(f"{part}: a candidate of the largest step costs {bend:.2f} x one of the second size")
    print(f"limit {options.max_bend}")
    return int(max(bends.values()) > options.max_bend)


if __name__ == "__main__":
    raise SystemExit(main())
