"""Coding tasks from data sets: every format, rows that are left out, and rows that are refused."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from fakes.coding_problems import ROWS, verdict, write

from verl_atgrpo import EnvironmentConfigError
from verl_atgrpo.environments.code import formats as coding_formats
from verl_atgrpo.environments.code.formats import FORMATS, read_problems
from verl_atgrpo.environments.code.programs import Asserts, Call


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path) -> None:
    for row, problem in ROWS[name]:
        assert read_problems({"path": write(tmp_path, [row]), "format": name}, "train") == (problem,)
        if problem.solution and isinstance(problem.tests[0], Asserts):
            assert verdict(problem, problem.solution).fraction == 1


def test_formats_from_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = str(tmp_path / "rows.parquet")
    for name in ("codecontests", "mbpp"):
        row, problem = ROWS[name][0]
        pandas.DataFrame([row]).to_parquet(path)
        assert read_problems({"path": path, "format": name}, "train") == (problem,)


def test_unusable_rows_are_left_out(tmp_path: Path) -> None:
    good, problem = ROWS["apps"][0]
    huge = f'{{"fn_name": "f", "inputs": [[{"1" * 5000}]], "outputs": [[1]]}}'
    rows = [{**good, "input_output": text} for text in ("", "{}", huge, good["input_output"])]
    assert read_problems({"path": write(tmp_path, rows), "format": "apps"}, "train") == (problem,)


PAIR = "class Pair:\n  def __init__(self, a): self.a = a\ndef order(x): return x\ndef f(pairs, n=1): return n"


@pytest.mark.parametrize(
    ("tests", "setup", "usable"),
    [
        (["assert f([Pair(5)], 1) == 1"], "", False),
        (["assert f([1]) == 1", "assert f([Pair(5)]) == 1"], "", False),
        (["assert f(root) == 1"], "root = Pair(1)\nroot.left = Pair(2)", False),
        (["assert f(order([2, 1])) == 1"], "", False),
        (["assert isinstance(f([]), Pair)"], "", False),
        (["assert f(math.sqrt(4)) == 1"], "", False),
        (["assert f(gcd(2, 4)) == 1"], "from math import *", True),
        (["assert f(math.sqrt(4)) == 1"], "import math", True),
        (["assert f(np.sqrt(4)) == 1"], "import numpy.linalg as np", True),
        (["assert f([x for x in range(3)]) == len([1])"], "", True),
        (["assert f(Own(1)) == 1"], "class Own:\n  def __init__(self, a): self.a = a", True),
        (["assert f(sorted([2, 1], key=lambda item: -item)) == 1"], "", True),
        (
            ["def own(k):\n  try: return f(k)\n  except ValueError as error: return error\nassert own(1) == 1"],
            "",
            True,
        ),
    ],
)
def test_rows_whose_tests_need_the_solution_are_left_out(
    tests: list[str], setup: str, usable: bool, tmp_path: Path
) -> None:
    good, problem = ROWS["mbpp"][1]
    rows = [good, {"prompt": "Order.", "code": PAIR, "test_list": tests, "test_setup_code": setup}]
    read = read_problems({"path": write(tmp_path, rows), "format": "mbpp"}, "train")
    assert [one.statement for one in read] == ["Three.", "Order."][: 1 + usable]
    assert read[0] == problem


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        ("def f(x):\n    pass", ""),
        ("import math\ndef f(x):\n    'Doc.'", "import math"),
        ("from typing import List\nN = 3\n\ndef f(x: List[int]):\n    'Doc.'", "from typing import List\nN = 3"),
        ("def g(x):\n    return x\n\ndef f(x):\n    'Doc.'", "def g(x):\n    return x"),
        ("class A:\n    b = 1\n\ndef f(x):\n    'Doc.'", "class A:\n    b = 1"),
    ],
)
def test_programs_have_what_the_prompt_of_humaneval_defines_but_the_function(
    prompt: str, given: str, tmp_path: Path
) -> None:
    row = {"prompt": prompt, "entry_point": "f", "test": "def check(candidate):\n    assert candidate(1) == 1"}
    (problem,) = read_problems({"path": write(tmp_path, [row]), "format": "humaneval"}, "train")
    assert problem.given == given


@pytest.mark.parametrize(
    ("argument", "read"),
    [
        ({"1": 2}, {1: 2}),
        ({"-1": {"2": 3}}, {-1: {"2": 3}}),
        ({"1": 2, "a": 3}, {"1": 2, "a": 3}),
        ({"1": 2, "01": 3}, {"1": 2, "01": 3}),
        ({"1.5": 2}, {"1.5": 2}),
        ({"\u0661": 2}, {"\u0661": 2}),
        ([{"1": 2}], [{"1": 2}]),
        ({}, {}),
        ("1", "1"),
    ],
)
def test_integer_keys_that_json_made_texts(argument: Any, read: Any, tmp_path: Path) -> None:
    data = {"fn_name": "f", "inputs": [[0, argument]], "outputs": [1]}
    row = {"question": "?", "input_output": json.dumps(data)}
    (problem,) = read_problems({"path": write(tmp_path, [row]), "format": "apps"}, "train")
    assert isinstance(problem.tests[0], Call) and problem.tests[0].arguments == (0, read)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("apps", {"input_output": "{"}, "train.format=apps: row 0 of .* is not of this format: JSONDecodeError"),
        ("apps", {"input_output": '{"inputs": ["1"], "outputs": []}'}, "row 0 of .* ValueError: zip"),
        ("apps", {"input_output": ""}, "train.path=.*: no row has a test"),
        ("livecodebench", {"private_test_cases": "{"}, "neither JSON nor packed"),
        ("livecodebench", {"private_test_cases": "AAAA"}, "neither JSON nor packed"),
        ("humaneval", {"test": "def check(candidate"}, "SyntaxError"),
        ("humaneval", {"test": "x = 1"}, "row 0 of .* ValueError"),
        ("mbpp", {"code": "class Node: pass"}, "no row has a test"),
    ],
)
def test_malformed_rows(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path, [{**ROWS[name][0][0], **changes}])
    with pytest.raises(EnvironmentConfigError, match=rf"at_grpo\.environment\..*{message}") as caught:
        read_problems({"path": path, "format": name}, "train")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ LiveCodeBench's packed tests


def packed(pickled: bytes) -> str:
    return base64.b64encode(zlib.compress(pickled)).decode()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("size", [1, 300, 70_000])
def test_packed_tests_are_read_as_they_were_written(protocol: int, size: int, tmp_path: Path) -> None:
    row, problem = ROWS["livecodebench"][0]
    tests = [{"input": "1\n", "output": "2\n" + "é" * size, "testtype": "stdin"}]
    packed_tests = packed(pickle.dumps(json.dumps(tests, ensure_ascii=False), protocol))
    source = {"path": write(tmp_path, [{**row, "private_test_cases": packed_tests}]), "format": "livecodebench"}
    (read,) = read_problems(source, "val")
    assert [(test.given, test.expected) for test in read.tests] == [("1\n", tests[0]["output"]), ("2\n", "4\n")]
    assert read.statement == problem.statement


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


class Texts(str):
    """A text with a class that unpickling would import."""


@pytest.mark.parametrize(
    "pickled",
    [
        pickle.dumps(Hostile()),
        pickle.dumps(Hostile(), 0),
        pickle.dumps(["[]", Hostile()]),
        pickle.dumps(Texts("[]")),
        pickle.dumps(["[]"]),
        pickle.dumps(("[]", "[]")),
        pickle.dumps(b"[]"),
        pickle.dumps(None),
        pickle.dumps(bytearray(9)),
        b"cos\nsystem\n(S'touch hostile'\ntR.",
        b"\x80\x04\x8c\x02[]\x8c\x02[].",
        b"\x80\x04P7\n.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension
        pickle.dumps("[]")[:-1],
        b"",
        b".",
    ],
)
def test_other_pickles_are_refused_and_none_is_loaded(
    pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {**ROWS["livecodebench"][0][0], "private_test_cases": packed(pickled)}
    with pytest.raises(EnvironmentConfigError, match=r"row 0 of .* is not of this format: ValueError"):
        read_problems({"path": write(tmp_path, [row]), "format": "livecodebench"}, "val")
    assert os.listdir() == ["rows.jsonl"]


def test_packed_tests_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_formats, "MOST_BYTES", 1000)
    row = ROWS["livecodebench"][0][0]
    for text in (packed(pickle.dumps("1" * 10**6)), packed(pickle.dumps("[]") + bytes(10**6))):
        path = write(tmp_path, [{**row, "private_test_cases": text}])
        with pytest.raises(EnvironmentConfigError, match="larger than 1,000 bytes"):
            read_problems({"path": path, "format": "livecodebench"}, "val")
    short = packed(pickle.dumps("[]"))[:-4]
    path = write(tmp_path, [{**row, "private_test_cases": short}])
    with pytest.raises(EnvironmentConfigError, match="truncated"):
        read_problems({"path": path, "format": "livecodebench"}, "val")


def test_only_the_first_tests_are_kept(tmp_path: Path) -> None:
    row, problem = ROWS["codecontests"][0]
    source = {"path": write(tmp_path, [row]), "format": "codecontests"}
    assert read_problems(source, "train", max_tests=1)[0].tests == problem.tests[:1]
