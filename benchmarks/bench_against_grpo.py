"""Compares a step without its rollout in AT-GRPO and in verl's stock GRPO trainer, with equal rows and tokens.

Both train the same model on prompts of equal length, with responses of forced length, in groups of K and with equally
many optimizer steps; verl with its estimator `grpo`, we with `at_grpo` and a team of one agent and one turn. Runs
alternate. A cycle is the time between two steps' lines in the metrics file, so it includes what verl does not count as
the step, such as metrics. The limit is for the cycle without `timing_s/gen`, as a median over all runs.

python benchmarks/bench_against_grpo.py --model runs/models/plan_path_tiny [--rounds 2 --steps 8]
    [--tasks 32 --candidates 8 --prompt-letters 40 --answer-tokens 64] [--limit 1.05] [override ...]
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import real_stack
import training_jobs
from processes import exit_on_sigterm

from verl_atgrpo import Environment, Outcome, Score

STAGES = ("old_log_prob", "adv", "update_actor", "update_weights")
WARM_UP = 2
_TASKS = 4096


def prompt(index: int, letters: int) -> str:
    """Returns a prompt of so many letters, each a token; only the candidates of a task share one."""
    rng = random.Random(index)
    return "".join(rng.choice("UDLR") for _ in range(letters))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The reward of both sides (interface of verl's stock trainer)."""
    return float(solution_str.count("U"))


class Letters(Environment):
    """Decisions of two agents in turns, each with a prompt of its own; a single one without more."""

    def __init__(self, letters: int, decisions: int = 1) -> None:
        self.letters, self.decisions = letters, decisions
        self.agents = ("first", "second")[:decisions]  # type: ignore[misc]

    def task(self, split: str, index: int) -> tuple[str, int]:
        """Returns split and index."""
        return split, index

    def fingerprint(self, task: tuple[str, int]) -> str:
        """Returns the task as text."""
        return f"{task[0]} {task[1]}"

    async def run(self, task: tuple[str, int], team: Any) -> Outcome:
        """Plays the decisions one after the other."""
        total = 0.0
        for number in range(self.decisions):
            asked = prompt(task[1] * self.decisions + number, self.letters)
            agent = team[self.agents[number % len(self.agents)]]
            answer = await agent.act(asked, score=lambda reply: Score(compute_score("", reply, "U")))
            total += answer.score.team
        return Outcome(success=False, team_reward=total)


def stages_of(cycle: float, timers: Mapping[str, float]) -> dict[str, float]:
    """Returns stage -> seconds of a step, from its cycle and verl's timers.

    `rest of the step` is not covered by a timer; the limit is for `outside rollout`.
    """
    seconds = {stage: timers[f"timing_s/{stage}"] for stage in ("step", "gen", *STAGES)}
    whole, rollout = seconds.pop("step"), seconds.pop("gen")
    return {
        **seconds,
        "rest of the step": whole - rollout - sum(seconds.values()),
        "after the step": cycle - whole,
        "outside rollout": cycle - rollout,
        "rollout": rollout,
    }


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns stage -> median seconds."""
    return {stage: statistics.median(step[stage] for step in steps) for stage in steps[0]}


def shapes(records: Sequence[dict[str, float]]) -> set[tuple[float, ...]]:
    """Returns tokens and lengths of the steps, which must be equal on both sides."""
    names = ("perf/total_num_tokens", "prompt_length/mean", "response_length/mean")
    return {tuple(record[name] for name in names) for record in records}


def write_prompts(path: Path, letters: int) -> None:
    """Writes the prompts for verl's stock data set."""
    import pandas

    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": prompt(index, letters)}],
            "reward_model": {"style": "rule", "ground_truth": "U"},
            "extra_info": {"index": index},
        }
        for index in range(_TASKS)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def overrides_of(side: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Returns a side's overrides of the recipe."""
    longest = options.prompt_letters + 88
    common = [
        f"data.train_batch_size={options.tasks}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.tasks // 2}",
        f"data.max_prompt_length={longest}",
        f"data.max_response_length={options.answer_tokens}",
        f"actor_rollout_ref.rollout.max_model_len={longest + options.answer_tokens}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"trainer.total_training_steps={WARM_UP + options.steps}",
        "trainer.resume_mode=disable",
    ]
    if side == "ours":
        return [
            *common,
            "~at_grpo.environment",
            f"+at_grpo.environment={{name: 'bench_against_grpo:Letters', letters: {options.prompt_letters}}}",
            f"at_grpo.candidates={options.candidates}",
            f"at_grpo.train_tasks={_TASKS}",
        ]
    return [
        *common,
        "~at_grpo",
        "trainer.v1.trainer_mode=sync",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n={options.candidates}",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "reward.custom_reward_function.path=pkg://bench_against_grpo",
        "reward.custom_reward_function.name=compute_score",
    ]


def run(side: str, options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, float]], set[tuple[float, ...]]]:
    """Trains; returns the steps after the warm-up and their shapes. Raises SystemExit if the run fails."""
    own = folder / f"{side}_{len(list(folder.iterdir()))}"
    own.mkdir()
    job = training_jobs.start(
        options.recipe,
        own,
        options.model.resolve(),
        *training_jobs.TRAIN_ONLY,
        *overrides_of(side, options, folder),
        *options.overrides,
        PYTHONPATH=real_stack.environment()["PYTHONPATH"],
    )
    try:
        times = _times_of_lines(own / "metrics.jsonl", job)
    finally:
        training_jobs.end(job)
    if job.returncode != 0 or len(times) < WARM_UP + options.steps:
        raise SystemExit(f"the {side} run failed:\n{(own / 'log').read_text(errors='replace')[-6000:]}")
    records = list(training_jobs.metrics_of(own).values())
    steps = [
        stages_of(later - earlier, record)
        for earlier, later, record in zip(times, times[1:], records[1:], strict=False)
    ]
    return steps[WARM_UP - 1 :], shapes(records)


def _times_of_lines(path: Path, job: subprocess.Popen[bytes]) -> list[float]:
    """Returns when each line was written, after the job has ended."""
    times: list[float] = []
    while True:
        running = job.poll() is None
        lines = path.read_bytes().count(b"\n") if path.exists() else 0
        times += [time.perf_counter()] * (lines - len(times))
        if not running:
            return times
        time.sleep(0.01)


def main() -> int:
    """Prints medians and ratios; status 1 if ours is above the limit."""
    sizes = {"rounds": 2, "tasks": 32, "candidates": 8, "prompt_letters": 40, "answer_tokens": 64}
    parser = real_stack.parser(__doc__, **sizes, limit=1.05)
    parser.add_argument("--steps", type=int, default=8, help="per run, after the warm-up")
    options = parser.parse_args()
    exit_on_sigterm()
    steps: dict[str, list[dict[str, float]]] = {"ours": [], "stock": []}
    seen: set[tuple[float, ...]] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.parquet", options.prompt_letters)
        for number in range(options.rounds):
            for side in ("ours", "stock") if number % 2 == 0 else ("stock", "ours"):
                made, found = run(side, options, folder)
                steps[side] += made
                seen |= found
                if len(seen) != 1:
                    raise SystemExit(f"not all steps had equal rows (tokens, prompt length, answer length): {seen}")
                outside = medians(made)["outside rollout"]
                print(
                    f"round {number + 1}, {side}: {outside:.2f} s outside the rollout; {real_stack.load_average()}",
                    flush=True,
                )
    (tokens, prompts, answers) = seen.pop()
    print(
        f"a step: {options.tasks * options.candidates} rows, {tokens:,.0f} tokens (prompts {prompts:.0f}, answers "
        f"{answers:.0f}), 2 optimizer steps; medians of {len(steps['ours'])} steps"
    )
    ours, stock = medians(steps["ours"]), medians(steps["stock"])
    for stage, one in ours.items():
        two = stock[stage]
        print(f"{stage:17}  ours {one:7.3f} s   stock {two:7.3f} s   ratio {one / two if two else float('nan'):6.3f}")
    ratio = ours["outside rollout"] / stock["outside rollout"]
    print(f"outside the rollout, ours / stock: {ratio:.3f} (limit {options.limit})")
    whole = [one["outside rollout"] + one["rollout"] for one in (ours, stock)]
    print(f"the whole step, ours / stock: {whole[0] / whole[1]:.3f}")
    return int(ratio > options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
