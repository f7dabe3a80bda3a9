"""Policies on one base: an adapter that is trained by a critic's scores, with its past selves, one without rows, and
one not trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file
from training_jobs import FRESH, SMALL, Start, end, finish, wait_for, weights

from verl_atgrpo.lab.export import export

pytestmark = [pytest.mark.slow, pytest.mark.training]

ADAPTER = "lora_adapter/adapter_model.safetensors"
POLICIES = {
    "judge": "{base: one, trainable: false}",
    "left": "{base: one, lora: {rank: 4}, optim: {lr: 0.01}}",
    "right": "{base: one, lora: {rank: 8, target_modules: [q_proj, v_proj]}}",
}
OVERRIDES = (
    *SMALL,
    "trainer.val_before_train=true",
    "trainer.test_freq=1",
    "trainer.save_freq=1",
    "~at_grpo.environment",
    "+at_grpo.environment={name: 'lone_learner:WithRival'}",
    "~at_grpo.agents",
    "+at_grpo.agents={left: left, right: right, judge: judge, rival: left}",
    "at_grpo.opponents={policy: left, current: 0, size: 2, every: 2}",
    # In validation the agent `right` answers with the adapter that is trained.
    "at_grpo.val_agents={left: right, right: left}",
    "at_grpo.scheme=parallel",
    "at_grpo.estimator=dr_mas",
    "at_grpo.episode_reward=own",
    "at_grpo.critic={weight: 0.5}",
    f"at_grpo.policies={{{', '.join(f'{name}: {block}' for name, block in POLICIES.items())}}}",
)


def test_one_adapter_learns_in_a_resumed_run_and_its_base_and_the_others_stay(
    start: Start, tied_model: Path, tmp_path: Path
) -> None:
    environment = {"VERL_USE_EXTERNAL_MODULES": "lone_learner", "NOTES": str(tmp_path / "notes")}
    saved, checkpoints = 2, tmp_path / "checkpoints"
    job = start("plan_path_cpu", tmp_path, tied_model, *OVERRIDES, "trainer.total_training_steps=40", **environment)
    # Killed while it saves; what the run is resumed from is complete.
    wait_for(checkpoints / f"global_step_{saved + 1}", job, tmp_path)
    end(job)
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    if (last := int(latest.read_text())) != saved:  # it was faster than the kill
        latest.write_text(str(saved))
        for step in range(saved + 1, last + 2):
            shutil.rmtree(checkpoints / f"global_step_{step}", ignore_errors=True)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "first.jsonl")
    slower = "at_grpo.policies.left.optim.lr=0.005"
    more = ("+mode=async", f"trainer.total_training_steps={saved + 3}", slower)
    metrics = finish(start("plan_path_cpu", tmp_path, tied_model, *OVERRIDES, *more, **environment), tmp_path)
    assert set(metrics) == {*range(saved, saved + 4)}
    for step in range(saved + 1, saved + 4):
        data = metrics[step]
        assert data["policy/left/grad_norm"] > 0 and data["policy/left/lr"] == 0.005
        assert data.get("policy/left/training/rollout_probs_diff_max", 0.0) < FRESH
        assert data["policy/right/rows"] == 0
        assert {data[f"policy/{name}/updated"] for name in ("right", "judge")} == {0}
        # A row for each of the learner's answers. No episode has earned anything, which a resumed critic knows.
        assert data["critic/rows"] == data["policy/left/rows"] == 16 and data["critic/brier"] == 0
        # Only the first sync after a start sends the base with the adapters.
        sends_base = data["policy/left/weights_megabytes"] > _megabytes(tied_model)
        assert sends_base == (step == saved + 1) and data["policy/left/weights_megabytes"] > 0

    folder = tmp_path / f"checkpoints/global_step_{saved + 3}/policies"
    adapters = {
        name: load_file(folder / name / "lora_adapter/adapter_model.safetensors") for name in ("left", "right")
    }
    ups = {name: [one for key, one in found.items() if "lora_B" in key] for name, found in adapters.items()}
    assert all(one.any() for one in ups["left"]) and not any(one.any() for one in ups["right"])
    # What was frozen after step 2 is what was saved then; the first past self was the base, and has made room.
    saved_then = load_file(tmp_path / f"checkpoints/global_step_{saved}/policies/left" / ADAPTER)
    past = {slot: load_file(folder / f"left/past_selves/{slot}.safetensors") for slot in (1, 2)}
    assert all(torch.equal(saved_then[key], past[2][key]) for key in saved_then)
    assert not any(torch.equal(past[1][key], past[2][key]) for key in past[1])
    assert [metrics[step]["opponents/past_selves"] for step in range(saved + 1, saved + 4)] == [2, 2, 2]
    assert not (folder / "judge").exists()
    exported = export(folder.parent, tmp_path / "exported")
    base, left, right = (weights(one) for one in (tied_model, exported["left"], exported["right"]))
    rounded = {name: tensor.bfloat16().float() for name, tensor in base.items()}
    assert all(torch.equal(rounded[name], right[name]) for name in base)
    moved = {name for name in base if not torch.equal(rounded[name], left[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}
    check_servers(tmp_path / "notes", tied_model)


@torch.no_grad()
def check_servers(notes: Path, model: Path) -> None:
    """The policy that is not trained and the first past self answer as the base does, the trained one does not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "plan"}], add_generation_prompt=True)
    ids = prompt if isinstance(prompt, list) else prompt["input_ids"]
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = net(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    noted: list[dict[str, Any]] = [json.loads(line) for line in notes.read_text().splitlines()]
    answers = {name: [one for one in noted if one.get("agent") == name] for name in ("judge", "right")}
    apart = {
        name: max(abs(one["log_prob"] - float(expected[one["token"]])) for one in found)
        for name, found in answers.items()
    }
    assert apart["judge"] < FRESH
    assert apart["right"] > 0.1, "in validation it is the trained adapter's"
    rival = [
        (one["weights"], abs(one["log_prob"] - float(expected[one["token"]])))
        for one in noted
        if one.get("agent") == "rival"
    ]
    assert max(far for version, far in rival if version < 2) < FRESH
    assert max(far for version, far in rival if version >= 2) > 0.01


def _megabytes(model: Path) -> float:
    return sum(tensor.nbytes for tensor in weights(model).values()) / 1e6
