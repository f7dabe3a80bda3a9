"""Programs whose verdicts graders of public data sets decide (`grades/*.yaml`), and where ours differ from theirs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.coding_problems import verdicts, write

from verl_atgrpo.environments.code import outputs
from verl_atgrpo.environments.code.formats import read_problems
from verl_atgrpo.environments.code.outputs import same_output
from verl_atgrpo.environments.code.programs import Problem

GRADES = Path(__file__).parent / "grades"
OUTPUTS: list[list[Any]] = yaml.safe_load((GRADES / "outputs.yaml").read_text(encoding="utf-8"))
PROGRAMS: list[dict[str, Any]] = yaml.safe_load((GRADES / "programs.yaml").read_text(encoding="utf-8"))
FIRST = list({row["kind"]: row for row in reversed(PROGRAMS)}.values())
"""The first row of every kind."""


def problem_of(row: dict[str, Any], folder: Path) -> Problem:
    """Returns the problem that a row of the data set is read as."""
    form, name = row["format"], row.get("function")
    given = row.get("given")
    code = row.get("prints_code") or row.get("returns_code")
    expected = row.get("prints", row.get("returns")) if code is None else eval(code)  # noqa: S307  (our own table)
    if form == "apps":
        outputs = row.get("outputs") or [expected]
        inputs = [given] if name is None else [row["arguments"]] * len(outputs)
        data: dict[str, Any] = {"inputs": inputs, "outputs": outputs, **({} if name is None else {"fn_name": name})}
        record = {"question": "?", "input_output": json.dumps(data)}
    elif form == "codecontests":
        record = {"description": "?", "private_tests": {"input": [given], "output": [expected]}}
    elif form == "livecodebench":
        lines = given if name is None else "\n".join(map(json.dumps, row["arguments"]))
        test = {"input": lines, "output": expected if name is None else json.dumps(expected)}
        record = {
            "question_content": "?",
            "public_test_cases": "[]",
            "private_test_cases": json.dumps([test]),
            "metadata": json.dumps({} if name is None else {"func_name": name}),
        }
    elif form == "humaneval":
        record = {"prompt": row["prompt"], "entry_point": name, "test": row["test"]}
    else:
        record = {"text": "?", "code": row["code"], "test_list": row["tests"], "test_setup_code": row["setup"]}
    (problem,) = read_problems({"path": write(folder, [record]), "format": form}, "train")
    return problem


@pytest.mark.parametrize("row", OUTPUTS, ids=lambda row: "|".join(map(str, row[:3])))
def test_outputs_are_compared_as_graders_do(row: list[Any]) -> None:
    form, printed, expected, right, grader, *why = row
    assert same_output(printed, expected, by_words=form == "codecontests") is right
    assert bool(why) == (grader is not right), "a reason where a grader differs, and only there"


def check(rows: list[dict[str, Any]], folder: Path) -> None:
    problems = [problem_of(row, folder) for row in rows]
    found = verdicts([(problem, row["program"]) for problem, row in zip(problems, rows, strict=True)])
    wrong = [(row, got) for row, got in zip(rows, found, strict=True) if (got.fraction == 1) is not row["right"]]
    assert not wrong
    assert all(got.built for got in found)  # whatever the compiler warns of


def test_the_first_program_of_every_kind(tmp_path: Path) -> None:
    check(FIRST, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["apps", "codecontests", "livecodebench", "humaneval", "mbpp"])
def test_programs_pass_as_graders_say(form: str, tmp_path: Path) -> None:
    check([row for row in PROGRAMS if row["format"] == form], tmp_path)


@pytest.mark.slow
def test_outputs_in_the_sandbox(tmp_path: Path) -> None:
    rows = [
        {"format": form, "given": "", "prints": expected, "program": f"print({printed!r}, end='')", "right": right}
        for form, printed, expected, right, *_ in OUTPUTS
    ]
    check(rows, tmp_path)


def test_the_tables_are_complete() -> None:
    assert len(OUTPUTS) + len(PROGRAMS) >= 150
    assert min(Counter(row["kind"] for row in PROGRAMS).values()) >= 2
    for row in PROGRAMS:
        assert ("grader" in row) == ("why" in row) and row.get("grader", not row["right"]) is not row["right"]


@pytest.mark.parametrize("by_words", [False, True])
@pytest.mark.parametrize("first", ["2.0", "x", "1.5 ", ""])
def test_comparing_stops_at_the_first_difference(first: str, by_words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = outputs.same_word

    def counted(printed: str, expected: str) -> bool:
        asked.append(printed)
        return plain(printed, expected)

    monkeypatch.setattr(outputs, "same_word", counted)
    assert not same_output(f"{first}\n" + "1.0\n" * 1000, "1\n" * 1001, by_words)
    assert len(asked) <= 2
