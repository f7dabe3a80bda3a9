"""The examples of a statement, whatever their notation: a tester is not paid for them, as every solution passes them.

What counts is the input: who has an example's input has its result from the statement. Inputs are compared as values:
words of standard input, numbers by their value, and the parsed arguments of a call.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from decimal import Context

from verl_atgrpo.environments.code.outputs import NUMBER
from verl_atgrpo.environments.code.programs import Call, Problem

_KIND = r"(?:(?:the|expected|sample|example|test|correct|standard) )*"
_MARK = r"(?im)^(?P<mark>[ \t\-*•#_`]*)(?:[0-9]+[.)] )?"
_END = r"(?: [0-9]+)?(?P<end>[ \t*_`]*:[ \t*_]*|[ \t*_`]*(?=\r?$))"
INPUT = re.compile(rf"{_MARK}{_KIND}inputs?{_END}")
"""The label of an input, in a statement or a reply."""
OUTPUT = re.compile(rf"{_MARK}{_KIND}(?:outputs?|results?|return value){_END}")
_MARKUP = "*_`#>\"'"
_LONG = 4
"""Words, or characters of a call's arguments, from which an example needs no label."""
_LONGEST_CALL = 2000
_MOST_CALLS = 100
_FEW = 60
"""Characters between an example's arguments and its result, in a sentence."""
_CONTEXT = Context(prec=200, traps=[])


def is_example_input(given: str, expected: str, statement: str) -> bool:
    """Returns whether a program's input is an example's, or one with something after it that changes no output."""
    words, results = _words(given), _words(expected)
    for example, output in _labelled(statement):
        if words == example or (words[: len(example)] == example and output[: len(results)] == results and example):
            return True
    return len(words) >= _LONG and f" {' '.join(words)} " in f" {' '.join(_all_words(statement))} "


@functools.lru_cache(maxsize=256)
def _labelled(statement: str) -> list[tuple[list[str], list[str]]]:
    return [(_words(given), _words(result)) for given, result in _labelled_texts(statement)]


def _labelled_texts(statement: str) -> Iterator[tuple[str, str]]:
    """Yields the text after each label of an input, and the text after the label of its output, to the next input."""
    inputs = [*INPUT.finditer(statement)]
    ends = [*(mark.start() for mark in inputs[1:]), len(statement)]
    for mark, end in zip(inputs, ends, strict=False):  # without inputs there is an end, too
        output = OUTPUT.search(statement, mark.end(), end)
        if output is not None:
            yield statement[mark.end() : output.start()], statement[output.end() : end]


@functools.lru_cache(maxsize=256)
def _all_words(statement: str) -> list[str]:
    return _words(statement)


def _words(text: str) -> list[str]:
    return [word for word in map(_word, text.split()) if word]


def _word(text: str) -> str:
    """Returns a word without markup and case, a number in one form."""
    bare = text.strip(_MARKUP).casefold()
    if len(bare) > 100 or NUMBER.fullmatch(bare) is None:
        return bare
    value = _CONTEXT.create_decimal(bare)
    return f"{_CONTEXT.normalize(value):f}" if value else "0"


def is_example_call(call: Call, problem: Problem) -> bool:
    """Returns whether a call has the arguments of one in the statement: a call, labelled ones, or in a sentence."""
    if any(_plain(list(call.arguments)) == _plain(known) for known in _calls(problem)):
        return True
    arguments, text = _text(list(call.arguments)), _tight(problem.statement)
    if len(arguments) < _LONG:
        return False
    result = _alone(_text([call.expected]))
    return any(
        result.search(text, match.end(), match.end() + _FEW + len(result.pattern))
        for match in _alone(arguments).finditer(text)
    )


def _alone(text: str) -> re.Pattern[str]:
    """Returns the pattern of a text that no digit continues."""
    return re.compile(rf"(?<![0-9]){re.escape(text)}(?![0-9])")


def _calls(problem: Problem) -> Iterator[list[object]]:
    """Yields the arguments of the calls in a statement."""
    statement, name = problem.statement, _bare(problem.entry_point or "")
    named = (match for match in re.finditer(r"(\w+)[ \t]*\(", statement) if _bare(match[1]) == name)
    for _, match in zip(range(_MOST_CALLS), named, strict=False):
        end = _closing(statement, match.end())
        if end is not None:
            yield from _parsed(statement[match.end() : end], problem)
    for given, _ in _labelled_texts(statement):
        text = given.strip(_MARKUP + " \t\r\n")
        yield from _parsed(text, problem)
        if "\n" in text:  # one argument a line
            yield from _parsed(
                ",".join(line.strip(_MARKUP + " ,") for line in text.split("\n") if line.strip()), problem
            )


def _bare(name: str) -> str:
    return name.replace("_", "").casefold()


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for end in range(start, min(start + _LONGEST_CALL, len(text))):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return end
    return None


def _parsed(text: str, problem: Problem) -> Iterator[list[object]]:
    try:
        yield call_arguments(text, problem)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return


def _plain(value: object) -> object:
    """Returns a value with tuples as lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _text(values: list[object]) -> str:
    return _tight(", ".join(map(repr, values)))


def _tight(text: str) -> str:
    """Returns a text without spaces, with one kind of quotes and brackets."""
    return re.sub(r"\s", "", text).translate(str.maketrans('"()`*', "'[]  ")).replace(" ", "")


def call_arguments(text: str, problem: Problem) -> list[object]:
    """Returns the arguments that a text has: `f(1, 2)`, `1, 2` or `a = 1, b = 2`.

    Raises ValueError, TypeError, SyntaxError, MemoryError or RecursionError if it has none.
    """
    whole = re.fullmatch(rf"(?s){re.escape(problem.entry_point or 'f')}[ \t]*\((.*)\)", text)
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
