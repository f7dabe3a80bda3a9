"""Coding tasks from public data sets: one small function per layout, from a row to a `Problem`.

Golden tests come private ones first, then generated ones, then the public examples, which statements show.
"""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_atgrpo.environment import EnvironmentConfigError
from verl_atgrpo.environments.code.programs import Asserts, Call, Exchange, Problem, Test
from verl_atgrpo.environments.common.records import Record, read_records

_MOST_DIGITS = 4300  # of an integer that Python converts from text
_MOST_BYTES = 1 << 29  # of a problem's tests, unpacked
_TEXT = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_AROUND_TEXT = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")


class _Unusable(Exception):
    """A row has no test that we can run."""


@dataclass(frozen=True)
class Format:
    """How the rows of a data set are read."""

    read: Callable[[Record], Problem]
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()


def read_problems(source: object, option: str, max_tests: int | None = None) -> tuple[Problem, ...]:
    """Returns the problems of a data set; rows without a test that can be run are left out.

    Those are rows without tests, with integers of more than 4300 digits in them, or (MBPP) that call no function
    of the solution.

    Args:
        source: the option's value: what `read_records` takes, and `format`, a key of `FORMATS`.
        option: the option's name, for messages.
        max_tests: golden tests of a problem that are kept, the first ones; None keeps all.

    Raises EnvironmentConfigError if the option is malformed, the data cannot be read, or is of another format.
    """
    where = f"at_grpo.environment.{option}"
    if not isinstance(source, Mapping):
        raise EnvironmentConfigError(f"{where}={source!r}: a section with path: <file or data set> and format:")
    name = source.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise EnvironmentConfigError(f"{where}.format={name!r}: use {', '.join(FORMATS)}")
    form = FORMATS[name]
    columns = {column: column for column in form.columns + form.optional}
    rows = read_records({k: v for k, v in source.items() if k != "format"}, option, columns, form.optional)
    problems = []
    for index, row in enumerate(rows):
        try:
            problem = form.read(row)
        except _Unusable:
            continue
        except (ValueError, TypeError, KeyError, AttributeError, SyntaxError) as error:
            raise EnvironmentConfigError(
                f"{where}.format={name}: row {index} of {source['path']!r} is not of this format: "
                f"{type(error).__name__}: {error}"
            ) from error
        problems.append(replace(problem, tests=problem.tests[:max_tests]))
    if not problems:
        raise EnvironmentConfigError(f"{where}.path={source['path']!r}: no row has a test that can be run")
    return tuple(problems)


def _loads(text: str) -> Any:
    def whole(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise _Unusable
        return int(digits)

    return json.loads(text, parse_int=whole)


def _usable(tests: Sequence[Test]) -> tuple[Test, ...]:
    if not tests:
        raise _Unusable
    return tuple(tests)


def _apps(row: Record) -> Problem:
    data = _loads(row["input_output"] or "{}")
    name = data.get("fn_name")
    inputs, outputs = data.get("inputs", []), data.get("outputs", [])
    tests: list[Test]
    if name is None:
        tests = [Exchange(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)]
    else:
        if all(isinstance(output, list) and len(output) == 1 for output in outputs):
            outputs = [output[0] for output in outputs]  # how most rows wrap the result, but not all
        tests = [Call(tuple(i), o) for i, o in zip(inputs, outputs, strict=True)]
    solutions = json.loads(row["solutions"] or "[]")
    return Problem(
        row["question"],
        _usable(tests),
        name,
        starter=row["starter_code"] or "",
        solution=solutions[0] if solutions else None,
    )


def _text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else "\n".join(value)


def _codecontests(row: Record) -> Problem:
    tests = [
        Exchange(given, expected)
        for column in ("private_tests", "generated_tests", "public_tests")
        if row[column]
        for given, expected in zip(row[column]["input"], row[column]["output"], strict=True)
    ]
    solutions = row["solutions"] or {"language": [], "solution": []}
    python = [text for kind, text in zip(solutions["language"], solutions["solution"], strict=True) if kind == 3]
    return Problem(row["description"], _usable(tests), solution=python[0] if python else None)


def _livecodebench(row: Record) -> Problem:
    private = row["private_test_cases"] or "[]"
    tests = _loads(private if private.lstrip().startswith("[") else _unpacked(private))
    tests += _loads(row["public_test_cases"])
    name = json.loads(row["metadata"] or "{}").get("func_name")
    read = _call if name else lambda test: Exchange(test["input"], test["output"])
    return Problem(
        row["question_content"], _usable([read(test) for test in tests]), name, starter=row["starter_code"] or ""
    )


def _unpacked(packed: str) -> str:
    """The text in LiveCodeBench's base64 of zlib of a pickle, with no pickle loaded: that could run code.

    Raises ValueError for anything but one text of at most `_MOST_BYTES` bytes.
    """
    unpacker = zlib.decompressobj()
    try:
        pickled = unpacker.decompress(base64.b64decode(packed, validate=True), _MOST_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"private_test_cases is neither JSON nor packed: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"private_test_cases is cut off, or larger than {_MOST_BYTES:,} bytes")
    texts = []
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name in _TEXT:
            texts.append(str(argument))
        elif instruction.name not in _AROUND_TEXT:
            raise ValueError(f"private_test_cases: the pickle in it is no text, it has {instruction.name}")
    if len(texts) != 1:
        raise ValueError(f"private_test_cases: the pickle in it has {len(texts)} texts, not one")
    return texts[0]


def _call(test: Mapping[str, str]) -> Call:
    return Call(tuple(_loads(line) for line in test["input"].split("\n") if line.strip()), _loads(test["output"]))


def _humaneval(row: Record) -> Problem:
    prompt, solution = row["prompt"], row["canonical_solution"]
    tests, rest = _asserts_of_check(row["test"])
    return Problem(
        prompt,
        _usable(tests),
        row["entry_point"],
        setup=f"{prompt}\n{rest}",  # tests call helpers that the prompt defines
        solution=None if solution is None else prompt + solution,
    )


def _asserts_of_check(code: str) -> tuple[list[Asserts], str]:
    """The asserts in `check(candidate)`, each with what comes before it in there, and the rest of the code.

    Those that never call the candidate would be passed by every program.
    """
    tree = ast.parse(code)
    (check,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check")
    tree.body.remove(check)
    before: list[ast.stmt] = []
    tests = []
    for statement in check.body:
        if not any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            before.append(statement)
        elif "candidate" in {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}:
            tests.append(Asserts(ast.unparse(ast.Module([*before, statement], []))))
    return tests, ast.unparse(tree)


def _mbpp(row: Record) -> Problem:
    statement, code = row["text"] or row["prompt"], row["code"]
    setup = row["test_setup_code"] or "\n".join(row["test_imports"] or ())
    tests = _usable([Asserts(test) for test in row["test_list"]])
    calls = [node.func for node in ast.walk(ast.parse("\n".join(row["test_list"]))) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef) and node.name in called]
    if not functions:
        raise _Unusable
    name = functions[-1].name
    starter = f"def {name}({ast.unparse(functions[-1].args)}):"
    return Problem(statement, tests, name, starter=starter, setup=setup, solution=code)


FORMATS = {
    "apps": Format(_apps, ("question", "input_output"), ("solutions", "starter_code")),
    "codecontests": Format(
        _codecontests, ("description", "private_tests"), ("public_tests", "generated_tests", "solutions")
    ),
    "livecodebench": Format(
        _livecodebench, ("question_content", "public_test_cases", "private_test_cases"), ("starter_code", "metadata")
    ),
    "humaneval": Format(_humaneval, ("prompt", "entry_point", "test"), ("canonical_solution",)),
    "mbpp": Format(_mbpp, ("code", "test_list"), ("text", "prompt", "test_setup_code", "test_imports")),
}
"""The layouts that can be read, by the names that data sets are known by."""
