"""Training jobs of the end-to-end tests: real ones, each with its files in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

EXTERNAL = Path(__file__).parent / "external"


def start(recipe: str, folder: Path, model: Path, *overrides: str, **environment: str) -> subprocess.Popen[bytes]:
    """Starts a job whose files all lie in `folder`."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-name={recipe}"]
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
    try:
        status = job.wait(timeout=480)
    except subprocess.TimeoutExpired:
        end(job)
        raise
    assert status == 0, (folder / "log").read_text(errors="replace")[-6000:]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["data"] for record in records}


def end(job: subprocess.Popen[bytes]) -> None:
    """Kills a job with everything it started: its Ray cluster lives in its session."""
    session = os.getsid(job.pid)
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(status.parent.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue
    job.wait()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def wait_for(path: Path, job: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits until a job has written a file."""
    deadline = time.monotonic() + 480
    while not path.exists():
        assert job.poll() is None, (folder / "log").read_text(errors="replace")[-6000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def engine_of(replica: int, job: subprocess.Popen[bytes]) -> int:
    """The vLLM engine of a replica in a job's session; its server is another process."""
    session = os.getsid(job.pid)
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if os.getsid(process.pid) != session or "VLLM::EngineCore" not in " ".join(process.info["cmdline"] or ()):
                continue
            if process.environ()["VERL_REPLICA_RANK"] == str(replica):
                return process.pid
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    raise AssertionError(f"no engine of replica {replica}")
