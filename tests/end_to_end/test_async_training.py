"""Asynchronous training with the real stack: interrupted candidates resume, and every task is trained on once."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import torch
from training_jobs import FRESH, SMALL, Start, finish, trained, weights

from verl_atgrpo.lab.report.records import find, read

pytestmark = [pytest.mark.slow, pytest.mark.training]

OVERRIDES = (
    *SMALL,
    # When the first episodes have ended, others are in the middle of a response.
    "~at_grpo.environment",
    "+at_grpo.environment={name: 'uneven_writer:UnevenWriter'}",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.max_model_len=128",
    # Small steps: importance weights of long responses must stay near 1.
    "actor_rollout_ref.actor.optim.lr=2e-4",
    "trainer.test_freq=3",
    "trainer.save_freq=2",
)


def versions(folder: Path) -> dict[int, set[int]]:
    """The versions of the weights that sampled the rows that were trained on, by step."""
    sampled_by: dict[int, set[int]] = {}
    for (split, step, *_), decisions in read(find(folder)).episodes.items():
        if split == "train":
            found = (one["version"] for decision in decisions for one in decision["candidates"])
            sampled_by.setdefault(step, set()).update(chain.from_iterable(found))
    return sampled_by


def test_the_slowest_episodes_resume_with_new_weights_and_no_task_is_lost(
    start: Start, tied_model: Path, tmp_path: Path
) -> None:
    job = start("plan_path_cpu", tmp_path, tied_model, "+mode=async", *OVERRIDES, "trainer.total_training_steps=5")
    metrics = finish(job, tmp_path)
    for step in range(1, 6):
        data = metrics[step]
        assert math.isfinite(data["actor/pg_loss"])
        assert data["actor/grad_norm"] > 0
        assert data["rollout/episodes_failed"] == 0
        assert data["team/episodes"] == 4
        assert data["team/staleness_max"] <= 2
        # Over candidates sampled entirely with this step's weights.
        assert data.get("training/rollout_probs_diff_max", 0.0) < FRESH
        assert 0.5 < data["rollout_corr/rollout_is_mean"] < 2
    assert metrics[1]["team/staleness_max"] == 0
    assert sum("training/rollout_probs_diff_max" in metrics[step] for step in range(2, 6)) > 0
    assert max(metrics[step]["team/staleness_max"] for step in range(2, 6)) > 0
    assert sum(metrics[step]["rollout/requests_resumed"] for step in range(1, 6)) > 0
    assert [value for name, value in metrics[3].items() if "/failed/mean@" in name] == [0]

    before, after = weights(tied_model), weights(tmp_path / "checkpoints/global_step_4/actor/huggingface")
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])

    first = trained(tmp_path)
    assert [len(first[step]) for step in range(1, 6)] == [4] * 5
    assert len(set(chain.from_iterable(first.values()))) == 20
    sampled_by = versions(tmp_path)
    for step in range(1, 6):
        assert max(sampled_by[step]) < step
        assert metrics[step]["team/staleness_max"] == step - 1 - min(sampled_by[step])

    # Unfinished tasks are in the checkpoints; the trainer's tests resume from there.
    unfinished = {
        step: json.loads((tmp_path / f"checkpoints/global_step_{step}/pending.json").read_text())["tasks"]
        for step in (2, 4)
    }
    assert len(unfinished[2]) == 4
    assert not {*first[1], *first[2]} & {*unfinished[2]}
    assert sorted(unfinished[4]) == first[5]
