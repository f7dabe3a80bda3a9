"""The dataset of tasks has the configured size, without reading any data set again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)

from verl_atgrpo import Split
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.trainer.dataset import TeamTaskDataset, wire


def wire_checked(config: Any) -> None:
    job = check_run(config)
    assert job is not None
    wire(config, job.settings, job.env)


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
    # A recipe's own data set, `path`, is taken away.
    val = f"{{path: null, one: {{path: {files['one']}}}, two: {{path: {files['two']}}}}}"
    config = compose(
        "plan_path_cpu",
        "~at_grpo.environment",
        f"+at_grpo.environment={{name: math, train: {{path: {files['train']}}}, val: {val}}}",
        "data.train_batch_size=16",
        "at_grpo.allow_overlap=true",
        "at_grpo.val_tasks=4",
    )
    wire_checked(config)
    sources = [TeamTaskDataset("val", None, config.data)[index]["data_source"] for index in range(4)]
    assert sources == ["one", "one", "two", "two"]
    assert TeamTaskDataset("train", None, config.data)[0]["data_source"] == "math"
