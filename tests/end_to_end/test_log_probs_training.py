"""Training with the real stack at a temperature, with a reference: log-probs compared with a model's, and KL loss."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import torch
from torch import Tensor
from training_jobs import FRESH, SMALL, Start, finish, weights

pytestmark = [pytest.mark.slow, pytest.mark.training]

TEMPERATURE = 0.7


def test_log_probs_are_at_the_temperature_and_the_reference_is_fixed(
    start: Start, tied_model: Path, tmp_path: Path
) -> None:
    job = start(
        "plan_path_cpu_roles",
        tmp_path,
        tied_model,
        *SMALL,
        # One reference is a separate model, the other the policy without its adapter.
        f"at_grpo.policies.tool_user.model.path={tied_model}",
        f"at_grpo.policies.planner.model.path={tied_model}",
        "+at_grpo.policies.tool_user.lora={rank: 4}",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "at_grpo.environment.max_turns=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",  # one optimizer step, with the rollout's weights
        "trainer.save_freq=2",
        "trainer.total_training_steps=2",
        VERL_USE_EXTERNAL_MODULES="kept_log_probs",
        KEPT_FOLDER=str(tmp_path),
    )
    metrics = finish(job, tmp_path)
    for step in (1, 2):
        assert metrics[step]["training/rollout_probs_diff_max"] < FRESH
        for policy in ("tool_user", "planner"):
            assert metrics[step][f"policy/{policy}/grad_norm"] > 0
            # The update's log-probs equal those before it.
            assert abs(metrics[step][f"policy/{policy}/ppo_kl"]) < FRESH
            assert metrics[step][f"policy/{policy}/pg_clipfrac"] == 0
    for policy in ("tool_user", "planner"):
        first, second = (metrics[step][f"policy/{policy}/kl_loss"] for step in (1, 2))
        assert abs(first) < 1e-9
        assert second > 1e-6

    before = weights(tied_model)
    after = weights(tmp_path / "checkpoints/global_step_2/policies/planner/huggingface")
    assert not torch.equal(before["model.layers.0.mlp.down_proj.weight"], after["model.layers.0.mlp.down_proj.weight"])

    for policy in ("tool_user", "planner"):
        check_rows(tmp_path / f"{policy}.pt", tied_model)


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
