"""Measures the cost of further policies: one per role, adapters on one base, or past selves to play against.

Both runs start from the same model with a learning rate of 0, so they sample the same tokens and train on the same
rows; only the policies differ. Memory is the proportional set size of all of a run's processes together, the largest
of samples a second apart.

python benchmarks/bench_policies.py --model runs/models/plan_path_tiny [--steps 8] [--limit 1.2] [override ...]
python benchmarks/bench_policies.py --model runs/models/smollm2 --adapters 4 --steps 3 --limit 1.15
    [override ...]
python benchmarks/bench_policies.py --model runs/models/smollm2 --pool 8 --steps 8 --limit 1.15 [override ...]
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
from pathlib import Path

import psutil
import script
import training_jobs
from processes import exit_on_sigterm

STAGES = ("step", "gen", "old_log_prob", "update_actor", "update_weights")
LORA = "lora: {rank: 16, alpha: 32}"


class Memory(threading.Thread):
    """Samples the memory of a session's processes until `over` is set."""

    def __init__(self, session: int) -> None:
        super().__init__(daemon=True)
        self.session, self.over, self.most = session, threading.Event(), 0

    def run(self) -> None:
        while not self.over.wait(1.0):
            total = 0
            for process in training_jobs.living(self.session):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_full_info().pss
            self.most = max(self.most, total)


def run(recipe: str, folder: Path, model: Path, steps: int, *overrides: str) -> tuple[list[dict[str, float]], float]:
    """Trains and returns the metrics of all steps but the first, which includes compilation, and gigabytes."""
    folder.mkdir()
    job = training_jobs.start(
        recipe,
        folder,
        model,
        *overrides,
        f"trainer.total_training_steps={steps + 1}",
        "actor_rollout_ref.actor.optim.lr=0",
        *training_jobs.TRAIN_ONLY,
        "trainer.resume_mode=disable",
    )
    memory = Memory(job.pid)
    memory.start()
    try:
        metrics = training_jobs.finish(job, folder)
    finally:
        memory.over.set()
        training_jobs.end(job)
    return [data for step, data in metrics.items() if step > 1], memory.most / 2**30


def adapters(number: int, policies: int) -> list[str]:
    """Returns the overrides of a team of `number` agents that share so many adapters on one base."""
    agents = {f"agent_{index}": f"p{index % policies}" for index in range(number)}
    blocks = [f"p{index}: {{{LORA}{', base: one' if policies > 1 else ''}}}" for index in range(policies)]
    return [
        "~at_grpo.environment",
        f"+at_grpo.environment={{name: 'many_agents:ManyAgents', number: {number}}}",
        "~at_grpo.agents",
        f"+at_grpo.agents={{{', '.join(f'{agent}: {policy}' for agent, policy in agents.items())}}}",
        f"at_grpo.policies={{{', '.join(blocks)}}}",
        "actor_rollout_ref.rollout.ignore_eos=true",
    ]


def pool(size: int) -> list[str]:
    """Returns the overrides of a game of two agents, one of which so many past selves answer for in turns."""
    return [
        "~at_grpo.environment",
        "+at_grpo.environment={name: 'many_agents:Duel', number: 2}",
        "~at_grpo.agents",
        "+at_grpo.agents={all: player}",
        f"at_grpo.policies={{player: {{{LORA}, base: one}}}}",
        f"at_grpo.opponents={{current: 0, size: {size}, every: 1, choose: uniform}}",
        "actor_rollout_ref.rollout.ignore_eos=true",
    ]


def main() -> int:
    """Prints medians and their ratio; status 1 if it is above the limit."""
    parser = script.parser(__doc__, model=Path, steps=8, limit=1.2)
    parser.add_argument("--adapters", type=int, default=0, help="how many on one base, against one adapter")
    parser.add_argument("--pool", type=int, default=0, help="how many past selves, against one")
    parser.add_argument("--recipe", default="walk_smollm2", help="with --adapters or --pool")
    parser.add_argument("overrides", nargs="*", help="overrides of verl's command, for both runs")
    options = parser.parse_args()
    exit_on_sigterm()
    model, number = options.model.resolve(), options.adapters
    if options.pool:
        names = ("one past self", f"{options.pool} past selves")
        sides = [(options.recipe, pool(size)) for size in (1, options.pool)]
    elif number:
        names = ("one adapter", f"{number} adapters")
        sides = [(options.recipe, adapters(number, policies)) for policies in (1, number)]
    else:
        names = ("shared", "per role")
        own = [f"at_grpo.policies.{role}.model.path={model}" for role in ("tool_user", "planner")]
        sides = [("plan_path_cpu", []), ("plan_path_cpu_roles", own)]
    with tempfile.TemporaryDirectory() as name:
        first, second = (
            run(recipe, Path(name) / place, model, options.steps, *own, *options.overrides)
            for place, (recipe, own) in zip(("first", "second"), sides, strict=True)
        )
    tokens = [sum(data["rollout/tokens"] for data in records) for records, _ in (first, second)]
    print(f"tokens generated: {names[0]} {tokens[0]:,.0f}, {names[1]} {tokens[1]:,.0f}")
    if abs(tokens[0] - tokens[1]) > 0.01 * tokens[0]:
        raise SystemExit("the runs did not generate equally many tokens: their times cannot be compared")
    for stage in STAGES:
        one, two = (statistics.median(data[f"timing_s/{stage}"] for data in records) for records, _ in (first, second))
        print(f"{stage:15} {names[0]} {one:6.2f} s   {names[1]} {two:6.2f} s   ratio {two / one:.2f}")
    one, two = first[1], second[1]
    print(f"{'memory':15} {names[0]} {one:6.2f} GiB   {names[1]} {two:6.2f} GiB   ratio {two / one:.2f}")
    sent = [data.get(f"policy/{'player' if options.pool else 'p0'}/weights_megabytes") for data in second[0]]
    if sent[-1]:
        print(f"a weight sync sends {sent[-1]:.1f} MB")
    steps = [statistics.median(data["timing_s/step"] for data in records) for records, _ in (first, second)]
    ratio = steps[1] / steps[0]
    print(f"median step, {names[1]} / {names[0]}: {ratio:.2f} (limit {options.limit})")
    measured = number or options.pool
    return 0 if ratio <= options.limit and (not measured or second[1] <= options.limit * first[1]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
