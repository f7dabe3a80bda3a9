"""Answers to mathematical problems: parsing and comparison.

Plain numbers are compared here, everything else by math-verify in a separate process (`worker`), so that no reply can
hang or kill the run: answers whose comparison times out are not equal.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import numbers
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from verl_atgrpo.environments.common.replies import after_thoughts, closing_brace, labelled, labels, last_box
from verl_atgrpo.environments.common.workflow import Style

LONGEST = 256
"""Most characters of an answer; a longer one does not parse."""
WORKER = "verl_atgrpo.environments.math.worker"
_NUMBER = re.compile(r"[-+]?(?:[0-9]+/0*[1-9][0-9]*|[0-9]+\.?[0-9]*|\.[0-9]+)")
_RUNAWAY = re.compile(
    r"""
    \^[\s{(]*[0-9]{5}                        # 9^{99999}
    | \^[\s{(]*[0-9]+[\s{(}]*\^[\s{(]*[0-9]  # 9^{9^{9}}
    | [0-9]{5}\s*! | ![\s)}]*!               # 99999!, 9!!
""",
    re.VERBOSE,
)
"""Common forms of numbers too large to compute."""
_PROSE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{3,} +[a-zA-Z]{2}")
"""Words, which math-verify would parse as a product of their letters."""
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?0*[0-9]{1,2}(?![\w.])")
"""A number such as `1e-05`, in which math-verify would take `e` for Euler's number."""
_OPERATIONS = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|gcd|lcm|min|max|det|[dt]?binom|[lr]?floor|[lr]?ceil|begin)(?![a-zA-Z])|!"
    r"|\\[dt]?frac\s*\{\s*(?:\\mathrm\s*\{)?(?:d|\\partial)(?![a-zA-Z])"
)
"""What leaves more to compute than powers, roots and functions do: sums, limits, binomials, matrices, factorials."""
_ARITHMETIC = re.compile(
    r"(?<=[0-9)}\]])\s*(?:[-+*\u00d7\u00b7]|\\(?:times|cdot|div|bmod|mod|pmod)(?![a-zA-Z]))\s*(?!\{?10\}?\s*\^)[-0-9({\[.\\]"
)
"""Two numbers that are to be added or multiplied; not powers of ten."""
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?")

_LABELS = labels("(?!)", r"(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:(?:final|correct) )*answer")
_CHOICE = re.compile(r"[.!?;] |\bor\b", re.IGNORECASE)
"""A second sentence, or a second answer."""
_PRINTED_LABEL = re.compile(r"[a-z ]{0,30}(?:answer|result|solutions?)[a-z ]{0,20}[:=]", re.IGNORECASE)
_AS_LATEX = {"pi": r"\pi", "oo": r"\infty", "I": "i", "log": r"\log", "exp": r"\exp"}
_AS_LATEX |= {name: rf"\{name}" for name in ("sin", "cos", "tan")}
_SYMPY = re.compile(rf"(?<![a-zA-Z\\])(?:{'|'.join(_AS_LATEX)})(?![a-zA-Z])")
"""Names in sympy's output, which LaTeX would parse as products of letters."""


def tidy(text: str) -> str | None:
    """Returns an answer without currency and percent signs and LaTeX spacing, or None if it is not an answer.

    Percent signs are removed because gold answers use them inconsistently: `8%` equals `8` but not 0.08. A number in
    scientific notation is written in digits.
    """
    text = (
        re.sub(r"\\?\$|\\!|\\(?:left|right)(?![a-zA-Z])", "", text).replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    )
    text = re.sub(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|~|\s+", " ", text)
    text = re.sub(r"\s*\\?%$", "", re.sub(r" +", " ", text).strip().rstrip(" ."))
    if " " in text and _GROUPED.fullmatch(text) and "," not in text:
        text = text.replace(" ", "")
    if _SCIENTIFIC.fullmatch(text):
        text = _in_digits(text)
    # math-verify adds adjacent numbers: `1 234` would be 235.
    side_by_side = re.search(r"[0-9.] [0-9.]", text)
    if side_by_side or not re.search(r"\w", text) or len(text) > LONGEST or _RUNAWAY.search(text):
        return None
    return text


def _in_digits(number: str) -> str:
    return format(Decimal(number), "f")


def parse_answer(reply: str, style: Style = "full") -> str | None:
    r"""Returns the answer in a reply in the agreed format, tidied, or None.

    It is the content of the last `\boxed{...}`; None if that is empty, not closed or too long. With `full` also None
    if another box of the same line differs; without any box, it is the text after the last label `Final answer:` or
    `Answer:`.
    """
    if style == "compact":
        return _last_boxed(reply)
    text = after_thoughts(reply)
    box = last_box(text, LONGEST)
    if box is not None:
        return tidy(re.sub(r"^[*`]+|[*`]+$", "", box[1].strip()))
    for label in labelled(text, _LABELS, 4 * LONGEST, boxes=False):
        line = next((line for line in label.lines[:3] if line.strip(" *_")), "")
        answer = tidy(re.sub(r"\\[()\[\]]", "", line).strip(" \t*_`"))
        return None if answer is None or _PROSE.search(answer) or _CHOICE.search(answer) else answer
    return None


def _last_boxed(reply: str) -> str | None:
    before, mark, _ = reply.rpartition(r"\boxed{")
    start = len(before + mark)
    end = closing_brace(reply, start, LONGEST) if mark else None
    return None if end is None else tidy(reply[start:end])


def parse_printed(output: str, style: Style = "full") -> str | None:
    r"""Returns the answer in the last non-empty line of a program's output, or None; powers may be `**`.

    With `full` the line may be labelled (`Answer: 3`), boxed, a list, or in sympy's notation (`2*pi`, `log(2)`);
    floats may be in it as Python prints them (`1e-05`).
    """
    line = output.strip().rpartition("\n")[2].replace("**", "^")
    if style == "compact" or len(line) > 2 * LONGEST:
        return tidy(line)
    line = _PRINTED_LABEL.sub("", line.strip(), count=1)
    if (box := last_box(line, LONGEST)) is not None:
        line = box[1]
    if (listed := re.fullmatch(r"\[([^\[\]]*)\]", line.strip())) is not None:
        line = listed[1]
    line = _SCIENTIFIC.sub(lambda number: _in_digits(number[0]), line)
    return tidy(_SYMPY.sub(lambda name: _AS_LATEX[name[0]], line))


_MISSING = {"", "na", "n/a", "#n/a", "#na", "<na>", "nan", "-nan", "none", "null", "nil", "inf", "-inf", "undefined"}
"""What pandas and others write for a missing value or the result of a failed computation, in lower case."""


def _is_given(gold: object) -> bool:
    """Returns whether a value of a data set is a text or a number that can be an answer."""
    if isinstance(gold, str):
        return gold.strip().casefold() not in _MISSING
    return isinstance(gold, numbers.Real) and math.isfinite(gold)


def parse_gold(gold: object) -> str | None:
    r"""Returns a data set's answer, tidied, or None if it is missing or a sentence.

    The result depends on the text alone, so that all processes number the problems alike. Whether math-verify can
    parse it is a separate check (`verifiable`), which takes 15 ms per answer and a time limit.

    Args:
        gold: a finite number; or a text with the answer at its end, after `####` (GSM8K) or in `\boxed{}` (MATH); or
            a list of such (OlympiadBench), which are the answer together. Anything else, and what data frames write
            for a missing value (`nan`, `N/A`, `None`), is no answer.
    """
    if not (values := gold if isinstance(gold, (list, tuple)) else [gold]) or not all(map(_is_given, values)):
        return None
    if isinstance(gold, (list, tuple)):
        # Commas separate answers here: `100,200` is not a number of six digits.
        answer = tidy(re.sub(r",\s*", ", ", ", ".join(map(str, gold))))
    elif isinstance(gold, str) and "####" in gold:
        answer = tidy(gold.rpartition("####")[2].replace(",", ""))
    else:
        answer = _last_boxed(str(gold)) or tidy(str(gold))
    return None if answer is None or _PROSE.search(answer) else answer


def verifiable(gold: str) -> bool:
    """Returns whether other texts can be found equal to a tidied answer; the first call takes seconds."""
    return _NUMBER.fullmatch(gold) is not None or _equal_expressions(gold, gold)


def _same_operations(one: str, other: str) -> bool:
    """Returns whether neither of two answers leaves a computation to math-verify that the other does not.

    Otherwise the problem itself, such as a sum over k, would be a right answer to it.
    """
    if set(_OPERATIONS.findall(one)) != set(_OPERATIONS.findall(other)):
        return False
    numbers = [_NUMBER.fullmatch(text) is not None for text in (one, other)]
    return not ((numbers[0] and _ARITHMETIC.search(other)) or (numbers[1] and _ARITHMETIC.search(one)))


async def equal(one: str | None, other: str | None) -> bool:
    """Returns whether two tidied answers are equal; None equals nothing."""
    if one is None or other is None:
        return False
    if one == other:
        return True
    if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
        if Fraction(one) == Fraction(other):
            return True
        if "." not in one + other:  # decimals may be rounded: math-verify compares six places
            return False
    if not _same_operations(one, other):
        return False
    for first in _readings(one):
        for second in _readings(other):
            if await asyncio.to_thread(_equal_expressions, first, second):
                return True
    return False


async def majority(answers: Sequence[str | None]) -> str | None:
    """Returns the most frequent answer, the first of several, or None if there is no answer."""
    given = [answer for answer in answers if answer is not None]
    votes = [sum([await equal(answer, other) for other in given]) for answer in given]
    return given[votes.index(max(votes))] if given else None


def _readings(text: str) -> list[str]:
    """Returns the possible meanings of a text: `1,234` is a number or a list of two."""
    return [text.replace(",", ""), text.replace(",", ", ")] if _GROUPED.fullmatch(text) else [text]


class Worker:
    """The process that compares answers, started when first needed and again after it ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        """None until the first comparison, and after one that hit its time limit."""
        self._lock = threading.Lock()
        self._owner = 0

    def equal(self, one: str, other: str) -> bool:
        """Returns whether math-verify finds two answers equal; retried once if the process was killed."""
        with self._lock:
            verdict, ended = self._ask(one, other)
            if ended is not None and ended != -signal.SIGPROF:  # not killed by its own time limit
                verdict, ended = self._ask(one, other)
            return verdict == "1\n"

    def _ask(self, one: str, other: str) -> tuple[str, int | None]:
        """Returns the verdict and None, or "" and the return code if the process ended."""
        if self.process is None or self._owner != os.getpid():  # forks must not share pipes
            self._start()
        assert self.process and self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps([one, other]) + "\n")
            self.process.stdin.flush()
            verdict = self.process.stdout.readline()
        except BrokenPipeError:  # ended since the last comparison
            verdict = ""
        if verdict:
            return verdict, None
        self.process.communicate()
        ended = self.process.returncode
        if ended > 0:  # not killed by a signal: it does not work at all
            raise RuntimeError(f"math-verify does not work; to see why: {sys.executable} -m {WORKER}")
        self.process = None
        return "", ended

    def _start(self) -> None:
        self._owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the parser writes warnings
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # not interrupted by Ctrl-C
        )


_equal_expressions = functools.lru_cache(maxsize=1 << 16)(Worker().equal)
