"""Measures CPU time and memory of our code for a step of a thousand to a million candidates, in worker and driver.

Worker: on a simulated engine in virtual time, without Ray and TransferQueue; all episodes run concurrently, so its
memory is that of all responses of the step. Driver: keys and tags from the queue are sorted, filtered, split by
policy, balanced over ranks and split into mini-batches; then log-probs (generated when fetched, dropped when
written), advantages and metrics are computed. Every size and part runs in a process of its own; memory is its peak
above that of the imports.

python benchmarks/bench_step_rows.py [--sizes 1000 10000 100000 1000000] [--no-tensors] [--max-bend 2]
                                           [--parts worker driver] [--answer-tokens 1024]

In training many workers share a step's episodes; here one has them all. Status 1 if a candidate of the largest size
takes more than `--max-bend` times as long as one of the second size, in either part.
"""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import script

Costs = dict[str, float]
"""Seconds of every stage, `rows` and `megabytes`."""
AGENTS, TURNS, CANDIDATES = 2, 4, 8
BEND = 1.5
"""Ratio to linear growth from which a stage is reported."""


def peak() -> float:
    """Returns this process's peak memory in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Watch:
    """Measures CPU time, which hardly depends on other load, by stage."""

    def __init__(self) -> None:
        self.costs: Costs = {}
        self._since = time.process_time()

    def skip(self) -> None:
        """Discards the time since the last stage."""
        self._since = time.process_time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time inside."""
        began = time.process_time()
        yield
        self._since += time.process_time() - began

    def stage(self, name: str) -> None:
        """Records the time since the last stage under `name`."""
        now = time.process_time()
        self.costs[name] = now - self._since
        self._since = now


def work(rows: int, median_tokens: float, tensors: bool, queue: str) -> Costs:
    """Plays episodes with about `rows` rows; writes keys and tags to the file `queue`, one pickle per episode."""
    from fakes.simulated_engine import SimulatedEngine, log_normal, run_virtually
    from fakes.simulated_worker import SimulatedWorker, without_tensors

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


class RandomQueue:
    """A queue without rows: fetched fields are random, of the rows' lengths; written ones are dropped."""

    def __init__(self, rows: dict[str, tuple[int, int]], watch: Watch) -> None:
        self._rows, self._watch = rows, watch

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        """Returns log-probs and entropies of whole rows, and masks and the servers' log-probs of responses."""
        with self._watch.paused():
            return self._fields(keys, select_fields)

    def _fields(self, keys: list[str], select_fields: list[str]) -> Any:
        import torch
        from tensordict import TensorDict

        lengths = torch.tensor([self._rows[key] for key in keys])
        whole, answers = (
            torch.cat([total.new_zeros(1), total.cumsum(0)]) for total in (lengths.sum(1), lengths[:, 1])
        )
        fields = {}
        for field in select_fields:
            offsets = whole if field in ("entropy", "log_probs") else answers
            number = int(offsets[-1])
            values = torch.ones(number, dtype=torch.int64) if field == "response_mask" else -torch.rand(number)
            rows = offsets.diff()
            fields[field] = torch.nested.nested_tensor_from_jagged(
                values, offsets, min_seqlen=int(rows.min()), max_seqlen=int(rows.max())
            )
        return TensorDict(fields, batch_size=[len(keys)])

    def kv_batch_put(self, **_: Any) -> None:
        """Drops the fields."""


def drive(queue: str, answer_tokens: int) -> Costs:
    """Runs the driver's part of a step with the rows in the file `queue`.

    Reading the file and generating fetched fields is not counted.

    Args:
        queue: written by `work`.
        answer_tokens: longest response; 0 keeps the lengths in the file.
    """
    from omegaconf import OmegaConf

    from verl_atgrpo.train.estimators.presets import PRESETS
    from verl_atgrpo.train.rows import batch as batches
    from verl_atgrpo.train.rows.batch import Batch
    from verl_atgrpo.train.rows.row_advantages import rows_with_signal
    from verl_atgrpo.train.rows.step_rows import StepRows, groups_with_signal
    from verl_atgrpo.train.trainer.metrics import step_metrics, training_metrics
    from verl_atgrpo.train.trainer.update_inputs import deal, write_advantages, write_old_log_probs

    before = peak()
    rows = StepRows()
    watch = Watch()
    with open(queue, "rb") as file:
        while file.peek():  # type: ignore[attr-defined]
            keys, tags = pickle.load(file)
            rows.keys += keys
            rows.tags += tags
    if answer_tokens:
        for row, tags in enumerate(rows.tags):
            tags["response_len"] = 1 + row * 7919 % answer_tokens
            tags["seq_len"] = tags["prompt_len"] + tags["response_len"]
    watch.skip()
    rows.sort()
    watch.stage("sort")
    rows.signal = groups_with_signal(rows.tags, PRESETS["at_grpo"])
    watch.stage("filter")
    batch, others = rows.rows_for({"shared"}), rows.rows_for({"shared"}, others=True)
    assert len(batch) + len(others) == len(rows.keys)
    watch.stage("split")
    ranks = mini_batches = 8
    even = len(batch) // (ranks * mini_batches) * ranks * mini_batches
    batch = Batch(batch.keys[:even], batch.tags[:even])
    batch.reorder(deal(batch.tags, ranks, mini_batches, seed=0, shared=True)[0])
    watch.stage("mini-batches")
    lengths = {
        key: (tags["prompt_len"], tags["response_len"]) for key, tags in zip(batch.keys, batch.tags, strict=True)
    }
    watch.skip()
    batches.tq = RandomQueue(lengths, watch)
    write_old_log_probs(batch, OmegaConf.create({"loss_agg_mode": "token-mean", "loss_scale_factor": None}))
    watch.stage("log-probs")
    write_advantages(batch, PRESETS["at_grpo"], "token-mean", {"rollout_is": "token"})
    watch.stage("advantage")
    training_metrics(batch.tags, {"step": 1.0}, 1, 0, ranks)
    step_metrics(rows.tags, rows_with_signal(rows.tags, PRESETS["at_grpo"]))
    watch.stage("metrics")
    return {"rows": len(rows.keys), **watch.costs, "megabytes": peak() - before}


def total(costs: Costs) -> float:
    """Returns the seconds of all stages."""
    return sum(costs[name] for name in costs if name not in ("rows", "megabytes"))


def each(cost: Costs, stage: str) -> float:
    """Returns a stage's microseconds per candidate."""
    return cost[stage] / cost["rows"] * 1e6


def show(part: str, costs: list[Costs]) -> None:
    """Prints a part's costs, one line per size, and which stages grow faster than the number of candidates.

    The driver's memory includes fields generated by the benchmark.
    """
    stages = [name for name in costs[0] if name not in ("rows", "megabytes")]
    heads = "  ".join(f"{name:>9}" for name in stages)
    print(
        f"\n{part}: seconds of CPU\n{'candidates':>10}  {heads}      total  us/candidate  x linear  peak MB  "
        "KB/candidate"
    )
    for cost in costs:
        cells = "  ".join(f"{cost[name]:>9.3f}" for name in stages)
        of_one = total(cost) / cost["rows"]
        print(
            f"{cost['rows']:>10,}  {cells}  {total(cost):>9.3f}  {of_one * 1e6:>12.1f}  "
            f"{of_one / (total(base(costs)) / base(costs)['rows']):>8.2f}  {cost['megabytes']:>7.0f}  "
            f"{cost['megabytes'] * 1024 / cost['rows']:>12.2f}",
            flush=True,
        )
    for name in (*stages, "megabytes"):
        bent = [cost for cost in costs[1:] if each(cost, name) > BEND * each(base(costs), name) > 0]
        if bent:
            print(
                f"  {name} bends at {bent[0]['rows']:,}: {each(bent[0], name) / each(base(costs), name):.1f} x linear"
            )


def base(costs: list[Costs]) -> Costs:
    """Returns the size to compare others with: not the smallest, which includes warm-up."""
    return costs[1] if len(costs) > 2 else costs[0]


def alone(function: Callable[..., Costs], *arguments: object) -> Costs:
    """Runs the function in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


def main() -> int:
    """Prints both tables; status 1 if a part grows too fast."""
    sizes = [1_000, 10_000, 100_000, 1_000_000]
    parser = script.parser(__doc__, sizes=sizes, median_tokens=16.0, max_bend=2.0)
    parser.add_argument("--no-tensors", dest="tensors", action="store_false", help="do not create the rows' tensors")
    parser.add_argument("--parts", nargs="+", choices=("worker", "driver"), default=["worker", "driver"])
    parser.add_argument(
        "--answer-tokens", type=int, default=0, help="longest response in the driver, of uniform lengths"
    )
    options = parser.parse_args()
    costs: dict[str, list[Costs]] = {part: [] for part in options.parts}
    with tempfile.TemporaryDirectory() as folder:
        queue = str(Path(folder) / "queue")
        for rows in options.sizes:
            played = alone(work, rows, options.median_tokens, options.tensors, queue)
            if "worker" in costs:
                costs["worker"].append(played)
            if "driver" in costs:
                costs["driver"].append(alone(drive, queue, options.answer_tokens))
            # Printed now, in case a larger size is interrupted.
            done = ", ".join(f"{part} {total(mine[-1]):.1f} s" for part, mine in costs.items())
            print(f"{played['rows']:>10,} candidates: {done}", flush=True)
    bends = {}
    for part, mine in costs.items():
        show(part, mine)
        bends[part] = total(mine[-1]) / mine[-1]["rows"] / (total(base(mine)) / base(mine)["rows"])
    print()
    for part, bend in bends.items():
        print(f"{part}: a candidate of the largest step costs {bend:.2f} x one of the second size")
    print(f"limit {options.max_bend}")
    return int(max(bends.values()) > options.max_bend)


if __name__ == "__main__":
    raise SystemExit(main())
