"""verl's dataset of tasks: as many as the run deals out, without reading any data again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)

from verl_atgrpo.config import AtGrpoConfig
from verl_atgrpo.environment import Split
from verl_atgrpo.run_check import check_team_run
from verl_atgrpo.trainer.dataset import TeamTaskDataset
from verl_atgrpo.trainer.verl_keys import wire


@pytest.mark.parametrize(("split", "size"), [("train", 40), ("val", 9)])
def test_a_row_names_its_task(compose: Any, monkeypatch: pytest.MonkeyPatch, split: Split, size: int) -> None:
    config = compose("plan_path_cpu", "at_grpo.train_tasks=40", "at_grpo.val_tasks=9")
    wire(config, check_team_run(config))
    monkeypatch.setattr(AtGrpoConfig, "make_environment", None)
    tasks = TeamTaskDataset(split, None, config.data)
    assert len(tasks) == size
    assert tasks[3] == {"raw_prompt": [], "index": 3, "split": split, "data_source": "plan_path"}
