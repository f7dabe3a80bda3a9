"""Two servers of one policy with the real stack: one dies and is restarted, then dies again; a worker dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

from training_jobs import FRESH, TRAIN_ONLY, Start, engine_of, processes_of, wait_for, wait_for_lines
from waiting import TRAINING, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.training]

TASKS = 16


def test_a_replica_dies_and_is_restarted_and_a_worker_dies(start: Start, tied_model: Path, tmp_path: Path) -> None:
    served, dumps, shared = tmp_path / "served.jsonl", tmp_path / "rows", Path("/dev/shm")
    buckets = set(shared.glob("verl_weights_*"))
    metrics_file = tmp_path / "metrics.jsonl"
    job = start(
        "plan_path_cpu",
        tmp_path,
        tied_model,
        "at_grpo.train_tasks=256",
        "at_grpo.val_tasks=8",
        "at_grpo.environment.max_turns=2",
        "at_grpo.restart_servers=1",
        f"data.train_batch_size={TASKS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={TASKS}",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
        *TRAIN_ONLY,
        "trainer.save_freq=2",
        "trainer.total_training_steps=60",
        f"trainer.rollout_data_dir={dumps}",
        VERL_USE_EXTERNAL_MODULES="served_by",
        SERVED_FILE=str(served),
        KILLED_AT="1 4",
    )
    wait_for(served, job, tmp_path)
    kill_during_rollout(engine_of(1, job), 1, served, job)
    wait_for(dumps / "4.jsonl", job, tmp_path)
    assert len(processes_of(job, "VLLM::EngineCore")) == 2, "the dead engine was replaced"
    kill_during_rollout(engine_of(1, job), 4, served, job)
    wait_for_lines(metrics_file, 7, job, tmp_path)
    assert len(processes_of(job, "VLLM::EngineCore")) == 1
    os.kill(processes_of(job, "ray::WorkerDict")[1], signal.SIGKILL)
    assert job.wait(timeout=TRAINING) != 0
    log = (tmp_path / "log").read_text(errors="replace")
    checkpoint = (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text()
    assert f"the last complete checkpoint is {tmp_path}/checkpoints/global_step_{checkpoint}" in log
    # In any stage of the step.
    doing = "its update|its weight sync|saving its checkpoint|putting its servers to sleep"
    assert re.search(rf"policy 'shared': ({doing}) failed: ActorDiedError", log)
    for message in ("server 1 is dead", "server 1 is started again; at_grpo.restart_servers=1 allows 0 more"):
        assert message in log
    assert not set(shared.glob("verl_weights_*")) - buckets

    records = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    metrics = {record["step"]: record["data"] for record in records}
    alive = [metrics[step]["team/replicas_alive"] for step in range(1, 8)]
    assert alive == [2, 1, 2, 2, 1, 1, 1]
    assert [metrics[step]["team/replicas_restarted"] for step in range(1, 8)] == [0, 0, 1, 1, 1, 1, 1]
    for step in range(1, 8):
        # All serving replicas have the weights: the survivor and the restarted one.
        assert metrics[step]["training/rollout_probs_diff_max"] < FRESH
        assert metrics[step]["actor/grad_norm"] > 0
        assert metrics[step]["rollout/episodes_failed"] == 0
        assert (metrics[step]["rollout/requests_retried"] > 0) == (step in (2, 5))

    by_step: dict[int, Counter[str]] = defaultdict(Counter)
    servers: dict[str, set[str]] = defaultdict(set)
    for line in served.read_text().splitlines():
        answer = json.loads(line)
        by_step[answer["weights"] + 1][answer["server"]] += 1
        if answer["weights"] not in (1, 4):
            servers[answer["decision"]].add(answer["server"])
    assert all(len(one) == 1 for one in servers.values()), "the candidates of a decision are on one server"
    # In steps 2 and 5 the dead server may not have returned a response.
    assert [len(by_step[step]) for step in (1, 3, 4, 6, 7)] == [2, 2, 2, 1, 1]
    for step in (1, 3, 4):
        assert min(by_step[step].values()) > 0.25 * by_step[step].total(), "both servers have a share of the requests"
    assert by_step[1].keys() != by_step[3].keys() == by_step[4].keys()
    assert by_step[6].keys() == by_step[7].keys() == by_step[1].keys() & by_step[3].keys()


def kill_during_rollout(process: int, weights: int, served: Path, job: subprocess.Popen[bytes]) -> None:
    """Kills a process after some requests of the step with those weights have finished; the step waits for it."""
    answered = f'"weights": {weights}}}'
    wait_until(lambda: served.read_text().count(answered) >= 8, lambda: job.poll() is None, TRAINING)
    os.kill(process, signal.SIGKILL)
    served.with_name(f"{served.name}.killed.{weights}").touch()
