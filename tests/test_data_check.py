"""Data that grades itself: rows that teach something wrong are reported, and refused where they are many."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.jobs import asked

from verl_atgrpo import Environment, Outcome, Split, make
from verl_atgrpo.cli import main
from verl_atgrpo.play import data_check, registry
from verl_atgrpo.play.environment import RowDefect
from verl_atgrpo.recipes import compose
from verl_atgrpo.train.config.job_rules import of_bad_rows
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.section import read_section

ECHO = {"question": "Echo.", "input_output": json.dumps({"inputs": ["3\n"], "outputs": ["3\n"]})}
SILENT = {"question": "Say nothing.", "input_output": json.dumps({"inputs": ["3\n"], "outputs": [""]})}
DOUBLE = {
    "question": "Double.",
    "input_output": json.dumps({"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}),
}


def problem(base: dict[str, str], number: int, *solutions: str) -> dict[str, str]:
    return {**base, "question": f"{base['question']} {number}", "solutions": json.dumps(solutions)}


CODE: list[tuple[dict[str, str], RowDefect | None]] = [
    (problem(ECHO, 0, "print(input())"), None),
    (problem(ECHO, 1, "print(int(input()) + 1)"), "its own solution fails"),
    (problem(ECHO, 2, "print(input()"), "its own solution fails"),  # does not compile
    (problem(ECHO, 3, "while True: pass"), "its own solution fails"),
    (problem(ECHO, 4), "it has no solution to check"),
    (problem(SILENT, 5, "pass"), "the empty reply passes"),
    (problem(SILENT, 6), "the empty reply passes"),
    (problem(DOUBLE, 7, "def double(n): return 2 * n"), None),
    (problem(DOUBLE, 8, "def double(n): return n * n"), "its own solution fails"),  # right on the first test alone
    (problem(DOUBLE, 9, "def twice(n): return 2 * n"), "its own solution fails"),
]
MATH: list[tuple[str, RowDefect | None]] = [
    ("12", None),
    (r"\frac{3}{7}", None),
    (r"(-\infty, 4]", None),
    ("x^2 + 1", None),
    (r"\frac{1}{", "its answer cannot be verified"),
    (r"\begin{cases", "its answer cannot be verified"),
]


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def code(folder: Path, train: list[dict[str, str]], val: list[dict[str, str]] | None = None) -> dict[str, Any]:
    rows = {"train": train, "val": val or [problem(ECHO, 99, "print(input())")]}
    return {split: {**write(folder / f"{split}.jsonl", mine), "format": "apps"} for split, mine in rows.items()}


def test_a_program_is_graded_by_its_own_golden_tests(tmp_path: Path) -> None:
    env = make("code", **code(tmp_path, [row for row, _ in CODE]), cpu_seconds=1)
    check = data_check.check_rows(env, "train", range(len(CODE)))
    found = {index: check.defects.get(index) for index in range(len(CODE))}
    wanted = {index: what if what != "it has no solution to check" else None for index, (_, what) in enumerate(CODE)}
    assert found == wanted
    assert (check.graded, check.unchecked, check.share) == (10, 1, 0.7)


def test_an_answer_is_graded_as_its_gold(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    rows = [{"question": f"Problem {number}?", "answer": gold} for number, (gold, _) in enumerate(MATH)]
    env = make("math_single", train=write(tmp_path / "a.jsonl", rows), val=write(tmp_path / "b.jsonl", rows[:1]))
    check = data_check.check_rows(env, "train", range(len(MATH)))
    assert [check.defects.get(index) for index in range(len(MATH))] == [what for _, what in MATH]


class Rows(Environment):
    """Tasks whose defects are given, in data sets of given sizes."""

    agents = ("solo",)

    def __init__(self, bad: tuple[int, ...] = (), rows: int = 100, sets: Mapping[str, int] | None = None) -> None:
        self.bad, self.rows, self.sets = bad, rows, sets or {}

    def task(self, split: Split, index: int) -> int:
        return index

    def num_tasks(self, split: Split) -> int:
        return self.rows

    def data_sets(self, split: Split) -> Mapping[str, int]:
        return self.sets

    def fingerprint(self, task: int) -> str:
        return str(task)

    async def row_defect(self, task: int) -> RowDefect | None:
        return "its own solution fails" if task in self.bad else None

    async def run(self, task: int, team: Any) -> Outcome:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("rows", "sets", "size", "of_each"),
    [
        (100, {}, 100, [32]),
        (100, {}, 5, [5]),
        (100, {"a": 90, "b": 10}, 100, [16, 10]),
        (100, {"a": 3, "b": 97}, 100, [3, 16]),
        (100, {"a": 40, "b": 60}, 50, [16, 10]),
        (100, {"a": 40}, 100, [16, 16]),  # the rest has no name
        (100, {"a": 60, "b": 40}, 60, [32]),  # the run uses none of b
    ],
)
def test_a_sample_has_rows_of_every_data_set(rows: int, sets: dict[str, int], size: int, of_each: list[int]) -> None:
    env = Rows(rows=rows, sets=sets)
    found = data_check.sample(env, "train", size)
    assert found == sorted(set(found)) == data_check.sample(env, "train", size)
    assert found[-1] < size
    limits = [0]
    for tasks in (*sets.values(), rows):
        limits.append(min(limits[-1] + tasks, size))
    counted = [sum(low <= index < high for index in found) for low, high in itertools.pairwise(limits)]
    assert [count for count in counted if count] == of_each
    assert data_check.sample(env, "train", size) != data_check.sample(env, "val", size) or size == len(found)


def settings(**section: Any) -> AtGrpoConfig:
    return read_section(compose("walk_smollm2", [f"at_grpo.{key}={value}" for key, value in section.items()]))


def test_a_run_on_bad_rows_is_refused_and_the_bound_can_be_raised(caplog: pytest.LogCaptureFixture) -> None:
    half = Rows(tuple(range(0, 100, 2)))
    with pytest.raises(ConfigError, match=r"environment\.train: 32 train rows graded, \d+\.\d% .*max_bad_rows=0\.25"):
        asked(of_bad_rows, settings(train_tasks=100, val_tasks=100), half)
    asked(of_bad_rows, settings(train_tasks=100, val_tasks=100, max_bad_rows=1.0), half)
    assert "train rows graded" in caplog.text and "val rows graded" in caplog.text
    one = Rows((data_check.sample(half, "val", 100)[3],))
    asked(of_bad_rows, settings(train_tasks=100, val_tasks=100), one)
    with pytest.raises(ConfigError, match=rf"environment\.(train|val): .*such as row {one.bad[0]};"):
        asked(of_bad_rows, settings(train_tasks=100, val_tasks=100, max_bad_rows=0), one)


def test_all_rows_are_graded_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row, _ in CODE[:3]]
    for split, part in (("train", rows), ("val", [problem(ECHO, 5, "print(input())")])):
        write(tmp_path / f"{split}.jsonl", part)
    (tmp_path / "mine.yaml").write_text(
        "defaults: [at_grpo_trainer, _self_]\n"
        "at_grpo:\n"
        "  environment:\n    name: code\n"
        + "".join(f"    {split}: {{path: {tmp_path}/{split}.jsonl, format: apps}}\n" for split in ("train", "val"))
    )
    arguments = ["data", "check", f"--config-dir={tmp_path}", "--config-name=mine", "at_grpo.allow_overlap=true"]
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "train row 1: its own solution fails\ntrain row 2: its own solution fails\n" in printed
    assert "3 train rows graded, 66.7% with a defect (2: its own solution fails)" in printed
    assert "1 val rows graded, 0.0% with a defect (no defect)" in printed
    assert main([*arguments, "at_grpo.max_bad_rows=0.7"]) == 0
    assert data_check.report(Rows((7,)), {"train": 100}, 0.01) == (
        "train row 7: its own solution fails\n100 train rows graded, 1.0% with a defect (1: its own solution fails)",
        False,
    )


def test_a_part_of_a_mixture_is_graded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside four times as many generated tasks, bad rows would be a fifth of all."""
    monkeypatch.setitem(registry._REGISTRY, "rows", Rows)
    bad = {"weight": 1, "name": "rows", "bad": tuple(range(100)), "val_tasks": 5}
    made = make("mixture", parts={"walk": {"weight": 4}, "bad": bad})
    with pytest.raises(ConfigError, match=r"environment\.parts\.bad\.train: 32 train rows graded, 100\.0% with a"):
        asked(of_bad_rows, settings(train_tasks=100, val_tasks=200), made)
    text, failed = data_check.report(made, {"train": 40, "val": 105}, 0.25)
    assert failed and "parts.bad.train row 0: its own solution fails\n" in text
    # A run's 40 tasks are spread over all rows.
    assert "parts.bad: 100 train rows graded" in text
    assert text.endswith("parts.bad: 5 val rows graded, 100.0% with a defect (5: its own solution fails)")
    only_validated = make("mixture", parts={"walk": {}, "bad": {**bad, "weight": 0}})
    with pytest.raises(ConfigError, match=r"environment\.parts\.bad\.val: 5 val rows graded, 100\.0% with a"):
        asked(of_bad_rows, settings(train_tasks=100, val_tasks=200), only_validated)
    generated = make("mixture", parts={"walk": {}, "number_search": {}})
    assert data_check.report(generated, {"train": 5, "val": 5}, 0.0) == ("", False)


def test_a_level_of_a_curriculum_is_graded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small level's rows would be asked for again and again, as often as the largest has any."""
    monkeypatch.setitem(registry._REGISTRY, "rows", Rows)
    levels: list[dict[str, Any]] = [{"bad": (1, 2, 3), "rows": 6}, {"rows": 90}]
    made = make("curriculum", of={"name": "rows", "bad": ()}, levels=levels)
    text, failed = data_check.report(made, {"train": 180, "val": 5}, 0.6)
    assert not failed
    assert text.splitlines()[3:] == [
        "levels[0]: 6 train rows graded, 50.0% with a defect (3: its own solution fails)",
        "levels[1]: 90 train rows graded, 0.0% with a defect (no defect)",
        "levels[1]: 5 val rows graded, 0.0% with a defect (no defect)",
    ]
    with pytest.raises(ConfigError, match=r"environment\.levels\[0\]\.train: 6 train rows graded, 50\.0% with a"):
        asked(of_bad_rows, settings(train_tasks=100, val_tasks=5), made)


def test_generated_tasks_have_no_rows() -> None:
    assert data_check.report(make("walk"), {"train": 5, "val": 5}, 0.0) == ("", False)
