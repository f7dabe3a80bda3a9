"""Numbers, units, printed expressions and operations, as they are read before anything is computed."""

from __future__ import annotations

from fractions import Fraction

import pytest

from verl_atgrpo.environments.math.decimals import Number, read_float, read_number, same_number
from verl_atgrpo.environments.math.notation import operations, readings, tidy
from verl_atgrpo.environments.math.printed import python_as_latex


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-3", -3),
        ("+.50", Fraction(1, 2)),
        ("2/4", Fraction(1, 2)),
        (r"-\frac{1}{3}", Fraction(-1, 3)),
        (r"\frac{-1}{3}", Fraction(-1, 3)),
        ("2 1/3", Fraction(7, 3)),
        ("-2 1/3", Fraction(-7, 3)),
        (r"2\frac{1}{3}", Fraction(7, 3)),
        (r"1.6 \times 10^{-3}", Fraction(16, 10_000)),
        ("3*10^2", 300),
        ("1/0", None),
        (r"\frac{1}{0}", None),
        (r"2\frac{-1}{3}", None),
        ("1,2", None),
        ("x", None),
        ("", None),
        (".", None),
        ("10^{99999}", None),
        ("\N{FULLWIDTH DIGIT ONE}", None),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Fraction | int | None) -> None:
    number = read_number(text)
    assert (None if number is None else number.value) == value


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("3", "3.00000000000001", True),  # 15 digits
        ("3", "3.0000000000001", False),  # 14
        ("3", "3.00000000100000", True),
        ("1/3", "0.333333333666666", True),  # 1e-9 of the value
        ("1/3", "0.333333333666667", False),
        ("0", "0.000000000999999999999999", True),
        ("0", "0.00000000100000000000001", False),
        ("1000000000000001", "1000000000000000.2", False),  # another integer is nearer
        ("90071992547409920", "90071992547409921.5", True),  # above 2^53 floats do not tell integers apart
        ("2/3", "0.666667", True),
        ("2/3", "0.66667", False),  # five places
        ("2/3", "0.666666", False),  # cut off, not rounded
        ("1/8000", "0.000125", True),
        ("1/8001", "0.000125", False),  # three digits
        ("123456.789", "123456.79", False),  # two places
        ("0.5", ".500", True),
        ("-3", "3.00000000000001", False),
    ],
)
def test_decimals_stand_for_values(one: str, other: str, same: bool) -> None:
    numbers = read_number(one), read_number(other)
    assert numbers[0] is not None and numbers[1] is not None
    assert same_number(*numbers) is same_number(*reversed(numbers)) is same


def test_a_float_has_the_digits_it_is_written_with() -> None:
    assert read_float(0.1) == Number(Fraction(1, 10), 1, 1)
    assert read_float(0.1 + 0.2).digits == 17
    assert read_float(1e300).value == 10**300


@pytest.mark.parametrize(
    ("line", "latex"),
    [
        ("2*pi/3", r"\frac{2 \cdot \pi}{3}"),
        ("a - (b - c)", "a - (b - c)"),
        ("a - b - c", "a - b - c"),
        ("a + (b + c)", "a + b + c"),
        ("2*(3*x)", r"2 \cdot (3 \cdot x)"),
        ("x*-y", r"x \cdot (-y)"),
        ("-(x + 1)*2", r"(-(x + 1)) \cdot 2"),
        ("(-2)**2", "(-2)^{2}"),
        ("-2**2", "-2^{2}"),
        ("(x/2)**2", r"(\frac{x}{2})^{2}"),
        ("sqrt(1 + sqrt(2))", r"\sqrt{1 + \sqrt{2}}"),
        ("log(2)**2", r"(\ln(2))^{2}"),
        ("asin(1/2)", r"\arcsin(\frac{1}{2})"),
        ("factorial(n)", "(n)!"),
        ("binomial(n, 2)", r"\binom{n}{2}"),
        ("Rational(-1, 2)", r"\frac{-1}{2}"),
        ("Decimal('0.50')", "0.50"),
        ("np.int64(-3)", "-3"),
        ("(2+3j)", "2 + 3i"),
        ("1e-05", "0.00001"),
        ("1e200", r"1 \times 10^{200}"),
        ("x_1 + theta", r"x_{1} + \theta"),
        ("x <= 3", r"x\leq 3"),
        ("[1, (2, 3)]", "1, (2, 3)"),
        ("(1, 2), (3, 4)", "(1, 2), (3, 4)"),
        ("(1, 2)", "(1, 2)"),
        ("Interval.Lopen(0, oo)", r"(0, \infty]"),
        ("FiniteSet(1, 2)", r"\{1, 2\}"),
        ("floor(x)", r"\lfloor x \rfloor"),
        ("Yes", r"\text{Yes}"),
    ],
)
def test_python_and_sympy_are_translated(line: str, latex: str) -> None:
    assert python_as_latex(line) == latex


@pytest.mark.parametrize(
    "line",
    [
        *(
            "5 million",
            r"\frac{1}{2}",
            "3 eggs",
            "None",
            "True",
            "nan",
            "inf()",
            "x if y else z",
            "lambda: 1",
            "f(x, y)",
        ),
        *(
            "x.real",
            "x[0]",
            "not x",
            "x % 2",
            "x // 2",
            "1 < x < 2",
            "{1: 2}",
            "f(x=1)",
            "'a'",
            "b'a'",
            "...",
            "",
            "½",
        ),
        *(
            "(" * 200 + ")" * 200,
            "-" * 500 + "1",
            "\0",
            "(x := 1)",
            "*x",
            "await x",
            "__import__('os')",
        ),
    ],
)
def test_what_is_no_expression_is_not_translated(line: str) -> None:
    assert python_as_latex(line) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\frac{1}{2}+\sqrt{3}\cdot\pi", set()),
        (r"\max(3, 7)", {"max"}),
        (r"\operatorname{anything}(3)", {"anything"}),
        ("anything(3)", {"anything"}),
        (r"\sin x + \cos x", {"trigonometric"}),
        (r"\ln 2 + \log_{2} 3", {"log"}),
        ("5!", {"factorial"}),
        (r"\dbinom{5}{2}", {"factorial"}),
        ("|x|", {"absolute"}),
        (r"\frac{d}{dx}(5x)", {"derivative"}),
        (r"12\text{ anything (3)}", set()),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", set()),
        (r"x \in \mathbb{R}", set()),
    ],
)
def test_operations_are_all_but_what_is_known_as_notation(text: str, found: set[str]) -> None:
    assert operations(text) == found


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("5 ft 7 in", [{"foot"}, {"inch"}]),
        (r"5\text{ ft }7\text{ in}", [{"foot"}, {"inch"}]),
        (r"12\text{ sq. cm}", [{"centimeter^2"}]),
        (r"12\text{ cm}^2", [{"centimeter^2"}]),
        (r"12\,\mathrm{cm^2}", [{"centimeter^2"}]),
        ("60 km/h", [set()]),  # h may be a variable
        (r"60\text{ km/h}", [{"kilometer", "/hour"}]),
        ("45°", [{"degree"}]),
        ("3 apples", [{"apple"}]),
        ("6m", [set()]),
        ("2 n", [set()]),
        ("2ab", [set()]),
        ("5 million dollars", [{"dollar"}]),
        ("3, 4", [set(), set()]),
        (r"\text{3 hours}", [{"hour"}]),
    ],
)
def test_units_are_read_and_variables_are_not(text: str, units: list[set[str]]) -> None:
    tidied = tidy(text)
    assert tidied is not None
    assert [set(part.unit) for part in readings(tidied)[-1]] == units


def test_one_bracing_does_not_change_another() -> None:
    for text in (r"\frac 1 3", "2^3 5^2", r"\log_2 3", "√(x+1)", "a_1", r"\frac{√3}2", "x²y³", "sqrt(2)", "½"):
        once = tidy(text)
        assert once is not None and tidy(once) == once


@pytest.mark.parametrize(
    "words", [" dollars", " km/", r"\text{ m}", " hours /", " cups of", "^{\\circ}", " square", " base 2"]
)
@pytest.mark.parametrize("end", ["", "?", " (", "7"])
def test_units_that_a_reply_repeats_are_read_at_once(words: str, end: str) -> None:
    """As many as an answer may have: were there two ways to read one, it would take hours."""
    text = f"5{words * (240 // len(words))}{end}"
    assert len(readings(text)[-1]) >= 1
