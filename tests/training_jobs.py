"""Real training jobs for the end-to-end tests, each in its own folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from processes import of_session
from waiting import TRAINING, wait_until

from verl_atgrpo.lab.report.records import find, read

FRESH = 1e-5
"""Largest difference of a token's probability between server and actor with the same weights, in float32."""
EXTERNAL = Path(__file__).parent / "end_to_end" / "external"
TRAIN_ONLY = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")
"""Overrides without validation and checkpoints."""
SMALL = (
    "at_grpo.candidates=4",
    "at_grpo.train_tasks=64",
    "at_grpo.val_tasks=8",
    "data.train_batch_size=4",
    "data.val_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    *TRAIN_ONLY,
)
"""Overrides for short steps; further ones may change them."""
Start = Callable[..., subprocess.Popen[bytes]]
"""Type of the fixture `start`."""


def start(recipe: str, folder: Path, model: Path, *overrides: str, **environment: str) -> subprocess.Popen[bytes]:
    """Starts a job with all its files in `folder`."""
    options = [one for one in overrides if one.startswith("--")]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-name={recipe}", *options]
    overrides = tuple(one for one in overrides if one not in options)
    command += [f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}/checkpoints", *overrides]
    paths = [str(EXTERNAL), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={
            **os.environ,
            "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            **environment,
        },
        stdout=(folder / "log").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[bytes], folder: Path) -> dict[int, dict[str, float]]:
    """Waits for a job and returns its metrics by step."""
    assert job.wait(timeout=TRAINING) == 0, (folder / "log").read_text(errors="replace")[-6000:]
    return metrics_of(folder)


def metrics_of(folder: Path, file: str = "metrics.jsonl") -> dict[int, dict[str, float]]:
    """Returns a run's metrics by step."""
    records = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return {record["step"]: record["data"] for record in records}


def trained(folder: Path) -> dict[int, list[int]]:
    """Returns the tasks that were trained on, by step."""
    train = [key for key in read(find(folder)).episodes if key[0] == "train"]
    return {step: sorted(task for _, of, task, _ in train if of == step) for step in {key[1] for key in train}}


def end(job: subprocess.Popen[bytes]) -> None:
    """Kills a job and all processes of its session, which includes its Ray cluster."""
    session = job.pid  # set by `start`; the job itself may have ended
    # Repeatedly: processes may start others meanwhile.
    while there := living(session):
        for process in there:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(there, timeout=1)
    job.wait()


def living(session: int) -> list[psutil.Process]:
    """The processes of a session, without zombies."""
    found = []
    for pid in of_session(session):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def wait_for(path: Path, job: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until a job has written a file completely: no process of its session has it open."""

    def written() -> bool:
        return path.is_dir() or not any(_has_open(process, path) for process in living(job.pid))

    wait_until(path.exists, lambda: _alive(job, folder), TRAINING)
    wait_until(written, lambda: _alive(job, folder), TRAINING)


def wait_for_lines(path: Path, lines: int, job: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until a job has written `lines` complete lines to a file."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= lines, lambda: _alive(job, folder), TRAINING)


def _alive(job: subprocess.Popen[bytes], folder: Path) -> bool:
    assert job.poll() is None, (folder / "log").read_text(errors="replace")[-6000:]
    return True


def _has_open(process: psutil.Process, path: Path) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(file.path == str(path) for file in process.open_files())
    return False


def processes_of(job: subprocess.Popen[bytes], title: str) -> list[int]:
    """The processes in a job's session whose command line has `title` in it, the oldest first."""
    found = []
    for process in living(os.getsid(job.pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def engine_of(replica: int, job: subprocess.Popen[bytes]) -> int:
    """The vLLM engine of a replica in a job's session; its server is another process."""
    for pid in processes_of(job, "VLLM::EngineCore"):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).environ()["VERL_REPLICA_RANK"] == str(replica):
                return pid
    raise AssertionError(f"no engine of replica {replica}")
