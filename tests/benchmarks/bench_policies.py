"""What a second policy costs: steps with one shared policy against steps with one for each role.

Both runs start from the same model and do not learn (learning rate 0), so they draw the same tokens and train
on the same rows; only who answers and who is updated differs.

python tests/benchmarks/bench_policies.py --model runs/models/plan_path_tiny [--steps 8] [--limit 1.2] [override ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STAGES = ("step", "gen", "old_log_prob", "update_actor", "update_weights")


def run(recipe: str, folder: Path, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Trains and returns the metrics of every step but the first, which compiles and fills caches."""
    metrics = folder / f"{recipe}.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-name={recipe}", *overrides]
    command += [
        f"trainer.total_training_steps={steps + 1}",
        "actor_rollout_ref.actor.optim.lr=0",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}",
    ]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout.decode(errors='replace')[-3000:]}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["data"] for record in records if record["step"] > 1]


def main() -> int:
    """Prints medians and their ratio; status 1 if it is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument("overrides", nargs="*", help="for both runs, as verl's command takes them")
    options = parser.parse_args()
    model = options.model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        shared = run(
            "plan_path_cpu",
            Path(folder),
            options.steps,
            f"actor_rollout_ref.model.path={model}",
            *options.overrides,
        )
        roles = run(
            "plan_path_cpu_roles",
            Path(folder),
            options.steps,
            f"at_grpo.policies.tool_user.model.path={model}",
            f"at_grpo.policies.planner.model.path={model}",
            *options.overrides,
        )
    tokens = [sum(data["rollout/tokens"] for data in records) for records in (shared, roles)]
    print(f"tokens generated: shared {tokens[0]:,.0f}, per role {tokens[1]:,.0f}")
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
