"""Coding tasks from public data sets: one function per format converts a row to a `Problem`.

Order of golden tests: private, generated, then the public examples that statements show.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickletools
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_atgrpo.environments.code.programs import Asserts, Call, Exchange, Problem, Test
from verl_atgrpo.environments.common.options import option_error
from verl_atgrpo.environments.common.records import Record, read_records

_MOST_DIGITS = 4300
"""Most digits of an integer that Python converts from text."""
MOST_BYTES = 1 << 29
"""Most bytes of a problem's unpacked tests."""
_KEY = re.compile("-?[0-9]+")
"""An integer that JSON has made a text, as the key of an object."""
_TEXT = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_AROUND_TEXT = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")


class _Unusable(Exception):
    """A row has no test that can be run."""


@dataclass(frozen=True)
class Format:
    """How to read the rows of a data set."""

    read: Callable[[Record], Problem]
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()


def read_problems(source: object, option: str, max_tests: int | None = None) -> tuple[Problem, ...]:
    """Returns the problems of a data set; rows without a test that can be run are left out.

    These are rows without tests, with integers of more than 4300 digits, or (MBPP, HumanEval) whose tests use what
    only the data's solution defines, other than the one function.

    Args:
        source: the option's value: a mapping as in `read_records`, with `format`, a key of `FORMATS`.
        option: the option's name, for messages.
        max_tests: golden tests per problem, the first ones; None keeps all.

    Raises EnvironmentConfigError if the option is malformed, the data cannot be read or are of another format.
    """
    if not isinstance(source, Mapping):
        raise option_error(f"{option}={source!r}: a section with path: <file or data set> and format:")
    name = source.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise option_error(f"{option}.format={name!r}: use {', '.join(FORMATS)}")
    form = FORMATS[name]
    columns = {column: column for column in form.columns + form.optional}
    rows = read_records({k: v for k, v in source.items() if k != "format"}, option, columns, form.optional)
    problems = []
    for index, row in enumerate(rows):
        try:
            problem = form.read(row)
            _check_texts(problem)
        except _Unusable:
            continue
        except (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError) as error:
            raise option_error(
                f"{option}.format={name}: row {index} of {source['path']!r} is not of this format: "
                f"{type(error).__name__}: {error}"
            ) from error
        problems.append(replace(problem, tests=problem.tests[:max_tests]))
    if not problems:
        raise option_error(f"{option}.path={source['path']!r}: no row has a test that can be run")
    return tuple(problems)


def _check_texts(problem: Problem) -> None:
    """Raises ValueError if something that is to be a text is none, or there is no statement."""
    if not isinstance(problem.statement, str) or not problem.statement.strip():
        raise ValueError("it has no statement")
    exchanged = [text for test in problem.tests if isinstance(test, Exchange) for text in (test.given, test.expected)]
    for text in (problem.solution or "", problem.starter, *exchanged):
        if not isinstance(text, str):
            raise ValueError(f"{text!r:.80} is no text")


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
        # Most rows wrap the result in a list; those of functions that return lists of one look the same.
        wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
        tests = [Call(tuple(map(_with_keys, i)), o, wrapped) for i, o in zip(inputs, outputs, strict=True)]
    solutions = json.loads(row["solutions"] or "[]")
    return Problem(
        row["question"],
        _usable(tests),
        name,
        starter=row["starter_code"] or "",
        solution=solutions[0] if solutions else None,
        contest=True,
    )


def _with_keys(value: Any) -> Any:
    """Returns an argument with the integer keys that a dictionary had before it became JSON, as APPS's grader does."""
    if not isinstance(value, dict) or not all(map(_KEY.fullmatch, value)):
        return value
    keyed = {int(key): item for key, item in value.items()}
    return keyed if len(keyed) == len(value) else value


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
    return Problem(
        row["description"], _usable(tests), solution=python[0] if python else None, contest=True, by_words=True
    )


def _livecodebench(row: Record) -> Problem:
    private = row["private_test_cases"] or "[]"
    tests = _loads(private if private.lstrip().startswith("[") else _unpacked(private))
    tests += _loads(row["public_test_cases"])
    name = json.loads(row["metadata"] or "{}").get("func_name")
    read = _call if name else lambda test: Exchange(test["input"], test["output"])
    return Problem(
        row["question_content"],
        _usable([read(test) for test in tests]),
        name,
        starter=row["starter_code"] or "",
        contest=True,
    )


def _unpacked(packed: str) -> str:
    """Returns the text in LiveCodeBench's base64 of zlib of a pickle, without loading the pickle, which can run code.

    Raises ValueError unless it is one text of at most `MOST_BYTES` bytes.
    """
    unpacker = zlib.decompressobj()
    try:
        pickled = unpacker.decompress(base64.b64decode(packed, validate=True), MOST_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"private_test_cases is neither JSON nor packed: {error}") from error
    if not unpacker.eof:
        raise ValueError(f"private_test_cases is truncated or larger than {MOST_BYTES:,} bytes")
    texts = []
    for instruction, argument, _ in pickletools.genops(pickled):
        if instruction.name in _TEXT:
            texts.append(str(argument))
        elif instruction.name not in _AROUND_TEXT:
            raise ValueError(f"private_test_cases: the pickle in it is not a text, it has {instruction.name}")
    if len(texts) != 1:
        raise ValueError(f"private_test_cases: the pickle in it has {len(texts)} texts, not one")
    return texts[0]


def _call(test: Mapping[str, str]) -> Call:
    return Call(tuple(_loads(line) for line in test["input"].split("\n") if line.strip()), _loads(test["output"]))


def _humaneval(row: Record) -> Problem:
    prompt, solution = row["prompt"], row["canonical_solution"]
    tests, rest = _asserts_of_check(row["test"])
    setup = f"{prompt}\n{rest}"  # tests may call helpers that the prompt defines
    return Problem(
        prompt,
        _defined(tests, setup, row["entry_point"]),
        row["entry_point"],
        setup=setup,
        solution=None if solution is None else prompt + solution,
        # What it has besides the function to write: imports, and functions that it may call.
        given=_without(prompt, lambda node: isinstance(node, ast.FunctionDef) and node.name == row["entry_point"]),
    )


def _without(code: str, drops: Callable[[ast.stmt], bool]) -> str:
    """Returns code without some of the statements at its top level."""
    tree = ast.parse(code)
    tree.body = [statement for statement in tree.body if not drops(statement)]
    return ast.unparse(tree)


def _defined(tests: Sequence[Asserts], setup: str, entry_point: str) -> tuple[Test, ...]:
    """Returns the tests; raises `_Unusable` if they need a name that only the data's solution has: no reply passes."""
    used: set[str] = set()
    known = {entry_point, "candidate", "__name__", *dir(builtins)}
    for node in ast.walk(ast.parse("\n".join((setup, *(test.code for test in tests))))):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if "*" in names:
                return _usable(tests)
            known |= names
    if used - known:
        raise _Unusable
    return _usable(tests)


def _asserts_of_check(code: str) -> tuple[list[Asserts], str]:
    """Returns the asserts in `check(candidate)`, each with the statements it needs, and the rest of the code.

    Asserts that do not use the candidate are left out: every program would pass them.
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
    calls = [node.func for node in ast.walk(ast.parse("\n".join(row["test_list"]))) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef) and node.name in called]
    if not functions:
        raise _Unusable
    name = functions[-1].name
    starter = f"def {name}({ast.unparse(functions[-1].args)}):"
    tests = _defined([Asserts(test) for test in row["test_list"]], setup, name)
    imports = _without(setup, lambda node: not isinstance(node, (ast.Import, ast.ImportFrom)))
    return Problem(statement, tests, name, starter=starter, setup=setup, solution=code, given=imports)


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
"""Name of the data set -> format of its rows."""
