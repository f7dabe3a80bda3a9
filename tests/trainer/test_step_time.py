"""All of a step's time is in a timer that a user sees as `timing_s/...`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import transfer_queue as tq
from fakes.clock import Clock
from fakes.fake_trainer import FLAT, STEEP, FakeRollout, FakeTrainer, FakeUnit
from verl.utils.debug import marked_timer

PARTS = ("submit", "gen", "bookkeeping", "policies", "update_weights")
"""A step's, which do not overlap."""


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_timer_runs_during_every_call_of_a_step(
    mode: str, rollout: FakeRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout.agents, rollout.drafts = ["a", "b"], 1
    rollout.rewards = [[STEEP, FLAT]] * 40
    units = [FakeUnit("p_a", 2), FakeUnit("p_b", 2, trainable=False)]
    trainer = FakeTrainer(rollout, *units, mode=mode, filters={}, failures=2)
    clock = Clock(monkeypatch)
    clock.costs(tq, "kv_list", "kv_clear", "kv_batch_put")
    clock.costs(rollout, "generate_sequences", "sleep_replicas", "update_weights", "pause", "resume", "drain_report")
    clock.costs(units[0], "train", "metrics")
    after = None
    for _ in range(3):
        began = clock.called.total()
        timing: dict[str, float] = {}
        metrics: dict[str, Any] = {}
        trainer.timing_raw = timing
        # As verl's `fit`.
        with marked_timer("step", timing):
            trainer.on_step_begin()
            trainer.prepare_step()
            batch = trainer._step_once(metrics, timing, 4)
            trainer.on_step_end()
        assert timing["step"] == sum(timing.get(part, 0) for part in PARTS) == clock.called.total() - began
        assert timing.get("between_steps") == after
        between = clock.called.total()
        trainer.end_step(batch, metrics)
        after = clock.called.total() - between
    assert {"train", "kv_clear", "kv_batch_put", "generate_sequences"} <= clock.called.keys()
