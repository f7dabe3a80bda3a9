"""Coding tasks, and running programs on their tests: in the sandbox, never in this process.

Programs never get expected values. Printed output is compared here. A function is loaded in a separate process that
serves calls; its parent (`function_harness`) reads the tests from standard input after the fork, calls the function
through pipes that carry plain data, and is the only one that can write to standard output. So no program passes a test
by exiting, by printing a test run's output, by replacing builtins or `__eq__`, at exit, or by reading files,
descriptors or memory. Not covered: the examples of a statement may be among the golden tests, and at lower isolation
levels programs can read whatever their user can (docs/sandbox.md), so data sets must not be readable there.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import importlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_atgrpo.environments.code import function_harness
from verl_atgrpo.environments.code.function_harness import pack
from verl_atgrpo.environments.code.outputs import same_output
from verl_atgrpo.environments.common.running import BUILT, runnable
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits, run_python, without_addresses

_LONG = 1 << 16
"""Characters of an output from which it is compared in another thread."""
_LONGER = 8
"""Bytes of output that a program may print for each expected one, as numbers have several forms."""
_OF_A_TEST = 64
"""Bytes that the report of a function's test has, besides what is shown."""
# Later ones win, as in the graders; `typing` comes first, so that `Counter` is the one of `collections`.
_STARS = (
    *("typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_MODULES = (*_STARS, "time", "fractions")
_WORD = re.compile(r"[^\W\d]\w*")
_DEEP = """
import resource, sys
sys.setrecursionlimit(50_000)
getattr(sys, "set_int_max_str_digits", id)(50_000)
_hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (64 << 20 if _hard < 0 else min(_hard, 64 << 20), _hard))
del resource, sys, _hard
"""
"""LiveCodeBench's limits on recursion and digits, and a stack that has room for such recursion in C as well."""


@dataclass(frozen=True)
class Exchange:
    """A test of a program: standard input and expected output."""

    given: str
    expected: str


@dataclass(frozen=True)
class Call:
    """A test of a function: arguments and expected result, plain values, compared as by `function_harness.same`."""

    arguments: tuple[Any, ...]
    expected: Any
    wrapped: bool = False
    """Whether `expected` is a list of one element which may be the result itself, as in many rows of APPS."""


@dataclass(frozen=True)
class Asserts:
    """A test of a function: code that calls it, by name or as `candidate`, and raises if the result is wrong."""

    code: str


Test = Exchange | Call | Asserts


@dataclass(frozen=True)
class Problem:
    """A coding task."""

    statement: str
    tests: tuple[Test, ...]
    """Golden tests, which no prompt shows."""
    entry_point: str | None = None
    """The function to write (or method of a class Solution); None for a program from stdin to stdout."""
    starter: str = ""
    """Code to start from, shown with the statement."""
    setup: str = ""
    """Trusted code that the `Asserts` need."""
    solution: str | None = None
    """A program that passes all tests."""
    given: str = ""
    """Trusted code that runs before a program, in its namespace: what the data set's grader gives."""
    contest: bool = False
    """Whether programs have the names and limits that graders of contests give (`contest_names`)."""
    by_words: bool = False
    """Whether lines of output do not count, as in `outputs.same_output`."""


@dataclass(frozen=True)
class Verdict:
    """Results of a program on some tests; `passed` and `shown` have one entry per test."""

    built: bool
    """Whether it compiles."""
    ran: bool
    """Whether it ended or returned without error on at least one test."""
    passed: tuple[bool, ...]
    shown: tuple[str, ...]
    """Output, result or error; at most 1000 characters."""

    @property
    def fraction(self) -> float:
        """Fraction of passed tests."""
        return sum(self.passed) / len(self.passed)


async def judge(problem: Problem, program: str, tests: Sequence[Test], limits: Limits) -> Verdict:
    """Runs a program on at least one test of a problem, all of the problem's kind.

    Every `Exchange` is a separate run under `limits`, whose `output_bytes` grow with the expected output. All calls of
    a function share one run, so after a call that times out the remaining tests count as failed. Arguments and results
    are None, booleans, numbers, texts, bytes, and what holds or yields them; anything else is an error of the program.
    """
    given = problem.given
    if problem.contest:
        given += contest_names(program, problem.entry_point)
    if problem.entry_point is not None:
        return await _judge_function(problem, program, given, tests, limits)
    exchanges = [test for test in tests if isinstance(test, Exchange)]
    source = runnable(program, given)

    async def judged(test: Exchange) -> tuple[ExecutionResult, bool]:
        output_bytes = limits.output_bytes + _LONGER * len(test.expected.encode(errors="replace"))
        run = await run_python(source, stdin=test.given, limits=replace(limits, output_bytes=output_bytes))
        if not run.ok:
            return run, False
        compared = run.stdout, test.expected, problem.by_words
        if len(run.stdout) > _LONG:
            return run, await asyncio.to_thread(same_output, *compared)
        return run, same_output(*compared)

    runs, passed = zip(*await asyncio.gather(*map(judged, exchanges)), strict=True)
    return Verdict(
        built=any(run.stderr.startswith(BUILT) for run in runs),
        ran=any(run.ok for run in runs),
        passed=passed,
        shown=tuple(map(_shown, runs)),
    )


def _shown(run: ExecutionResult) -> str:
    printed = run.printed.rstrip()[:1000]
    if run.ok:
        return printed
    errors = run.stderr.removeprefix(BUILT).strip().split("\n")
    return f"{printed}\n{_ending(run) or errors[-1]}".strip()[:1000]


def _ending(run: ExecutionResult) -> str:
    return "(time limit)" if run.timed_out else "(too much output)" if run.output_truncated else ""


async def _judge_function(
    problem: Problem, program: str, given: str, tests: Sequence[Test], limits: Limits
) -> Verdict:
    def work_of(test: Asserts | Call) -> object:
        if isinstance(test, Asserts):
            return test.code
        results = [test.expected, *(test.expected if test.wrapped else ())]
        return [pack(list(test.arguments)), pack(results)]

    work = {
        "setup": problem.setup,
        "tests": [work_of(test) for test in tests if not isinstance(test, Exchange)],
    }
    run = await run_python(
        f"{inspect.getsource(function_harness)}\nrun_tests({program!r}, {problem.entry_point!r}, {given!r})",
        stdin=json.dumps(work),
        limits=replace(limits, output_bytes=limits.output_bytes + _OF_A_TEST * len(tests)),
    )
    # A limit may have truncated the last line.
    built, *results = map(json.loads, run.stdout.split("\n")[:-1] or ["false"])
    missing = len(tests) - len(results)
    return Verdict(
        built=built,
        ran=any(returned for _, returned, _ in results),
        passed=tuple(passed for passed, _, _ in results) + (False,) * missing,
        shown=tuple(without_addresses(shown) for _, _, shown in results) + (_ending(run) or "(no result)",) * missing,
    )


# ------------------------------------------------------------------ names of contests


def contest_names(program: str, entry_point: str | None) -> str:
    """Returns the code that gives a program what graders of contests give: names, except its own, and deep recursion.

    LiveCodeBench's grader and verl's `prime_code` put star imports before a program, APPS's its own imports. All of
    them are given here but numpy, which the sandbox lacks. Only the imports that a program's words call for are made:
    all together cost more time than many programs need.
    """
    wanted = (set(_WORD.findall(program)) & _statements().keys()) - {entry_point}
    return _DEEP + "\n".join(_statements()[name] for name in sorted(wanted))


@functools.cache
def _statements() -> dict[str, str]:
    """Returns name -> the statement that imports it."""
    statements = {}
    for name in _STARS:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", None) or [key for key in dir(module) if key[0] != "_"]:
            statements[public] = f"from {name} import {public}"
    for name in dir(builtins):  # star imports of the graders end with these
        statements.pop(name, None)
    return statements | {name: f"import {name}" for name in _MODULES}
