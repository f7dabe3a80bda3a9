"""Rollouts on real servers without training, for benchmarks of the engine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import script
import training_jobs


@dataclass(frozen=True)
class Request:
    """A candidate's request to the engine."""

    prompt: list[int]
    tokens: int
    """Number of generated tokens."""
    seed: int


class Rollout(NamedTuple):
    """What a rollout took: seconds, its requests, and the CPU seconds of the job's processes by name."""

    seconds: float
    requests: list[Request]
    cpu: Counter[str]


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark that trains or serves a recipe, and further ones."""
    made = script.parser(description, model=Path, recipe="plan_path_cpu", **defaults)
    made.add_argument("overrides", nargs="*", help="overrides of verl's command")
    return made


def save(path: Path, rollouts: Sequence[Sequence[Request]]) -> None:
    """Writes recorded rollouts, one per line."""
    path.write_text("".join(json.dumps([asdict(request) for request in rollout]) + "\n" for rollout in rollouts))


def load(path: Path) -> list[list[Request]]:
    """Reads rollouts written by `save`."""
    return [[Request(**request) for request in json.loads(line)] for line in path.read_text().splitlines()]


def compose(recipe: str, model: Path, overrides: Sequence[str]) -> Any:
    """Returns the recipe's configuration with this model, without checkpoints and records.

    Sets the recipe's environment variables: here the trainer runs in this process, not in an actor that has them.
    """
    from omegaconf import OmegaConf

    from verl_atgrpo import recipes

    fixed = [
        f"actor_rollout_ref.model.path={model.resolve()}",
        "trainer.total_training_steps=1000",
        "trainer.resume_mode=disable",
        "at_grpo.record=null",
    ]
    config = recipes.compose(recipe, [*fixed, *overrides])
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    os.environ.update(config.ray_kwargs.ray_init.runtime_env.get("env_vars", {}))
    return config


@contextmanager
def started(config: Any) -> Iterator[Any]:
    """Starts a job as verl's main_ppo, and yields the trainer, ready for a step."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.ppo.v1 import get_trainer_cls

    from verl_atgrpo.train.rollout.manager import TeamRolloutManager

    options: Any = OmegaConf.to_container(config.ray_kwargs.ray_init)
    environment = get_ppo_ray_runtime_env(config)
    environment["env_vars"].update({**options["runtime_env"].get("env_vars", {}), "TRANSFER_QUEUE_ENABLE": "1"})
    ray.init(**{**options, "address": "local", "runtime_env": environment})
    try:
        tq.init(config.transfer_queue)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
        trainer.init()
        trainer.agent_loop_manager = TeamRolloutManager.create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.global_steps = 1
        yield trainer
    finally:
        tq.close()
        ray.shutdown()


def play(trainer: Any) -> Any:
    """Plays a step's tasks as in training and returns their rows, which stay in the queue."""
    trainer.timing_raw = {}  # verl's `fit` makes it
    trainer.prepare_step()
    return trainer.sample_step(trainer.config.data.train_batch_size)


def end_step(trainer: Any) -> None:
    """Syncs weights as after an update, which empties the servers' prefix cache.

    Raises RuntimeError after a defect in an episode.
    """
    trainer.collect_report()
    trainer.checkpoint_manager.sleep_replicas()
    trainer.checkpoint_manager.update_weights(trainer.global_steps)
    trainer.global_steps += 1


def rollouts(config: Any, number: int) -> Iterator[Rollout]:
    """Starts a job, plays a warm-up rollout, and yields so many more."""
    with started(config) as trainer:
        for index in range(1 + number):
            before, began = cpu_seconds(), time.perf_counter()
            rows = play(trainer)
            seconds = time.perf_counter() - began
            cpu = cpu_seconds()
            cpu.subtract(before)
            requests = requests_of(rows)
            if index:
                yield Rollout(seconds, requests, cpu)
            end_step(trainer)


def client_of(trainer: Any) -> Any:
    """Returns the rollout workers' client of a job with one policy."""
    from verl_atgrpo.train.serving.requests import Gate, PatientClient

    (client,) = trainer.get_llm_client().clients.values()
    return PatientClient(client, Gate(), timeout=600.0, retries=0, count=lambda _: None)


def requests_of(rows: Any) -> list[Request]:
    """Removes a step's rows from the queue and returns their requests; siblings are adjacent."""
    import transfer_queue as tq

    from verl_atgrpo.train.rows.batch import PARTITION

    fields = tq.kv_batch_get(keys=rows.keys, partition_id=PARTITION, select_fields=["prompts"])
    tq.kv_clear(keys=rows.keys, partition_id=PARTITION)
    return [
        Request(prompt.tolist(), tags["response_len"], seed)
        for seed, (prompt, tags) in enumerate(zip(fields["prompts"].unbind(), rows.tags, strict=True))
    ]


def cpu_seconds() -> Counter[str]:
    """Returns the CPU seconds so far of this process and its descendants, summed by name."""
    spent: Counter[str] = Counter()
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # or a zombie
            name, times = process.cmdline()[:1], process.cpu_times()
            spent[name_of(name[0] if name else "", process == this)] += times.user + times.system
    return spent


def name_of(command: str, driver: bool = False) -> str:
    """Returns a process's name in tables: Ray's or vLLM's title, without the method."""
    if driver:
        return "driver"
    for mark in ("ray::", "VLLM::"):
        if command.startswith(mark):
            return command.removeprefix(mark).split(".")[0].split("(")[0].strip()
    return "Ray itself"


def run_part(script: str, *arguments: str) -> Any:
    """Runs a part of a benchmark in a process of its own; returns the JSON in the last line of output that has some.

    Libraries may say something after it, as torch of a process group that nobody has destroyed.

    Raises SystemExit with the end of its output if it fails. If this process is terminated meanwhile, it prints that.
    """
    command = [sys.executable, script, *arguments]
    with (
        tempfile.TemporaryFile() as file,
        subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        ) as part,
    ):
        ended = False
        try:
            part.wait()
            ended = True
        finally:
            training_jobs.end(part)  # with its Ray cluster, also if this process is terminated
            file.seek(0)
            output = file.read().decode(errors="replace")
            if not ended:
                print(output[-6000:], flush=True)
    if part.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output[-6000:]}")
    return json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))


def environment() -> dict[str, str]:
    """Returns the environment of a job that imports modules of the tests."""
    paths = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def load_average() -> str:
    """Returns the machine's load average as text."""
    return f"load {' '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} cores"
