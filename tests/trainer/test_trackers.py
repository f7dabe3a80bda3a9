"""The table of a validation's decisions, as real trackers hold it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)
from fakes.recorded_run import candidate, decision
from verl.utils import tracking

from verl_atgrpo.train.config.schema import RecordSettings
from verl_atgrpo.train.trainer import recorder
from verl_atgrpo.train.trainer.recorder import Recorder
from verl_atgrpo.train.trainer.trackers import COLUMNS, table_rows, write_table
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer

HOSTILE = "<think> a|b\n\n# *no* ```\n    <b>deep</b> & ü"
RECORDS = [
    decision(7, "val", 2, 0, candidate("later", 1.0, None)),
    decision(7, "val", 1, 1, candidate(HOSTILE, 0.5, None)),
    decision(7, "val", 1, 0, candidate("first", 1.25, None), prompt=HOSTILE),
    {**decision(7, "val", 0, 0), "failed": True},
]
ROWS = table_rows(RECORDS, 2)


def started(tracker: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tracking.Tracking:
    """verl's own logger of one tracker, which keeps its files in a folder."""
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder))
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", folder.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    return tracking.Tracking("project", "experiment", [tracker], {})


def test_rows_are_the_first_decisions_of_the_first_tasks_in_order() -> None:
    assert [dict(zip(COLUMNS, row, strict=True)) for row in ROWS] == [
        {
            **{"step": 7, "task": 1, "episode": 0, "agent": "drafter", "turn": 0, "prompt": HOSTILE},
            **{"reply": "first", "team_score": 1.0, "local_score": 0.25, "committed": True},
        },
        {
            **{"step": 7, "task": 1, "episode": 0, "agent": "planner", "turn": 0, "prompt": "prompt of val 1 at 7"},
            **{"reply": HOSTILE, "team_score": 0.25, "local_score": 0.25, "committed": True},
        },
    ]
    assert [row[COLUMNS.index("task")] for row in table_rows(RECORDS, 9)] == [1, 1, 2]
    assert table_rows(RECORDS[3:], 2) == []


def test_tensorboard_shows_texts_as_the_model_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugin_util import markdowns_to_safe_html

    logger = started("tensorboard", tmp_path, monkeypatch)
    write_table(logger.logger, [], 6)
    write_table(logger.logger, ROWS, 7)
    logger.finish()
    board = events.EventAccumulator(str(tmp_path)).Reload()
    (tag,) = board.Tags()["tensors"]
    (event,) = board.Tensors(tag)
    assert (tag, event.step) == ("val/decisions/text_summary", 7)
    page = markdowns_to_safe_html([event.tensor_proto.string_val[0]], "".join)
    shown = "&lt;think&gt; a|b\n\n# *no* ```\n    &lt;b&gt;deep&lt;/b&gt; &amp; ü\n"
    assert page.count(f"<pre><code>{shown}</code></pre>") == 2
    assert "<strong>task 1, episode 0, planner, turn 0</strong>: team 0.25, local 0.25, committed" in page


def test_mlflow_gets_a_table_of_each_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is no dependency: it wants older packages than ours")
    logger = started("mlflow", tmp_path, monkeypatch)
    for step in range(100, 170):
        write_table(logger.logger, ROWS, step)
    ((run_id, shown),) = mlflow.search_runs(search_all_experiments=True)[
        ["run_id", "tags.mlflow.loggedArtifacts"]
    ].values
    assert [one["path"] for one in json.loads(shown)] == [
        f"val/decisions/step_000{step}.json" for step in range(106, 170)
    ]
    for step in (100, 169):
        table = mlflow.artifacts.load_dict(f"runs:/{run_id}/val/decisions/step_000{step}.json")
        assert table == {"columns": [*COLUMNS], "data": ROWS}
    frame = mlflow.load_table("val/decisions/step_000169.json", run_ids=[run_id])
    assert (list(frame), frame.values.tolist()) == ([*COLUMNS], ROWS)
    logger.finish()


def test_a_table_that_mlflow_does_not_take_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is no dependency: it wants older packages than ours")
    logger = started("mlflow", tmp_path, monkeypatch)
    run_id = mlflow.active_run().info.run_id
    mlflow.delete_run(run_id)
    write_table(logger.logger, ROWS, 7)
    assert "MLflow did not take the table of step 7" in caplog.text
    mlflow.MlflowClient().restore_run(run_id)
    logger.finish()


def test_trackio_gets_the_table_beside_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read at import
    storage = pytest.importorskip(
        "trackio.sqlite_storage", reason="trackio is no dependency: it wants an older pillow than ours"
    ).SQLiteStorage
    logger = started("trackio", tmp_path, monkeypatch)
    write_table(logger.logger, ROWS, 7)
    logger.log({"agent/planner/reward": 0.5}, 7)
    logger.finish()
    table, metrics = storage.get_logs("project", "experiment")
    assert (table["step"], metrics["step"], metrics["agent/planner/reward"]) == (7, 7, 0.5)
    assert table["val/decisions"]["_value"] == [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]


def test_the_trainer_writes_the_table_once_all_batches_of_its_validation_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "decisions", lambda rows, *_: rows)
    trainer: Any = AtGrpoTrainer.__new__(AtGrpoTrainer)
    trainer._logger = SimpleNamespace(logger={"console": None, "wandb": (tracker := Tables())})
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(log_val_generations=2))
    trainer.global_steps, trainer._dump_futures = 7, []
    with ThreadPoolExecutor(1) as trainer._dump_executor:
        files = SimpleNamespace(append=lambda *_: None)
        trainer.recorder = Recorder(RecordSettings(), cast(Any, files), {}, trainer.in_background)
        earlier, training = [decision(6, "val", 1, 0)], [decision(7, "train", 1, 0)]
        for split, batch in (("val", earlier), ("val", RECORDS[:1]), ("train", training), ("val", RECORDS[1:])):
            trainer.in_background(trainer.recorder._write, split, batch[0]["step"], batch)
        trainer._maybe_log_val_generations([], [], [])
    assert tracker.logged == [({"val/decisions": ([*COLUMNS], ROWS)}, 7)]
    trainer.config.trainer.log_val_generations = 0
    trainer._maybe_log_val_generations([], [], [])
    assert len(tracker.logged) == 1


class Tables:
    """W&B, as far as tables go."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def Table(self, columns: list[str], data: list[Any]) -> tuple[list[str], list[Any]]:
        return columns, json.loads(json.dumps(data))

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((data, step))
