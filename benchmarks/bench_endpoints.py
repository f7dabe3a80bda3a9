"""Compares rollouts of a team behind OpenAI-compatible endpoints with those of the native environment.

Both play the same episodes with the same seeds on real servers, all of a step's at once, in jobs without updates; the
rows must be equal. Prints the median of the native rollouts' seconds over the others', each step with its twin.

python benchmarks/bench_endpoints.py --model runs/models/plan_path_tiny [--rollouts 4] [--sessions 200]
    [--limit 0.8] [override ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

EXTERNAL = Path(__file__).resolve().parents[1] / "tests" / "end_to_end" / "external"
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import real_stack
from processes import exit_on_sigterm

from verl_atgrpo import stable_hash

LIMIT = 0.8
ENVIRONMENTS = {"native": "plan_path", "endpoints": "served_plan_path:ServedPlanPath"}


def roll_out(options: argparse.Namespace) -> dict[str, Any]:
    """Plays a warm-up rollout and `--rollouts` more; returns their seconds and a hash of their requests."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(EXTERNAL), os.environ.get("PYTHONPATH"))))
    sys.path.append(str(EXTERNAL))
    sizes = [
        f"data.train_batch_size={options.sessions}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.sessions}",
    ]
    name = f"at_grpo.environment.name={ENVIRONMENTS[options.part]}"
    config = real_stack.compose(options.recipe, options.model, [*sizes, name, *options.overrides])
    seconds, rows = [], []
    with real_stack.started(config) as trainer:
        for number in range(options.rollouts + 1):
            began = time.perf_counter()
            played = real_stack.play(trainer)
            took = time.perf_counter() - began
            requests = real_stack.requests_of(played)
            if number:
                seconds.append(took)
                rows.append(stable_hash(sorted((tuple(one.prompt), one.tokens) for one in requests)))
            real_stack.end_step(trainer)
    return {"seconds": seconds, "rows": rows}


def main() -> None:
    """Runs both, prints their times and exits with 1 below `--limit`."""
    parser = real_stack.parser(__doc__)
    parser.add_argument("--part", choices=ENVIRONMENTS)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=200, help="tasks of a step, which are played at once")
    parser.add_argument("--limit", type=float, default=LIMIT)
    options = parser.parse_intermixed_args()
    exit_on_sigterm()
    if options.part:
        print(json.dumps(roll_out(options)))
        return
    common = ["--model", str(options.model), "--recipe", options.recipe, f"--rollouts={options.rollouts}"]
    common += [f"--sessions={options.sessions}", *options.overrides]
    found = {part: real_stack.run_part(__file__, f"--part={part}", *common) for part in ENVIRONMENTS}
    native, served = found["native"], found["endpoints"]
    assert native["rows"] == served["rows"], "the rows differ"
    ratios = [one / other for one, other in zip(native["seconds"], served["seconds"], strict=True)]
    for part, measured in found.items():
        print(f"{part}: {' '.join(f'{one:.1f}' for one in measured['seconds'])} s a rollout")
    ratio = statistics.median(ratios)
    print(f"throughput behind endpoints over native: {ratio:.2f} (limit {options.limit})")
    sys.exit(ratio < options.limit)


if __name__ == "__main__":
    main()
