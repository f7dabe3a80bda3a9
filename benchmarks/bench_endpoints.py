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
from typing import Any

import real_stack
import script
from processes import exit_on_sigterm

from verl_atgrpo import stable_hash

ENVIRONMENTS = {"native": "plan_path", "endpoints": "served_plan_path:ServedPlanPath"}


def roll_out(options: argparse.Namespace) -> dict[str, Any]:
    """Plays a warm-up rollout and `--rollouts` more; returns their seconds and a hash of their requests."""
    external = str(script.TESTS / "end_to_end/external")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (external, os.environ.get("PYTHONPATH"))))
    sys.path.append(external)
    sizes = [
        f"data.train_batch_size={options.sessions}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.sessions}",
    ]
    name = f"at_grpo.environment.name={ENVIRONMENTS[options.part]}"
    config = real_stack.compose(options.recipe, options.model, [*sizes, name, *options.overrides])
    played = list(real_stack.rollouts(config, options.rollouts))
    rows = [stable_hash(sorted((tuple(one.prompt), one.tokens) for one in each.requests)) for each in played]
    return {"seconds": [each.seconds for each in played], "rows": rows}


def main() -> None:
    """Runs both, prints their times and exits with 1 below `--limit`."""
    parser = real_stack.parser(__doc__, rollouts=4, limit=0.8)
    parser.add_argument("--part", choices=ENVIRONMENTS)
    parser.add_argument("--sessions", type=int, default=200, help="tasks of a step, which are played at once")
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
