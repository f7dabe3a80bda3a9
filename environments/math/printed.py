"""What programs print, as LaTeX: expressions in the notation of Python and of sympy.

They are parsed, never evaluated: names, functions and operators that are not listed are left as they are printed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from verl_atgrpo.environments.math.notation import in_digits

_NAMES = {"pi": r"\pi", "E": "e", "I": "i", "oo": r"\infty", "inf": r"\infty", "zoo": "", "nan": "", "None": ""}
"""Constants of sympy; an empty text is no answer."""
_FUNCTIONS = {
    "log": r"\ln",  # sympy's and Python's is the natural one
    "ln": r"\ln",
    "exp": r"\exp",
    **{name: rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{name: rf"\arc{name[1:]}" for name in ("asin", "acos", "atan")},
}
_FENCED = {
    "floor": (r"\lfloor ", r" \rfloor"),
    "ceiling": (r"\lceil ", r" \rceil"),
    "Abs": ("|", "|"),
    "abs": ("|", "|"),
}
_INTERVALS = {"Interval": "[]", "open": "()", "Lopen": "(]", "Ropen": "[)"}
"""`Interval(1, 2)` and `Interval.open(1, 2)`."""
_GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "rho", "sigma", "phi", "omega")
_WRAPPERS = ("Integer", "Float", "Decimal", "float64", "float32", "int64", "int32", "mpf")
"""Types whose representation holds one number: `Decimal('0.5')`, `np.float64(0.5)`."""
_OPERATORS: dict[type[ast.operator], tuple[str, int]] = {
    ast.Add: (" + ", 1),
    ast.Sub: (" - ", 1),
    ast.Mult: (r" \cdot ", 2),
    ast.Div: ("/", 2),
    ast.Pow: ("^", 4),
    ast.BitXor: ("^", 4),  # what parses as one here is LaTeX or a power as other systems write it
}
_RELATIONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.Gt: ">",
    ast.LtE: r"\leq ",
    ast.GtE: r"\geq ",
    ast.Eq: "=",
}
_ATOM = 9
"""Binding of what needs no parentheses."""


def python_as_latex(line: str) -> str | None:
    """Returns an expression of Python or sympy as LaTeX, or None if it is none that can be translated.

    A list, a set or a tuple without parentheses at the top is its elements, separated by commas: several answers.
    """
    if "\\" in line or not line.isascii():
        return None
    try:
        tree = ast.parse(line, mode="eval").body
        match tree:
            case ast.List(elts=elements) | ast.Set(elts=elements):
                return _commas(elements, line)
            case ast.Tuple(elts=[first, *_] as elements) if first.col_offset == tree.col_offset:  # 1, 2
                return _commas(elements, line)
        return _latex(tree, line)[0]
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last three: what nests too deep for Python
        return None


def _latex(node: ast.expr, line: str) -> tuple[str, int]:
    """Returns an expression as LaTeX, and how strongly its outermost operator binds; raises ValueError."""
    match node:
        case ast.Constant(value=bool() | None):
            pass
        case ast.Constant(value=int(number)):
            return str(number), _ATOM
        case ast.Constant(value=float() | complex()):
            written = in_digits(line[node.col_offset : node.end_col_offset]).replace("j", "i")
            if r"\times" in written:
                return written, 2
            if set(written) <= set("0123456789.i"):
                return written, _ATOM
        case ast.Constant(value=str(text)) if text.replace(".", "").replace("-", "").isdigit():
            return text, _ATOM
        case ast.Name(id=name):
            if symbol := _symbol(name):
                return symbol, _ATOM
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            sign = "-" if isinstance(node.op, ast.USub) else ""
            return sign + _bound(operand, 2, line), 1
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _binary(left, type(op), right, line)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _RELATIONS:
            return _latex(left, line)[0] + _RELATIONS[type(op)] + _latex(right, line)[0], 0
        case ast.Tuple(elts=elements) if elements:
            return f"({_commas(elements, line)})", _ATOM
        case ast.List(elts=elements):
            return f"[{_commas(elements, line)}]", _ATOM
        case ast.Set(elts=elements):
            return rf"\{{{_commas(elements, line)}\}}", _ATOM
        case ast.Call(func=function, args=arguments, keywords=[]) if arguments:
            return _call(function, [_latex(argument, line)[0] for argument in arguments])
    raise ValueError


def _symbol(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    if name.rstrip("_") in _GREEK:
        return "\\" + name.rstrip("_")
    if (indexed := re.fullmatch(r"([a-zA-Z])_?([0-9]+)", name)) is not None:
        return f"{indexed[1]}_{{{indexed[2]}}}"
    return name if len(name) == 1 else rf"\text{{{name}}}"


def _binary(left: ast.expr, op: type[ast.operator], right: ast.expr, line: str) -> tuple[str, int]:
    sign, binding = _OPERATORS[op]
    if sign == "^":
        return f"{_bound(left, _ATOM, line)}^{{{_latex(right, line)[0]}}}", binding
    if sign == "/":
        return rf"\frac{{{_latex(left, line)[0]}}}{{{_latex(right, line)[0]}}}", 3
    tighter = binding + (op is not ast.Add)  # a - (b - c), a * (-b)
    return _bound(left, binding, line) + sign + _bound(right, tighter, line), binding


def _bound(node: ast.expr, binding: int, line: str) -> str:
    text, own = _latex(node, line)
    return text if own >= binding else f"({text})"


def _commas(elements: Sequence[ast.expr], line: str) -> str:
    return ", ".join(_latex(element, line)[0] for element in elements)


def _call(function: ast.expr, arguments: list[str]) -> tuple[str, int]:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    first, *others = arguments
    if name in _INTERVALS and len(others) == 1:
        return f"{_INTERVALS[name][0]}{first}, {others[0]}{_INTERVALS[name][1]}", _ATOM
    if name == "Union":
        return r" \cup ".join(arguments), 0
    if name in ("Fraction", "Rational") and len(others) == 1:
        return rf"\frac{{{first}}}{{{others[0]}}}", 3
    if name == "binomial" and len(others) == 1:
        return rf"\binom{{{first}}}{{{others[0]}}}", _ATOM
    if name == "FiniteSet":
        return rf"\{{{', '.join(arguments)}\}}", _ATOM
    if name == "root" and len(others) == 1:
        return rf"\sqrt[{others[0]}]{{{first}}}", _ATOM
    if others:
        raise ValueError
    if name in _WRAPPERS or name in ("Fraction", "Rational"):
        return first, _ATOM if first[0] != "-" else 1
    if name in ("sqrt", "cbrt"):
        return rf"\sqrt{'[3]' * (name == 'cbrt')}{{{first}}}", _ATOM
    if name in _FENCED:
        return first.join(_FENCED[name]), _ATOM
    if name == "factorial":
        return f"({first})!", _ATOM
    if name in _FUNCTIONS:
        return f"{_FUNCTIONS[name]}({first})", 3
    if len(name) == 1:  # f(x)
        return f"{name}({first})", _ATOM
    raise ValueError
