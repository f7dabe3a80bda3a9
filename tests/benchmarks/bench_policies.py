"""Measures the cost of a second policy: steps with one shared policy and with one per role.

Both runs start from the same model with a learning rate of 0, so they sample the same tokens and train on the same
rows; only the policies differ.

python tests/benchmarks/bench_policies.py --model runs/models/plan_path_tiny [--steps 8] [--limit 1.2] [override ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import training_jobs
from processes import exit_on_sigterm

STAGES = ("step", "gen", "old_log_prob", "update_actor", "update_weights")


def run(recipe: str, folder: Path, model: Path, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Trains and returns the metrics of all steps but the first, which includes compilation."""
    own = folder / recipe
    own.mkdir()
    job = training_jobs.start(
        recipe,
        own,
        model,
        *overrides,
        f"trainer.total_training_steps={steps + 1}",
        "actor_rollout_ref.actor.optim.lr=0",
        *training_jobs.TRAIN_ONLY,
        "trainer.resume_mode=disable",
    )
    try:
        metrics = training_jobs.finish(job, own)
    finally:
        training_jobs.end(job)
    return [data for step, data in metrics.items() if step > 1]


def main() -> int:
    """Prints medians and their ratio; status 1 if it is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("overrides", nargs="*", help="overrides of verl's command, for both runs")
    options = parser.parse_args()
    exit_on_sigterm()
    model = options.model.resolve()
    own = [f"at_grpo.policies.{role}.model.path={model}" for role in ("tool_user", "planner")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = run("plan_path_cpu", folder, model, options.steps, *options.overrides)
        roles = run("plan_path_cpu_roles", folder, model, options.steps, *own, *options.overrides)
    tokens = [sum(data["rollout/tokens"] for data in records) for records in (shared, roles)]
    print(f"tokens generated: shared {tokens[0]:,.0f}, per role {tokens[1]:,.0f}")
    if abs(tokens[0] - tokens[1]) > 0.01 * tokens[0]:
        raise SystemExit("the runs did not generate equally many tokens: their times cannot be compared")
    for stage in STAGES:
        one, two = (statistics.median(data[f"timing_s/{stage}"] for data in records) for records in (shared, roles))
        print(f"{stage:15} shared {one:6.2f} s   per role {two:6.2f} s   ratio {two / one:.2f}")
    ratio = statistics.median(data["timing_s/step"] for data in roles) / statistics.median(
        data["timing_s/step"] for data in shared
    )
    print(f"median step, per role / shared: {ratio:.2f} (limit {options.limit})")
    return 0 if ratio <= options.limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
