"""Prefix trees and adapters in verl's FSDP engines on this device: the same numbers as rows one by one, and as alone.

verl's engines, its loss and its optimizer run in this process, without Ray, queue and servers.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from one_gpu.measures import Measure, Report
from one_gpu.models import random_model
from verl_atgrpo import platform_choice

STEPS = {"cuda": 8, "cpu": 3}
"""Optimizer steps whose entropies are compared."""
_APART = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Largest difference of a log-prob (nats) that the dtype's rounding explains, with this model."""
_ENTROPY = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2}
"""The same for the relative difference of a step's mean entropy; optimizer steps amplify rounding."""
_MOVES = 1e-2
"""How far the entropy must move in these steps for the comparison to say anything."""


def start() -> str:
    """Joins a process group of one; returns the device's kind, "cuda" or "cpu"."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    device, backend = "cuda", "nccl"
    if platform_choice.wants_cpu():
        from verl_atgrpo import cpu

        device, backend = "cpu", "gloo"
        cpu.activate()
    else:
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # or it would compare what is not compiled
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    return device


class Computed(NamedTuple):
    """What an engine computes of the same rows, step by step."""

    log_probs: torch.Tensor
    """Of the first step, before any update."""
    entropies: torch.Tensor
    """Mean of each step."""
    losses: torch.Tensor
    norms: torch.Tensor


def compute(kind: Any, folder: Path, strategy: str, dtype: str, steps: int) -> Computed:
    """Returns log-probs and entropies of some rows by an engine, before each of a few optimizer steps on them."""
    from fakes.fsdp_rows import batch, make, some_rows
    from verl.utils.device import get_device_id
    from verl.workers.utils.losses import ppo_loss

    from verl_atgrpo import recipes

    dtypes = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    config = recipes.compose(
        "plan_path_cpu",
        [
            f"actor_rollout_ref.model.path={folder}",
            f"actor_rollout_ref.actor.strategy={strategy}",
            *(f"actor_rollout_ref.actor.fsdp_config.mixed_precision.{key}={one}" for key, one in dtypes.items()),
        ],
    ).actor_rollout_ref
    engine, section = make(kind, config)
    if hasattr(engine, "worth"):
        engine.worth = 0.0  # trees, however little they save
        if engine.refusal is not None:
            raise RuntimeError(f"{strategy}, {dtype}: no trees: {engine.refusal}")
    rows = some_rows(0)

    def data() -> Any:
        return batch(rows, 0, 1).to(get_device_id())

    first, entropies, losses, norms = None, [], [], []
    for _ in range(steps):
        with engine.eval_mode():
            output = engine.infer_batch(data())["model_output"]
        inferred = {name: _of_responses(output[name], rows) for name in ("log_probs", "entropy")}
        first = inferred["log_probs"] if first is None else first
        entropies.append(inferred["entropy"].mean())
        with engine.train_mode():
            trained = engine.train_batch(data(), functools.partial(ppo_loss, config=section))
        losses.append(float(sum(trained["loss"])))
        norms.append(float(trained["metrics"]["grad_norm"]))
    assert first is not None
    return Computed(first, torch.stack(entropies), torch.tensor(losses), torch.tensor(norms))


def _of_responses(values: Any, rows: Sequence[Any]) -> torch.Tensor:
    """verl keeps a token's value at the place of the token before it."""
    pairs = zip(values.unbind(), rows, strict=True)
    return torch.cat([row[len(prompt) - 1 :][: len(answer)].float().cpu() for row, (prompt, answer) in pairs])


def engines(folder: Path, report: Report, device: str) -> None:
    """Compares verl's engine and ours: FSDP2 in each dtype, FSDP1 where it runs."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_atgrpo.train.engine.prefix_tree.engine import TreeEngine

    pairs = [("fsdp2", "fp32"), ("fsdp2", "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16"), ("fsdp2", "fp16")]
    for strategy, dtype in pairs[:2] if device == "cpu" else pairs:
        # In float16 verl's engine drops an optimizer step whose scaled gradients overflow, where ours repeats it.
        steps = 1 if dtype == "fp16" else STEPS[device]
        plain, trees = (compute(kind, folder, strategy, dtype, steps) for kind in (FSDPEngineWithLMHead, TreeEngine))
        apart = float((plain.log_probs - trees.log_probs).abs().max())
        entropy = float(((trees.entropies - plain.entropies) / plain.entropies).abs().max())
        norm = float(((trees.norms - plain.norms) / plain.norms)[0].abs())
        moved = float((plain.entropies[-1] - plain.entropies[0]).abs() / plain.entropies[0])
        where = f"trees, {strategy}, {dtype}"
        print(f"{where}: entropies {trees.entropies.tolist()}, without trees {plain.entropies.tolist()}", flush=True)
        report.add(
            Measure(f"{where}: log-probs against rows one by one", apart, "nats", _APART[dtype]),
            Measure(f"{where}: entropies of {steps} steps against those without", entropy, "of it", _ENTROPY[dtype]),
            Measure(f"{where}: first gradient's norm against that without", norm, "of it"),
        )
        if steps > 1:
            report.add(Measure(f"{where}: entropy moves in these steps", moved, "of it", _MOVES, "higher"))


def small_trees(
    folder: Path, report: Report, device: str, lengths: Sequence[int] = (40, 60, 90, 30, 127, 200, 64, 129, 300, 20)
) -> None:
    """Compares two rows that share half of their tokens with their tree, for many sizes."""
    import numpy as np
    from bench_tree_attention import plain, trees, update
    from transformers import AutoModelForCausalLM

    from verl_atgrpo.train.engine.prefix_tree.forward import FLEX

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    worst, seconds = 0.0, []
    for length in lengths:
        half = length // 2
        ids = np.random.default_rng(length).integers(0, net.config.vocab_size, (2, length))
        ids[1, :half] = ids[0, :half]
        sizes = argparse.Namespace(prompt=half, response=length - half, budget=4096)
        net.set_attn_implementation("sdpa")
        wanted, *_ = update(plain, net, ids, sizes)
        if device == "cuda":
            net.set_attn_implementation(FLEX)
        began = time.perf_counter()
        made, *_ = update(trees, net, ids, sizes)
        worst = max(worst, float((made - wanted).abs().max()))
        seconds.append(time.perf_counter() - began)
    print(f"seconds of each small tree: {' '.join(f'{each:.2f}' for each in seconds)}", flush=True)
    name = f"trees of {min(lengths)} to {max(lengths)} tokens: log-probs against rows one by one"
    report.add(Measure(name, worst, "nats", _APART["fp32"]))


def adapters(folder: Path, report: Report, scratch: Path) -> None:
    """Compares adapters beside each other, alone, and resumed, to the bit."""
    from fakes import adapter_runs

    scratch.mkdir()
    adapter_runs.check(0, 1, str(folder), scratch)
    report.add(Measure("adapters: differ from each alone, or after a restart", 0.0, "", 0.0))


def check(folder: Path, report: Report) -> None:
    """Runs everything in a folder of the part's; raises SystemExit at the end if something raised."""
    device = start()
    model = random_model(folder / "model", "small")
    checks = {
        "small trees": lambda: small_trees(model, report, device),
        "adapters": lambda: adapters(model, report, folder / "adapters"),
        "engines": lambda: engines(model, report, device),
    }
    failed = []
    for name, run in checks.items():
        try:
            run()
        except Exception:  # noqa: BLE001  # the others are run all the same
            traceback.print_exc()
            failed.append(name)
    torch.distributed.destroy_process_group()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
