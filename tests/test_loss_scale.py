"""float16 with FSDP2, prefix trees and adapters, and real optimizer steps on one rank and on two."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")
pytest.importorskip("peft")

from fakes.fsdp_rows import batch, join, make, save_model, some_rows, spawn

from verl_atgrpo.train.engine.loss_scale import LOSS_SCALE, OVERFLOWS, repeat_overflows

pytestmark = pytest.mark.slow
SCALE = 2.0**30
"""At which every gradient of a float16 overflows."""


def _weights(engine: Any) -> dict[str, Any]:
    return {name: whole.clone() for name, whole in engine.get_per_tensor_param()[0]}


def _train(engine: Any, section: Any, rank: int, ranks: int) -> dict[str, Any]:
    from verl.workers.utils.losses import ppo_loss

    with engine.train_mode():
        found = engine.train_batch(batch(some_rows(rank), rank, ranks), functools.partial(ppo_loss, config=section))
    metrics: dict[str, Any] = found["metrics"]
    return metrics


def _work(rank: int, ranks: int, port: int, model: str) -> None:
    join(rank, ranks, port)
    from fakes.adapter_runs import Run
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_atgrpo import recipes
    from verl_atgrpo.train.engine.prefix_tree.engine import TreeEngine

    def built(kind: Any, precision: str) -> tuple[Any, Any]:
        overrides = [f"actor_rollout_ref.model.path={model}", f"precision={precision}"]
        engine, section = make(kind, recipes.compose("plan_path_cpu", overrides).actor_rollout_ref)
        repeat_overflows(engine)
        return engine, section

    for kind in (FSDPEngineWithLMHead, TreeEngine):
        exact = _train(*built(kind, "fp32"), rank, ranks)
        assert LOSS_SCALE not in exact, "a loss of float32 is not scaled"
        engine, section = built(kind, "fp16")
        engine.scaler._init_scale = SCALE  # of the first step
        start = _weights(engine)
        found = _train(engine, section, rank, ranks)
        assert found["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
        assert found[OVERFLOWS][0] > 0 and found[LOSS_SCALE][0] == SCALE / 2 ** found[OVERFLOWS][0]
        assert any(not torch.equal(start[name], now) for name, now in _weights(engine).items()), "the step counts"
        assert _train(engine, section, rank, ranks)[OVERFLOWS] == [0], "the next one begins at that scale"

        # No scale helps where the model itself has no number: nothing moves, and the scale stays.
        engine.scaler.update(4.0)  # so that it has been tried soon
        before, scale = _weights(engine), engine.scaler.get_scale()
        data = batch(some_rows(rank), rank, ranks)
        data["advantages"] = torch.nested.nested_tensor_from_jagged(
            torch.full_like(data["advantages"].values(), float("nan")), data["advantages"].offsets()
        )
        from verl.workers.utils.losses import ppo_loss

        with engine.train_mode():
            engine.train_batch(data, functools.partial(ppo_loss, config=section))
        assert all(torch.equal(before[name], now) for name, now in _weights(engine).items())
        assert engine.scaler.get_scale() == scale

    run = Run(rank, ranks, model, ["small", "large"], "fp16")
    repeat_overflows(run.engine)
    run.engine.scaler._init_scale = SCALE
    for name, other in (("small", "large"), ("large", "small"), ("small", "large")):
        before, others = run.weights(name), run.weights(other)
        run.train(name, seed=1)
        moved = any(not torch.equal(before[key], now) for key, now in run.weights(name).items())
        assert moved == (name == "small"), "the other's first rate is 0"
        assert all(torch.equal(others[key], now) for key, now in run.weights(other).items())
    torch.distributed.destroy_process_group()


def test_a_step_that_overflows_is_repeated_until_it_counts(tmp_path: Path) -> None:
    spawn(_work, 2, str(save_model(tmp_path)))
