"""Parsing of tests in testers' replies."""

from __future__ import annotations

import ast
import re

from verl_atgrpo.environments.code.examples import (
    INPUT,
    OUTPUT,
    call_arguments,
    is_example_call,
    is_example_input,
)
from verl_atgrpo.environments.code.function_harness import pack
from verl_atgrpo.environments.code.programs import Call, Exchange, Problem, Test
from verl_atgrpo.environments.common.replies import after_thoughts, block_below, fence

_LONGEST_LITERAL = 2000
"""Most characters of a literal; far below the limits of Python's parser."""
_AROUND = " \t\n*_`"


def parse_test(reply: str, problem: Problem) -> Test | None:
    """Returns the test that `reply` gives in the agreed format, or None.

    After a line `Input:` comes what it gives, after a line `Output:` what it expects. Labels may be marked up and
    worded differently (`### Expected output`); each value is a fenced block, the rest of its label's line, or the text
    up to the next label or the reply's end. An example of the statement does not count (`examples`).

    For a function the values are its arguments and its result as Python literals of at most 2000 characters each, the
    arguments also as `f(1, 2)` and `a = 1, b = 2`.
    """
    values = _values(after_thoughts(reply))
    if values is None:
        return None
    if problem.entry_point is None:
        return None if is_example_input(*values, problem.statement) else Exchange(*values)
    if max(map(len, values)) > _LONGEST_LITERAL:
        return None
    try:
        call = Call(tuple(call_arguments(values[0].strip(), problem)), ast.literal_eval(values[1].strip()))
        pack([call.arguments, call.expected])  # raises TypeError for other than plain data: Ellipsis
        return None if is_example_call(call, problem) else call
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _values(text: str) -> tuple[str, str] | None:
    inputs = _marks(INPUT, text)
    outputs = [mark for mark in _marks(OUTPUT, text) if inputs and mark.start() >= inputs[-1].end()]
    if not outputs:
        return None
    given = _value(text[inputs[-1].end() : outputs[0].start()], alone=True)
    expected = _value(text[outputs[0].end() :], alone=False)
    return None if given is None or expected is None else (given, expected)


def _marks(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Returns the labels: with a colon, in bold or as a heading."""
    return [match for match in pattern.finditer(text) if ":" in match["end"] or {"#", "*"} & set(match["mark"])]


def _value(text: str, alone: bool) -> str | None:
    """Returns the value after a label, as a program would read it; `alone` allows no text after a fenced block."""
    lines = [line.rstrip("\r") for line in text.strip().split("\n")]
    if fence(lines[0]) is not None:
        block = block_below(lines)
        if block is None or (alone and any(line.strip(_AROUND) for line in lines[len(block) + 2 :])):
            return None
        return "".join(f"{line}\n" for line in block)
    # Without a fence it must be one line or one paragraph: further text would be ambiguous.
    value = "\n".join(lines).strip(_AROUND)
    several = "\n" in value if text.partition("\n")[0].strip(_AROUND) else "\n\n" in value
    return None if not value or several or "```" in value else f"{value}\n"
