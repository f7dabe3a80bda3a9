"""Runs tests of one function: this file is sent into the sandbox whole, so it imports the standard library alone.

The program is loaded in a child that serves calls and does nothing else; the tests are known to the parent alone.
Arguments and results cross between the tests and the function as JSON, in which `pack` keeps their Python types.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import types
from typing import Any


def pack(value: Any) -> Any:
    """Returns what JSON can hold of plain data, and raises TypeError for anything else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset, bytes):
        if isinstance(value, kind):
            return {kind.__name__: [pack(item) for item in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def unpack(packed: Any) -> Any:
    """Returns the data that were packed: plain, whatever a program sends."""
    if not isinstance(packed, dict):
        return packed
    ((kind, items),) = packed.items()
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in items}
    if kind == "complex":
        return complex(*items)
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes}
    return kinds[kind](map(unpack, items))


def listed(value: Any) -> Any:
    """Returns `value` with lists for tuples: tests kept as JSON know no others."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def run_tests(program: str, entry_point: str) -> None:
    """Prints whether the program compiles, then for each test [passed, returned, shown], a line of JSON each.

    Tests come from standard input: {"setup": code, "tests": [code or [packed arguments, packed result], ...]}.
    """
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: the child cannot look into the memory of its parent
    (child_reads, parent_writes), (parent_reads, child_writes) = os.pipe(), os.pipe()

    def serve() -> None:
        requests, answers = os.fdopen(child_reads), os.fdopen(child_writes, "w")
        module = sys.modules["program"] = types.ModuleType("program")

        def answer(value: object) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        built, function, error = False, None, ""
        try:
            code = compile(program, "program.py", "exec", dont_inherit=True)
            built = True
            answer(built)
            exec(code, vars(module))  # noqa: S102  (in the sandbox)
            owner = module if hasattr(module, entry_point) else module.Solution()
            function = getattr(owner, entry_point)
        except BaseException as raised:  # noqa: BLE001  (whatever a program raises is its answer)
            error = f"{type(raised).__name__}: {raised}"
            if not built:
                answer(built)
        for line in requests:
            try:
                answer([True, pack(function(*unpack(json.loads(line))))] if function else [False, error])
            except BaseException as raised:  # noqa: BLE001
                answer([False, f"{type(raised).__name__}: {raised}"])

    # The child is made before this process knows any test, and keeps nothing but its ends of the pipes.
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for taken in (0, 1, 2):
            os.dup2(null, taken)
        for taken in (null, parent_writes, parent_reads):
            os.close(taken)
        try:
            serve()
        finally:
            os._exit(0)
    os.close(child_reads)
    os.close(child_writes)
    requests, answers = os.fdopen(parent_writes, "w"), os.fdopen(parent_reads)
    work = json.load(sys.stdin)
    report, sys.stdout = sys.stdout, sys.stderr  # tests may print
    returned, shown = False, ""

    def tell(value: object) -> None:
        report.write(json.dumps(value) + "\n")
        report.flush()

    def candidate(*arguments: Any) -> Any:
        nonlocal returned, shown
        returned, shown = False, "(the program has ended)"
        requests.write(json.dumps(pack(list(arguments))) + "\n")
        requests.flush()
        returned, value = json.loads(answers.readline())
        if returned is not True:
            shown = str(value)
            raise RuntimeError(shown)
        value = unpack(value)
        shown = repr(value)
        return value

    tell(answers.readline() == "true\n")
    names: dict[str, Any] = {"__name__": "tests"}
    random.seed(0)  # a score follows from the program alone
    exec(work["setup"], names)  # noqa: S102
    names["candidate"] = names[entry_point] = candidate
    for test in work["tests"]:
        passed, returned = False, False
        try:
            if isinstance(test, str):
                exec(test, names)  # noqa: S102
                passed = True
            else:
                arguments, expected = map(unpack, test)
                passed = listed(candidate(*arguments)) == listed(expected)
        except Exception:  # noqa: BLE001  (a failed test, whatever it raised)
            pass
        tell([passed, returned is True, shown[:1000].encode(errors="replace").decode()])
