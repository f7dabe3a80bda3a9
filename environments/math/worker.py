"""The process that compares values with math-verify, under a CPU time limit.

math-verify's own time limits need the main thread and do not interrupt C code (`9^{9^{9}}`). Here the kernel kills the
process when a comparison exceeds its CPU time, and `answers` starts another one. sympy raises exceptions of any kind
for what it cannot compute; math-verify's `parse` and `verify` take them all for "nothing" and "not equal", and so does
this process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from verl_atgrpo.environments.common.limited import serve
from verl_atgrpo.environments.math.decimals import FLOAT_TOLERANCE, Number, read_float, same_number

CPU_SECONDS = 0.5
"""CPU time for each value of the gold answer; a usual comparison takes a fiftieth."""
MEMORY_BYTES = 2 << 30
_EXACT = 30
"""Significant digits to which two exact values are compared where no rule of sympy shows that they are equal."""


def main() -> None:
    """Answers requests of values, other values, and verdicts known: whether they match, as `answers` asks."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, grader, parse, verify

    grader.sympy_numeric_eq = numerically_equal
    # Units are read by `notation`: math-verify would take `6m` for 6.
    normal = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    # Only LaTeX, and all of it: without a box math-verify would look for a fraction anywhere.
    form = (LatexExtractionConfig(False, boxed_match_priority=0, normalization_config=normal),)

    @functools.lru_cache(maxsize=1024)
    def parsed(text: str) -> list[Any]:
        boxed = f"\\boxed{{{text}}}"
        found: list[Any] = parse(boxed, form, "no_fallback", "first_match", parsing_timeout=None)  # type: ignore[arg-type]
        return found

    @functools.lru_cache(maxsize=1024)
    def values(text: str) -> list[Any]:
        return list(map(with_imaginary_unit, parsed(text)))

    def includes(gold: str, answer: str) -> bool:
        return bool(verify(values(gold), values(answer), allow_set_relation_comp=True, timeout_seconds=None))

    def equal(gold: str, answer: str) -> bool:
        try:
            if not arithmetic(parsed(answer)) <= arithmetic(parsed(gold)) or cancels(parsed(gold), parsed(answer)):
                return False
            # Both directions: `verify` parses the second one leniently, 17 = 18 as 18.
            return includes(gold, answer) and includes(answer, gold)
        except MemoryError:
            raise  # ends the process, see `serve`
        except Exception:  # noqa: BLE001  # sympy raises any for what it cannot compute, as an interval from i
            return False

    def matching(request: Sequence[Any]) -> bool:
        golds, answers, known = request
        left = set(range(len(answers)))
        for gold, row in zip(golds, known, strict=True):
            equals = (j for j in sorted(left) if (equal(gold, answers[j]) if row[j] is None else row[j]))
            if (match := next(equals, None)) is None:
                break
            left.remove(match)
        return not left

    equal(r"\frac{1}{3}", r"\sqrt{2}")  # warm-up: the first comparison builds the grammar
    serve(matching, lambda request: CPU_SECONDS * len(request[0]), MEMORY_BYTES)


def with_imaginary_unit(value: Any) -> Any:
    """Returns a parsed value with sympy's imaginary unit for the symbol i, and symbols without assumptions of theirs.

    math-verify parses i as a symbol, and makes all symbols of a text with one complex.
    """
    from sympy import Basic, GreaterThan, I, LessThan, StrictGreaterThan, StrictLessThan, Symbol

    if not isinstance(value, Basic) or value.has(LessThan, GreaterThan, StrictLessThan, StrictGreaterThan):
        return value  # in 1 <= i <= n it is an index
    names = {symbol: I if symbol.name == "i" else Symbol(symbol.name, real=True) for symbol in value.atoms(Symbol)}
    return value.subs(names) if any(symbol != names[symbol] for symbol in names) else value


def arithmetic(values: list[Any]) -> set[str]:
    """Returns what parsed values leave to compute: sums and products of rational numbers, and roots that are rational.

    One fraction, a power of an integer, and a multiple of a power of ten are values.
    """
    from sympy import Add, MatrixBase, Mul, Pow, preorder_traversal

    found = set()
    entries = [part for value in values for part in (value.flat() if isinstance(value, MatrixBase) else [value])]
    for node in (node for part in entries for node in preorder_traversal(part)):
        if isinstance(node, Add) and sum(_rational(part) for part in node.args) > 1:
            found.add("sum")
        elif isinstance(node, Mul) and _factors(node) > 1:
            found.add("product")
        elif isinstance(node, Pow) and not node.exp.is_Integer and _rational(node):
            found.add("root")
    return found


def cancels(golds: list[Any], answers: list[Any]) -> bool:
    """Returns whether an answer leaves more to do than the gold one.

    It is made of symbols, constants or irrational roots where that is rational, or is an inequality to be solved where
    that is an interval.
    """
    from sympy import Float, Function, Pow, Symbol
    from sympy.core.numbers import ImaginaryUnit, NumberSymbol
    from sympy.core.relational import Eq, Relational

    def made_of(values: list[Any], *kinds: type) -> bool:
        roots = [power for value in values for power in value.atoms(Pow) if not power.exp.is_Integer]
        return bool(roots) or any(value.has(*kinds) for value in values)

    leaves = Symbol, NumberSymbol, ImaginaryUnit
    golds, answers = ([value for value in values if hasattr(value, "atoms")] for values in (golds, answers))
    # An interval is also written as 1 <= x <= 2, and a decimal may stand for an irrational number.
    bounds = [one for value in answers for one in value.atoms(Relational) if not isinstance(one, Eq)]
    solved = all(
        sum(side.is_Symbol for side in one.args) + sum(side.is_number for side in one.args) == 2 for one in bounds
    )
    if not solved and not any(value.has(Relational) for value in golds):
        return True
    unbound = [value for value in answers if not value.has(Relational)]
    return bool(golds) and not made_of(golds, *leaves, Float, Function) and made_of(unbound, *leaves)


def _rational(value: Any) -> bool:
    """Returns whether a value is a rational number; sympy says of no decimal that it is one."""
    from sympy import Rational

    if value.is_Pow and value.base.is_Float:
        return bool(value.exp.is_Integer or (Rational(str(value.base)) ** value.exp).is_rational)
    return bool(value.is_number and (value.is_rational or value.is_Float))


def _factors(product: Any) -> int:
    """Returns the number of rational factors of a product, a numerator with its denominator as one."""
    from sympy import Mul, Pow

    tops = bottoms = 0
    for factor in Mul.make_args(product):
        if not _rational(factor) or abs(factor) == 1:
            continue
        base, exponent = factor.as_base_exp()
        if base == 10 and exponent.is_Integer:
            continue
        if base.has(Pow):  # a fraction in a fraction
            return 2
        if factor.is_Rational:
            tops += abs(factor.p) != 1
            bottoms += factor.q != 1
        elif exponent.is_negative:
            bottoms += 1
        else:
            tops += 1
    return max(tops, bottoms)


def numerically_equal(one: Any, other: Any, float_rounding: int, numeric_precision: int) -> bool:
    """Returns whether two numbers or matrices of sympy are equal: in the place of math-verify's own comparison.

    That one rounds to six places and takes differences below 1e-15 for none, so that all small numbers are equal.
    """
    from sympy import Float, MatrixBase

    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        return one.shape == other.shape and all(
            numerically_equal(*pair, float_rounding, numeric_precision)
            for pair in zip(one.flat(), other.flat(), strict=True)
        )
    one, other = one.doit(), other.doit()
    if not (one.is_number and other.is_number):
        return False
    if isinstance(one, Float) or isinstance(other, Float):
        numbers = [_number(value) for value in (one, other)]
        return None not in numbers and same_number(*numbers)  # type: ignore[arg-type]
    if one.is_Rational and other.is_Rational:
        return bool(one == other)
    first, second = one.evalf(_EXACT), other.evalf(_EXACT)
    if not (first.is_finite and second.is_finite):
        return bool(first == second)
    tolerance = float(FLOAT_TOLERANCE) if one.has(Float) or other.has(Float) else 10.0 ** (10 - _EXACT)
    return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))


def _number(value: Any) -> Number | None:
    from sympy import Rational

    if value.is_Float:
        return read_float(float(value))
    if not value.is_real:
        return None
    exact = value if value.is_Rational else value.evalf(_EXACT)
    ratio = exact if exact.is_Rational else Rational(str(exact))
    return Number(Fraction(int(ratio.p), int(ratio.q)))


if __name__ == "__main__":
    main()
