"""Running programs on golden tests: programs, functions, shown results, exploits, HumanEval."""

from __future__ import annotations

import ast
import asyncio
import json

import pytest
from fakes.coding_problems import (
    ADD,
    ASSERTED,
    DOUBLE,
    humaneval,
    needs_humaneval,
    needs_namespaces,
    verdict,
    verdicts,
)
from waiting import HANG

from verl_atgrpo.environments.code.programs import Asserts, Call, Exchange, Problem, judge
from verl_atgrpo.sandbox.runner import Limits

# ------------------------------------------------------------------ judging


@pytest.mark.parametrize(
    ("program", "built", "ran", "passed"),
    [
        ("print(2 * int(input()))", True, True, [True] * 4),
        ("print(2 * int(input()), end='  \\n\\n ')", True, True, [True] * 4),  # trailing spaces are ignored
        ("n = int(input())\nif n < 0: raise SystemExit(3)\nprint(n * 2)", True, True, [True, True, False, True]),
        ("print(2 * int(input()))\n1 / 0", True, False, [False] * 4),
        ("print(2.0 * int(input()))", True, True, [True] * 4),  # numbers are compared as numbers
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


def test_results_of_programs_are_shown() -> None:
    assert verdict(DOUBLE, "print(7)", Exchange("1", "2")).shown == ("7",)
    assert verdict(DOUBLE, "print(7)\n1 / 0", Exchange("1", "2")).shown == ("7\nZeroDivisionError: division by zero",)
    assert verdict(DOUBLE, "while 1: 1", Exchange("1", "2")).shown == ("(time limit)",)
    # Addresses would differ between runs.
    assert verdict(DOUBLE, "print(map(int, '12'))", Exchange("1", "2")).shown == ("<map object>",)
    assert "SyntaxError" in verdict(DOUBLE, "print((", Exchange("1", "2")).shown[0]
    assert verdict(ADD, "def add(a, b): return 'x'", Call((1, 2), 3)).shown == ("'x'",)
    assert verdict(ADD, "def add(a, b): raise KeyError(a)", Call((1, 2), 3)).shown == ("KeyError: 1",)
    assert verdict(ADD, "import os; os._exit(0)", Call((1, 2), 3)).shown == ("(the program has ended)",)
    assert "SyntaxError" in verdict(ADD, "def add(a, b) return", Call((1, 2), 3)).shown[0]
    assert len(verdict(ADD, "def add(a, b): return 'x' * 9999", Call((1, 2), 3)).shown[0]) == 1000


def test_as_many_tests_as_a_problem_has_are_reported() -> None:
    """Their reports together are longer than the limit on output."""
    tests = tuple(Call((number,), "x" * 3000 + str(number)) for number in range(3000))
    problem = Problem("", tests, "f")
    limits = Limits(cpu_seconds=20, wall_seconds=HANG, memory_mb=512, output_bytes=300_000)
    found = asyncio.run(judge(problem, "def f(n): return 'x' * 3000 + str(n)", tests, limits))
    assert found.fraction == 1 and len(found.shown[0]) == 1000


@pytest.mark.parametrize(
    "code",
    [
        "import re; re.sub('\\d', '', '1')",
        "assert (1, 'always')",
        "x = 1 is 1",
        "x = 3 if 1 else [1](2)",
        "def f():\n  '''\\W'''",
        "\n".join(f"x = '\\d'  # {number}" for number in range(3000)),
    ],
)
def test_a_warning_of_the_compiler_is_no_error(code: str) -> None:
    for problem, end in ((DOUBLE, "print(6)"), (ADD, "def add(a, b): return 3")):
        found = verdict(problem, f"{code}\n{end}", problem.tests[0])
        assert (found.built, found.ran, found.passed) == (True, True, (True,))


@pytest.mark.parametrize(("printed", "passed"), [(100_000, True), (100_001, False), (700_000, False)])
def test_what_may_be_printed_grows_with_what_is_expected(printed: int, passed: bool) -> None:
    problem = Problem("", (Exchange("", "7 " * 100_000),))
    limits = Limits(cpu_seconds=20, wall_seconds=HANG, output_bytes=1000)
    found = asyncio.run(judge(problem, f"print('7.0000 ' * {printed})", problem.tests, limits))
    assert found.passed == (passed,) and found.ran is (printed < 400_000)


def test_more_than_a_right_program_prints_is_too_much() -> None:
    limits = Limits(cpu_seconds=20, wall_seconds=HANG, output_bytes=500)
    found = asyncio.run(judge(DOUBLE, "print('6' * 2000)", DOUBLE.tests[:1], limits))
    assert not found.ran and found.shown[0].endswith("\n(too much output)")


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
def test_no_exploit_passes(name: str, problem: Problem) -> None:
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
def test_programs_cannot_find_golden_values() -> None:
    tests = (Call((1,), "kumquat"), Asserts("assert candidate(2) == 'kumquat'"), Call(("kumquat",), "apple"))
    found = verdict(ADD, SEARCH, *tests)
    assert found.ran and found.shown == ("[]", "[]", "['objects']")  # the last one: it would have been found


@needs_namespaces
def test_programs_cannot_find_expected_output() -> None:
    code = "import os, sys\nfolder = os.path.dirname(sys.argv[0])\nprint(sys.stdin.read(), os.listdir('.'))\n"
    code += "print(open(sys.argv[0]).read(), sorted(os.environ), os.path.exists(folder + '/stdin'))"
    found = verdict(DOUBLE, code, Exchange("in_1234", "out_" + "1234"))
    assert found.ran and "in_1234" in found.shown[0] and "out_" not in found.shown[0]


@needs_namespaces
def test_asserts_may_name_arguments() -> None:
    code = "def add(xs, n=1, reverse=False):\n    return sorted(xs, reverse=reverse)[:n]\n"
    asserts = ("add([3, 1, 2], n=2) == [1, 2]", "candidate([3, 1], 2, reverse=True) == [3, 1]", "add([3], m=2) == [3]")
    found = verdict(ADD, code, *(Asserts(f"assert {said}") for said in asserts))
    assert found.passed == (True, True, False) and "unexpected keyword argument 'm'" in found.shown[2]


# ------------------------------------------------------------------ HumanEval


def check_humaneval(problems: tuple[Problem, ...]) -> None:
    good = verdicts([(problem, str(problem.solution)) for problem in problems])
    assert [p.entry_point for p, v in zip(problems, good, strict=True) if v.fraction < 1] == []
    bad = verdicts([(problem, f"{problem.statement}\n    return None") for problem in problems])
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


@pytest.mark.slow
@needs_humaneval
def test_nothing_passes_no_test_of_humaneval() -> None:
    problems = humaneval()
    said = [*((problem, "") for problem in problems), (problems[0], "pass")]
    assert {one.fraction for one in verdicts(said)} == {0}
