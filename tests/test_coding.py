"""Coding: judging on golden tests, programs that try to cheat, every data format, rewards, prompts, whole episodes."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_atgrpo.environment import EnvironmentConfigError, make
from verl_atgrpo.environments.coding import Code, State, parse_test
from verl_atgrpo.environments.coding_formats import FORMATS, read_problems
from verl_atgrpo.environments.programs import Asserts, Call, Exchange, Problem, Test, Verdict, judge
from verl_atgrpo.sandbox import Limits, isolation
from verl_atgrpo.team import Decision, EpisodeRecord, ScriptedTeam, play

HUMANEVAL = Path("/work/shared/data/HumanEval.jsonl.gz")
needs_humaneval = pytest.mark.skipif(not HUMANEVAL.exists(), reason=f"{HUMANEVAL} is not here")
needs_namespaces = pytest.mark.skipif(isolation() != "namespaces", reason="this machine gives no namespaces")
LIMITS = Limits(cpu_seconds=1, wall_seconds=60.0)  # on the clock, a busy machine takes its time
Script = Callable[[str, int], str]

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
    return asyncio.run(judge(problem, program, tests or problem.tests, LIMITS))


def block(code: str) -> str:
    return f"Let me see.\n```python\n{code}\n```\n"


def test_block(given: object, expected: object) -> str:
    return f"I am sure.\nInput:\n```\n{given}\n```\nOutput:\n```\n{expected}\n```"


test_block.__test__ = False  # type: ignore[attr-defined]


# ------------------------------------------------------------------ judging


@pytest.mark.parametrize(
    ("program", "built", "ran", "passed"),
    [
        ("print(2 * int(input()))", True, True, [True] * 4),
        ("print(2 * int(input()), end='  \\n\\n ')", True, True, [True] * 4),  # trailing space does not matter
        ("n = int(input())\nif n < 0: raise SystemExit(3)\nprint(n * 2)", True, True, [True, True, False, True]),
        ("print(2 * int(input()))\n1 / 0", True, False, [False] * 4),
        ("print(2.0 * int(input()))", True, True, [False] * 4),  # numbers are texts
        ("print(2 * int(sys.stdin.read()))", True, False, [False] * 4),  # nothing is imported for it
        ("if __name__ == '__main__': print(2 * int(input()))", True, True, [True] * 4),
        ("", True, True, [False] * 4),
        ("print((", False, False, [False] * 4),
        ("import os; os.write(2, b'built\\n'); print((", False, False, [False] * 4),
        ("(" * 5000 + ")" * 5000, False, False, [False] * 4),
        ("-" * 100_000 + "1", False, False, [False] * 4),
        ("x = '\udc80'\0", False, False, [False] * 4),
    ],
)
def test_programs_from_stdin_to_stdout(program: str, built: bool, ran: bool, passed: list[bool]) -> None:
    result = verdict(DOUBLE, program)
    assert (result.built, result.ran, list(result.passed)) == (built, ran, passed)
    assert result.fraction == sum(passed) / 4


@pytest.mark.parametrize(
    ("program", "built", "ran", "passed"),
    [
        ("def add(a, b): return a + b", True, True, [True] * 4),
        ("class Solution:\n  def add(self, a, b): return a + b", True, True, [True] * 4),
        ("def add(a, b): return abs(a) + b", True, True, [True, False, True, True]),
        ("def add(a, b): return a + b if b else exit()", True, True, [True, True, True, False]),
        ("def add(a, b): return str(a + b)", True, True, [False] * 4),
        ("def add(a, b): return object()", True, False, [False] * 4),
        ("def add(a, b): raise ValueError('no')", True, False, [False] * 4),
        ("def add(a): return 3", True, False, [False] * 4),
        ("add = 3", True, False, [False] * 4),
        ("", True, False, [False] * 4),
        ("def add(a, b) return 3", False, False, [False] * 4),
        ("(" * 5000, False, False, [False] * 4),
        ("def add(a, b):\n  while a > 700: pass\n  return a + b", True, True, [True, True, False, False]),
        ("while True: pass", True, False, [False] * 4),
        ("x = []\nx.append(x)\ndef add(a, b): return x", True, False, [False] * 4),
    ],
)
def test_functions(program: str, built: bool, ran: bool, passed: list[bool]) -> None:
    result = verdict(ADD, program)
    assert (result.built, result.ran, list(result.passed)) == (built, ran, passed)


def test_values_keep_their_types() -> None:
    values = [
        None,
        True,
        -3,
        1.5,
        "é\n",
        b"\x00\xff",
        [1, [2]],
        {1, 2},
        {"a": {1: [2]}},
        1 + 2j,
        {(1, 2): frozenset()},
    ]
    echo = Problem("", tuple(Call((value,), value) for value in values), "echo")
    assert all(verdict(echo, "def echo(x): return x").passed)
    kinds = verdict(echo, "def echo(x): return type(x).__name__").shown
    assert [ast.literal_eval(kind) for kind in kinds] == [type(value).__name__ for value in values]
    pair = Problem("", (Call(([1, 2],), [2, [1]]),), "flip")
    assert verdict(pair, "def flip(x): return x[1], (x[0],)").passed == (True,)  # tuples count as lists
    strict = Problem("", (Asserts("assert flip((1, 2)) == (2, 1)"), Asserts("assert flip((1, 2)) == [2, 1]")), "flip")
    assert verdict(strict, "def flip(x): return x[1], x[0]").passed == (True, False)  # not in code of the data


def test_what_programs_gave_is_shown() -> None:
    assert verdict(DOUBLE, "print(7)", Exchange("1", "2")).shown == ("7",)
    assert verdict(DOUBLE, "print(7)\n1 / 0", Exchange("1", "2")).shown == ("7\nZeroDivisionError: division by zero",)
    assert verdict(DOUBLE, "while 1: 1", Exchange("1", "2")).shown == ("(time limit)",)
    assert "SyntaxError" in verdict(DOUBLE, "print((", Exchange("1", "2")).shown[0]
    assert verdict(ADD, "def add(a, b): return 'x'", Call((1, 2), 3)).shown == ("'x'",)
    assert verdict(ADD, "def add(a, b): raise KeyError(a)", Call((1, 2), 3)).shown == ("KeyError: 1",)
    assert verdict(ADD, "import os; os._exit(0)", Call((1, 2), 3)).shown == ("(the program has ended)",)
    assert "SyntaxError" in verdict(ADD, "def add(a, b) return", Call((1, 2), 3)).shown[0]
    assert len(verdict(ADD, "def add(a, b): return 'x' * 9999", Call((1, 2), 3)).shown[0]) == 1000


# ------------------------------------------------------------------ programs that try to cheat

FORGED = json.dumps([True, True, "3"])
HACKS = {
    "exit": "import sys; sys.exit(0)",
    "hard exit": "import os; os._exit(0)",
    "exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "equal to everything": "class E(int):\n  def __eq__(self, o): return True\n  def __ne__(self, o): return False\n"
    "  __hash__ = int.__hash__\ndef add(a, b): return E(-5)",
    "equal to everything, no number": "class E:\n  def __eq__(self, o): return True\ndef add(a, b): return E()",
    "print the report": f"import os, sys\ndef add(a, b): return -5\nfor fd in range(64):\n  try: os.write(fd, "
    f"b'true\\n' + b'{FORGED}\\n' * 9)\n  except OSError: pass\nprint('true'); print('{FORGED}\\n' * 9)",
    "print at exit": f"import atexit\natexit.register(lambda: print('true\\n' + '{FORGED}\\n' * 9, flush=True))\n",
    "other builtins": "import builtins, json\nbuiltins.print = builtins.compile = lambda *a, **k: True\n"
    "json.loads = lambda *a, **k: True\njson.dumps = lambda *a, **k: '[true, true, \"\"]'\n"
    "def add(a, b): return -5",
    "the caller's frames": "import sys\ndef add(a, b):\n  f = sys._getframe()\n  while f:\n    f.f_globals['exec'] = "
    "f.f_globals['listed'] = lambda *a: 0\n    f = f.f_back\n  return -5",
    "kill the tests": "import os, signal\nos.kill(os.getppid(), signal.SIGINT)\ndef add(a, b): return -5",
    "many answers": "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'[true, true]\\n' * 50)\n"
    "  except OSError: pass\ndef add(a, b): return -5",
    "raise": "def add(a, b): raise AssertionError",
    "leave a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()\nexit(0)",
}


@pytest.mark.parametrize("name", HACKS)
@pytest.mark.parametrize("problem", [ADD, ASSERTED], ids=["calls", "asserts"])
def test_no_hack_passes(name: str, problem: Problem) -> None:
    assert sum(verdict(problem, HACKS[name]).passed) == 0


SEARCH = """
import ctypes, gc, glob, os, sys
halves = ["kum", "quat"]
def files():
    folder = os.path.dirname(sys.argv[0])
    for path in [sys.argv[0], folder + "/stdin", *glob.glob("/proc/*/*"), *glob.glob("/tmp/sandbox-*/*")]:
        if os.path.isfile(path):
            try: yield open(path, "rb").read().decode("latin-1")
            except OSError: pass
def descriptors():
    for fd in range(3):
        try: os.lseek(fd, 0, 0)
        except OSError: pass
        yield os.read(fd, 1 << 20).decode("latin-1")
def objects():
    for o in gc.get_objects(): yield repr(o)
def parent():
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in {os.getppid(), 1}:
        if libc.ptrace(16, pid, 0, 0) == 0: yield "".join(halves)  # PTRACE_ATTACH
        fd = libc.syscall(434, pid, 0)  # pidfd_open
        for taken in range(3):
            if libc.syscall(438, fd, taken, 0) >= 0: yield "".join(halves)  # pidfd_getfd
        local = (ctypes.c_char * 64)()
        ours = (ctypes.c_size_t * 2)(ctypes.addressof(local), 64)
        theirs = (ctypes.c_size_t * 2)(id(halves), 64)  # an address of its parent's too, who was forked
        if libc.process_vm_readv(pid, ours, 1, theirs, 1, 0) > 0: yield "".join(halves)
def add(a):
    return sorted({f.__name__ for f in (files, descriptors, objects, parent) for t in f() if "".join(halves) in t})
"""


@needs_namespaces
def test_golden_values_are_nowhere_to_be_found() -> None:
    tests = (Call((1,), "kumquat"), Asserts("assert candidate(2) == 'kumquat'"), Call(("kumquat",), "apple"))
    found = verdict(ADD, SEARCH, *tests)
    assert found.ran and found.shown == ("[]", "[]", "['objects']")  # the last one: it would have been found


@needs_namespaces
def test_expected_output_is_nowhere_to_be_found() -> None:
    code = "import os, sys\nfolder = os.path.dirname(sys.argv[0])\nprint(sys.stdin.read(), os.listdir('.'))\n"
    code += "print(open(sys.argv[0]).read(), sorted(os.environ), os.path.exists(folder + '/stdin'))"
    found = verdict(DOUBLE, code, Exchange("in_1234", "out_" + "1234"))
    assert found.ran and "in_1234" in found.shown[0] and "out_" not in found.shown[0]


# ------------------------------------------------------------------ HumanEval


def humaneval() -> tuple[Problem, ...]:
    return read_problems({"path": str(HUMANEVAL), "format": "humaneval"}, "train")


async def judge_all(programs: list[tuple[Problem, str]]) -> list[Verdict]:
    return list(
        await asyncio.gather(*(judge(p, program, p.tests, Limits(wall_seconds=60.0)) for p, program in programs))
    )


def check_humaneval(problems: tuple[Problem, ...]) -> None:
    good = asyncio.run(judge_all([(problem, str(problem.solution)) for problem in problems]))
    assert [p.entry_point for p, v in zip(problems, good, strict=True) if v.fraction < 1] == []
    bad = asyncio.run(judge_all([(problem, f"{problem.statement}\n    return None") for problem in problems]))
    assert [p.entry_point for p, v in zip(problems, bad, strict=True) if v.fraction == 1] == []
    assert all(v.built and v.ran for v in bad)


@needs_humaneval
def test_some_of_humaneval() -> None:
    problems = humaneval()
    assert len(problems) == 164 and min(len(problem.tests) for problem in problems) == 1
    check_humaneval(tuple(p for i, p in enumerate(problems) if i in (0, 32, 38, 50, 99, 163)))


@pytest.mark.slow
@needs_humaneval
def test_all_of_humaneval() -> None:
    check_humaneval(humaneval())


# ------------------------------------------------------------------ formats

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
            Problem("Double it.", EXCHANGES, solution="print(2*int(input()))"),
        ),
        (
            {
                "question": "Add.",
                "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [0, 0]], "outputs": [[3], [0]]}),
                "solutions": "",
                "starter_code": "class Solution:",
            },
            Problem("Add.", (Call((1, 2), 3), Call((0, 0), 0)), "add", starter="class Solution:"),
        ),
        (
            {
                "question": "Lines.",
                "input_output": json.dumps({"inputs": [["1", "2"]], "outputs": [["3"]]}),
                "solutions": None,
                "starter_code": None,
            },
            Problem("Lines.", (Exchange("1\n2", "3"),)),
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
            Problem("Double it.", EXCHANGES, solution="py3"),
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
            Problem("Double it.", EXCHANGES),
        ),
        (
            {
                "question_content": "Add.",
                "public_test_cases": json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}]),
                "private_test_cases": "[]",
                "starter_code": "class Solution:\n    def add(self, a, b):",
                "metadata": json.dumps({"func_name": "add"}),
            },
            Problem("Add.", (Call(([1], 2), 3),), "add", starter="class Solution:\n    def add(self, a, b):"),
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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("apps", {"input_output": "{"}, "train.format=apps: row 0 of .* is not of this format: JSONDecodeError"),
        ("apps", {"input_output": '{"inputs": ["1"], "outputs": []}'}, "row 0 of .* ValueError: zip"),
        ("apps", {"input_output": ""}, "train.path=.*: no row has a test"),
        ("livecodebench", {"private_test_cases": "eJxrYJmqCAAFYQHg"}, "not JSON; the compressed pickle .* save the"),
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


# ------------------------------------------------------------------ the environment


def sections(folder: Path, name: str = "apps") -> dict[str, Any]:
    rows = [row for row, _ in ROWS[name]]
    return {
        "train": {"path": write(folder, rows), "format": name},
        "val": {"path": write(folder, rows), "format": name},
    }


def environment(folder: Path, **options: Any) -> Code:
    env = make("code", **{**sections(folder), "cpu_seconds": 9, **options})
    assert isinstance(env, Code)
    return env


def episode(env: Code, problem: Problem, coder: Script, tester: Script, candidates: int = 1) -> EpisodeRecord:
    return asyncio.run(play(env, problem, ScriptedTeam({"coder": coder, "tester": tester}, candidates=candidates)))


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    return sorted((d for d in record.decisions if d.agent == agent), key=lambda decision: decision.turn)


def test_tasks(tmp_path: Path) -> None:
    env = environment(tmp_path, max_tests=1)
    assert env.size("train") == env.size("val") == 3
    assert env.task("val", 1).tests == (Call((1, 2), 3),)
    one, other = Problem(" Double\n it. ", EXCHANGES), Problem("double it.", EXCHANGES[:1])
    assert env.fingerprint(one) == env.fingerprint(other) != env.fingerprint(DOUBLE)


@pytest.mark.parametrize(
    ("reply", "problem", "test"),
    [
        (test_block("3", "6"), DOUBLE, Exchange("3\n", "6\n")),
        (test_block("", "6"), DOUBLE, Exchange("\n", "6\n")),
        ("Input:\n```\n```\n\nOutput:\n```text\n6\n```", DOUBLE, Exchange("", "6\n")),
        (test_block("1", "2") + "\nno:\n" + test_block("3", "6"), DOUBLE, Exchange("3\n", "6\n")),
        (test_block("1, [2, (3,)]", "{'a': None}"), ADD, Call((1, [2, (3,)]), {"a": None})),
        (test_block("1,\n2,", "3"), ADD, Call((1, 2), 3)),
        (test_block("", "3"), ADD, Call((), 3)),
        ("Input: 3\nOutput: 6", DOUBLE, None),
        ("```\n3\n```\n```\n6\n```", DOUBLE, None),
        ("Output:\n```\n3\n```\nInput:\n```\n6\n```", DOUBLE, None),
        (test_block("1, x", "3"), ADD, None),
        (test_block("__import__('os').system('echo')", "3"), ADD, None),
        (test_block("1, 2", "1 +"), ADD, None),
        (test_block("{[]}", "3"), ADD, None),
        (test_block("1] + [2", "3"), ADD, None),
        *((test_block(deep * 1000, "3"), ADD, None) for deep in ("-", "[", "(", "{1:", "~", "not ")),
        (test_block("[" * 900 + "]" * 900, "3"), ADD, None),
        (test_block("9" * 3000, "3"), ADD, None),
        ("Input:\n```\n" * 3000, ADD, None),
        ("Input:\n" + "```\n" * 3000, ADD, None),
    ],
)
def test_parse_test(reply: str, problem: Problem, test: Test | None) -> None:
    assert parse_test(reply, problem) == test


def test_rewards(tmp_path: Path) -> None:
    programs = {
        "no program": (0, 0),
        "```python\nprint(2 * int(input()))": (0, 0),
        block("print(("): (0, 0),
        block("1 / 0"): (0, 0.1),
        block("import os; os._exit(0)"): (0, 0.2),
        block("print(6)"): (0.25, 0.4),
        block("print(abs(2 * int(input())))"): (0.75, 0.8),
        block("print(2 * int(input()))"): (1, 1),
    }
    tests = {
        "no test": 0,
        test_block("5", "11"): 0.2,
        test_block("five", "10"): 0.2,
        test_block("5", "10"): 1,
    }
    said, asked = list(programs), list(tests)
    env = environment(tmp_path, max_turns=1)
    record = episode(env, DOUBLE, lambda p, k: said[k], lambda p, k: asked[k % 4], candidates=len(said))
    (coder,), (tester,) = of("coder", record), of("tester", record)
    assert [c.score.team for c in coder.candidates] == pytest.approx([team for team, _ in programs.values()])
    assert [c.score.local for c in coder.candidates] == pytest.approx([local for _, local in programs.values()])
    assert coder.committed == len(said) - 1
    assert [c.score.local for c in tester.candidates] == pytest.approx([*tests.values()] * 2)
    assert [c.score.team for c in tester.candidates] == [0] * len(said)
    assert record.outcome.success and record.outcome.team_reward == 1
    assert record.outcome.metrics == {"turns": 1, "passed": 1, "agreed": 1}


def test_rewards_without_solutions(tmp_path: Path) -> None:
    for env, problem in (
        (environment(tmp_path, tester_reward="format"), DOUBLE),
        (environment(tmp_path), Problem("", DOUBLE.tests)),
    ):
        for reply, local in (("no test", 0), (test_block("5", "10"), 0.2), (test_block("5", "11"), 0.2)):
            assert asyncio.run(env.score_test(problem, reply)).local == local


def test_hostile_replies_earn_no_more_than_the_floor(tmp_path: Path) -> None:
    replies = [
        " ", "```python", "\0", "\udc80", "Input:" * 500, "`" * 5000,
        block("'\udc80'"), block("\0"), block("import os; os.kill(0, 9)"), block("print('x' * 10**8)"),
        block("import sys; sys.stdout.buffer.write(b'\\xff' * 99)"), block("x = bytearray(1 << 40)"),
        test_block("\0", "\udc80"), test_block("1e999", "-" * 2000), test_block("{", "}"),
    ]  # fmt: skip
    env = environment(tmp_path, max_turns=1, tester_reward="golden")
    for problem in (replace(DOUBLE, tests=DOUBLE.tests[:1]), ADD):
        record = episode(env, problem, lambda p, k: replies[k], lambda p, k: replies[k], len(replies))
        assert not record.outcome.success and record.outcome.team_reward == 0
        for decision in record.decisions:
            assert all(c.score.team == 0 and c.score.local <= 0.2 for c in decision.candidates)


def test_agents_act_at_once_and_a_mismatch_goes_back_to_both(tmp_path: Path) -> None:
    programs = [block("print(int(input()) + 3)"), block("print(int(input()) * 2)  # better"), "never asked"]
    tests = [test_block("2041", "4082"), "nothing new"]
    seen: list[str] = []

    def coder(prompt: str, k: int) -> str:
        seen.append(prompt)
        return programs[len(seen) - 1]

    def tester(prompt: str, k: int) -> str:
        return tests["so far" in prompt]

    record = episode(environment(tmp_path), DOUBLE, coder, tester)
    first, second = of("coder", record), of("tester", record)
    assert len(first) == len(second) == 2  # they agree in the second turn
    assert record.outcome.success and record.outcome.metrics == {"turns": 2, "passed": 1, "agreed": 1}
    for decisions in (first, second):
        before, after = map(prompt_of, decisions)
        assert "2041" not in before and "+ 3" not in before and "so far" not in before
        for told in ("> print(int(input()) + 3)", "> 2041", "> 4082", "On this input the program gave:\n> 2044\n"):
            assert told in after
        assert "better" not in after
        assert DOUBLE.statement in before and DOUBLE.statement in after


def test_feedback_on_functions(tmp_path: Path) -> None:
    replies = {"coder": block("def add(a, b): return [a]"), "tester": test_block("2041, 'x'", "{1: 2}")}
    env = environment(tmp_path, max_turns=2)
    record = episode(env, ADD, lambda p, k: replies["coder"], lambda p, k: replies["tester"])
    for agent in env.agents:
        for told in ("> def add(a, b): return [a]", "> 2041, 'x'\n", "> {1: 2}\n", "gave:\n> [2041]\n"):
            assert told in prompt_of(of(agent, record)[1])
        assert "Start from:\n```python\ndef add(a, b):\n```" in prompt_of(of(agent, record)[0])
    assert not record.outcome.success and record.outcome.metrics == {"turns": 2, "passed": 0, "agreed": 0}


def test_the_last_program_counts_and_agreement_is_not_success(tmp_path: Path) -> None:
    wrong, right = block("print(6)"), block("print(2 * int(input()))")
    env = environment(tmp_path, max_turns=2)
    agreeing = episode(env, DOUBLE, lambda p, k: wrong, lambda p, k: test_block("3", "6"))
    assert not agreeing.outcome.success and agreeing.outcome.team_reward == 0.25
    assert agreeing.outcome.metrics == {"turns": 1, "passed": 0.25, "agreed": 1}
    for success, programs in ((False, (right, wrong)), (True, (wrong, right))):
        record = episode(
            env, DOUBLE, lambda p, k, said=programs: said["so far" in p], lambda p, k: test_block("1", "99")
        )
        assert record.outcome.success is success and record.outcome.metrics["agreed"] == 0
    standing = episode(env, DOUBLE, lambda p, k: "-" if "so far" in p else right, lambda p, k: test_block("1", "99"))
    assert standing.outcome.success  # nothing new: the program stands
    nothing = episode(env, DOUBLE, lambda p, k: "-", lambda p, k: "-")
    assert nothing.outcome.team_reward == 0 and len(nothing.decisions) == 4


def test_the_single_agent_is_asked_what_the_team_is_asked(tmp_path: Path) -> None:
    def answer(prompt: str, k: int) -> str:
        return test_block("1, 2", 4) if "Write one test" in prompt else block("def add(a, b): return 3")

    options = {"max_turns": 3, "tester_reward": "format"}
    single = make("code_single", **sections(tmp_path), **options)
    record = episode(environment(tmp_path, **options), ADD, answer, answer)
    alone = asyncio.run(play(single, ADD, ScriptedTeam({"solo": answer})))
    assert single.agents == ("solo",)
    assert sorted(d.prompt_ids for d in alone.decisions) == sorted(d.prompt_ids for d in record.decisions)
    assert [d.turn for d in of("solo", alone)] == list(range(6))
    assert alone.outcome == record.outcome


def test_no_golden_test_or_solution_is_in_a_prompt(tmp_path: Path) -> None:
    env = environment(tmp_path)
    for problem in (DOUBLE, ADD, ASSERTED):
        own = Call((1, 1), 5) if problem.entry_point else Exchange("7", "5")
        shown = verdict(problem, "print(4)\ndef add(a, b): return 4", own)
        for state in (State(problem), State(problem, "print(4)", own, shown)):
            for ask in (env.coder_prompt, env.tester_prompt):
                text = "\n".join(message["content"] for message in ask(state))
                for hidden in ("500", "1000", "777", "222", "999", "0.5", "a + b", "2 * int", "twice", "candidate"):
                    assert hidden not in text


@needs_humaneval
def test_no_golden_test_of_humaneval_is_in_a_prompt() -> None:
    section = {"path": str(HUMANEVAL), "format": "humaneval"}
    env = Code(section, section)
    for index in range(env.size("val")):
        problem = env.task("val", index)
        bodies = str(problem.solution).removeprefix(problem.statement).strip()
        for ask in (env.coder_prompt, env.tester_prompt):
            text = "\n".join(message["content"] for message in ask(State(problem)))
            assert "assert candidate" not in text and "METADATA" not in text and bodies not in text


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_tests": 0}, "max_tests=0"),
        ({"max_tests": 2.5}, "max_tests=2.5"),
        ({"cpu_seconds": 0}, "cpu_seconds=0"),
        ({"memory_mb": 1}, "memory_mb=1"),
        ({"tester_reward": "solution"}, "tester_reward='solution'"),
        ({"train": None}, "train=None"),
        ({"val": "x.jsonl"}, "val='x.jsonl'"),
        ({"val": {"path": "x.jsonl"}}, "val.format=None"),
        ({"val": {"path": "x.jsonl", "format": "codeforces"}}, "val.format='codeforces'"),
        ({"val": {"path": "x.jsonl", "format": ["apps"]}}, "val.format=['apps']"),
        ({"val": {"path": "/nowhere/x.jsonl", "format": "apps"}}, "val.path='/nowhere/x.jsonl'"),
        ({"val": {"format": "apps"}}, "val="),
        ({"style": "compact"}, "style is not an option"),
    ],
)
def test_option_errors_name_key_and_value(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    for name in ("code", "code_single"):
        with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
            make(name, **{**sections(tmp_path), **options})
        assert "\n" not in str(caught.value)


def test_golden_tester_reward_needs_solutions(tmp_path: Path) -> None:
    for name in ("code", "code_single"):
        with pytest.raises(EnvironmentConfigError, match=r"environment\.tester_reward='golden': .* use format"):
            make(name, **sections(tmp_path, "livecodebench"))
        assert make(name, **sections(tmp_path, "livecodebench"), tester_reward="format").size("train") == 2
    row = {key: ROWS["apps"][0][0][key] for key in ("question", "input_output")}  # no column at all
    section = {"path": write(tmp_path, [row]), "format": "apps"}
    with pytest.raises(EnvironmentConfigError, match="tester_reward='golden'"):
        Code(section, section)
