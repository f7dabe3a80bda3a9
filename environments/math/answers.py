"""Answers to mathematical problems: parsing and comparison.

Plain numbers are compared here, everything else by math-verify in a separate process (`worker`), so that no reply can
hang or kill the run: answers whose comparison times out are not equal.
"""

from __future__ import annotations

import asyncio
import functools
import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import replace

from verl_atgrpo.environments.common.limited import LimitedProcess
from verl_atgrpo.environments.common.replies import (
    after_thoughts,
    closing_brace,
    closing_parenthesis,
    labelled,
    labels,
    last_box,
)
from verl_atgrpo.environments.math.decimals import Number, read_number, same_number
from verl_atgrpo.environments.math.notation import (
    GROUPED,
    LONGEST,
    Part,
    in_digits,
    is_prose,
    operations,
    readings,
    same_unit,
    stated,
    tidy,
)
from verl_atgrpo.environments.math.printed import python_as_latex

_WORKER = LimitedProcess("verl_atgrpo.environments.math.worker")
"""Compares answers that are no plain numbers; those whose comparison exceeds its limits are not equal."""
_LABELS = labels("(?!)", r"(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:(?:final|correct) )*answer")
_CHOICE = re.compile(r"[.!?;] |\bor\b", re.IGNORECASE)
"""A second sentence, or a second answer."""
_OPERATOR = re.compile(r"[-+*/^!|]|\\(?!pi|infty)[a-zA-Z]|[a-z]\(")
"""What an expression has that is not a single number or symbol."""
_FORMULA = re.compile(r"\$+([^$]+?)[.,;]?\s*\$+|\\[(\[](.+?)[.,;]?\s*\\[)\]]", re.DOTALL)
_PRINTED_LABEL = re.compile(r"[a-z ]{0,30}(?:answer|result|solutions?)[a-z ]{0,20}[:=]", re.IGNORECASE)


def parse_answer(reply: str) -> str | None:
    r"""Returns the answer in a reply in the agreed format, tidied, or None.

    It is the content of the last `\boxed{...}`; None if that is empty, not closed or too long, or if another box of
    the same line differs. Without any box, it is the text after the last label `Final answer:` or `Answer:`.
    """
    text = after_thoughts(reply)
    box = last_box(text, LONGEST)
    if box is not None:
        return tidy(re.sub(r"^[*`]+|[*`]+$", "", box[1].strip()))
    for label in labelled(text, _LABELS, 4 * LONGEST, boxes=False):
        line = next((line for line in label.lines[:3] if line.strip(" *_")), "")
        answer = tidy(re.sub(r"\\[()\[\]]", "", line).strip(" \t*_`"))
        return None if answer is None or is_prose(answer) or _CHOICE.search(answer) else answer
    return None


def _last_boxed(reply: str) -> str | None:
    before, mark, _ = reply.rpartition(r"\boxed{")
    start = len(before + mark)
    end = closing_brace(reply, start, LONGEST) if mark else None
    return None if end is None else tidy(reply[start:end])


def parse_printed(output: str) -> str | None:
    r"""Returns the answer in the last non-empty line of a program's output, or None; powers may be `**`.

    The line may be labelled (`Answer: 3`), boxed, a list, or in Python's or sympy's notation (`2*pi`,
    `log(2)`, `Fraction(1, 2)`); floats may be in it as Python prints them (`1e-05`).
    """
    line = output.strip().rpartition("\n")[2]
    if len(line) > 2 * LONGEST:
        return tidy(line.replace("**", "^"))
    line = _PRINTED_LABEL.sub("", line.strip(), count=1)
    if (box := last_box(line, LONGEST)) is not None:
        line = box[1]
    line = line.strip()
    if not GROUPED.fullmatch(line) and (latex := python_as_latex(line)) is not None:
        return tidy(latex)
    line = in_digits(line)
    if (listed := re.fullmatch(r"\[([^\[\]]*)\]", line)) is not None:
        line = listed[1]
    return tidy(line.replace("**", "^"))


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
    values = gold if isinstance(gold, (list, tuple)) else [gold]
    if not values or not all(map(_is_given, values)):
        return None
    if isinstance(gold, (list, tuple)):
        # Commas separate answers here: `100,200` is not a number of six digits.
        answer = tidy(re.sub(r",\s*", ", ", ", ".join(map(str, gold))))
    elif isinstance(gold, str) and "####" in gold:
        answer = tidy(gold.rpartition("####")[2].replace(",", ""))
    else:
        answer = _last_boxed(str(gold)) or tidy(str(gold))
    return None if answer is None or is_prose(answer) else answer


def verifiable(gold: str) -> bool:
    """Returns whether other texts can be found equal to a tidied answer; the first call takes seconds."""
    return any(all(map(_readable, parts)) for parts in readings(gold))


def _readable(part: Part) -> bool:
    if part.text or part.base != "10" or read_number(part.value) is not None:
        return True
    return _matching((part.value,), (part.value,), ((None,),))


async def equal(gold: str | None, answer: str | None) -> bool:
    """Returns whether a tidied answer is equal to a gold one; None equals nothing. docs/math_answers.md has the rules.

    The answer may compute less than the gold one and say more (a unit): see `agree` for two answers of agents.
    """
    if gold is None or answer is None:
        return False
    if gold == answer:
        return True
    if "=" not in gold:
        answer = stated(answer)
    if not operations(answer) <= operations(gold):
        return False
    for expected in readings(gold):
        for given in readings(answer):
            if await _equal_parts(expected, given):
                return True
    return False


async def correct(question: str, gold: str, answer: str | None) -> bool:
    """Returns whether an answer is equal to the gold one and is not an expression of the question, unevaluated."""
    return answer is not None and not _copied(question, gold, answer) and await equal(gold, answer)


async def agree(one: str | None, other: str | None) -> bool:
    """Returns whether two answers are equal, whichever of them is taken for the gold one."""
    return await equal(one, other) or await equal(other, one)


async def majority(answers: Sequence[str | None]) -> str | None:
    """Returns the most frequent answer, the first of several, or None if there is no answer."""
    given = [answer for answer in answers if answer is not None]
    votes = [sum([await agree(answer, other) for other in given]) for answer in given]
    return given[votes.index(max(votes))] if given else None


def _copied(question: str, gold: str, answer: str) -> bool:
    """Returns whether an answer stands in the question, and is neither a value nor the gold answer as it is written.

    In another order, too: `-1 + x^2` for `$x^2 - 1$`. Of an equation its right side, or all if that is a number.
    """

    def bare(text: str) -> str:
        noise = r"[\s{}$~]|\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:!]|(?<=\\)[dtc](?=frac)"
        text = re.sub(noise, "", text).lower()
        outer = text.startswith("(") and closing_parenthesis(text, 1, len(text)) == len(text) - 1
        return text[1:-1] if outer else text

    values = [part.value for part in readings(answer)[-1]]
    if all(read_number(value) is not None or not _OPERATOR.search(value) for value in values):
        return False

    whole = read_number(answer.rpartition("=")[2].strip()) is not None

    def side(text: str) -> str:
        return text if whole else text.rpartition("=")[2]

    def letters(text: str) -> list[str]:
        return sorted(re.sub(r"\\(?:cdot|times)(?![a-zA-Z])|[+*]", "", bare(side(text))))

    value = bare(side(answer))
    if value in (bare(gold), bare(side(gold))) or letters(answer) == letters(gold):
        return False
    return value in bare(question) or letters(answer) in (
        letters(one[1] or one[2]) for one in _FORMULA.finditer(question)
    )


async def _equal_parts(golds: Sequence[Part], answers: Sequence[Part]) -> bool:
    if len(golds) != len(answers):
        return False
    known = [[_known(gold, answer) for answer in answers] for gold in golds]
    if all(gold.text for gold in golds):  # words and letters: their order is part of the answer
        return all(row[place] for place, row in enumerate(known))
    rest = list(range(len(answers)))
    unsure: list[int] = []
    for place, row in enumerate(known):
        match = next((other for other in rest if row[other]), None)
        if match is not None:
            rest.remove(match)
        elif any(row[other] is None for other in rest):
            unsure.append(place)
        else:
            return False
    if not unsure:
        return True
    relation = any("=" in part.value for part in (*golds, *answers))  # y = 2x is the relation 2x - y = 0

    def values(parts: Sequence[Part], places: Sequence[int]) -> tuple[str, ...]:
        return tuple(parts[place].written if relation else parts[place].value for place in places)

    verdicts = tuple(tuple(known[place][other] for other in rest) for place in unsure)
    return await asyncio.to_thread(_matching, values(golds, unsure), values(answers, rest), verdicts)


def _known(gold: Part, answer: Part) -> bool | None:
    """Returns whether two values are equal, or None if math-verify has to find out."""
    if gold.written == answer.written:
        return True
    if gold.name and answer.name and gold.name.lower() != answer.name.lower():
        return False
    if gold.base != answer.base or (gold.half and gold.half != answer.half):
        return False
    if gold.unit and answer.unit and not same_unit(gold.unit, answer.unit):
        return False
    if gold.text or answer.text:
        return (gold.text or gold.value.lower()) == (answer.text or answer.value.lower())
    if gold.base != "10":
        return gold.value.lstrip("0") == answer.value.lstrip("0")
    one, other = read_number(gold.value), read_number(answer.value)
    if one is None or other is None:
        return None if gold.power == answer.power else False
    return same_number(_scaled(one, gold.power), _scaled(other, answer.power))


def _scaled(number: Number, power: int) -> Number:
    return replace(number, value=number.value * 10**power)


@functools.lru_cache(maxsize=1 << 16)
def _matching(golds: Sequence[str], answers: Sequence[str], known: Sequence[Sequence[bool | None]]) -> bool:
    """Returns whether each gold value equals another one of the answers.

    Args:
        golds: LaTeX values.
        answers: as many values.
        known: for each gold value and answer whether they are equal, or None: then math-verify is asked.
    """
    return _WORKER.ask((golds, answers, known)) is True
