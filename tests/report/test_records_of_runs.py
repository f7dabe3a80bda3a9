"""Records of a training: recorded episodes, sizes of files, reading them back."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fakes.recorded_run import ABOUT, candidate, decision, write_run

from verl_atgrpo.lab.report import records
from verl_atgrpo.lab.report.records import find, read
from verl_atgrpo.train.config.schema import ConfigError, RecordSettings
from verl_atgrpo.train.config.section import parse_section
from verl_atgrpo.train.trainer.record_files import METRICS, TRAIN, VAL, RecordFiles, metrics_row


def files(folder: Path, from_step: int = 0, max_megabytes: float = 64) -> RecordFiles:
    return RecordFiles(folder, max_megabytes, from_step, ABOUT)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def metric(folder: Path, name: str) -> dict[int, Any]:
    return {step: row[name] for step, row in read(folder).metrics.items() if name in row}


# ------------------------------------------------------------------ files


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = read(find(write_run(tmp_path)))
    assert run.about == ABOUT
    assert sorted(run.metrics) == [0, 1, 2, 3]
    assert run.metrics[2]["team/success"] == 0.5
    assert run.metrics[2]["actor/grad_norm"] == "nan"
    assert sorted(key for key in run.episodes if key[0] == VAL) == [
        (VAL, step, task, 0) for step in (0, 3) for task in (0, 1)
    ]
    assert [row["decision"] for row in run.episodes[TRAIN, 2, 42, 0]] == [0, 1, 2]


def test_metrics_are_numbers_only() -> None:
    row = metrics_row(3, 12.3456, {"a": 1, "b": "word", "c": float("-inf"), "d": None, "e": [1, 2]})
    assert row == {"step": 3, "time": 12.346, "data": {"a": 1.0, "c": "-inf"}}


def test_a_resumed_run_supersedes_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = files(tmp_path)
    for step in range(6):
        first.append(METRICS, [metrics_row(step, 0, {"x": step, "first": 1})])
        first.append(TRAIN, [decision(step, TRAIN, 7, number, candidate("old", 1, 0)) for number in range(2)])
    first.append(VAL, [decision(4, VAL, 0, number, candidate("old", 1, None)) for number in range(3)])
    again = files(tmp_path, from_step=4)
    again.append(METRICS, [metrics_row(4, 0, {"val": 1}), metrics_row(5, 0, {"x": 50})])
    again.append(VAL, [decision(4, VAL, 0, 0, candidate("new", 1, None))])
    run = read(tmp_path)
    # Step 4 is kept and validated again; step 5 is the second attempt's.
    assert metric(tmp_path, "x") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 50}
    assert run.metrics[4] == {"x": 4, "first": 1, "val": 1}
    assert run.metrics[5] == {"x": 50}
    assert [row["candidates"][0]["text"] for row in run.episodes[VAL, 4, 0, 0]] == ["new"]
    assert {key[1] for key in run.episodes if key[0] == TRAIN} == {0, 1, 2, 3, 4}


def test_a_run_from_scratch_in_the_same_folder_supersedes_everything(tmp_path: Path) -> None:
    write_run(tmp_path)
    fresh = files(tmp_path / "record")
    fresh.append(METRICS, [metrics_row(1, 0, {"x": 1})])
    run = read(tmp_path / "record")
    assert run.metrics == {1: {"x": 1}}
    assert not run.episodes


@pytest.mark.parametrize("step", [0, 2, 4])
def test_an_attempt_that_trains_nothing_hides_nothing(step: int, tmp_path: Path) -> None:
    """It validates an older checkpoint, or the base model, or ends before its first step."""
    first = files(tmp_path)
    first.append(METRICS, [metrics_row(number, 0, {"x": number}) for number in range(1, 6)])
    first.append(TRAIN, [decision(5, TRAIN, 7, 0, candidate("old", 1, 0))])
    first.append(VAL, [decision(2, VAL, 0, 0, candidate("old", 1, None))])
    validates = files(tmp_path, from_step=step)
    validates.append(METRICS, [metrics_row(step, 0, {"x": -1, "val": 1})])
    validates.append(VAL, [decision(step, VAL, 0, 0, candidate("new", 1, None))])
    last = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5} if step else {0: -1, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5}
    assert metric(tmp_path, "x") == last
    shown = {key: rows[0]["candidates"][0]["text"] for key, rows in read(tmp_path).episodes.items()}
    assert shown == {
        (TRAIN, 5, 7, 0): "old",
        (VAL, 2, 0, 0): "old",
        **({} if step == 2 else {(VAL, step, 0, 0): "new"}),
    }
    goes_on = files(tmp_path, from_step=5)
    goes_on.append(METRICS, [metrics_row(6, 0, {"x": 6})])
    assert metric(tmp_path, "x") == {**last, 6: 6}


def test_an_incomplete_last_line_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = find(write_run(tmp_path))
    path = folder / "metrics-0001-0000.jsonl"
    path.write_text(path.read_text()[:-9])
    assert sorted(read(folder).metrics) == [0, 1, 2]
    assert f"{path}:5: ignored an incomplete last line" in caplog.text
    # The next attempt writes to another file, so the incomplete line stays the last one.
    files(folder, from_step=2).append(METRICS, [metrics_row(3, 0, {"x": 3})])
    assert read(folder).metrics[3] == {"x": 3}


def test_a_last_line_is_whole_without_a_newline(tmp_path: Path) -> None:
    folder = find(write_run(tmp_path))
    whole = read(folder)
    for path in folder.glob("*.jsonl"):
        path.write_text(path.read_text().removesuffix("\n"))
    assert read(folder) == whole


def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    folder = find(write_run(tmp_path))
    path = folder / "metrics-0001-0000.jsonl"
    path.write_text(path.read_text().replace('{"step": 1', '{"step" 1'))
    with pytest.raises(ValueError, match=r"metrics-0001-0000\.jsonl:3: not JSON"):
        read(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics-0001-0000.jsonl").write_text('{"format": 2}\n')
    with pytest.raises(ValueError, match="format 2, this version reads format 1"):
        read(tmp_path)


def test_a_folder_without_records_is_refused_with_the_places(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no records here, in record/ or in checkpoints/record/"):
        find(tmp_path)
    write_run(tmp_path / "checkpoints")
    assert find(tmp_path) == find(tmp_path / "checkpoints") == find(tmp_path / "checkpoints/record")


def test_the_oldest_training_episodes_are_deleted_first_and_metrics_never(tmp_path: Path) -> None:
    writer = files(tmp_path, max_megabytes=0.1)
    text = candidate("x" * 1000, 1, 0)
    for step in range(1, 201):
        writer.append(METRICS, [metrics_row(step, 0, {"x": step})])
        writer.append(TRAIN, [decision(step, TRAIN, 1, 0, text)])
        if step % 10 == 0:
            writer.append(VAL, [decision(step, VAL, 0, 0, text)])
        sizes = [path.stat().st_size for path in tmp_path.glob("*.jsonl") if not path.name.startswith(METRICS)]
        assert sum(sizes) <= 100_000
        assert max(sizes, default=0) <= 100_000 / 8
    run = read(tmp_path)
    assert len(run.metrics) == 200
    assert [key[1] for key in sorted(run.episodes) if key[0] == VAL] == list(range(10, 201, 10))
    kept = [key[1] for key in sorted(run.episodes) if key[0] == TRAIN]
    assert kept == list(range(kept[0], 201))
    assert 20 < len(kept) < 80


def test_old_validations_are_deleted_when_nothing_else_is_left(tmp_path: Path) -> None:
    writer = files(tmp_path, max_megabytes=0.02)
    for step in range(100):
        writer.append(VAL, [decision(step, VAL, 0, 0, candidate("x" * 1000, 1, None))])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert max(key[1] for key in read(tmp_path).episodes) == 99


def test_a_full_disk_costs_records_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = files(tmp_path)
    writer.append(METRICS, [metrics_row(1, 0, {"x": 1})])
    opened = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "ab":
            with opened(path, mode) as file:
                file.write(b'{"step": 2, "da')
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *args, **kwargs)

    with caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        for step in (2, 3, 4):
            writer.append(METRICS, [metrics_row(step, 0, {"x": step})])
    assert caplog.text.count("records cannot be written") == 1
    assert str(tmp_path) in caplog.text
    writer.append(METRICS, [metrics_row(5, 0, {"x": 5})])
    assert "records are written again" in caplog.text
    assert sorted(metric(tmp_path, "x")) == [1, 5]


def test_lone_surrogates_do_not_stop_the_training(tmp_path: Path) -> None:
    files(tmp_path).append(VAL, [decision(0, VAL, 0, 0, candidate("a\ud800b", 1, None))])
    (rows,) = read(tmp_path).episodes.values()
    assert rows[0]["candidates"][0]["text"] == "a?b"


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"episodes": 3}, "at_grpo.record.episodes is not a known key: use one of train_tasks, val_tasks"),
        ({"train_tasks": -1}, "at_grpo.record.train_tasks=-1: a whole number, at least 0"),
        ({"val_tasks": 1.5}, "at_grpo.record.val_tasks=1.5: a whole number"),
        ({"max_megabytes": 0}, "at_grpo.record.max_megabytes=0: a number above 0"),
        ({"max_megabytes": "x"}, "at_grpo.record.max_megabytes='x': a number"),
        ({"train_tasks": True}, "at_grpo.record.train_tasks=True: a whole number"),
    ],
)
def test_invalid_settings(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_section({"environment": {"name": "plan_path"}, "record": section})


def test_settings_of_a_recipe() -> None:
    section: dict[str, Any] = {"environment": {"name": "plan_path"}}
    assert parse_section(section).record == RecordSettings()
    assert parse_section({**section, "record": None}).record is None
    with pytest.raises(ConfigError, match=r"at_grpo\.record\.tasks is not a known key"):
        parse_section({**section, "record": {"tasks": 1}})
    with pytest.raises(ConfigError, match=r"at_grpo\.record=False: a section"):
        parse_section({**section, "record": False})


def test_header_and_rows_are_as_documented(tmp_path: Path) -> None:
    folder = find(write_run(tmp_path))
    assert names(folder) == [f"{kind}-0001-0000.jsonl" for kind in (METRICS, TRAIN, VAL)]
    documented = (Path(__file__).parents[2] / "docs/report.md").read_text()
    for name in names(folder):
        header, *rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert header == {"format": 1, "from_step": 0, "about": ABOUT}
        for field in {*header, *rows[0], *(rows[0].get("candidates") or [{}])[0]}:
            assert f"`{field}`" in documented, field
    assert records.FOLDER == "record"
