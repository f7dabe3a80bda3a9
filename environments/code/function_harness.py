"""Runs tests of one function; its source runs in the sandbox, so it imports only the standard library.

The program is loaded in a child process that serves calls; only the parent has the tests. Arguments and results are
passed as JSON, in which `pack` keeps their Python types.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import itertools
import json
import math
import os
import random
import sys
import types
from typing import Any, TextIO

_MOST_ITEMS = 1_000_000
"""Items that are taken from an iterator."""
_SHOWN = 1000
"""Characters of a result that are shown."""
_SHOWN_OF_ALL = 1 << 18
"""Characters of all results together: a problem may have thousands of tests."""
_NUMBERS = (bool, int, float)
_VIEWS = {name: type(getattr({}, name)()) for name in ("keys", "values", "items")}


def pack(value: Any) -> Any:
    """Returns plain data as JSON-serialisable values; raises TypeError for anything else.

    Iterators are plain data as well, and are used up.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset, bytes, bytearray, collections.deque):
        if isinstance(value, kind):
            return {kind.__name__: [pack(item) for item in value]}
    for name, view in _VIEWS.items():
        if isinstance(value, view):
            return {name: [pack(item) for item in value]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if (type(value).__module__, type(value).__name__) in (("decimal", "Decimal"), ("fractions", "Fraction")):
        return {type(value).__name__: [str(value)]}
    if hasattr(type(value), "__next__"):
        items = [pack(item) for item in itertools.islice(value, _MOST_ITEMS + 1)]
        if len(items) > _MOST_ITEMS:
            raise TypeError(f"an iterator with more than {_MOST_ITEMS:,} items")
        return {"iterator": items}
    raise TypeError(f"{type(value).__name__} is not plain data")


def unpack(packed: Any) -> Any:
    """Returns packed data; the result is plain data for any input."""
    if not isinstance(packed, dict):
        return packed
    ((kind, items),) = packed.items()
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in items}
    kinds: dict[str, Any] = {
        "list": list,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
        "bytes": bytes,
        "bytearray": bytearray,
        "deque": collections.deque,
        "iterator": iter,
        "keys": lambda values: dict.fromkeys(values).keys(),
        "values": lambda values: dict(enumerate(values)).values(),
        "items": lambda pairs: dict(pairs).items(),
        "Decimal": lambda text: __import__("decimal").Decimal(*text),
        "Fraction": lambda text: __import__("fractions").Fraction(*text),
        "range": lambda values: range(*values),
        "complex": lambda values: complex(*values),
    }
    return kinds[kind]([unpack(item) for item in items])


def same(value: Any, expected: Any) -> bool:
    """Returns whether a call returned what is expected, where both may have come through JSON.

    Tuples are lists, and dictionaries may have their keys as JSON has them, as texts. Floats are near: 1e-9 relative,
    or 1e-6, or 1e-5 if the expected one has five decimal places at most, as LeetCode rounds. All else is equal.
    """
    if isinstance(expected, (list, tuple)):
        alike = isinstance(value, (list, tuple)) and len(value) == len(expected)
        return alike and all(map(same, value, expected))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        if all(isinstance(key, str) for key in expected) and not any(isinstance(key, str) for key in value):
            value = {json.dumps(key) if key is None or type(key) in _NUMBERS else key: value[key] for key in value}
        return all(key in value and same(value[key], item) for key, item in expected.items())
    if value == expected:
        return True
    numbers = [one for one in (value, expected) if isinstance(one, (int, float)) and not isinstance(one, bool)]
    if len(numbers) < 2 or all(isinstance(one, int) for one in numbers):
        return False
    if isinstance(expected, int):  # a large one is not compared as a float, which has no room for it
        return abs(expected) < 2**53 and abs(value - expected) <= 1e-6
    return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-5 if round(expected, 5) == expected else 1e-6)


def send(file: TextIO, value: object) -> None:
    """Writes a value as a line of JSON, at once."""
    file.write(json.dumps(value) + "\n")
    file.flush()


def run_tests(program: str, entry_point: str, given: str = "") -> None:
    """Prints lines of JSON: whether the program compiles, then for each test [passed, returned, shown].

    Reads the tests from standard input: {"setup": code, "tests": [code or [packed arguments, packed results], ...]},
    of which any result is right.

    Args:
        program: defines the function, or a class `Solution` with it.
        entry_point: the function's name.
        given: trusted code that runs before the program, in its namespace.
    """
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `python -S` lacks them
    getattr(sys, "set_int_max_str_digits", id)(50_000)
    if ctypes.CDLL(None).prctl(4, 0):  # PR_SET_DUMPABLE: the child cannot read its parent's memory and files
        raise OSError("the tests cannot be kept from the program")
    (child_reads, parent_writes), (parent_reads, child_writes) = os.pipe(), os.pipe()

    def serve() -> None:
        requests, answers = os.fdopen(child_reads), os.fdopen(child_writes, "w")
        module = sys.modules["program"] = types.ModuleType("program")

        built, function, error = False, None, ""
        try:
            code = compile(program, "program.py", "exec", dont_inherit=True)
            built = True
            send(answers, built)
            exec(given, vars(module))  # noqa: S102  (in the sandbox)
            exec(code, vars(module))  # noqa: S102
            in_class = hasattr(getattr(module, "Solution", None), entry_point)
            function = getattr(module.Solution() if in_class else module, entry_point)
        except BaseException as raised:  # noqa: BLE001  (anything a program raises is a result)
            error = f"{type(raised).__name__}: {raised}"
            if not built:
                send(answers, built)
        for line in requests:
            try:
                positional, named = map(unpack, json.loads(line))
                send(answers, [True, pack(function(*positional, **named))] if function else [False, error])
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
    returned, shown, room = False, "", _SHOWN_OF_ALL

    def candidate(*arguments: Any, **named: Any) -> Any:
        nonlocal returned, shown
        returned, shown = False, "(the program has ended)"
        send(requests, [pack(list(arguments)), pack(named)])
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
                arguments, results = map(unpack, test)
                value = candidate(*arguments)
                passed = any(same(value, expected) for expected in results)
        except Exception:  # noqa: BLE001  (any error fails the test)
            pass
        shown = shown[: min(_SHOWN, room)].encode(errors="replace").decode()
        room -= len(shown)
        send(report, [passed, returned is True, shown])
