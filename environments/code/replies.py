"""Parsing of tests in testers' replies, and the examples of a statement, whatever their notation.

A tester is not paid for an example, as every solution passes it. What counts is the input: who has an example's input
has its result from the statement. Inputs are compared as values: words of standard input, numbers by their value, and
the parsed arguments of a call.
"""

from __future__ import annotations

import ast
import functools
import re
import unicodedata
from collections.abc import Iterator
from decimal import Context

from verl_atgrpo.environments.code.function_harness import pack
from verl_atgrpo.environments.code.outputs import NUMBER
from verl_atgrpo.environments.code.programs import Call, Exchange, Problem, Test
from verl_atgrpo.environments.common.replies import after_thoughts, block_below, closing_parenthesis, fence

_LONGEST_LITERAL = 2000
"""Most characters of a literal; far below the limits of Python's parser."""
_AROUND = " \t\n*_`"
_KIND = r"(?:(?:the|expected|sample|example|test|correct|standard) )*"
_MARK = r"(?im)^(?P<mark>[ \t\-*•#_`]*)(?:[0-9]+[.)] )?"
# APPS has -----Sample Input----- and -----Sample Input:-----; the one of -5 is a number's.
_END = r"(?: [0-9]+)?(?P<end>[ \t*_`\-]*:[ \t*_]*(?:-+(?=\r?$))?|[ \t*_`\-]*(?=\r?$))"
_INPUT = re.compile(rf"{_MARK}{_KIND}inputs?{_END}")
"""The label of an input, in a statement or a reply."""
_OUTPUT = re.compile(rf"{_MARK}{_KIND}(?:outputs?|results?|return value){_END}")
_MARKUP = "*_`#>\"'"
_LONG = 4
"""Words, or characters of a call's arguments, from which an example needs no label."""
_LONGEST_CALL = 2000
_MOST_CALLS = 100
_FEW = 60
"""Characters between an example's arguments and its result, in a sentence."""
_GROUPED = re.compile(r"(?<=\d)_(?=\d)")
_CONTEXT = Context(prec=200, traps=[])


def parse_test(reply: str, problem: Problem) -> Test | None:
    """Returns the test that `reply` gives in the agreed format, or None.

    After a line `Input:` comes what it gives, after a line `Output:` what it expects. Labels may be marked up and
    worded differently (`### Expected output`); each value is a fenced block, the rest of its label's line, or the text
    up to the next label or the reply's end. An example of the statement does not count (`is_example_input`), nor does
    a test of a program that expects no output, such as one of zero test cases: every program passes it.

    For a function the values are its arguments and its result as Python literals of at most 2000 characters each, the
    arguments also as `f(1, 2)` and `a = 1, b = 2`.
    """
    values = _values(after_thoughts(reply))
    if values is None:
        return None
    if problem.entry_point is None:
        tests_nothing = not values[1].strip() or is_example_input(*values, problem.statement)
        return None if tests_nothing else Exchange(*values)
    if max(map(len, values)) > _LONGEST_LITERAL:
        return None
    try:
        call = Call(tuple(call_arguments(values[0].strip(), problem)), ast.literal_eval(values[1].strip()))
        pack([call.arguments, call.expected])  # raises TypeError for other than plain data: Ellipsis
        return None if is_example_call(call, problem) else call
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _values(text: str) -> tuple[str, str] | None:
    inputs = _marks(_INPUT, text)
    outputs = [mark for mark in _marks(_OUTPUT, text) if inputs and mark.start() >= inputs[-1].end()]
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


# ------------------------------------------------------------------ examples


def is_example_input(given: str, expected: str, statement: str) -> bool:
    """Returns whether a program's input is an example's, one with something after it, or some cases of an example's.

    What comes after it changes no output. An example of several cases begins with their number, and has a line of
    output for each.
    """
    words, results = _words(given), _words(expected)
    for example, output, lines in _labelled(statement):
        if words == example or (words[: len(example)] == example and output[: len(results)] == results and example):
            return True
        several = example[:1] == [str(lines)] and words[:1] == [str(_lines(expected))]
        if several and _in_a_row(words[1:], example[1:]) and _in_a_row(results, output):
            return True
    return len(words) >= _LONG and _in_a_row(words, _all_words(statement))


@functools.lru_cache(maxsize=256)
def _labelled(statement: str) -> list[tuple[list[str], list[str], int]]:
    """Returns the words of each example's input and output, and the number of the output's lines."""
    return [(_words(given), _words(result), _lines(result)) for given, result in _labelled_texts(statement)]


def _lines(text: str) -> int:
    return sum(bool(_words(line)) for line in text.splitlines())


def _in_a_row(words: list[str], of: list[str]) -> bool:
    return f" {' '.join(words)} " in f" {' '.join(of)} "


def _labelled_texts(statement: str) -> Iterator[tuple[str, str]]:
    """Yields the text after each label of an input, and the text after the label of its output, to the next input."""
    inputs = [*_INPUT.finditer(statement)]
    ends = [*(mark.start() for mark in inputs[1:]), len(statement)]
    for mark, end in zip(inputs, ends, strict=False):  # without inputs there is an end, too
        output = _OUTPUT.search(statement, mark.end(), end)
        if output is not None:
            yield statement[mark.end() : output.start()], statement[output.end() : end]


@functools.lru_cache(maxsize=256)
def _all_words(statement: str) -> list[str]:
    return _words(statement)


def _words(text: str) -> list[str]:
    return [word for word in map(_word, text.split()) if word]


def _word(text: str) -> str:
    """Returns a word without markup and case, a number in one form."""
    bare = unicodedata.normalize("NFKC", text).strip(_MARKUP).casefold()
    # int() reads the digits of all scripts, and 1_0 as 10.
    bare = _GROUPED.sub("", bare if bare.isascii() else "".join(str(unicodedata.decimal(one, one)) for one in bare))
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
        end = closing_parenthesis(statement, match.end(), _LONGEST_CALL)
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
