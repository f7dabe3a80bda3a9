"""Data of the report's page: curves, figures, size limit, escaping."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fakes.recorded_run import HOSTILE, step_metrics, write_run

from verl_atgrpo.cli import main
from verl_atgrpo.lab.report.page import contents, embedded, render, thinned
from verl_atgrpo.lab.report.panels import averaged, figures, panels
from verl_atgrpo.lab.report.records import Run, find, read
from verl_atgrpo.train.trainer.record_files import METRICS as METRICS_FILE
from verl_atgrpo.train.trainer.record_files import RecordFiles, metrics_row


def titled(found: list[dict[str, Any]], title: str) -> dict[str, Any]:
    (panel,) = [panel for panel in found if panel["title"] == title]
    return panel


def lines(panel: dict[str, Any]) -> dict[str, list[tuple[float, float | None]]]:
    return {series["name"]: series["points"] for series in panel["series"]}


METRICS = {
    0: {"val-core/plan_path/acc/mean@1": 0.25},
    1: {**step_metrics(1), "timing_s/update_actor": 3.0},
    2: {**step_metrics(2), "actor/grad_norm": "nan"},
    3: {**step_metrics(3), "val-core/plan_path/acc/mean@1": 0.75},
}


def test_panels() -> None:
    found = panels(METRICS, ["shared"])
    success = lines(titled(found, "Success"))
    assert success == {"validation": [(0, 25.0), (3, 75.0)], "training": [(1, 25.0), (2, 50.0), (3, 75.0)]}
    assert lines(titled(found, "Reward")) == {
        "drafter": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "planner": [(1, 0.25), (2, 0.5), (3, 0.75)],
    }
    # A value that was not finite is a gap, not a zero.
    assert lines(titled(found, "Gradient norm")) == {"shared": [(1, 1.0), (2, None), (3, pytest.approx(1 / 3))]}
    # An agent keeps its colour where others are missing.
    inflation = titled(found, "Inflation factor")["series"]
    assert [(series["name"], series["colour"]) for series in inflation] == [("planner", 1)]
    assert lines(titled(found, "Step time")) == {
        "rollout": [(1, 6.0), (2, 6.0), (3, 6.0)],
        "update": [(1, 3.0), (2, 0.0), (3, 0.0)],
        "other": [(1, 1.0), (2, 4.0), (3, 4.0)],
    }
    # Missing metrics have no panel.
    assert not any("Entropy" in panel["title"] for panel in found)
    assert panels({}, []) == []


def test_panels_of_a_mixture_and_of_a_curriculum() -> None:
    rows = {
        1: {"agent/walk.navigator/reward": 0.5, "agent/walk.navigator/turn_0/reward": 0.1, "curriculum/level": 0.0},
        2: {"agent/walk.navigator/reward": 0.75, "agent/hard.checker/reward": 0.25, "curriculum/level": 1.0},
    }
    found = panels(rows, ["shared"])
    assert lines(titled(found, "Reward")) == {"hard.checker": [(2, 0.25)], "walk.navigator": [(1, 0.5), (2, 0.75)]}
    assert lines(titled(found, "Level of the curriculum")) == {"level": [(1, 0.0), (2, 1.0)]}


def test_panels_of_games() -> None:
    rows = {
        1: {"opponents/current/win": 0.5, "opponents/current/loss": 0.25, "opponents/past_selves": 1.0},
        2: {"opponents/past/win": 1.0, "opponents/past/loss": 0.0, "opponents/elo": 80.0, "opponents/elo_margin": 9.0},
    }
    found = panels(rows, ["player"])
    assert lines(titled(found, "Games won")) == {"against current": [(1, 50.0)], "against past": [(2, 100.0)]}
    assert lines(titled(found, "Games lost")) == {"against current": [(1, 25.0)], "against past": [(2, 0.0)]}
    assert lines(titled(found, "Rating")) == {"policy": [(2, 80.0)]}


@pytest.mark.parametrize(
    ("section", "described"),
    [
        ({"candidates": 4}, ["4 candidates a decision"]),
        ({"candidates": {"all": 4, "judge": 8}}, ["candidates a decision: all 4, judge 8"]),
        ({"candidates": 4, "scheme": "parallel", "branch": None}, ["4 episodes a task"]),
        ({"scheme": "branch", "branch": {"at": "every", "nested": False}}, ["branches at: every"]),
        ({"scheme": "branch", "branch": {"at": {"left": 0, "right": 1}}}, ["branches at: left 0, right 1"]),
    ],
)
def test_a_run_is_described_whatever_its_section_has(
    section: dict[str, Any], described: list[str], tmp_path: Path
) -> None:
    RecordFiles(tmp_path, 64, 0, {"section": section}).append(METRICS_FILE, [metrics_row(1, 0.0, {})])
    assert contents(read(tmp_path), 1)["about"] == described


def test_gradient_norms_of_several_policies() -> None:
    metrics = {1: {"policy/left/grad_norm": 1.0, "policy/right/grad_norm": 2.0}}
    found = titled(panels(metrics, ["left", "right", "judge"]), "Gradient norm")
    assert lines(found) == {"left": [(1, 1.0)], "right": [(1, 2.0)]}


@pytest.mark.parametrize(
    ("prefixes", "policies", "drawn"),
    [
        (["actor"], ["shared"], {"update": (0, 2.0), "weights": (1, 50.0)}),
        (
            ["policy/left", "policy/right"],
            ["left", "right", "judge"],
            {"left update": (0, 2.0), "left weights": (3, 50.0), "right update": (1, 2.0), "right weights": (4, 50.0)},
        ),
    ],
)
def test_what_arrives_of_an_update(
    prefixes: list[str], policies: list[str], drawn: dict[str, tuple[int, float]]
) -> None:
    figures = {"update_arrived": 0.02, "weights_changed_share": 0.5}
    metrics = {1: {f"{prefix}/{key}": value for prefix in prefixes for key, value in figures.items()}}
    panel = titled(panels(metrics, policies), "Update that arrives at the servers")
    assert {one["name"]: (one["colour"], one["points"][0][1]) for one in panel["series"]} == drawn


def test_long_curves_are_averaged() -> None:
    points = [(step, float(step)) for step in range(1, 1001)]
    few = averaged(points, most=100)
    assert len(few) == 100
    assert few[0] == (5.5, 5.5)
    assert few[-1] == (995.5, 995.5)
    assert averaged([(1, None), (2, 3.0), (3, None), (4, None)], most=2) == [(1.5, 3.0), (3.5, None)]
    assert averaged(points[:100], most=100) == points[:100]


def test_figures() -> None:
    found = {figure["label"]: (figure["value"], figure["note"]) for figure in figures(METRICS)}
    assert found["validation success, plan_path"] == ("25.0% → 75.0%", "steps 0 to 3")
    assert found["training"] == ("3 steps", "0.5 minutes")
    named = figures({0: {f"val-core/{name}/acc/mean@1": 0.5 for name in ("own/hard", "own/easy")}})
    assert {one["label"] for one in named} == {"validation success, own/hard", "validation success, own/easy"}
    assert found["tokens generated"] == ("3,000", "192 candidates")
    assert found["waiting for records"] == ("0.50%", "of the steps' time")
    assert figures({}) == []


@pytest.mark.parametrize(
    ("sizes", "budget", "kept"),
    [
        ({0: 5, 1: 5, 2: 5, 3: 5}, 20, [0, 1, 2, 3]),
        ({0: 5, 1: 5, 2: 5, 3: 5}, 19, [0, 2, 3]),
        ({0: 5, 1: 5, 2: 5, 3: 5}, 10, [3]),
        ({0: 5, 1: 5, 2: 5, 3: 5}, 4, []),
        ({step: 1 for step in range(0, 100, 10)}, 4, [0, 40, 80, 90]),
        ({}, 10, []),
    ],
)
def test_thinned_steps(sizes: dict[int, int], budget: int, kept: list[int]) -> None:
    assert thinned(sizes, budget) == kept


def test_the_page_respects_its_size_limit_and_says_so(tmp_path: Path) -> None:
    run = read(find(write_run(tmp_path, steps=40, text="x" * 2000)))
    whole, part = contents(run, 16), contents(run, 0.1)
    assert whole["notes"] == []
    assert len(whole["episodes"]) == len(run.episodes)
    assert len(json.dumps(part["episodes"])) < 100_000
    (note,) = part["notes"]
    kept = {episode["step"] for episode in part["episodes"] if episode["split"] == "train"}
    assert note.startswith(f"Of 40 training steps with recorded episodes, {len(kept)} on this page; more with")
    assert 5 < len(kept) < 40
    assert {1, 40} <= kept
    # Validation comes first.
    assert {episode["step"] for episode in part["episodes"] if episode["split"] == "val"} == {0, 40}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    kind = read(find(write_run(tmp_path / "kind")))
    run = read(find(write_run(tmp_path / "hostile", text=HOSTILE)))
    run.about["experiment"] = HOSTILE
    page, expected = Tags(), Tags()
    page.feed(render(run, 16))
    expected.feed(render(kind, 16))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in expected.tags]
    assert "img" not in [tag for tag, _ in page.tags]
    data = re.search(r'(?s)<script id="data" type="application/json">(.*?)</script>', render(run, 16))
    assert data is not None
    shown = json.loads(data[1])
    assert shown["title"] == HOSTILE
    assert HOSTILE in shown["episodes"][-1]["decisions"][0]["candidates"][0]["text"]


def test_nothing_is_loaded(tmp_path: Path) -> None:
    page = render(read(find(write_run(tmp_path))), 16)
    tags = Tags()
    tags.feed(page)
    assert not [found for _, found in tags.tags if {"src", "href"} & set(found)]
    (policy,) = [found["content"] for tag, found in tags.tags if tag == "meta" and "http-equiv" in found]
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.parametrize("value", ["</script>", "<!--", "]]>", "a & b", "&lt;", "\u2028"])
def test_embedded_json(value: str) -> None:
    text = embedded([value])
    assert not set("<>&") & set(text)
    assert json.loads(text) == [value]


def test_a_run_without_metrics() -> None:
    shown = contents(Run(), 16)
    assert shown["panels"] == shown["episodes"] == shown["figures"] == []
    assert shown["notes"] == ["No metrics were recorded yet."]
    assert render(Run(), 16)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "checkpoints")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/report.html: 4 steps, 7 recorded episodes\n"
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "new/r.html"), "--max-megabytes", "1"]) == 0
    assert (tmp_path / "new/r.html").stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "nothing")])
    assert "nothing: no records here" in capsys.readouterr().err
