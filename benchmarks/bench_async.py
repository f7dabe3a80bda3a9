"""Measures the time to 90% success on Plan-Path in sync and in colocate_async mode.

    python benchmarks/bench_async.py [--seeds 0 1 2] [--out runs/async]

Trains the study's variants `at_grpo` and `colocate_async` (examples/study) to 90%, one after the other. Prints for
each the seconds of training (rollout, update and weight sync, without start-up and validation, during which no
training episode runs), the tokens to 90%, and the staleness of candidates. Every step is validated. Sampling between
two steps, while metrics are computed and logged, is not counted, which slightly favours colocate_async. Finished
trainings are kept, and an interrupted benchmark resumes. Needs an otherwise idle machine; a training takes two to
four minutes.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "study"))

import script
import study
from variants import GAMES

from verl_atgrpo.lab.report.learning_curve import Point, read
from verl_atgrpo.lab.tiny_models.warm_start import WarmStart, make

GAME = "plan_path"
MODES = {"at_grpo": "sync", "colocate_async": "colocate_async"}
TARGET = 0.9


@dataclass(frozen=True)
class Result:
    """Seconds and tokens of a training to the target; infinite if it was not reached."""

    seconds: float
    tokens: float
    seconds_per_step: float
    staleness: float
    """Mean over steps of the mean staleness; 0 in sync mode."""
    oldest: float


def crossing(points: Sequence[Point], target: float) -> tuple[float, float]:
    """Returns seconds and tokens to the first success rate of `target`, interpolated between validations.

    Infinite if it was not reached.
    """
    for before, after in pairwise(points):
        if after.success >= target:
            missing = target - before.success  # none if it began there
            share = missing / (after.success - before.success) if missing > 0 else 0.0
            return (
                before.seconds + share * (after.seconds - before.seconds),
                before.tokens + share * (after.tokens - before.tokens),
            )
    return math.inf, math.inf


def result(metrics: Path, start: Point) -> Result:
    """Returns the result of a training; `start` is the validation of its initial model."""
    points = read(metrics)
    seconds, tokens = crossing(points if points[0].step == 0 else [start, *points], TARGET)
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    trained = [step for step in steps if "timing_s/step" in step]
    # The first step includes warm-up.
    usual = [step["timing_s/step"] for step in trained[1:]]
    return Result(
        seconds,
        tokens,
        mean(usual),
        mean(step.get("team/staleness_mean", 0.0) for step in trained),
        max(step.get("team/staleness_max", 0.0) for step in trained),
    )


def table(seeds: Sequence[int], results: dict[str, list[Result]]) -> list[str]:
    """Returns the lines to print."""
    lines = []
    for name, mode in MODES.items():
        for seed, one in zip(seeds, results[name], strict=True):
            lines.append(
                f"{mode:15} seed {seed}: {one.seconds:6.1f} s and {one.tokens:7,.0f} tokens to {TARGET:.0%}, "
                f"{one.seconds_per_step:5.2f} s a step, staleness {one.staleness:.2f} (at most {one.oldest:.0f})"
            )
    sync, asynchronous = (mean(one.seconds for one in results[name]) for name in MODES)
    lines.append(f"time to {TARGET:.0%}, colocate_async over sync: {asynchronous / sync:.2f}")
    return lines


def main() -> None:
    """Runs missing trainings and prints the table."""
    options = script.parser(__doc__, seeds=[0, 1, 2], out=Path("runs/async")).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running training is ended, too
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder, game = options.out / GAME, replace(GAMES[GAME], test_every=1)
    results: dict[str, list[Result]] = {name: [] for name in MODES}
    for seed in options.seeds:
        model = folder / f"model_{seed}"
        make(model, WarmStart.of(GAME, seed=seed))
        for name in MODES:
            study.run(folder, game, name, seed, model, target=TARGET)
            start = read(folder / f"at_grpo_{seed}" / "metrics.jsonl")[0]
            results[name].append(result(folder / f"{name}_{seed}" / "metrics.jsonl", start))
    print("\n".join(table(options.seeds, results)))


if __name__ == "__main__":
    main()
