"""Adapters that share a base beside each other, and each alone: the same numbers, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fakes.fsdp_rows import batch, make, some_rows

RANKS = {"small": 2, "large": 8, "idle": 4}
RATES = {"small": 1e-2, "large": 3e-3, "idle": 1e-2}


def make_engine(model: str, names: Sequence[str], precision: str = "fp32") -> tuple[Any, Any]:
    """An engine with adapters of these names; the second has fewer layers and a schedule."""
    from omegaconf import OmegaConf, open_dict

    from verl_atgrpo import recipes
    from verl_atgrpo.train.engine.prefix_tree.engine import TreeEngine

    overrides = [f"actor_rollout_ref.model.path={model}", f"precision={precision}"]
    config = recipes.compose("plan_path_cpu", overrides).actor_rollout_ref
    config.actor.optim.total_training_steps = 8
    optim = OmegaConf.to_container(config.actor.optim, resolve=True)
    assert isinstance(optim, dict)
    with open_dict(config.model):
        config.model.lora_rank = 8
        config.model.lora.past_selves = 2
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

    def __init__(self, rank: int, ranks: int, model: str, names: Sequence[str], precision: str = "fp32") -> None:
        from verl.workers.utils.losses import ppo_loss

        self.engine, section = make_engine(model, names, precision)
        self.loss = functools.partial(ppo_loss, config=section)
        self.rank, self.ranks = rank, ranks
        self.computed: list[Any] = []

    def rows(self, seed: int) -> Any:
        from verl.utils.device import get_device_id

        rows = batch(some_rows(self.rank + 10 * seed), self.rank, self.ranks)
        return rows.to(get_device_id())

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


def check(rank: int, ranks: int, model: str, folder: Path) -> None:
    """Raises AssertionError unless adapters train beside others, and after a restart, as they do alone.

    Args:
        rank: of this process, which has joined the process group.
        ranks: number of processes.
        model: the base.
        folder: for checkpoints.
    """
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

    # A past self stays as it was, is saved beside it, and never takes part in an update.
    past, at_first = beside.engine.past, beside.weights("small")
    beside.engine.freeze_self("small", 2)
    beside.train("small", 6)
    assert past.keys() == {2} and past[2][0] == "small"
    assert _same({key: one.cpu() for key, one in at_first.items()}, past[2][1])
    assert not _same(beside.weights("small"), at_first)
    beside.engine.freeze_self("small", 1)
    for name in ("small", "large"):
        beside.engine.save_adapter(name, folder / name)
        resumed.engine.load_adapter(name, folder / name)
    assert {slot: policy for slot, (policy, _) in resumed.engine.past.items()} == {1: "small", 2: "small"}
    assert all(_same(kept, past[slot][1]) for slot, (_, kept) in resumed.engine.past.items())
