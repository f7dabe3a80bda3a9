"""Comparing what a program printed with what its test expects, as the graders of the data sets do.

LiveCodeBench compares lines, and their numbers as decimals; APPS compares lines, then floats by their nearness, then
sets of words; CodeContests compares words in any case and numbers to 1e-5. What would pay a wrong answer there is left
out here: words in another order, integers as floats, all words in any case (docs/code_grading.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal

NUMBER = re.compile(r"[+-]?(?:[0-9]+(?P<point>\.[0-9]*)?|(?P<only>\.[0-9]+))(?P<exponent>[eE][+-]?[0-9]{1,3})?", re.A)
"""A number in decimal digits, as programs print it; not NaN or infinity, which are words."""
_NEAR = Decimal("1e-6")
"""Error that judges of contests allow, absolute and relative."""
_WRITTEN = 6
"""Decimal places from which a number is taken for one in full precision, not for one that was rounded on purpose."""
_CONTEXT = Context(prec=40, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_ANY_CASE = ("yes", "no")
"""Words that contests accept in any case."""


def same_output(printed: str, expected: str, by_words: bool = False) -> bool:
    """Returns whether a program's output is the expected one.

    Blank lines around the output and spaces around a line do not count. Of two lines, words and the spaces between
    them must be equal; numbers may be written differently (`same_number`), and if there are only numbers, any spaces
    separate them. Takes linear time and stops at the first difference.

    Args:
        printed: the program's standard output.
        expected: the test's.
        by_words: lines do not count, only the words; `yes` and `no` may be in any case.
    """
    if by_words:
        return _all(_same_word_in_any_case, printed.split(), expected.split())
    return _all(_same_line, printed.strip().split("\n"), expected.strip().split("\n"))


def _all(same: Callable[[str, str], bool], printed: Sequence[str], expected: Sequence[str]) -> bool:
    return len(printed) == len(expected) and all(map(same, printed, expected))


def _same_line(printed: str, expected: str) -> bool:
    ours, theirs = printed.strip(), expected.strip()
    if ours == theirs:
        return True
    if all(map(NUMBER.fullmatch, (words := theirs.split()))):
        return _all(same_word, ours.split(), words)
    return _all(same_word, ours.split(" "), theirs.split(" "))


def _same_word_in_any_case(printed: str, expected: str) -> bool:
    return same_word(printed, expected) or (
        expected.casefold() in _ANY_CASE and printed.casefold() == expected.casefold()
    )


def same_word(printed: str, expected: str) -> bool:
    """Returns whether words are equal, or numbers of which one has a decimal point or an exponent and that are near.

    Two integers are compared as texts: leading zeros count, and no digit is lost. An expected value that is whole
    allows 1e-6; others 1e-6 relative or absolute, but if fewer than six decimal places are written, no more than half
    a unit of the last one.
    """
    if printed == expected:
        return True
    ours, theirs = NUMBER.fullmatch(printed), NUMBER.fullmatch(expected)
    if ours is None or theirs is None or not (any(ours.groups()) or any(theirs.groups())):
        return False
    value, gold = Decimal(printed), Decimal(expected)
    allowed = _NEAR
    if gold != gold.to_integral_value():
        allowed = max(_NEAR, _CONTEXT.multiply(_NEAR, gold.copy_abs()))
        places = len(theirs["point"] or theirs["only"] or ".") - 1
        if places < _WRITTEN and not theirs["exponent"]:
            allowed = min(allowed, Decimal(5).scaleb(-places - 1))
    return _CONTEXT.subtract(value, gold).copy_abs() <= allowed
