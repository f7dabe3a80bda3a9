"""Parsing of tests in testers' replies."""

from __future__ import annotations

import ast
import re

from verl_atgrpo.environments.code.function_harness import pack
from verl_atgrpo.environments.code.programs import Call, Exchange, Problem, Test
from verl_atgrpo.environments.common.replies import after_thoughts, block_below, fence
from verl_atgrpo.environments.common.workflow import Style

_LONGEST_LITERAL = 2000
"""Most characters of a literal; far below the limits of Python's parser."""
_BLOCK = r"\s*^```\w*[ \t]*\r?\n(.*?)^```[ \t]*\r?$"
_TEST = re.compile(rf"(?ms){_BLOCK}\s*^Output:{_BLOCK}")
_KIND = r"(?:(?:the|expected|sample|example|test|correct|standard) )*"
_MARK = r"(?im)^(?P<mark>[ \t\-*•#_`]*)(?:[0-9]+[.)] )?"
_END = r"(?: [0-9]+)?(?P<end>[ \t*_`]*:[ \t*_]*|[ \t*_`]*(?=\r?$))"
_INPUT = re.compile(rf"{_MARK}{_KIND}inputs?{_END}")
_AROUND = " \t\n*_`"
_OUTPUT = re.compile(rf"{_MARK}{_KIND}(?:outputs?|results?|return value){_END}")


def parse_test(reply: str, problem: Problem, style: Style = "full") -> Test | None:
    """Returns the test that `reply` gives in the agreed format, or None.

    `compact`: after the last line `Input:` a fenced block, then a line `Output:` and another block. `full`: labels may
    be marked up and worded differently (`### Expected output`); each value is a fenced block, the rest of its label's
    line, or the text up to the next label or the reply's end. A test that is copied from the statement does not count.

    For a function the values are its arguments and its result as Python literals of at most 2000 characters each;
    `full` accepts `f(1, 2)` and `a = 1, b = 2` as arguments, too.
    """
    if style == "compact":
        _, mark, rest = f"\n{reply}".rpartition("\nInput:")
        match = _TEST.match(rest) if mark else None
        values = None if match is None else (match[1], match[2])
    else:
        values = _values(after_thoughts(reply), problem.statement)
    if values is None:
        return None
    if problem.entry_point is None:
        return Exchange(*values)
    if max(map(len, values)) > _LONGEST_LITERAL:
        return None
    try:
        arguments = (
            ast.literal_eval(f"[{values[0]}]") if style == "compact" else _arguments(values[0].strip(), problem)
        )
        call = Call(tuple(arguments), ast.literal_eval(values[1].strip()))
        pack([call.arguments, call.expected])  # raises TypeError for other than plain data: Ellipsis
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return call


def _values(text: str, statement: str) -> tuple[str, str] | None:
    inputs = _marks(_INPUT, text)
    outputs = [mark for mark in _marks(_OUTPUT, text) if inputs and mark.start() >= inputs[-1].end()]
    if not outputs or text[inputs[-1].start() : outputs[0].end()].strip().casefold() in statement.casefold():
        return None
    given = _value(text[inputs[-1].end() : outputs[0].start()], alone=True)
    expected = _value(text[outputs[0].end() :], alone=False)
    if given is None or expected is None or _is_example(_bare(given), _bare(expected), statement):
        return None
    return given, expected


def _is_example(given: str, expected: str, statement: str) -> bool:
    """Returns whether the statement has the values under labels of its own, in whatever layout."""
    inputs = [*_INPUT.finditer(statement)]
    ends = [*(mark.start() for mark in inputs[1:]), len(statement)]
    for mark, end in zip(inputs, ends, strict=False):  # without inputs there is an end, too
        output = _OUTPUT.search(statement, mark.end(), end)
        if output is not None and _bare(statement[mark.end() : output.start()]) == given:
            return _bare(statement[output.end() : end]).startswith(expected)
    return False


def _bare(text: str) -> str:
    return re.sub(r"[\s*_`#>]", "", text).casefold()


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


def _arguments(text: str, problem: Problem) -> list[object]:
    """Returns a call's arguments; raises like `ast.literal_eval` if the text has none."""
    name = problem.entry_point or "f"
    whole = re.fullmatch(rf"(?s){re.escape(name)}[ \t]*\((.*)\)", text)
    call = ast.parse(f"f({whole[1] if whole else text}\n)", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("more than arguments")
    values: list[object] = [ast.literal_eval(argument) for argument in call.args]
    if call.keywords:
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        order = _parameters(problem)
        if len(named) < len(call.keywords) or sorted(map(str, named)) != sorted(order[len(values) :]):
            raise ValueError("not the parameters")
        values += [named[parameter] for parameter in order[len(values) :]]
    return values


def _parameters(problem: Problem) -> list[str]:
    """Returns the names of the function's parameters in the starter code; [] if it has none."""
    match = re.search(rf"def {re.escape(problem.entry_point or '')}\(([^()]*)\)", problem.starter)
    names = [part.split(":")[0].split("=")[0].strip() for part in match[1].split(",")] if match else []
    return [name for name in names if name != "self"]
