"""Training with standalone servers and the real stack: they sample while the policy is updated."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import torch
from processes import of_session
from training_jobs import FRESH, SMALL, Start, finish, weights
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.training]


def test_servers_sample_during_the_update_and_get_its_weights(start: Start, tied_model: Path, tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    job = start(
        "plan_path_cpu_separate",
        tmp_path,
        tied_model,
        *SMALL,
        "~at_grpo.environment",
        "+at_grpo.environment={name: 'late_writer:LateWriter'}",
        "at_grpo.candidates=2",
        # Half of a step's tasks are sampled with its own weights.
        "trainer.v1.separate_async.num_warmup_batches=0.5",
        "trainer.v1.sampler.max_off_policy_threshold=2",
        "trainer.total_training_steps=4",
        "trainer.test_freq=4",
        "trainer.save_freq=4",
        # Long responses: some are in flight during the update, and mostly during the weight sync.
        "actor_rollout_ref.rollout.ignore_eos=true",
        "data.max_response_length=64",
        "actor_rollout_ref.rollout.max_model_len=128",
        VERL_USE_EXTERNAL_MODULES="late_writer",
        NOTES=str(tmp_path / "notes"),
    )
    session = os.getsid(job.pid)
    metrics = finish(job, tmp_path)
    for step in (1, 2, 3, 4):
        data = metrics[step]
        assert math.isfinite(data["actor/pg_loss"])
        assert data["actor/grad_norm"] > 0
        assert data["rollout/episodes_failed"] == 0
        assert data["team/staleness_max"] <= 1
        # Over rows sampled with the step's own weights.
        assert data["training/rollout_probs_diff_max"] < FRESH
        assert "rollout_corr/rollout_is_mean" in data
    assert max(metrics[step]["team/staleness_max"] for step in (2, 3, 4)) == 1
    assert "val-core/late_writer:LateWriter/acc/mean@1" in metrics[4]

    notes: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    updates = [note for note in notes if note["what"] == "update"]
    requests = [note for note in notes if note["what"] == "request"]
    assert len(updates) == 4
    during = [[one for one in requests if update["began"] < one["began"] < update["ended"]] for update in updates]
    assert all(during[:3]), "requests were sent while the policy was trained"
    assert any(one["ended"] < update["ended"] for update, sent in zip(updates, during, strict=True) for one in sent)
    # No task was sampled beyond those of the last step.
    assert sum(metrics[step]["team/episodes"] for step in (1, 2, 3, 4)) == 16
    assert {request["version"] for request in requests} == {0, 1, 2, 3, 4}

    before, after = weights(tied_model), weights(tmp_path / "checkpoints/global_step_4/actor/huggingface")
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert "model.embed_tokens.weight" in moved

    wait_until(lambda: not of_session(session))
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_memory if name.startswith("verl_weights_")]
