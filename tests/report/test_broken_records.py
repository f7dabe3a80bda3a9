"""`summary` and `report` on files that are truncated, corrupt, foreign, huge or hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import LINES, changed, in_place_of, refused, snapshot, with_line
from fakes.recorded_run import write_run

from verl_atgrpo import files
from verl_atgrpo.cli import main
from verl_atgrpo.lab.report import learning_curve, page

SUCCESS = "val-core/plan_path/acc/mean@1"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "m.jsonl"
    rows = [{"step": step, "data": {SUCCESS: step / 4, "timing_s/step": 30.0}} for step in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


# ---------------------------------------------------------------------- metrics of verl

VALUES: list[tuple[tuple[Any, ...], Any]] = [
    (("step",), "1"),
    (("step",), -1),
    (("step",), 1.5),
    (("step",), True),
    (("step",), None),
    (("step",), 10**20),
    (("step",), ...),
    (("data",), []),
    (("data",), "abc"),
    (("data",), ...),
    (("data", SUCCESS), "abc"),
    (("data", SUCCESS), "0.5"),
    (("data", SUCCESS), float("nan")),
    (("data", SUCCESS), float("inf")),
    (("data", SUCCESS), [0.5]),
    (("data", SUCCESS), True),
    (("data", SUCCESS), 10**400),
    (("data", "timing_s/step"), "30"),
    (("data", "timing_s/step"), {}),
    (("data", "rollout/tokens"), "many"),
]


@pytest.mark.parametrize("name", LINES)
def test_a_summary_of_a_broken_line(name: str, metrics: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(["summary", with_line(metrics, 2, LINES[name])], tmp_path, capsys, f"{metrics}:2:")


@pytest.mark.parametrize(("place", "value"), VALUES)
def test_a_summary_of_a_wrong_value(
    place: tuple[Any, ...], value: Any, metrics: Path, tmp_path: Path, capsys: Capture
) -> None:
    refused(["summary", changed(metrics, 3, *place, value=value)], tmp_path, capsys, f"{metrics}:3:", place[-1])


def test_a_number_beyond_floats_is_refused(metrics: Path, tmp_path: Path, capsys: Capture) -> None:
    line = f'{{"step": 1, "data": {{"{SUCCESS}": 1e999}}}}'
    refused(["summary", with_line(metrics, 2, line.encode())], tmp_path, capsys, f"{metrics}:2:", SUCCESS)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "nothing", "2 GiB", "100 MB line"])
def test_no_metrics_file(kind: str, metrics: Path, tmp_path: Path, capsys: Capture) -> None:
    in_place_of(metrics, kind)
    refused(["summary", metrics], tmp_path, capsys, metrics)


@pytest.mark.parametrize("content", [b"", b"{", b'{"step": 1, "data": {}}\n', b'{"step": 1, "data": {}}'])
def test_metrics_without_a_validation(content: bytes, metrics: Path, tmp_path: Path, capsys: Capture) -> None:
    metrics.write_bytes(content)
    refused(["summary", metrics], tmp_path, capsys, metrics, "has no validation")


STEP_9 = b'{"step": 9, "data": {"' + SUCCESS.encode() + b'": 1.0}}'


@pytest.mark.parametrize("end", [b'{"step": 9, "da', STEP_9[:-1], b"9", b'"step"', b"[]", b"[" * 100_000])
def test_a_line_that_is_being_written_is_left_out(
    end: bytes, metrics: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.write_bytes(metrics.read_bytes() + end)
    assert main(["summary", str(metrics)]) == 0
    assert "75.0% after (step 3" in capsys.readouterr().out
    assert f"{metrics}:5: ignored an incomplete last line" in caplog.text


@pytest.mark.parametrize("end", [STEP_9, STEP_9 + b"\n", STEP_9 + b"\r\n", STEP_9 + b" ", STEP_9 + b"\r"])
def test_a_last_line_is_whole_without_a_newline(
    end: bytes, metrics: Path, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.write_bytes(metrics.read_bytes() + end)
    assert main(["summary", str(metrics)]) == 0
    assert "100.0% after (step 9" in capsys.readouterr().out
    assert "ignored" not in caplog.text


def test_a_whole_last_line_without_a_newline_is_checked_like_every_line(
    metrics: Path, tmp_path: Path, capsys: Capture
) -> None:
    metrics.write_bytes(metrics.read_bytes() + b'{"step": -1, "data": {}}')
    refused(["summary", metrics], tmp_path, capsys, f"{metrics}:5:", "step=-1")


def test_line_ends_of_windows_and_metrics_that_were_not_finite_are_read(metrics: Path, capsys: Capture) -> None:
    metrics.write_bytes(metrics.read_bytes().replace(b"30.0", b"null", 1).replace(b"\n", b"\r\n"))
    assert main(["summary", str(metrics)]) == 0
    assert "1.5 min of training" in capsys.readouterr().out


def test_only_the_metrics_of_a_curve_are_kept(metrics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million lines fit into memory, and none of them is read before the one in front of it is parsed."""
    seen: list[set[str]] = []
    parse = learning_curve.parse

    def watched(*arguments: Any) -> Any:
        row = parse(*arguments)
        seen.append(set(row.data))
        return row

    changed(metrics, 1, "data", "agent/planner/reward", value="anything")
    with_line(metrics, 4, b"broken")
    monkeypatch.setattr(learning_curve, "parse", watched)
    with pytest.raises(files.FileError, match=":4: not JSON"):
        learning_curve.read(metrics)
    assert seen == [{SUCCESS, "timing_s/step"}] * 3


# ---------------------------------------------------------------------- records

METRICS, TRAIN, VAL = (f"record/{kind}-0001-0000.jsonl" for kind in ("metrics", "train", "val"))
RECORDS: list[tuple[str, int, tuple[Any, ...], Any]] = [
    (METRICS, 1, ("format",), 2),
    (METRICS, 1, ("from_step",), "0"),
    (METRICS, 1, ("about",), []),
    (METRICS, 1, ("about", "section"), "x"),
    (METRICS, 1, ("about", "section", "environment"), [1]),
    (METRICS, 1, ("about", "section", "policies"), "ab"),
    (METRICS, 1, ("about", "section", "candidates"), "two"),
    (METRICS, 1, ("about", "models"), ["a"]),
    (METRICS, 1, ("about", "models", "shared"), 3),
    (METRICS, 1, ("about", "frozen"), 7),
    (METRICS, 3, ("step",), "1"),
    (METRICS, 3, ("data",), [1]),
    (METRICS, 3, ("data", "team/success"), "high"),
    (METRICS, 3, ("data", "team/success"), float("nan")),
    (METRICS, 3, ("data", "team/success"), None),
    (TRAIN, 2, ("split",), "test"),
    (TRAIN, 2, ("task",), -1),
    (TRAIN, 2, ("episode",), "0"),
    (TRAIN, 2, ("success",), "yes"),
    (TRAIN, 2, ("failed",), 1),
    (TRAIN, 2, ("prompt",), None),
    (TRAIN, 2, ("agent",), ["a"]),
    (TRAIN, 2, ("committed",), 2),
    (TRAIN, 2, ("candidates",), []),
    (TRAIN, 2, ("candidates",), {}),
    (TRAIN, 2, ("candidates", 0), None),
    (TRAIN, 2, ("candidates", 0, "text"), 7),
    (TRAIN, 2, ("candidates", 0, "reward"), float("inf")),
    (TRAIN, 2, ("candidates", 0, "reward"), "1"),
    (TRAIN, 2, ("candidates", 0, "advantage"), "<b>"),
    (TRAIN, 2, ("candidates", 1, "truncated"), ...),
    (VAL, 2, ("decision",), None),
    (VAL, 2, ("episode_reward",), float("nan")),
]


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize(("file", "number"), [(METRICS, 1), (METRICS, 3), (TRAIN, 2)])
def test_a_report_of_a_broken_line(
    file: str, number: int, name: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = with_line(run / file, number, LINES[name])
    refused(["report", run, "--out", tmp_path / "new/r.html"], tmp_path, capsys, f"{path}:{number}:")


@pytest.mark.parametrize(("file", "number", "place", "value"), RECORDS)
def test_a_report_of_a_wrong_value(
    file: str, number: int, place: tuple[Any, ...], value: Any, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = changed(run / file, number, *place, value=value)
    key = next(part for part in reversed(place) if isinstance(part, str))
    refused(["report", run], tmp_path, capsys, f"{path}:{number}:", key)


@pytest.mark.parametrize("kind", ["folder", "pipe", "2 GiB", "100 MB line"])
@pytest.mark.parametrize("file", [METRICS, TRAIN])
def test_no_record_file(file: str, kind: str, run: Path, tmp_path: Path, capsys: Capture) -> None:
    in_place_of(run / file, kind)
    refused(["report", run], tmp_path, capsys, run / "record")


def test_a_report_of_no_run(metrics: Path, tmp_path: Path, capsys: Capture) -> None:
    for run in (tmp_path / "absent", tmp_path, metrics):
        refused(["report", run, "--out", tmp_path / "r.html"], tmp_path, capsys, run, "no records")


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf"])
def test_a_limit_that_is_none(limit: str, run: Path, tmp_path: Path, capsys: Capture) -> None:
    refused(["report", run, f"--max-megabytes={limit}"], tmp_path, capsys, f"--max-megabytes {float(limit)}")


@pytest.mark.parametrize("fails", ["render", "write", "rename"])
def test_a_report_is_written_whole_or_not_at_all(
    fails: str, run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "report.html").write_text("the earlier report")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    def half(path: Path, text: str, **_: Any) -> Any:
        path.write_bytes(text.encode()[:100])
        full()

    if fails == "render":
        monkeypatch.setattr(page, "render", full)
    elif fails == "write":
        monkeypatch.setattr(Path, "write_text", half)
    else:
        monkeypatch.setattr(files.os, "replace", full)
    refused(["report", run], tmp_path, capsys, "No space left")


def test_a_report_replaces_a_link_and_not_the_file_that_it_leads_to(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "precious"
    elsewhere.write_text("precious")
    (run / "report.html").symlink_to(elsewhere)
    before = snapshot(run / "record")
    assert main(["report", str(run)]) == 0
    assert elsewhere.read_text() == "precious" and not (run / "report.html").is_symlink()
    assert snapshot(run / "record") == before
