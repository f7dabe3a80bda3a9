"""The notation of answers: characters, LaTeX, names, units, bases and lists, read without computing anything."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal

from verl_atgrpo.environments.common.replies import closing_parenthesis

LONGEST = 256
"""Most characters of an answer; a longer one does not parse."""
_RUNAWAY = re.compile(
    r"""
    \^[\s{(]*[0-9]{5}                        # 9^{99999}
    | \^[\s{(]*[0-9]+[\s{(}]*\^[\s{(]*[0-9]  # 9^{9^{9}}
    | [0-9]{5}\s*! | ![\s)}]*!               # 99999!, 9!!
""",
    re.VERBOSE,
)
"""Common forms of numbers too large to compute."""
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?0*[0-9]{1,3}(?![\w.])")
"""A number such as `1e-05`, in which math-verify would take `e` for Euler's number."""
GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?")
_THOUSANDS = re.compile(r"(?<![0-9,.(\[{])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,)\]}])")
_PROSE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{3,} +[a-zA-Z]{2}")
"""Words, which math-verify would parse as a product of their letters."""

# ------------------------------------------------------------------ characters and LaTeX

_CHARACTERS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{DEGREE SIGN}": r"^{\circ}",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{DOT OPERATOR}": r"\cdot ",
    "\N{DIVISION SIGN}": "/",
    "\N{FRACTION SLASH}": "/",
    "\N{GREEK SMALL LETTER PI}": r"\pi ",
    "\N{GREEK SMALL LETTER THETA}": r"\theta ",
    "\N{GREEK SMALL LETTER ALPHA}": r"\alpha ",
    "\N{GREEK SMALL LETTER BETA}": r"\beta ",
    "\N{INFINITY}": r"\infty ",
    "\N{LESS-THAN OR EQUAL TO}": r"\leq ",
    "\N{GREATER-THAN OR EQUAL TO}": r"\geq ",
    "\N{NOT EQUAL TO}": r"\neq ",
    "\N{PLUS-MINUS SIGN}": r"\pm ",
    "\N{UNION}": r"\cup ",
    "\N{INTERSECTION}": r"\cap ",
    "\N{ELEMENT OF}": r"\in ",
    "\N{NO-BREAK SPACE}": " ",
    "\N{SQUARE ROOT}": "sqrt ",
    "\N{CUBE ROOT}": "sqrt[3] ",
}
_STYLED = re.compile(r"[\u00b2\u00b3\u00b9\u2070-\u209c\u00bc-\u00be\u2150-\u215e]+")
"""Powers, indices and fractions that are single characters."""
_ROOT = re.compile(r"\\?sqrt(\[[0-9]+\])?\s*(\(|[0-9]+(?![0-9.])|[a-zA-Z\u03c0](?![a-zA-Z])|(?=\{))")
_LETTER = re.compile(r"\\(?:mathrm|text|mathit)\s*\{\s*([ei])\s*\}|\\imath(?![a-zA-Z])")
_ARGUMENT = r"(?:[0-9]|[a-zA-Z]|\\(?:pi|theta|alpha|beta)(?![a-zA-Z]))"


def tidy(text: str) -> str | None:
    """Returns an answer without currency and percent signs and LaTeX spacing, or None if it is not an answer.

    Percent signs are removed because gold answers use them inconsistently: `8%` equals `8` but not 0.08. A number in
    scientific notation is written in digits, single characters such as `½` or `√` as LaTeX, arguments in braces.
    """
    text = re.sub(r"(?<=[0-9],)\\!\s*(?=[0-9]{3})", "", text)
    text = re.sub(r"\\?\$|\\!|\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])", "", text).replace("{,}", ",")
    text = re.sub(r"\\\\\[[^\]]*(?:pt|em|ex|mm|cm)\]", r"\\\\", text)
    text = re.sub(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|~|\s+", " ", text)
    text = re.sub(r"\s*\\?%$", "", re.sub(r" +", " ", text).strip().rstrip(" ."))
    if len(text) > LONGEST:
        return None
    if not text.isascii():
        text = _STYLED.sub(lambda run: _plain(run[0]), text)
        text = "".join(_CHARACTERS.get(character, character) for character in text)
    text = _braced(text).strip()
    if " " in text and GROUPED.fullmatch(text) and "," not in text:
        text = text.replace(" ", "")
    if _SCIENTIFIC.fullmatch(text):
        text = in_digits(text)
    # math-verify adds adjacent numbers: `1 234` would be 235.
    side_by_side = re.search(r"[0-9.] [0-9.]", text) and not _MIXED.fullmatch(text)
    return None if side_by_side or not re.search(r"\w", text) or _RUNAWAY.search(text) else text


_MIXED = re.compile(r"(?:[a-zA-Z] ?= ?)?-?[0-9]+ [0-9]+/[1-9][0-9]*(?: ?[a-zA-Z\\][^0-9]*)?")
"""A whole number and a fraction, perhaps with a name or a unit."""


def in_digits(text: str) -> str:
    r"""Returns a text with its numbers such as `1e-05` in digits, or as `2.5 \times 10^{300}` if they are many."""

    def written(match: re.Match[str]) -> str:
        number = Decimal(match[0])
        if abs(number.adjusted()) < 100:
            return format(number, "f")
        digits, exponent = f"{number:e}".split("e")
        return rf"{digits} \times 10^{{{int(exponent)}}}"

    return _SCIENTIFIC.sub(written, text)


def _plain(run: str) -> str:
    r"""Returns `²` as `^{2}`, `₂` as `_{2}` and `½` as `\frac{1}{2}`; a run of powers or indices is one."""
    parts: list[tuple[str, str]] = []
    for character in run:
        kind, _, code = unicodedata.decomposition(character).partition(" ")
        plain = "".join(chr(int(number, 16)) for number in code.split())
        if kind not in ("<super>", "<sub>", "<fraction>"):
            return run
        if parts and parts[-1][0] == kind != "<fraction>":
            parts[-1] = (kind, parts[-1][1] + plain)
        else:
            parts.append((kind, plain))
    forms = {"<super>": "^{%s}", "<sub>": "_{%s}"}
    return "".join(
        forms[kind] % plain.replace("\N{MINUS SIGN}", "-")
        if kind in forms
        else r"\frac{{{}}}{{{}}}".format(*plain.split("\N{FRACTION SLASH}"))
        for kind, plain in parts
    )


def _braced(text: str) -> str:
    r"""Returns LaTeX with single arguments in braces: `\frac 1 3`, `2^3 5^2`, `\log_2 3`; `sqrt(2)` as `\sqrt{2}`."""
    text = _LETTER.sub(lambda letter: letter[1] or "i", text).replace(r"\varnothing", r"\emptyset")
    text = re.sub(rf"\\[dtc]?frac\s*({_ARGUMENT})\s*({_ARGUMENT})", r"\\frac{\1}{\2}", text)
    text = re.sub(rf"\\[dtc]?frac\s*({_ARGUMENT})\s*\{{", r"\\frac{\1}{", text)
    text = re.sub(rf"(\\[dtc]?frac\s*\{{[^{{}}]*\}})\s*({_ARGUMENT})", r"\1{\2}", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])", r"^{\\circ}", text)
    text = re.sub(r"\^\s*([0-9]+)", r"^{\1}", text)
    text = re.sub(r"(?<!\\log)_\s*([0-9]+)|(?<=\\log)_\s*([0-9]+(?= )|[0-9])", r"_{\1\2}", text)
    text = re.sub(r"(?<=\\log)\s+_", "_", text)
    parts, start = [], 0
    while (root := _ROOT.search(text, start)) is not None:
        parts.append(text[start : root.start()])
        head, argument, end = rf"\sqrt{root[1] or ''}", root[2], root.end()
        if argument == "(":
            closing = closing_parenthesis(text, end, len(text))
            if closing is None:
                parts.append(root[0])
                start = end
                continue
            argument, end = _braced(text[end:closing]), closing + 1
        parts.append(f"{head}{{{argument}}}" if argument else head)
        start = end
    return "".join([*parts, text[start:]])


# ------------------------------------------------------------------ units, bases, names

_UNITS = {
    "millimeter": "mm millimetre",
    "centimeter": "cm centimetre",
    "meter": "m metre",
    "kilometer": "km kilometre",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd",
    "mile": "mi",
    "milligram": "mg",
    "gram": "g",
    "kilogram": "kg",
    "pound": "lb lbs",
    "ounce": "oz",
    "milliliter": "ml millilitre",
    "liter": "l litre",
    "gallon": "gal",
    "second": "s sec",
    "minute": "min",
    "hour": "h hr",
    "year": "yr",
    "degree": "deg",
    "radian": "rad",
    "percent": "pct percentage",
    "dollar": "usd",
    "person": "people",
    **dict.fromkeys(("day", "week", "month", "cent", "euro", "unit", "mph", "am", "pm"), ""),
}
_CANONICAL = {
    f"{name}{plural}": unit
    for unit, others in _UNITS.items()
    for name in (unit, *others.split())
    for plural in ("", "s")
    if len(name) > 1 or not plural
}
_POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3", "cubed": "^3"}
_MULTIPLES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_HALVES = frozenset(("am", "pm"))
_EMPTY = frozenset(("of", "the", "in", "percent"))
"""Words that say nothing about a unit."""
_DIGITS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASES = {name: str(number) for number, name in enumerate(_DIGITS, 2)} | {"sixteen": "16"}

_NAMES = [name for name in [*_CANONICAL, *_POWERS, *_MULTIPLES] if len(name) > 1]
_KNOWN = "|".join(sorted(_NAMES, key=len, reverse=True))
_TEXT = r"\\(?:text|mathrm|textrm|textbf|textit|mbox|rm|operatorname)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
# No text matches in two ways, or looking for a unit would take twice as long for every word that a reply repeats.
_OTHER = rf"(?<= )(?!(?:{_KNOWN})(?![a-zA-Z]))(?:[a-z]{{4,}}|per|of|old|men)(?![a-zA-Z(])"
_BARE = rf"(?:{_KNOWN})(?![a-zA-Z])\.?|{_OTHER}|[ap]\.\s?m\b\.?|(?<= )\(?base[ -][0-9a-z]+\)?"
_POWER = r"(?:\s*\^\s*\{?[23]\}?)?"
_WORDS = re.compile(rf"(?:\s*(?:{_TEXT}|\^\{{\\circ\}}|{_BARE}){_POWER}(?:\s*/)?)+\s*$", re.IGNORECASE)
"""Units at the end of a value."""
_JOINED = re.compile(rf"([0-9]\s*(?:{_TEXT}|(?:{_KNOWN})(?![a-zA-Z])))\s*(?=[0-9])", re.IGNORECASE)
"""A quantity before another one: 5 ft 7 in."""
_BASE = re.compile(
    r"\(?([0-9][0-9A-Fa-f]*)\)?_\s*[{(]*(?:\\(?:text|mathrm)\s*\{)?\s*(?:base[ -]?\}?\s*)?([0-9]+|[a-z]+)[)}]*"
)
_TIME = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_NAME = re.compile(
    r"(?s)\s*((?:\\[a-zA-Z]+|[a-zA-Z])(?:_(?:\{[^{}]*\}|\w))?(?:\((?:[a-z]|-?[0-9]+)\))?)\s*(?:=|\\in(?![a-zA-Z]))(.*)"
)
_THING = re.compile(r"(?!\s*[0-9])(?=.*[a-zA-Z])(?:[^-+*/^<>=,;(]|\([^()=]*\))*")
"""What has a value, by its name: `n_{\\min}`, `|AB|`, `\\cos A`, `P(A, B)`; no equation's side."""
_COMPUTED = re.compile(r"\\(?:frac|cdot|times|div|sum|prod|int|pm|le|ge|ne|approx)")
_PHRASE = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|mbox|mathbf|mathit)\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class Part:
    """One of the values of an answer, with what is written around it."""

    value: str
    name: str = ""
    """What it is said to be: `x` in `x = 3`."""
    unit: frozenset[str] = frozenset()
    """Words of its unit, in one form for each: `{"foot"}` for `ft`."""
    half: str = ""
    """`am` or `pm`."""
    base: str = "10"
    power: int = 0
    """Of ten, which it is multiplied by: 6 for a million."""
    text: str = ""
    """The value if it is words or capital letters, whose order counts; in lower case."""
    written: str = ""
    """The part as it is in the answer."""


def readings(text: str) -> list[list[Part]]:
    """Returns the possible meanings of an answer, each a list of values: `1,234` is a number or a list of two."""
    grouped = _THOUSANDS.sub(lambda one: one[0].replace(",", ""), text)
    return [_parts(grouped), _parts(text)] if grouped != text else [_parts(text)]


def stated(answer: str) -> str:
    r"""Returns the value alone of an answer that says what it is of, by whatever name: `90` of `n_{\min} = 90`."""
    name, equals, value = answer.partition("=")
    plain = equals and "=" not in value and _THING.fullmatch(name) and not _COMPUTED.search(name)
    return value.strip() if plain else answer


def same_unit(one: frozenset[str], other: frozenset[str]) -> bool:
    """Returns whether units are equal, or one says more than the other: `cups` and `cups of flour`."""
    per = [{word for word in unit if word.startswith("/")} for unit in (one, other)]
    return per[0] == per[1] and (one <= other or other <= one)


def is_prose(text: str) -> bool:
    """Returns whether an answer has a sentence in it, units aside."""
    return any(_PROSE.search(part.value) is not None for part in _parts(text))


def _parts(text: str) -> list[Part]:
    text = re.sub(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ",", text)
    if (phrase := _PHRASE.fullmatch(text.strip())) is not None and "," in phrase[1]:  # \text{A, B}
        text = phrase[1]
    text = _JOINED.sub(r"\1, ", text)
    named = _NAME.fullmatch(text)
    if (braces := re.fullmatch(r"\s*\\\{(.+)\\\}", text if named is None else named[2])) and r"\{" not in braces[1]:
        text = braces[1]
    signed: list[str] = []
    for part in _split(text):
        if part.count(r"\pm") == 1:
            signed += [re.sub(r"^(.*=)?\s*\+\s*", r"\1", part.replace(r"\pm", "+")), part.replace(r"\pm", "-")]
        else:
            signed.append(part)
    return [_part(part) for part in signed]


def _split(text: str) -> list[str]:
    """Returns the parts of a text between commas and semicolons that no brackets enclose."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character in ",;" and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    stripped = [part.strip() for part in parts if part.strip()]
    return stripped if depth == 0 and stripped else [text]


def _part(written: str) -> Part:
    value, name = written, ""
    if (named := _NAME.fullmatch(value)) is not None and "=" not in named[2]:
        name, value = re.sub(r"[\s{}]", "", named[1]), named[2].strip()
    if (phrase := _PHRASE.fullmatch(value)) is not None:
        value = phrase[1].strip()
    value = re.sub(r"\s*\\?%$", "", value)
    if (choice := re.fullmatch(r"\(([A-Z])\)", value)) is not None:
        value = choice[1]
    letters = value.replace(" ", "")
    word = phrase is not None or len(letters) > 3 or letters.isupper()
    if word and letters.isalpha() and letters.isascii():
        return Part(value, name, text=letters.lower(), written=written)
    words: list[str] = []
    if (found := _WORDS.search(value)) is not None and value[: found.start()].strip():
        words = _words(found[0])
        value = value[: found.start()].strip()
    half = next((said for said in words if said in _HALVES), "")
    base = _BASES.get(words[-1], words[-1]) if words[-2:-1] == ["base"] else "10"
    power = sum(_MULTIPLES.get(said, 0) for said in words)
    unit = frozenset(words if base == "10" else ()) - _MULTIPLES.keys() - _HALVES - _EMPTY
    if (indexed := _BASE.fullmatch(value)) is not None and (indexed[2].isdigit() or indexed[2] in _BASES):
        value, base = indexed[1], _BASES.get(indexed[2], indexed[2])
    if (time := _TIME.fullmatch(value)) is not None:
        value = str(int(time[1])) if time[2] == "00" and half else f"{int(time[1])}:{time[2]}"
        return Part(value, name, half=half, text=value, written=written)
    return Part(value, name, unit, half, base, power, written=written)


def _words(text: str) -> list[str]:
    """Returns the words of a unit in one form each, powers with their words."""
    text = re.sub(r"\\[a-z]+\s*\{|[{}()]", " ", text.replace(r"^{\circ}", " degree ").lower())
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text)
    text = re.sub(r"\s*\^\s*([23])", r"^\1", re.sub(r"(?<=[a-z])\.", " ", text))
    text = re.sub(r"\s*(?:/|\bper\b)\s*", " /", text)
    words, power = [], ""
    for per, word in re.findall(r"(/?)([a-z]+(?:\^[23])?|(?<=base )[0-9]+|(?<=base-)[0-9]+)", text):
        if word in _POWERS:
            power = _POWERS[word]
            continue
        stem, caret, exponent = word.partition("^")
        stem = _CANONICAL.get(stem, stem[:-1] if len(stem) > 3 and stem.endswith("s") else stem)
        words.append(per + stem + (power or caret + exponent))
        power = ""
    return words


# ------------------------------------------------------------------ operations

_NOTATION = frozenset(
    re.findall(
        "[a-z]+",
        """
        frac sqrt exp cdot times div pi infty pm mp circ text mathrm textrm textbf textit mathbf mathit mbox rm le leq
        leqslant ge geq geqslant ne neq lt gt in cup cap setminus emptyset varnothing mathbb overline angle alpha beta
        gamma delta epsilon theta lambda mu rho sigma phi varphi omega ldots dots cdots quad displaystyle begin end
        left right approx forall triangle mid colon
        """,
    )
)
"""Commands that compute nothing; whatever else stands in an answer is an operation."""
_FAMILIES = {
    "log": ("log", "ln", "lg"),
    "trigonometric": ("sin", "cos", "tan", "cot", "sec", "csc"),
    "inverse": ("arcsin", "arccos", "arctan"),
    "factorial": ("!", "binom", "dbinom", "tbinom"),
    "floor": ("lfloor", "rfloor", "floor"),
    "ceiling": ("lceil", "rceil", "ceil"),
    "absolute": ("|", "lvert", "rvert", "vert"),
}
_FAMILY = {name: family for family, names in _FAMILIES.items() for name in names}
_NAMED = re.compile(
    r"\\operatorname\*?\s*\{\s*([a-zA-Z]+)\s*\}|\\([a-zA-Z]+)|(?<![a-zA-Z\\])([a-zA-Z]{2,})\s*\(|([!|])"
)
_DERIVATIVE = re.compile(r"\\frac\s*\{\s*(?:d|\\partial)(?![a-zA-Z])")
_BESIDE = re.compile(r"[0-9](?: ?\\frac\{| )([0-9]+)(?:\}\{|/)([0-9]+)")
"""A fraction beside a whole number."""


def operations(text: str) -> set[str]:
    """Returns what an answer leaves to compute besides arithmetic: functions, sums, limits, rounding, factorials.

    Functions of one kind are one operation: a sine may be written as a cosine. `worker` looks for arithmetic, but
    for a number beside a fraction of 1 or more, which it reads as a mixed number.
    """
    text = re.sub(r"\\(?:begin|end)\{[a-z]*\}|\\mathbb\{[A-Z]\}", " ", _PHRASE.sub(" ", text))
    found = {next(filter(None, match.groups())) for match in _NAMED.finditer(text)}
    found |= {"sum"} if any(int(top) >= int(bottom) for top, bottom in _BESIDE.findall(text)) else set()
    found |= {"derivative"} if _DERIVATIVE.search(text) else set()
    return {_FAMILY.get(name, name) for name in found} - _NOTATION
