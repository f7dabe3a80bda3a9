"""What each part runs and measures. Every function is called in the part's own process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nan
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import bench_against_grpo
import bench_engine
import bench_prefix_tree
import real_stack
import training_jobs

from one_gpu import measures, models
from one_gpu.jobs import Part, environment
from one_gpu.measures import Card, Measure, Report, Rows, Shape, middle, success_at
from one_gpu.results import last_lines

ENGINE_SHARE = bench_engine.LIMIT
OUTSIDE = 0.6
"""Time outside the rollout over that of verl's stock GRPO."""
MFU = 0.4
CONSTANT = 0.3
"""Seconds of a step that are neither sampling nor the model."""
ROLLOUT = 7.0
"""Seconds of the 1.5B model's rollout: 131,072 tokens, in chains of four decisions."""
FLOAT32 = 2e-2
"""Largest difference of a token's probability between servers and actor, in float32 with attention in TF32."""
REDUCED = ("numbers", "resume", "rollout_1p5b")
"""What is run on the CPU where no parts are named: numbers, trainings, a resumption, vLLM alone."""
_STAGES = ("gen", "old_log_prob", "update_actor")
_PROBS = "training/rollout_probs_diff_max"


@dataclass(frozen=True)
class Setting:
    """What a part is to use."""

    folder: Path
    """Its own."""
    models: Path
    """For models that several parts use."""
    start: Path
    """The model of the trainings."""
    reduced: bool
    """On the CPU, with tiny models and few steps."""
    lr: float | None
    card: Card | None
    report: Report

    def machine(self, precision: str | None = None) -> list[str]:
        """Returns the overrides for this machine, beside other jobs; their recipes are for the CPU."""
        if self.reduced:
            return []
        return [
            "hardware=1_gpu",
            *([] if precision is None else [f"precision={precision}"]),
            "++ray_kwargs.ray_init.object_store_memory=2000000000",
        ]

    def walk(self, precision: str | None = None) -> list[str]:
        """Returns the overrides of a training of the start model, which may run beside others."""
        if self.reduced:
            return [*training_jobs.SMALL, "at_grpo.environment.max_turns=2"]
        # vLLM's own measurement of free memory would count what the others take meanwhile.
        memory = ["actor_rollout_ref.rollout.gpu_memory_utilization=0.1"]
        memory.append("++actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=4294967296")
        rate = [] if self.lr is None else [f"actor_rollout_ref.actor.optim.lr={self.lr}"]
        return [*self.machine(precision), *memory, *training_jobs.TRAIN_ONLY, *rate]

    def recipe(self, kind: str = "") -> str:
        """Returns the walk's recipe, or with a `kind` a variant of it."""
        return f"{'plan_path_cpu' if self.reduced else 'walk_smollm2'}{kind}"


Metrics = dict[int, dict[str, float]]
"""By step."""


def train(setting: Setting, recipe: str, *overrides: str, name: str = "run", **more: str) -> Metrics:
    """Trains to the end and returns the metrics by step; raises SystemExit with the log's end if that fails."""
    folder = setting.folder / name
    job = begin(setting, recipe, *overrides, name=name, **more)
    try:
        status = job.wait()
    finally:
        training_jobs.end(job)
    if status:
        raise SystemExit(
            f"the training ended with status {status}; {folder}/log ends with\n{last_lines(folder / 'log')}"
        )
    return training_jobs.metrics_of(folder, more.get("VERL_FILE_LOGGER_PATH", "metrics.jsonl"))


def begin(setting: Setting, recipe: str, *overrides: str, name: str, **more: str) -> subprocess.Popen[bytes]:
    """Starts a training in a folder of the part's; the caller ends it."""
    folder = setting.folder / name
    folder.mkdir(exist_ok=True)
    given = {**environment(), **more}
    return training_jobs.start(recipe, folder, setting.start, *overrides, **given)


# ------------------------------------------------------------ trainings


def walk(
    setting: Setting,
    kind: str = "",
    precision: str | None = None,
    extra: Sequence[str] = (),
    steps: int = 10,
    wanted: Mapping[int, float] | None = None,
    apart: float | None = None,
    timed: bool = False,
) -> None:
    """Trains the walk and measures success, server against actor, and the time of a step.

    Args:
        setting: the part's.
        kind: the recipe's suffix.
        precision: of actor and server; None for the hardware's default.
        extra: further overrides.
        steps: how many; validated after every ten.
        wanted: step -> success to reach by it.
        apart: most that a token's probability may differ between server and actor.
        timed: whether nothing runs beside it.
    """
    from verl_atgrpo.train.engine.arrival import ARRIVED

    every = 10
    if setting.reduced:
        steps, every, wanted = 2, 2, None
    limits = [f"trainer.total_training_steps={steps}", f"trainer.test_freq={every}"]
    found = train(setting, setting.recipe(kind), *setting.walk(precision), *extra, *limits)
    done = [found[step] for step in sorted(found) if step > 0]
    for step in range(every, steps + 1, every):
        target = (wanted or {}).get(step)
        setting.report.add(Measure(f"success at step {step}", success_at(found, step), "", target, "higher"))
    probs = [step[_PROBS] for step in done if _PROBS in step]  # asynchronous steps may have no fresh rows
    arrived = [value for step in done for key, value in step.items() if key.endswith(f"/{ARRIVED}")]
    setting.report.add(
        Measure(
            "server against actor, largest of all steps",
            max(probs, default=nan),
            "",
            None if setting.reduced else apart,
        ),
        Measure("server against actor in step 1", done[0].get(_PROBS, nan)),
        Measure("part of an update that arrives at the servers", median(arrived or [nan]), better="higher"),
        Measure("tokens generated", sum(step["rollout/tokens"] for step in done)),
        Measure("a step", middle(done[2:] or done, "timing_s/step"), "s", steady=timed),
    )
    if timed:
        late = done[2:] or done  # the first steps compile
        target = None if setting.reduced else CONSTANT
        constant, rest = (median(map(cost, late)) for cost in (measures.constant_cost, measures.untimed_cost))
        setting.report.add(
            Measure("constant cost of a step", constant, "s", target, steady=True),
            *(Measure(f"of that {stage}", middle(late, f"timing_s/{stage}"), "s") for stage in measures.COSTS),
            Measure("of that in no timer", rest, "s"),
            *(Measure(f"of a step {stage}", middle(late, f"timing_s/{stage}"), "s") for stage in _STAGES),
        )


def roles(setting: Setting, precision: str | None = None) -> None:
    """The same with a policy for each role, whose states take turns on the card."""
    agents = "tool_user_planner" if setting.reduced else "navigator_pacer"
    walk(setting, "", precision, [f"+roles={agents}", "+placement=colocated"])


def resume(setting: Setting, precision: str | None = None) -> None:
    """Kills a training after its checkpoint, resumes it, and evaluates the checkpoint.

    The policy's success is measured when it was saved, after it was loaded, and on a GPU by `verl-atgrpo eval`. The
    step after the checkpoint is done twice, with the same tasks and seeds.
    """
    saved = 2 if setting.reduced else 6
    folder = setting.folder / "run"
    often = [f"trainer.save_freq={saved}", f"trainer.test_freq={saved}"]
    recipe, own = setting.recipe(), setting.walk(precision)
    job = begin(setting, recipe, *own, *often, f"trainer.total_training_steps={saved + 4}", name="run")
    try:
        lines = saved + 1
        training_jobs.wait_for_lines(folder / "metrics.jsonl", lines, job, folder)
    finally:
        training_jobs.end(job)  # SIGKILL
    first = training_jobs.metrics_of(folder)
    again = train(
        setting,
        recipe,
        *own,
        *often,
        "trainer.save_freq=-1",
        "trainer.val_before_train=true",
        f"trainer.total_training_steps={saved + 1}",
        VERL_FILE_LOGGER_PATH=str(folder / "resumed.jsonl"),
    )
    if saved not in again:
        raise SystemExit(f"it did not resume from step {saved}: its steps are {sorted(again)}")
    before, after = success_at(first, saved), success_at(again, saved)
    rounding = 1e-6 if setting.reduced else 0.1  # on a GPU twice the deviation of two samplings of 200 tasks
    setting.report.add(
        Measure(f"success at step {saved}, when saved", before, better="higher"),
        Measure("success apart, saved and resumed", abs(before - after), "", rounding),
    )
    one, two = (metrics[saved + 1] for metrics in (first, again))
    for key in ("actor/entropy", "rollout/tokens", "actor/grad_norm"):
        apart = abs(one[key] - two[key]) / max(abs(one[key]), 1e-9)
        allowed = (1e-6 if setting.reduced else 0.1) if key == "actor/entropy" else None
        setting.report.add(Measure(f"{key} of the next step, done twice: apart", apart, "of it", allowed))
    if not setting.reduced:  # on the CPU the tutorial's test does it
        evaluated = evaluate(setting, recipe, folder / f"checkpoints/global_step_{saved}", own)
        setting.report.add(Measure("success apart, saved and verl-atgrpo eval", abs(before - evaluated), "", 0.1))


def evaluate(setting: Setting, recipe: str, checkpoint: Path, overrides: Sequence[str]) -> float:
    """Returns the success of a checkpoint by `verl-atgrpo eval`; raises SystemExit with its output if that fails."""
    from verl_atgrpo.lab.evaluation.results import read

    out = setting.folder / "eval.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl_atgrpo.cli",
        "eval",
        f"--config-name={recipe}",
        f"--checkpoint={checkpoint}",
    ]
    command += [f"--out={out}", f"actor_rollout_ref.model.path={setting.start}", *overrides]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    print(done.stdout.decode(errors="replace"), flush=True)
    if done.returncode:
        raise SystemExit(f"verl-atgrpo eval ended with status {done.returncode}")
    rows = list(read(out).rows.values())
    return sum(row.success for row in rows) / len(rows)


# ------------------------------------------------------------ time


def _large(setting: Setting) -> list[str]:
    """Overrides for a model of half a billion parameters and more, alone on the card."""
    if setting.reduced:
        return []
    return [
        *setting.machine("bf16"),
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=12288",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",  # recomputation is no work of the model's
        "actor_rollout_ref.rollout.max_num_batched_tokens=16384",
    ]


def _made(setting: Setting, size: str) -> Path:
    return setting.start if setting.reduced else models.random_model(setting.models / size, size)


def against_grpo(setting: Setting, size: str) -> None:
    """Trains the same rows with our trainer and with verl's stock GRPO, one after the other."""
    model = _made(setting, size)
    letters, answer, tasks, steps = (40, 16, 4, 1) if setting.reduced else (600, 256, 16, 5)
    options: Any = SimpleNamespace(
        recipe="plan_path_cpu",
        model=model,
        steps=steps,
        tasks=tasks,
        candidates=8,
        prompt_letters=letters,
        answer_tokens=answer,
        overrides=_large(setting),
    )
    folder = setting.folder / "runs"
    folder.mkdir()
    bench_against_grpo.write_prompts(folder / "prompts.parquet", letters)
    sides, seen = {}, set[tuple[float, ...]]()
    for side in ("ours", "stock"):
        done, shapes = bench_against_grpo.run(side, options, folder)
        seen |= shapes
        sides[side] = bench_against_grpo.medians(done)
        trees = side == "ours"
        rows = Rows(tasks, options.candidates, round(next(iter(shapes))[1]), answer)
        _work_of(setting, Shape.of(models.config_of(model)), rows, sides[side], "ours" if trees else "stock", trees)
    if len(seen) != 1:
        raise SystemExit(f"not all steps had equal rows (tokens, prompt length, answer length): {seen}")
    ours, stock = sides["ours"], sides["stock"]
    for stage in ("outside rollout", "old_log_prob", "update_actor", "rollout"):
        target = OUTSIDE if stage == "outside rollout" and not setting.reduced else None
        setting.report.add(
            Measure(f"{stage}, over that of verl's stock GRPO", ours[stage] / stock[stage], "", target, steady=True)
        )


def _work_of(setting: Setting, shape: Shape, rows: Rows, seconds: Mapping[str, float], side: str, trees: bool) -> None:
    """Reports the times of a side's step, and which share of the card's peak its update and log-probs reach."""
    for stage in ("rollout", "old_log_prob", "update_actor", "outside rollout"):
        setting.report.add(Measure(f"{side}: {stage}", seconds[stage], "s", steady=trees))
    setting.report.add(Measure(f"{side}: tokens through the model", rows.tokens(trees)))
    work = {
        "update": measures.update_flops(shape, rows, trees) / seconds["update_actor"],
        "log-probs": measures.forward_flops(shape, rows, trees) / seconds["old_log_prob"],
    }
    for name, speed in work.items():
        if setting.card is None:
            setting.report.add(Measure(f"{side}: {name}", speed / 1e12, "TFLOP/s", better="higher", steady=trees))
            continue
        peak = setting.card.teraflops
        target = MFU if trees and name == "update" else None
        share = speed / 1e12 / peak
        what = f"{side}: {name}, of the peak of {peak:g} TFLOP/s"
        setting.report.add(Measure(what, share, "", target, "higher", steady=trees))


def rollout(setting: Setting, size: str, eager: bool = False) -> None:
    """Plays rollouts of 512 requests in chains of four decisions, and their requests again by vLLM alone.

    vLLM gets as many requests at once as there are at once in chains, a fourth of them. With `eager` there are no CUDA
    graphs, and vLLM alone is left out.
    """
    model = _made(setting, size)
    tasks, candidates, chain, letters, answer = (4, 4, 2, 40, 16) if setting.reduced else (32, 4, 4, 541, 256)
    rollouts, slots = (1, 128) if setting.reduced else (3, 512)
    longest = letters + 40
    common = [
        *_large(setting),
        f"data.train_batch_size={tasks}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={tasks}",
        f"at_grpo.candidates={candidates}",
        f"data.max_prompt_length={longest}",
        "~at_grpo.environment",
        f"+at_grpo.environment={{name: 'bench_against_grpo:Letters', letters: {letters}, decisions: {chain}}}",
        *bench_engine.forced_length(longest, answer),
        *([] if setting.reduced else [f"actor_rollout_ref.rollout.enforce_eager={str(eager).lower()}"]),
    ]
    record = setting.folder / "requests.jsonl"
    given = [f"--model={model}", "--recipe=plan_path_cpu", f"--record={record}", f"--rollouts={rollouts}"]
    played = real_stack.run_part(bench_engine.__file__, "--part=rollout", *given, *common)["seconds"]
    seconds, requests = median(played), real_stack.load(record)[0]
    rows = Rows(len(requests) // candidates, candidates, len(requests[0].prompt), answer)
    target = ROLLOUT if size == "1p5b" and not (setting.reduced or eager) else None
    setting.report.add(
        Measure(f"rollout of {len(requests)} requests", seconds, "s", target, steady=True),
        Measure("tokens a second", rows.decisions * candidates * answer / seconds, better="higher"),
    )
    shape = Shape.of(models.config_of(model))
    steps = measures.decoding_steps(rows, chain, slots)
    read = measures.decoded_bytes(shape, rows, steps, digits=4 if setting.reduced else 2)
    _bandwidth(setting, "rollout", read / seconds)
    if eager:
        return
    waves = setting.folder / "waves.jsonl"
    real_stack.save(waves, [wave for one in real_stack.load(record) for wave in in_waves(one, candidates, chain)])
    given[given.index(f"--record={record}")] = f"--record={waves}"
    of_waves = real_stack.run_part(bench_engine.__file__, "--part=offline", *given, *common)["seconds"]
    alone = [sum(of_waves[first : first + chain]) for first in range(0, len(of_waves), chain)]
    share = median(bench_engine.ratios(played, alone))
    target = None if setting.reduced else ENGINE_SHARE
    setting.report.add(
        Measure(f"vLLM alone, the same in {chain} waves", median(alone), "s", steady=True),
        Measure("engine share: vLLM alone over rollout", share, "", target, "higher", steady=True),
    )
    _bandwidth(setting, "vLLM alone", read / median(alone))


def in_waves(requests: Sequence[Any], candidates: int, chain: int) -> list[list[Any]]:
    """Returns a rollout's requests in as many parts as a chain has decisions; lengths are equal, so any will do."""
    return [
        [request for number, request in enumerate(requests) if number // candidates % chain == wave]
        for wave in range(chain)
    ]


def _bandwidth(setting: Setting, what: str, bytes_a_second: float) -> None:
    name = f"{what}: memory bandwidth while decoding, at least"
    if setting.card is None:
        setting.report.add(Measure(name, bytes_a_second / 1e9, "GB/s", better="higher", steady=True))
        return
    peak = setting.card.terabytes
    share = bytes_a_second / 1e12 / peak
    setting.report.add(Measure(f"{name}, of {peak:g} TB/s", share, better="higher", steady=True))


def trees(setting: Setting) -> None:
    """Times log-probs and updates over prefix trees, under FSDP2 and FSDP1, against verl's plain path."""
    decisions = 4 if setting.reduced else 16
    options = [f"--model={setting.start}", f"--decisions={decisions}", f"--rounds={1 if setting.reduced else 4}"]
    found = {}
    kinds = {"plain": ("plain", "fsdp2"), "trees": ("trees", "fsdp2"), "trees, FSDP1": ("trees", "fsdp")}
    if setting.reduced:
        del kinds["trees, FSDP1"]  # it takes no module on the CPU
    for name, (part, strategy) in kinds.items():
        own = [*setting.machine(), f"actor_rollout_ref.actor.strategy={strategy}"]
        found[name] = made = real_stack.run_part(bench_prefix_tree.__file__, f"--part={part}", *options, *own)
        for what in ("log_probs", "update"):
            setting.report.add(Measure(f"{name}: {what}", median(made[what]), "s", steady=True))
        setting.report.add(Measure(f"{name}: most memory", made["gigabytes"], "GB", steady=True))
    plain = found.pop("plain")
    for name, made in found.items():
        losses = max(abs(ours[0] - theirs[0]) for ours, theirs in zip(made["losses"], plain["losses"], strict=True))
        times = [sum(median(each[what]) for what in ("log_probs", "update")) for each in (plain, made)]
        rows, tokens = made["tokens"]
        setting.report.add(
            Measure(f"{name}: losses of two steps against plain", losses, "", 1e-4 if setting.reduced else None),
            Measure(f"{name}: times faster than plain", times[0] / times[1], "", 1.0, "higher", steady=True),
            Measure(f"{name}: times fewer tokens", rows / tokens, better="higher"),
        )


def numbers(setting: Setting) -> None:
    """Compares numbers of trees and adapters in verl's engines."""
    from one_gpu import numbers as of_engines

    of_engines.check(setting.folder, setting.report)


Run = Callable[[Setting], None]


def all_parts(precision: str | None) -> list[tuple[Part, Run]]:
    """Returns every part with its function, the most important first.

    Args:
        precision: of the parts that do not name theirs; None for the recipe's default.
    """
    made: list[tuple[Part, Run]] = []

    def part(name: str, does: str, seconds: float, gigabytes: float, run: Run, alone: bool = False) -> None:
        made.append((Part(name, does, seconds, gigabytes, alone), run))

    of_walk = partial(walk, precision=precision)
    part("numbers", "trees and adapters in FSDP1 and FSDP2, beside plain rows and alone", 100, 8, numbers)
    learns = {10: 0.25, 20: 0.95}
    part("walk", "SmolLM2's walk", 240, 24, partial(of_walk, wanted=learns, steps=20, timed=True), alone=True)
    part("step_1p5b", "a step of 1.5B and verl's stock GRPO", 330, 75, partial(against_grpo, size="1p5b"), alone=True)
    of_adapters = partial(of_walk, kind="_adapters", steps=20, wanted={20: 0.95})
    part("adapters", "an adapter for each role", 320, 24, of_adapters)
    part("resume", "checkpoint, kill, resume, evaluation", 380, 24, partial(resume, precision=precision))
    part("rollout_1p5b", "rollouts of 1.5B, and vLLM alone", 200, 75, partial(rollout, size="1p5b"), alone=True)
    exact = partial(walk, precision="fp32", wanted={10: 0.25}, apart=FLOAT32)
    part("fp32", "the walk in float32", 220, 24, exact)
    part("fp16", "the walk in float16", 220, 24, partial(walk, precision="fp16", wanted={10: 0.25}))
    part("bf16", "the walk in bfloat16", 220, 24, partial(walk, precision="bf16"))
    eager = partial(rollout, size="1p5b", eager=True)
    part("eager_1p5b", "the same rollouts without CUDA graphs", 180, 75, eager, alone=True)
    part("roles", "a policy for each role", 240, 40, partial(roles, precision=precision))
    part("colocate_async", "updates that do not wait", 220, 24, partial(of_walk, extra=["+mode=async"]))
    part("trees", "the time of trees and of verl's plain path", 150, 40, trees, alone=True)
    part("step_0p5b", "a step of .5B and verl's stock GRPO", 300, 60, partial(against_grpo, size="0p5b"), alone=True)
    return made


def reduced_parts() -> list[tuple[Part, Run]]:
    """Returns the same parts for the CPU, without limits, and none alone; those of `REDUCED` come first."""
    made = [(replace(part, gigabytes=0, seconds=inf, alone=False), run) for part, run in all_parts(None)]
    return sorted(made, key=lambda pair: pair[0].name not in REDUCED)
