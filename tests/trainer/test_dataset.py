"""The dataset of tasks has the configured size, without reading any data set again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)

from verl_atgrpo import Split
from verl_atgrpo.config.run_check import check_run
from verl_atgrpo.config.schema import AtGrpoConfig
from verl_atgrpo.trainer.dataset import TeamTaskDataset, wire


def wire_checked(config: Any) -> None:
    settings = check_run(config)
    assert settings is not None
    wire(config, settings, settings.make_environment())


@pytest.mark.parametrize(("split", "size"), [("train", 40), ("val", 9)])
def test_a_row_names_its_task(compose: Any, monkeypatch: pytest.MonkeyPatch, split: Split, size: int) -> None:
    config = compose("plan_path_cpu", "at_grpo.train_tasks=40", "at_grpo.val_tasks=9")
    wire_checked(config)
    monkeypatch.setattr(AtGrpoConfig, "make_environment", None)
    tasks = TeamTaskDataset(split, None, config.data)
    assert len(tasks) == size
    assert tasks[3] == {"raw_prompt": [], "index": 3, "split": split, "data_source": "plan_path"}


def test_a_row_names_its_data_set(compose: Any, tmp_path: Path) -> None:
    """Validation reports by `data_source`, so each data set gets its own success."""
    pytest.importorskip("math_verify")
    files = {}
    for name, tasks in (("train", 20), ("one", 2), ("two", 3)):
        files[name] = tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"question": f"What is {name} {n} doubled?", "answer": str(2 * n)}) for n in range(tasks)]
        files[name].write_text("\n".join(lines))
    config = compose(
        "math_qwen3_1p7b",
        "hardware=cpu",
        f"at_grpo.environment.train={{path: {files['train']}, split: null, columns: null}}",
        f"+at_grpo.environment.val.one={{path: {files['one']}}}",
        f"+at_grpo.environment.val.two={{path: {files['two']}}}",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "at_grpo.allow_overlap=true",
        "at_grpo.val_tasks=4",
        *(f"at_grpo.environment.val.{own}=null" for own in ("aime24", "aime25", "olympiadbench")),
    )
    wire_checked(config)
    sources = [TeamTaskDataset("val", None, config.data)[index]["data_source"] for index in range(4)]
    assert sources == ["one", "one", "two", "two"]
    assert TeamTaskDataset("train", None, config.data)[0]["data_source"] == "math"
