"""Runs tests of one function; its source runs in the sandbox, so it imports only the standard library.

The program is loaded in a child process that serves calls; only the parent has the tests. Arguments and results are
passed as JSON, in which `pack` keeps their Python types.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import types
from typing import Any, TextIO


def pack(value: Any) -> Any:
    """Returns plain data as JSON-serialisable values; raises TypeError for anything else."""
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
    """Returns packed data; the result is plain data for any input."""
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
    """Returns `value` with tuples replaced by lists, because tests stored as JSON have no tuples."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def send(file: TextIO, value: object) -> None:
    """Writes a value as a line of JSON, at once."""
    file.write(json.dumps(value) + "\n")
    file.flush()


def run_tests(program: str, entry_point: str) -> None:
    """Prints lines of JSON: whether the program compiles, then for each test [passed, returned, shown].

    Reads the tests from standard input: {"setup": code, "tests": [code or [packed arguments, packed result], ...]}.
    """
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: the child cannot read its parent's memory
    (child_reads, parent_writes), (parent_reads, child_writes) = os.pipe(), os.pipe()

    def serve() -> None:
        requests, answers = os.fdopen(child_reads), os.fdopen(child_writes, "w")
        module = sys.modules["program"] = types.ModuleType("program")

        built, function, error = False, None, ""
        try:
            code = compile(program, "program.py", "exec", dont_inherit=True)
            built = True
            send(answers, built)
            exec(code, vars(module))  # noqa: S102  (in the sandbox)
            owner = module if hasattr(module, entry_point) else module.Solution()
            function = getattr(owner, entry_point)
        except BaseException as raised:  # noqa: BLE001  (anything a program raises is a result)
            error = f"{type(raised).__name__}: {raised}"
            if not built:
                send(answers, built)
        for line in requests:
            try:
                send(answers, [True, pack(function(*unpack(json.loads(line))))] if function else [False, error])
            except BaseException as raised:  # noqa: BLE001
                send(answers, [False, f"{type(raised).__name__}: {raised}"])

    # Forked before this process reads any test; the child keeps only its ends of the pipes.
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        for file in (null, parent_writes, parent_reads):
            os.close(file)
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

    def candidate(*arguments: Any) -> Any:
        nonlocal returned, shown
        returned, shown = False, "(the program has ended)"
        send(requests, pack(list(arguments)))
        returned, value = json.loads(answers.readline())
        if returned is not True:
            shown = str(value)
            raise RuntimeError(shown)
        value = unpack(value)
        shown = repr(value)
        return value

    send(report, answers.readline() == "true\n")
    names: dict[str, Any] = {"__name__": "tests"}
    random.seed(0)  # scores must be deterministic
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
        except Exception:  # noqa: BLE001  (any error fails the test)
            pass
        send(report, [passed, returned is True, shown[:1000].encode(errors="replace").decode()])
