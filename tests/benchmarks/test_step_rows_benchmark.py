"""The benchmark of a step's rows runs at a small size."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")


import bench_step_rows

from verl_atgrpo.trainer import queue as trainer_queue


def test_a_step_goes_through_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_queue, "tq", trainer_queue.tq)  # restored after the test
    queue = str(tmp_path / "queue")
    played = bench_step_rows.work(128, 16.0, True, queue)
    driven = bench_step_rows.drive(queue, answer_tokens=0)
    assert played["rows"] == driven["rows"] == 128
    stages = ["sort", "filter", "split", "mini-batches", "log-probs", "advantage", "metrics"]
    assert [name for name in driven if name not in ("rows", "megabytes")] == stages
    assert bench_step_rows.total(driven) == pytest.approx(sum(driven[stage] for stage in stages))
