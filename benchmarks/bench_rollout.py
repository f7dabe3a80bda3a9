"""A rollout's wall time against its lower bound, on a simulated engine (fakes/simulated_engine.py).

The bound is for the same responses: the larger of all requests' time over all slots, and the longest chain of an
episode's slowest candidates. In virtual time, in which our code takes no time: our schedule, barriers (all episodes
wait before every decision), candidates sampled one after the other, and 1 to 32 replicas. Then our schedule in real
time, to measure our code: team and policy alone, and the rollout worker without Ray and TransferQueue. One process
has all episodes; in training they are distributed over `rollout.agent.num_workers`.

python benchmarks/bench_rollout.py [--episodes 512 --turns 4 --candidates 8] [--limit 1.10] [--no-real-time]

The limit is for our schedule in virtual time with few slots (bounded by work) and with the default engine, and for the
team in real time. If work and longest chain are similar, no schedule need reach the larger of them.
"""

from __future__ import annotations

import asyncio
import time

import script
from fakes.simulated_engine import Bound, SimulatedEngine, lower_bound, rollout, run_virtually

SCHEDULES = {
    "ours": {},
    "turn barriers": {"barriers": True},
    "sequential candidates": {"sequential": True},
    "both": {"barriers": True, "sequential": True},
}


def virtually(engine: SimulatedEngine, size: dict[str, int], **schedule: bool) -> tuple[float, Bound]:
    """Returns the virtual seconds of the rollout, and the lower bound for its requests."""
    _, seconds = run_virtually(rollout(engine, **size, **schedule))
    return seconds, lower_bound(engine.served, engine.replicas * engine.slots)


def schedules(size: dict[str, int], slots: int) -> float:
    """Prints every schedule's time with 8 replicas of `slots` slots; returns our ratio to the bound."""
    ratios = {}
    for name, schedule in SCHEDULES.items():
        seconds, bound = virtually(SimulatedEngine(slots=slots), size, **schedule)
        ratios[name] = seconds / bound.seconds
    by = "work" if bound.work > bound.chain else "chain"
    columns = "  ".join(f"{ratio:>{len(name)}.2f}" for name, ratio in ratios.items())
    print(f"{8 * slots:>6}  {bound.work:>8.1f}  {bound.chain:>8.1f}  {by:>5}  {columns}", flush=True)
    return ratios["ours"]


def replicas(size: dict[str, int], slots: int) -> None:
    """Prints our schedule's time by the number of replicas."""
    alone = 0.0
    for number in (1, 2, 4, 8, 16, 32):
        seconds, bound = virtually(SimulatedEngine(slots=slots, replicas=number), size)
        alone = alone or seconds
        speed_up = alone / seconds
        print(
            f"{number:>8}  {seconds:>9.1f}  {speed_up:>8.2f}  {speed_up / number:>10.2f}  {bound.work:>8.1f}  "
            f"{bound.chain:>8.1f}  {seconds / bound.seconds:>7.2f}",
            flush=True,
        )


def in_real_time(size: dict[str, int], whole_worker: bool) -> float:
    """Prints and returns the ratio to the bound in real time, which includes our code."""
    engine = SimulatedEngine()
    if whole_worker:
        from fakes.simulated_worker import SimulatedWorker  # imports verl, which takes a while

        worker = SimulatedWorker(engine, lambda keys, tags: None, turns=size["turns"], candidates=size["candidates"])
        main, name = worker.play_all(size["episodes"]), "one rollout worker, rows with tensors"
    else:
        main, name = rollout(engine, **size), "team and policy"
    started, used = time.perf_counter(), time.process_time()
    asyncio.run(main)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    bound = lower_bound(engine.served, engine.replicas * engine.slots).seconds
    print(
        f"{name}: {seconds:.1f} s, {seconds / bound:.3f} x the bound ({bound:.1f} s); CPU {used:.1f} s, "
        f"{used / len(engine.served) * 1e6:.0f} us a candidate, the engine's included",
        flush=True,
    )
    return seconds / bound


def main() -> int:
    """Prints the ratios; status 1 if ours is over the limit."""
    parser = script.parser(__doc__, episodes=512, turns=4, candidates=8, limit=1.10)
    parser.add_argument("--no-real-time", dest="real_time", action="store_false")
    options = parser.parse_args()
    size = {"episodes": options.episodes, "turns": options.turns, "candidates": options.candidates}
    engine = SimulatedEngine()
    requests = options.episodes * options.turns * 2 * options.candidates
    print(
        f"{options.episodes} episodes x {options.turns} turns x 2 agents x K = {options.candidates}: {requests:,} "
        f"requests; {engine.seconds_per_token * 1e3:.0f} ms a token, lengths log-normal (median 128, sigma 0.8, at "
        "most 1024 tokens)"
    )
    print("\nvirtual time, 8 replicas; bounds in seconds, schedules as multiples of the larger bound")
    print(f"{'slots':>6}  {'work':>8}  {'chain':>8}  {'bound':>5}  {'  '.join(SCHEDULES)}")
    ratios = {slots: schedules(size, slots) for slots in (512, engine.slots, 128, 64, 16)}
    worst = max(ratios[engine.slots], ratios[16])
    print("\nvirtual time, our schedule, 64 slots a replica")
    print("replicas    seconds  speed-up  efficiency      work     chain  / bound")
    replicas(size, slots=64)
    if options.real_time:
        print("\nreal time, our schedule, all episodes in one process")
        worst = max(worst, in_real_time(size, whole_worker=False))
        in_real_time(size, whole_worker=True)
    print(f"ours / bound: {worst:.3f} (limit {options.limit})")
    return int(worst > options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
