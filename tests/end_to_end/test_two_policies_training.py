"""Two policies on devices of their own, behind endpoints, at a temperature, with references and branches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import torch
from fakes.other_tokenizer import renumber
from torch import Tensor
from training_jobs import FRESH, SMALL, Start, finish, weights

from verl_atgrpo.lab.export import export
from verl_atgrpo.lab.report.records import find, read

pytestmark = [pytest.mark.slow, pytest.mark.training]

TEMPERATURE = 0.7
POLICIES = ("tool_user", "planner")


def test_policies_on_devices_of_their_own_at_a_temperature_with_references_and_branches(
    start: Start, tied_model: Path, tmp_path: Path
) -> None:
    models = {"tool_user": tied_model, "planner": tmp_path / "renumbered"}
    renumber(tied_model, models["planner"])
    job = start(
        "plan_path_cpu_roles",
        tmp_path,
        tied_model,
        *SMALL,
        "at_grpo.placement=split",
        # One reference is a separate model, the other the policy without its adapter.
        *(f"at_grpo.policies.{policy}.model.path={model}" for policy, model in models.items()),
        *(f"+at_grpo.policies.{policy}.gpus=1" for policy in POLICIES),
        "+at_grpo.policies.tool_user.lora={rank: 4}",
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "at_grpo.environment.name=served_plan_path:ServedPlanPath",
        "at_grpo.environment.max_turns=2",
        "at_grpo.scheme=branch",
        "at_grpo.branch={at: every, score_weight: 0.5}",  # outcomes alone may all be equal
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",  # one optimizer step, with the rollout's weights
        "trainer.save_freq=2",
        "trainer.total_training_steps=2",
        f"trainer.rollout_data_dir={tmp_path}/rows",
        VERL_USE_EXTERNAL_MODULES="kept_log_probs",
        KEPT_FOLDER=str(tmp_path),
    )
    metrics = finish(job, tmp_path)
    for step in (1, 2):
        data = metrics[step]
        assert data["rollout/endpoint_requests_refused"] == 0
        assert data["training/rollout_probs_diff_max"] < FRESH
        check_branches(tmp_path / "checkpoints", step, data)
        for policy in POLICIES:
            assert data[f"policy/{policy}/grad_norm"] > 0
            # The update's log-probs equal those before it.
            assert abs(data[f"policy/{policy}/ppo_kl"]) < FRESH
            assert data[f"policy/{policy}/pg_clipfrac"] == 0
        # Updates overlap: the sum of their times is more than the time of both.
        assert sum(data[f"policy/{policy}/update_seconds"] for policy in POLICIES) > data["timing_s/policies"]
        # Every row is decoded with its policy's tokenizer.
        prompts = [json.loads(line)["input"] for line in (tmp_path / f"rows/{step}.jsonl").read_text().splitlines()]
        assert {prompt.startswith("plan") for prompt in prompts} == {True, False}
        assert all(prompt.startswith(("draft", "plan")) for prompt in prompts)
    for policy in POLICIES:
        first, second = (metrics[step][f"policy/{policy}/kl_loss"] for step in (1, 2))
        assert abs(first) < 1e-9
        assert second > 1e-6

    exported = export(tmp_path / "checkpoints/global_step_2", tmp_path / "exported")
    for policy, model in models.items():
        before, after = weights(model), weights(exported[policy])
        assert before.keys() == after.keys()
        if policy == "tool_user":
            before = {name: tensor.bfloat16().float() for name, tensor in before.items()}  # as the export rounds
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        # An adapter is only on the layers' matrices.
        assert "model.layers.0.mlp.down_proj.weight" in moved
        assert ("model.embed_tokens.weight" in moved) == (policy == "planner")
        check_rows(tmp_path / f"{policy}.pt", model)


def check_branches(checkpoints: Path, step: int, data: Mapping[str, Any]) -> None:
    """Every decision of an episode is a group; its continuations have no rows, but tokens."""
    episodes = [rows for rows in read(find(checkpoints)).episodes.values() if rows[0]["step"] == step]
    groups = [row["candidates"] for rows in episodes for row in rows]
    assert len(groups) == sum(data[f"agent/{agent}/rows"] for agent in POLICIES) / 4
    assert {len(candidates) for candidates in groups} == {4}
    assert data["rollout/tokens"] > 1.5 * sum(one["tokens"] for candidates in groups for one in candidates)
    ends = {round(rows[0]["episode_reward"], 6) for rows in episodes}
    first = {round(one["reward"] - 0.5 * (one["team"] + one["local"]), 6) for one, *_ in groups}
    assert first == ends, "a group's first candidate goes on as the episode does"


@torch.no_grad()
def check_rows(file: Path, folder: Path) -> None:
    """Compares the first step's log-probs with those of the initial model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = torch.load(file, weights_only=False)
    assert rows
    differences = []
    for row in rows:
        prompt, response = row["prompts"], row["responses"]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        expected = log_probs(logits / TEMPERATURE, response)
        for name in ("old_log_probs", "ref_log_prob"):
            torch.testing.assert_close(row[name], expected, atol=1e-4, rtol=0)
        differences.append((log_probs(logits, response) - expected).abs().max().item())
    assert max(differences) > 0.1, "they differ at temperature 1"


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the tokens' log-probs: logits (T, V), tokens (T,)."""
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
