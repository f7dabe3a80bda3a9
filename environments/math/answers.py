"""Answers to mathematical problems: how they are read, and whether two are equal.

Plain numbers are compared here, everything else by math-verify in a process of its own (`math_worker`), so no reply
can hang or end the run: what takes too long there is not equal.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction

from verl_atgrpo.environments.common.replies import after_thoughts, labelled, labels, last_box
from verl_atgrpo.environments.common.workflow import Style

LONGEST = 256
"""Characters of an answer; a longer one is none."""
_WORKER = "verl_atgrpo.environments.math.worker"
_NUMBER = re.compile(r"[-+]?(?:[0-9]+/0*[1-9][0-9]*|[0-9]+\.?[0-9]*|\.[0-9]+)")
_RUNAWAY = re.compile(
    r"""
    \^[\s{(]*[0-9]{5}                        # 9^{99999}
    | \^[\s{(]*[0-9]+[\s{(}]*\^[\s{(]*[0-9]  # 9^{9^{9}}
    | [0-9]{5}\s*! | ![\s)}]*!               # 99999!, 9!!
""",
    re.VERBOSE,
)
"""Numbers that nothing can write down. Not all of them: just the common ones, at no cost."""
_PROSE = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{3,} +[a-zA-Z]{2}")
"""Words: math-verify would take them for a product of their letters, in any order."""
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(?:[, ][0-9]{3})+(?:\.[0-9]+)?")

_LABELS = labels("(?!)", r"(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:(?:final|correct) )*answer")
_CHOICE = re.compile(r"[.!?;] |\bor\b", re.IGNORECASE)
"""A second sentence, or a second answer."""
_PRINTED_LABEL = re.compile(r"[a-z ]{0,30}(?:answer|result|solutions?)[a-z ]{0,20}[:=]", re.IGNORECASE)
_AS_LATEX = {"pi": r"\pi", "oo": r"\infty", "I": "i", "log": r"\log", "exp": r"\exp"}
_AS_LATEX |= {name: rf"\{name}" for name in ("sin", "cos", "tan")}
_SYMPY = re.compile(rf"(?<![a-zA-Z\\])(?:{'|'.join(_AS_LATEX)})(?![a-zA-Z])")
"""Names that sympy prints, which are products of letters in LaTeX."""


def tidy(text: str) -> str | None:
    """Returns an answer without signs of money and percent and without LaTeX spacing, or None if it is none.

    Percent signs go because gold answers come with and without: `8%` and `8` are equal, `8%` and 0.08 are not.
    """
    text = (
        re.sub(r"\\?\$|\\!|\\(?:left|right)(?![a-zA-Z])", "", text).replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    )
    text = re.sub(r"(?<!\\)\\(?:[,;:> ]|q?quad(?![a-zA-Z]))|~|\s+", " ", text)
    text = re.sub(r"\s*\\?%$", "", re.sub(r" +", " ", text).strip().rstrip(" ."))
    if " " in text and _GROUPED.fullmatch(text) and "," not in text:
        text = text.replace(" ", "")
    # math-verify adds numbers that stand side by side: `1 234` would be 235.
    side_by_side = re.search(r"[0-9.] [0-9.]", text)
    if side_by_side or not re.search(r"\w", text) or len(text) > LONGEST or _RUNAWAY.search(text):
        return None
    return text


def parse_answer(reply: str, style: Style = "full") -> str | None:
    r"""Returns the answer that a reply gives in the agreed format, tidied, or None.

    It is what the last `\boxed{...}` holds; none if that is empty, open or too long. With `full` also none if another
    box of the same line holds something else; and where there is no box, it is what follows the last label `Final
    answer:` or `Answer:`.
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
    start = reply.rfind(r"\boxed{") + len(r"\boxed{")
    body = reply[start : start + LONGEST + 1]
    depth = 1
    for mark in re.finditer(r"\\.|[{}]", body if start >= len(r"\boxed{") else "", re.DOTALL):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return tidy(body[: mark.start()])
    return None


def parse_printed(output: str, style: Style = "full") -> str | None:
    r"""Returns the answer in the last non-empty line a program printed, or None; powers may be Python's.

    With `full` the line may be labelled (`Answer: 3`), boxed, a list, or as sympy prints (`2*pi`, `log(2)`).
    """
    line = output.strip().rpartition("\n")[2].replace("**", "^")
    if style == "compact" or len(line) > 2 * LONGEST:
        return tidy(line)
    line = _PRINTED_LABEL.sub("", line.strip(), count=1)
    if (box := last_box(line, LONGEST)) is not None:
        line = box[1]
    if (listed := re.fullmatch(r"\[([^\[\]]*)\]", line.strip())) is not None:
        line = listed[1]
    return tidy(_SYMPY.sub(lambda name: _AS_LATEX[name[0]], line))


def parse_gold(gold: object) -> str | None:
    r"""Returns a data set's answer, tidied, or None if there is none, or a sentence.

    What it returns follows from the text alone, so all processes number the problems alike; that math-verify can read
    it is another question (`verifiable`), which takes 15 ms an answer and a time limit to find out.

    Args:
        gold: a number; or a text, where `####` (GSM8K) or `\boxed{}` (MATH) marks the answer at its end; or a list of
            texts (OlympiadBench), which all together are the answer.
    """
    if gold is None:
        return None
    if isinstance(gold, (list, tuple)):
        # Commas separate here, so `100,200` is no number of six digits.
        answer = tidy(re.sub(r",\s*", ", ", ", ".join(map(str, gold))))
    elif isinstance(gold, str) and "####" in gold:
        answer = tidy(gold.rpartition("####")[2].replace(",", ""))
    else:
        answer = _last_boxed(str(gold)) or tidy(str(gold))
    return None if answer is None or _PROSE.search(answer) else answer


def verifiable(gold: str) -> bool:
    """Returns whether any answer but the same text can be found equal to a tidied one; takes a while at first."""
    return _NUMBER.fullmatch(gold) is not None or _equal_expressions(gold, gold)


async def equal(one: str | None, other: str | None) -> bool:
    """Returns whether two tidied answers are the same; None equals nothing."""
    if one is None or other is None:
        return False
    if one == other:
        return True
    if _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other):
        if Fraction(one) == Fraction(other):
            return True
        if "." not in one + other:  # decimals may be rounded: math-verify compares six places
            return False
    for first in _readings(one):
        for second in _readings(other):
            if await asyncio.to_thread(_equal_expressions, first, second):
                return True
    return False


async def majority(answers: Sequence[str | None]) -> str | None:
    """Returns the answer that most of `answers` are equal to, the first such one, or None if there is none."""
    given = [answer for answer in answers if answer is not None]
    votes = [sum([await equal(answer, other) for other in given]) for answer in given]
    return given[votes.index(max(votes))] if given else None


def _readings(text: str) -> list[str]:
    """`1,234` is a number or a list of two."""
    return [text.replace(",", ""), text.replace(",", ", ")] if _GROUPED.fullmatch(text) else [text]


class _Worker:
    """The process that compares, started when first needed and again after one that had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def equal(self, one: str, other: str) -> bool:
        """Returns whether it finds them equal; asked once more if somebody killed it, as when memory runs out."""
        with self._lock:
            verdict, ended = self._ask(one, other)
            if ended is not None and ended != -signal.SIGPROF:  # not by its own time limit
                verdict, ended = self._ask(one, other)
            return verdict == "1\n"

    def _ask(self, one: str, other: str) -> tuple[str, int | None]:
        """Returns the verdict; none, and how it ended, if it ended."""
        if self._process is None or self._owner != os.getpid():  # a fork must not share the pipes
            self._start()
        assert self._process and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps([one, other]) + "\n")
            self._process.stdin.flush()
            verdict = self._process.stdout.readline()
        except BrokenPipeError:  # it ended since the last comparison
            verdict = ""
        if verdict:
            return verdict, None
        self._process.communicate()
        ended = self._process.returncode
        if ended > 0:  # not ended by the kernel: it cannot work at all
            raise RuntimeError(f"math-verify cannot work; to see why: {sys.executable} -m {_WORKER}")
        self._process = None
        return "", ended

    def _start(self) -> None:
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the grammar complains there, and nobody would empty a pipe
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # an interrupt from the keyboard is for us
        )


_equal_expressions = functools.lru_cache(maxsize=1 << 16)(_Worker().equal)
