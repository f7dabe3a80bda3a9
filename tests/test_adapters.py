"""Adapters that share a base, with FSDP2 and real optimizer steps on one rank and on two."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")
pytest.importorskip("peft")

from fakes.fsdp_rows import batch, join, make, save_model, some_rows, spawn

from verl_atgrpo.export import ADAPTER

pytestmark = pytest.mark.slow
RANKS = {"small": 2, "large": 8, "idle": 4}
RATES = {"small": 1e-2, "large": 3e-3, "idle": 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def _engine(model: str, names: Sequence[str]) -> tuple[Any, Any]:
    """An engine with adapters of these names; the second has fewer layers and a schedule."""
    from omegaconf import OmegaConf, open_dict

    from verl_atgrpo import recipes
    from verl_atgrpo.prefix_tree.engine import TreeEngine

    config = recipes.compose("plan_path_cpu", [f"actor_rollout_ref.model.path={model}"]).actor_rollout_ref
    config.actor.optim.total_training_steps = 8
    optim = OmegaConf.to_container(config.actor.optim, resolve=True)
    assert isinstance(optim, dict)
    with open_dict(config.model):
        config.model.lora_rank = 8
        config.model.lora.adapters = {
            name: {
                "trainable": True,
                "rank": RANKS[name],
                "alpha": 16,
                "target_modules": ["q_proj", "v_proj"] if name == "large" else "all-linear",
                "exclude_modules": None,
                "optim": {**optim, "lr": RATES[name], "lr_warmup_steps": 2 if name == "large" else 0},
            }
            for name in names
        }
    return make(TreeEngine, config)


class Run:
    """What an engine with adapters computes, step by step."""

    def __init__(self, rank: int, ranks: int, model: str, names: Sequence[str]) -> None:
        from verl.workers.utils.losses import ppo_loss

        self.engine, section = _engine(model, names)
        self.loss = functools.partial(ppo_loss, config=section)
        self.rank, self.ranks = rank, ranks
        self.computed: list[Any] = []

    def rows(self, seed: int) -> Any:
        return batch(some_rows(self.rank + 10 * seed), self.rank, self.ranks)

    def infer(self, seed: int) -> Any:
        with self.engine.eval_mode():
            return self.engine.infer_batch(self.rows(seed))["model_output"]["log_probs"].values()

    def train(self, name: str, seed: int) -> None:
        """Log-probs, then a step, of one adapter."""
        self.engine.use(name)
        log_probs = self.infer(seed)
        with self.engine.train_mode():
            output = self.engine.train_batch(self.rows(seed), self.loss)
        norm, rate = float(output["metrics"]["grad_norm"]), self.engine.lr_scheduler_step()
        self.computed.append((name, log_probs, sum(output["loss"]), norm, rate))

    def weights(self, name: str) -> dict[str, Any]:
        return {key: value.clone() for key, value in self.engine.adapter_weights(name)}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _work(rank: int, ranks: int, port: int, model: str, out: str) -> None:
    join(rank, ranks, port)
    folder = Path(out)
    beside = Run(rank, ranks, model, ["small", "large", "idle"])
    starts = {name: beside.weights(name) for name in RANKS}
    base = dict(beside.engine.get_per_tensor_param(base_sync_done=False)[0])
    with beside.engine.disable_adapter():
        bare = beside.infer(0)
    assert torch.equal(bare, beside.infer(0)), "an adapter starts as nothing"
    for name, seed in (("small", 1), ("large", 2), ("small", 3), ("large", 4)):
        others = {other: beside.weights(other) for other in RANKS if other != name}
        before = beside.weights(name)
        beside.train(name, seed)
        assert all(_same(beside.weights(other), before) for other, before in others.items())
        moved, warming = beside.weights(name), (name, seed) == ("large", 2)  # its first rate is 0
        assert all(torch.equal(moved[key], before[key]) == warming for key in moved if "lora_B" in key)
    assert _same(beside.weights("idle"), starts["idle"])
    assert _same(dict(beside.engine.get_per_tensor_param(base_sync_done=False)[0]), base)
    with beside.engine.disable_adapter():
        assert torch.equal(beside.infer(0), bare)
    assert not torch.equal(beside.infer(0), bare)

    # Alone, on the same rows, each has the same numbers to the bit.
    for name in ("small", "large"):
        alone = Run(rank, ranks, model, [name])
        assert _same(alone.weights(name), starts[name])
        wanted = [step for step in beside.computed if step[0] == name]
        for seed in (1, 3) if name == "small" else (2, 4):
            alone.train(name, seed)
        for (_, logs, *numbers), (_, own, *others) in zip(wanted, alone.computed, strict=True):
            assert torch.equal(logs, own) and numbers == others
        assert _same(alone.weights(name), beside.weights(name))
        if name == "large":
            assert [step[-1] for step in wanted] == [RATES[name] * 0.5, RATES[name]]

    # Resumed, it goes on as it would have.
    for name in ("small", "large"):
        beside.engine.save_adapter(name, folder / name)
    resumed = Run(rank, ranks, model, ["idle", "large", "small"])
    for name in ("small", "large"):
        resumed.engine.load_adapter(name, folder / name)
    for run in (beside, resumed):
        for name in ("large", "small"):
            run.train(name, 5)
    for (_, logs, *numbers), (_, own, *others) in zip(beside.computed[-2:], resumed.computed, strict=True):
        assert torch.equal(logs, own) and numbers == others
    assert all(_same(beside.weights(name), resumed.weights(name)) for name in RANKS)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_train_beside_others_as_they_do_alone(ranks: int, model: Path, tmp_path: Path) -> None:
    spawn(_work, ranks, str(model), str(tmp_path))


def test_what_is_saved_is_an_adapter_of_peft(model: Path, tmp_path: Path) -> None:
    """peft reads it without us, and computes what the engine does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spawn(_save, 1, str(model), str(tmp_path))
    assert json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        model
    )
    net = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path / ADAPTER
    )
    (prompt, response), *_ = some_rows(0)
    with torch.no_grad():
        logits = net(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
    ours = torch.load(tmp_path / "log_probs.pt")[len(prompt) - 1 : len(prompt + response) - 1]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def _save(rank: int, ranks: int, port: int, model: str, out: str) -> None:
    join(rank, ranks, port)
    run = Run(rank, ranks, model, ["small", "large"])
    for seed in (1, 2):
        run.train("large", seed)
    run.engine.save_adapter("large", Path(out))
    torch.save(run.infer(0), Path(out) / "log_probs.pt")
    torch.distributed.destroy_process_group()
