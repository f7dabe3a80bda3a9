"""Numbers as answers write them, and when two of them are equal.

Exact values (integers, fractions, decimals of a few digits) are equal if they are the same. A decimal may also be what
a program prints for a value, or a value rounded: the digits it is written with say which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

FLOAT_DIGITS = 15
"""Significant digits from which a decimal counts as a binary float as programs print it: a float64 has 15 to 17."""
FLOAT_TOLERANCE = Fraction(1, 10**9)
"""Relative difference of such a float from the value that it stands for; the default of `math.isclose`."""
_WHOLE = 2**53
"""Integers below are different float64 numbers."""
ROUNDED = 6
"""Significant digits, and digits after the point, from which a decimal may be a rounded value: Math-Verify's six."""

_PLAIN = r"[0-9]+\.?[0-9]*|\.[0-9]+"
_DECIMAL = re.compile(rf"([-+]?)({_PLAIN})")
_FRACTION = re.compile(
    r"([-+]?)(?:([0-9]+)[ ]+)?(?:([0-9]+)/([0-9]+))|([-+]?)([0-9]*)[ ]?\\frac\{([-+]?[0-9]+)\}\{([0-9]+)\}"
)
_POWER_OF_TEN = re.compile(
    rf"([-+]?(?:{_PLAIN}))[ ]*(?:\\times|\\cdot|\*)[ ]*10[ ]*\^[ ]*(?:\{{([-+]?[0-9]{{1,4}})\}}|([-+]?[0-9]{{1,4}}))"
)


@dataclass(frozen=True)
class Number:
    """A number and how precisely it is written."""

    value: Fraction
    places: int | None = None
    """Digits after the decimal point; None if it has none, and for fractions."""
    digits: int = 0
    """Significant digits of a decimal."""


def read_number(text: str) -> Number | None:
    r"""Returns the number that a text is, or None: `-3`, `.50`, `1/3`, `\frac{1}{3}`, `2 1/3`, `1.6\times 10^{-19}`.

    The text has at most `notation.LONGEST` characters and an exponent at most four digits, so that no number is large.
    """
    if _DECIMAL.fullmatch(text):
        return _decimal(text, 0)
    if (power := _POWER_OF_TEN.fullmatch(text)) is not None:
        return _decimal(power[1], int(power[2] or power[3]))
    if (match := _FRACTION.fullmatch(text)) is None:
        return None
    sign, whole, top, bottom = match.groups()[:4] if match[3] else match.groups()[4:]
    if int(bottom) == 0 or (whole and int(top) < 0):
        return None
    value = int(whole or 0) + Fraction(int(top), int(bottom))
    return Number(-value if sign == "-" else value)


def read_float(value: float) -> Number:
    """Returns a float as the shortest decimal that is read as it, which has the digits it was written with."""
    written = Decimal(repr(value))
    _, digits, exponent = written.as_tuple()
    return Number(Fraction(written), max(-int(exponent), 0), len(digits))


def _decimal(text: str, exponent: int) -> Number:
    value = Fraction(text) * Fraction(10) ** exponent
    if "." not in text and exponent >= 0:
        return Number(value)
    written = text.lstrip("-+")
    places = len(written.partition(".")[2]) - exponent
    return Number(value, max(places, 0), len(written.replace(".", "").lstrip("0")))


def same_number(one: Number, other: Number) -> bool:
    """Returns whether two numbers are equal: exactly, as a float of a program, or rounded to six digits or more."""
    return one.value == other.value or _stands_for(one, other) or _stands_for(other, one)


def _stands_for(decimal: Number, other: Number) -> bool:
    """Returns whether a decimal is another number as a float, or rounded."""
    if decimal.places is None:
        return False
    off = abs(decimal.value - other.value)
    if decimal.digits >= FLOAT_DIGITS:
        scale = abs(other.value) if other.value else 1
        told_apart = other.value.denominator == 1 and scale < _WHOLE
        if off <= FLOAT_TOLERANCE * scale and (not told_apart or round(decimal.value) == other.value):
            return True
    return min(decimal.places, decimal.digits) >= ROUNDED and 2 * off <= Fraction(1, 10**decimal.places)
