"""Problems, rows of every data format and replies for the tests of coding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG

from verl_atgrpo.environments.code.formats import read_problems
from verl_atgrpo.environments.code.programs import Asserts, Call, Exchange, Problem, Test, Verdict, judge
from verl_atgrpo.sandbox.runner import Limits, isolation

HUMANEVAL = Path("/work/shared/data/HumanEval.jsonl.gz")
needs_humaneval = pytest.mark.skipif(not HUMANEVAL.exists(), reason=f"{HUMANEVAL} is missing")
needs_namespaces = pytest.mark.skipif(isolation() != "namespaces", reason="this machine has no namespaces")

DOUBLE = Problem(
    "Read a number, print its double.",
    (Exchange("3\n", "6\n"), Exchange("500\n", "1000\n"), Exchange("-2\n", "-4"), Exchange("0", "0")),
    solution="print(2 * int(input()))",
)
ADD = Problem(
    "Add two numbers.",
    (Call((1, 2), 3), Call((-1, 1), 0), Call((777, 222), 999), Call((0.5, 0), 0.5)),
    "add",
    starter="def add(a, b):",
    solution="def add(a, b): return a + b",
)
ASSERTED = Problem(
    "Add two numbers.",
    (Asserts("assert candidate(777, 222) == 999"), Asserts("for i in range(3): assert add(i, i) == twice(i)")),
    "add",
    setup="def twice(i): return 2 * i",
)


def verdict(problem: Problem, program: str, *tests: Test) -> Verdict:
    # The limit of CPU time ends infinite loops; it is many times what starting a program takes.
    limits = Limits(cpu_seconds=1 if "while" in program else 20, wall_seconds=HANG)
    return asyncio.run(judge(problem, program, tests or problem.tests, limits))


def humaneval() -> tuple[Problem, ...]:
    return read_problems({"path": str(HUMANEVAL), "format": "humaneval"}, "train")


def verdicts(programs: Sequence[tuple[Problem, str]]) -> list[Verdict]:
    """Judges all programs by all tests of their problems."""
    limits = Limits(cpu_seconds=20, wall_seconds=HANG)

    async def judged() -> list[Verdict]:
        return await asyncio.gather(*(judge(problem, program, problem.tests, limits) for problem, program in programs))

    return asyncio.run(judged())


def block(code: str) -> str:
    return f"Let me see.\n```python\n{code}\n```\n"


def test_block(given: object, expected: object) -> str:
    return f"I am sure.\nInput:\n```\n{given}\n```\nOutput:\n```\n{expected}\n```"


test_block.__test__ = False  # type: ignore[attr-defined]


EXCHANGES = (Exchange("1\n", "2\n"), Exchange("2\n", "4\n"))
CHECK = """
METADATA = {'author': 'x'}
def helper(x): return x

def check(candidate):
    start = 1
    assert True, "always"
    assert candidate(start) == helper(2)
    start += 1
    for i in range(start):
        assert candidate(i) == 2 * i
"""
ROWS: dict[str, list[tuple[dict[str, Any], Problem]]] = {
    "apps": [
        (
            {
                "question": "Double it.",
                "input_output": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}),
                "solutions": json.dumps(["print(2*int(input()))", "other"]),
                "starter_code": "",
            },
            Problem("Double it.", EXCHANGES, solution="print(2*int(input()))", contest=True),
        ),
        (
            {
                "question": "Add.",
                "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [0, 0]], "outputs": [[3], [0]]}),
                "solutions": "",
                "starter_code": "class Solution:",
            },
            Problem(
                "Add.",
                (Call((1, 2), [3], wrapped=True), Call((0, 0), [0], wrapped=True)),
                "add",
                starter="class Solution:",
                contest=True,
            ),
        ),
        (
            {
                "question": "Lines.",
                "input_output": json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]}),
                "solutions": None,
                "starter_code": None,
            },
            Problem("Lines.", (Exchange("1\n2", "3"),), contest=True),
        ),
    ],
    "codecontests": [
        (
            {
                "description": "Double it.",
                "public_tests": {"input": ["2\n"], "output": ["4\n"]},
                "private_tests": {"input": ["1\n"], "output": ["2\n"]},
                "generated_tests": {"input": [], "output": []},
                "solutions": {"language": [1, 2, 3, 3], "solution": ["print 2*input()", "c++", "py3", "py3 too"]},
            },
            Problem("Double it.", EXCHANGES, solution="py3", contest=True, by_words=True),
        )
    ],
    "livecodebench": [
        (
            {
                "question_content": "Double it.",
                "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
                "private_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
                "starter_code": "",
                "metadata": "{}",
            },
            Problem("Double it.", EXCHANGES, contest=True),
        ),
        (
            {
                "question_content": "Add.",
                "public_test_cases": json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}]),
                "private_test_cases": "[]",
                "starter_code": "class Solution:\n    def add(self, a, b):",
                "metadata": json.dumps({"func_name": "add"}),
            },
            Problem(
                "Add.", (Call(([1], 2), 3),), "add", starter="class Solution:\n    def add(self, a, b):", contest=True
            ),
        ),
    ],
    "humaneval": [
        (
            {
                "prompt": 'def f(x):\n    """Double it."""\n',
                "entry_point": "f",
                "test": CHECK,
                "canonical_solution": "    return 2 * x\n",
            },
            Problem(
                'def f(x):\n    """Double it."""\n',
                (
                    Asserts("start = 1\nassert candidate(start) == helper(2)"),
                    Asserts("start = 1\nstart += 1\nfor i in range(start):\n    assert candidate(i) == 2 * i"),
                ),
                "f",
                setup='def f(x):\n    """Double it."""\n\n'
                "METADATA = {'author': 'x'}\n\ndef helper(x):\n    return x",
                solution='def f(x):\n    """Double it."""\n    return 2 * x\n',
            ),
        )
    ],
    "mbpp": [
        (
            {
                "text": "Double it.",
                "code": "def two(): return 2\r\ndef f(x, y=1): return two() * x",
                "test_list": ["assert f(1) == 2", "assert math.isclose(f(2), 4)"],
                "test_setup_code": "import math",
            },
            Problem(
                "Double it.",
                (Asserts("assert f(1) == 2"), Asserts("assert math.isclose(f(2), 4)")),
                "f",
                starter="def f(x, y=1):",
                setup="import math",
                given="import math",
                solution="def two(): return 2\r\ndef f(x, y=1): return two() * x",
            ),
        ),
        (
            {"prompt": "Three.", "code": "def g(): return 3", "test_list": ["assert g() == 3"], "test_imports": []},
            Problem("Three.", (Asserts("assert g() == 3"),), "g", starter="def g():", solution="def g(): return 3"),
        ),
    ],
}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
