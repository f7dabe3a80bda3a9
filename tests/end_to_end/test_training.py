"""Training with the real stack: verl's entry point, FSDP2 over gloo, vLLM for CPU, a tiny model."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import torch
from training_jobs import (
    FRESH,
    SMALL,
    TRAIN_ONLY,
    Start,
    engine_of,
    finish,
    metrics_of,
    wait_for_lines,
    weights,
)
from waiting import TRAINING

from verl_atgrpo.lab.report.records import find, read
from verl_atgrpo.lab.tiny_models.warm_start import WarmStart, make
from verl_atgrpo.train.serving.workers import WeightTarget, check_wiring

pytestmark = [pytest.mark.slow, pytest.mark.training]

SHORT = (*SMALL, "at_grpo.environment.max_turns=2")


def test_steps_change_the_weights_of_the_server_too(start: Start, tied_model: Path, tmp_path: Path) -> None:
    job = start(
        "plan_path_cpu",
        tmp_path,
        tied_model,
        *SHORT,
        # Four tasks have at most sixteen groups, so four more are played, with the same weights.
        "at_grpo.group_filter={min_groups: 40, max_tasks: 8}",
        # Rows of one update at two temperatures: server and actor agree on each.
        "at_grpo.sampling={tool_user: {temperature: 0.7}, planner: {temperature: 1.3, max_response_length: 12}}",
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
        VERL_USE_EXTERNAL_MODULES="skip_one_sync",
    )
    # The sync after step 3 is skipped: the servers sample step 4 with old weights.
    assert job.wait(timeout=TRAINING) != 0
    said = r"policy 'shared': in step 4 a token's probability differs by 0\.\d+ between its servers and its actor"
    assert re.search(said, (tmp_path / "log").read_text(errors="replace"))
    metrics = metrics_of(tmp_path)
    assert max(metrics) == 3
    for step in (1, 2, 3):
        data = metrics[step]
        assert math.isfinite(data["actor/pg_loss"])
        assert data["actor/grad_norm"] > 0
        assert data["training/rollout_probs_diff_max"] < FRESH
        assert data["team/optimizer_steps"] == 4  # two, in each of two epochs
        assert data["team/prefix_tree_ratio"] > 2
        assert data["rollout/episodes_failed"] == 0
        for agent in ("tool_user", "planner"):
            assert data[f"agent/{agent}/rows"] > 0
            assert f"agent/{agent}/turn_0/reward" in data
            assert f"agent/{agent}/inflation_factor" in data
        entropies = [data[f"agent/{agent}/entropy"] for agent in ("tool_user", "planner")]
        assert min(entropies) - 1e-4 <= data["actor/entropy"] <= max(entropies) + 1e-4
        assert data["team/tasks"] == data["team/episodes"] == 8
        assert data["team/groups_missing"] == 40 - data["team/groups_kept"]
        # Four rows per group, and every row is trained on or dropped.
        assert data["team/rows"] == 4 * data["team/groups_kept"]
        assert data["team/rows_dropped"] == 4 * data["team/groups_dropped"]
        assert data["team/rows"] + data["team/rows_dropped"] == data["rollout/candidates"]
        assert data["team/rows_per_episode"] * 8 == data["rollout/candidates"]
    assert sum(metrics[step]["team/groups_dropped"] for step in (1, 2, 3)) > 0
    assert "val-core/plan_path/acc/mean@2" in metrics[2]

    check_records(tmp_path, metrics)

    before, after = weights(tied_model), weights(tmp_path / "checkpoints/global_step_2/actor/huggingface")
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert "model.embed_tokens.weight" in moved
    assert "model.layers.0.mlp.down_proj.weight" in moved


def check_records(folder: Path, metrics: dict[int, dict[str, float]]) -> None:
    """The records have the logger's metrics and the update's advantages."""
    run = read(find(folder))
    assert run.metrics == metrics
    trained = [rows for (split, *_), rows in run.episodes.items() if split == "train"]
    assert len(trained) == 3 * 4
    for candidates in [row["candidates"] for rows in trained for row in rows]:
        rewards = [one["reward"] for one in candidates]
        spread = statistics.stdev(rewards)
        for one in candidates:
            assert one["reward"] == pytest.approx(one["team"] + one["local"])
            # A group of equal rewards was dropped.
            expected = (one["reward"] - statistics.mean(rewards)) / (spread + 1e-6) if spread else None
            assert one["advantage"] == (expected if expected is None else pytest.approx(expected, abs=1e-5))
    # Four tasks, twice each.
    assert {key[2:] for key in run.episodes if key[0] == "val"} == {
        (task, time) for task in range(4) for time in (0, 1)
    }
    assert all(metrics[step]["timing_s/record"] > 0 for step in (1, 2, 3))


def test_only_the_trained_policy_changes_until_a_server_dies(start: Start, tied_model: Path, tmp_path: Path) -> None:
    # Of other shapes, trained as barely as the third, or hardly: one only answers in validation.
    for name, changes in {"untied": {"tied": False}, "shallow": {"layers": 2, "seed": 1, "clean_steps": 5}}.items():
        make(tmp_path / name, WarmStart(**{"clean_steps": 20, "noisy_steps": 0, **changes}))  # type: ignore[arg-type]
    own = {"left": tmp_path / "untied", "right": tmp_path / "shallow", "judge": tied_model}
    overrides = (
        *SMALL,
        "trainer.val_before_train=true",
        "~at_grpo.environment",
        "+at_grpo.environment={name: 'lone_learner:LoneLearner'}",
        "~at_grpo.agents",
        "+at_grpo.agents={left: left, right: right, judge: judge}",
        "at_grpo.policies={left: {}, right: {}, judge: {trainable: false}}",
        *(f"+at_grpo.policies.{policy}.model={{path: {model}}}" for policy, model in own.items()),
        "at_grpo.restart_servers=0",
        "trainer.total_training_steps=40",
        "trainer.test_freq=1",
        "trainer.save_freq=2",
    )
    environment = {"VERL_USE_EXTERNAL_MODULES": "lone_learner", "NOTES": str(tmp_path / "notes")}
    metrics_file, checkpoints = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    job = start("plan_path_cpu", tmp_path, own["left"], *overrides, **environment)
    wait_for_lines(metrics_file, 4, job, tmp_path)  # step 0 is the first validation
    os.kill(engine_of(0, job), signal.SIGKILL)
    assert job.wait(timeout=TRAINING) != 0
    check_lone_learner(tmp_path, own)
    check_wiring_of(tmp_path)
    saved = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    log = (tmp_path / "log").read_text(errors="replace")
    assert "policy 'left': " in log
    assert f"the last complete checkpoint is {checkpoints}/global_step_{saved}" in log


def check_lone_learner(folder: Path, models: dict[str, Path]) -> None:
    """In two steps one policy has changed, in the checkpoint and on its server, and the two others have not."""
    metrics = metrics_of(folder)
    for step in (1, 2):
        assert metrics[step]["policy/left/grad_norm"] > 0
        assert metrics[step]["policy/left/training/rollout_probs_diff_max"] < FRESH
        assert metrics[step]["policy/right/rows"] == 0
        assert metrics[step]["policy/judge/rows"] == 4 * 4
        updated = {policy: metrics[step][f"policy/{policy}/updated"] for policy in models}
        assert updated == {"left": 1, "right": 0, "judge": 0}
        assert metrics[step]["agent/left/entropy"] == pytest.approx(metrics[step]["policy/left/entropy"], rel=1e-3)
        assert "agent/judge/entropy" not in metrics[step]
        for untouched in ("right", "judge"):
            assert f"policy/{untouched}/grad_norm" not in metrics[step]

    policies = folder / "checkpoints/global_step_2/policies"
    before, after = weights(models["left"]), weights(policies / "left/huggingface")
    for moved in ("model.embed_tokens.weight", "lm_head.weight"):
        assert not torch.equal(before[moved], after[moved])
    assert not (policies / "judge").exists()
    before, after = weights(models["right"]), weights(policies / "right/huggingface")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    served: dict[str, dict[tuple[int, int], float]] = {policy: {} for policy in models}
    for record in notes(folder, "token"):
        served[record["agent"]][record["weights"], record["token"]] = record["log_prob"]
    moves = {agent: _largest_move(first_tokens) for agent, first_tokens in served.items()}
    assert moves["left"] > 1e-3
    assert max(moves["right"], moves["judge"]) < 1e-5


def check_wiring_of(folder: Path) -> None:
    """The wiring was checked with what the workers had found, and another policy's would have been refused."""
    wired = {note["policy"]: note for note in notes(folder, "wiring")}
    targets = {policy: [WeightTarget(*target) for target in note["targets"]] for policy, note in wired.items()}
    servers = {policy: {int(rank): ids for rank, ids in note["servers"].items()} for policy, note in wired.items()}
    assert [sorted(servers[policy]) for policy in ("left", "right", "judge")] == [[0], [1], [2]]
    assert [target.server for target in targets["left"]] == servers["left"][0]
    check_wiring("left", targets["left"], servers["left"])
    with pytest.raises(RuntimeError, match=r"pushes its weights to replica 1, but the policy's servers are \[0\]"):
        check_wiring("left", targets["right"], servers["left"])
    with pytest.raises(RuntimeError, match=r"would push its weights to .*, another policy's"):
        check_wiring("left", targets["left"], {0: servers["right"][1]})


def notes(folder: Path, what: str) -> list[dict[str, Any]]:
    noted = map(json.loads, (folder / "notes").read_text().splitlines())
    return [note for note in noted if note["what"] == what]


def _largest_move(log_probs: dict[tuple[int, int], float]) -> float:
    """Returns the largest change of a first token's log-prob between the first and the last weights."""
    common = {token for step, token in log_probs if step == 0} & {token for step, token in log_probs if step == 2}
    assert common
    return max(abs(log_probs[0, token] - log_probs[2, token]) for token in common)


def test_plain_job_with_the_stock_trainer_equals_grpo(start: Start, tied_model: Path, tmp_path: Path) -> None:
    import pandas
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rows: list[dict[str, Any]] = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"{'move ' * 12}draft{number}"}],
            "reward_model": {"style": "rule", "ground_truth": "U"},
            "extra_info": {"index": number},
        }
        for number in range(8)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "letters.parquet")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(set(solution_str)))\n"
    )
    job = start(
        "plan_path_cpu",
        tmp_path,
        tied_model,
        "~at_grpo",
        "trainer.v1.trainer_mode=sync",
        f"data.train_files={tmp_path}/letters.parquet",
        f"data.val_files={tmp_path}/letters.parquet",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        *TRAIN_ONLY,
        "trainer.total_training_steps=1",
        VERL_USE_EXTERNAL_MODULES="record_advantages",
        ADVANTAGES_FILE=str(tmp_path / "advantages.pt"),
        VERL_ENGINE_VENDOR="prefix_tree",
    )
    metrics = finish(job, tmp_path)
    assert math.isfinite(metrics[1]["actor/pg_loss"])
    assert metrics[1]["actor/row_tokens"] > 2 * metrics[1]["actor/model_tokens"] > 0
    kept = torch.load(tmp_path / "advantages.pt", weights_only=False)
    assert len(kept["index"]) == 32
    expected, _ = compute_grpo_outcome_advantage(kept["token_level_rewards"], kept["response_mask"], kept["index"])
    torch.testing.assert_close(kept["advantages"], expected)
    assert kept["advantages"].abs().max() > 0
