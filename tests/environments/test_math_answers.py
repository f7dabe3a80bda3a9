"""Mathematical answers: parsing, equality, gold answers of real data sets, hostile replies."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest

pytest.importorskip("math_verify", reason="needs the extra `math`")

from fakes.math_problems import DATA, box

from verl_atgrpo.environments.math import answers as math_answers
from verl_atgrpo.environments.math.answers import (
    agree,
    equal,
    majority,
    parse_answer,
    parse_gold,
    parse_printed,
    tidy,
    verifiable,
)


def same(one: str | None, other: str | None) -> bool:
    forth, back = asyncio.run(equal(one, other)), asyncio.run(equal(other, one))
    assert forth == back
    return forth


# ------------------------------------------------------------------ the data sets


REAL = [
    ("gsm8k_test", "answer", 1319, [], []),
    ("gsm8k_train_2000", "answer", 2000, [], []),
    ("aime24", "answer", 30, [], []),
    # A sentence; a slip in the data.
    ("olympiadbench_math", "final_answer", 675, ["where $b$ is"], ["t(0, 4]"]),
]


def read_golds(name: str, column: str) -> list[Any]:
    return [json.loads(line)[column] for line in (DATA / f"{name}.jsonl").read_text().split("\n") if line]


@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
@pytest.mark.parametrize(("name", "column", "total", "left_out", "unverifiable"), REAL)
def test_gold_answers_verify_and_others_do_not(
    name: str, column: str, total: int, left_out: list[str], unverifiable: list[str]
) -> None:
    raw = read_golds(name, column)
    golds = [parse_gold(value) for value in raw]
    assert len(golds) == total
    refused = [str(value) for value, gold in zip(raw, golds, strict=True) if gold is None]
    assert len(refused) == len(left_out)
    assert all(part in text for part, text in zip(left_out, refused, strict=True))
    bad = [gold for gold in golds if gold and any(part in gold for part in unverifiable)]
    assert len(bad) == len(unverifiable) and not any(map(verifiable, bad))
    pairs = [(value, gold) for value, gold in zip(raw, golds, strict=True) if gold and gold not in bad]
    assert all(verifiable(gold) for _, gold in random.Random(1).sample(pairs, 30))
    asyncio.run(_check(random.Random(0).sample(pairs, 25)))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
@pytest.mark.parametrize(("name", "column", "total", "left_out", "unverifiable"), REAL)
def test_no_other_gold_answer_is_unverifiable(
    name: str, column: str, total: int, left_out: list[str], unverifiable: list[str]
) -> None:
    golds = [gold for gold in map(parse_gold, read_golds(name, column)) if gold]
    assert [gold for gold in golds if not verifiable(gold)] == [
        gold for part in unverifiable for gold in golds if part in gold
    ]


def test_parsing_a_gold_answer_needs_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise 53,000 problems take minutes in every process, and time limits make processes number them apart."""
    monkeypatch.setattr(math_answers, "_matching", None)
    assert parse_gold(r"\frac{1}{2}") == r"\frac{1}{2}"
    assert parse_gold("t(0,4]") == "t(0,4]"


async def _check(sample: list[tuple[Any, str]]) -> None:
    async def right(gold: str, answer: str) -> bool:
        return await equal(gold, parse_answer(box(answer)))

    for index, (value, gold) in enumerate(sample):
        # As in the data set, with dollar signs, not tidied.
        written = value[0] if isinstance(value, list) else str(value).rpartition("####")[2]
        assert await right(gold, written)
        other = sample[index - 1][1]
        assert other == gold or not await right(gold, other)
        if re.fullmatch("-?[0-9]+", gold):
            for wrong in (int(gold) + 1, -int(gold) or 1, int(gold) * 10 or 1, f"{gold}.5", f"1/{gold}1", f"{gold}1"):
                assert not await right(gold, str(wrong)), (gold, wrong)


# ------------------------------------------------------------------ which answers are equal

EQUAL = [
    (".00001", "1e-05"),
    ("5", "5e0"),
    ("-1500", "-1.5E3"),
    ("2e - 5", "-5 + 2e"),
    (r"\frac12", "0.5"),
    ("1/2", r"\frac{1}{2}"),
    ("1/2", r"\dfrac{1}{2}"),
    ("0.50", "1/2"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    ("1 234", "1,234.0"),
    ("18", r"\$18"),
    ("18", "$18$"),
    ("18", r"18\text{ dollars}"),
    ("18", r"\text{18}"),
    ("18", "018"),
    ("18", "18.00"),
    ("18", "x = 18"),
    ("18", "18."),
    ("8%", r"8 \%"),
    ("8%", "8"),
    ("-5", "\N{MINUS SIGN}5"),
    ("45", r"45^{\circ}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"5 \cdot 2^{2/3}", "5*2^(2/3)"),
    ("2^{10}", "1024"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    ("1,3,5", "5, 3, 1"),
    ("27, 108, 135", "27,108,135"),
    (r"\left(2,4\right)", "(2, 4)"),
    (r"[\frac{1}{2}, 8]", r"\left[0.5, 8\right]"),
    (r"k\ge 2", r"k \geq 2"),
    ("1024", "2^{10}"),
    ("200000", r"2 \times 10^5"),
    (r"\binom{10}{3}", r"\binom{10}{7}"),
    (r"6\pi", r"6 \cdot \pi"),
    ("1+2i", "2i+1"),
]
DIFFERENT = [
    ("1/2", "0.51"),
    ("1/3", "0.33"),
    ("1234", "1235"),
    ("18", "18, 17"),
    ("18", "17 or 18"),
    ("18", r"\text{not }18"),
    ("18", r"18 \text{ or } 17"),
    ("18", "18!"),
    ("18", "17 = 18"),
    ("18", "x = 17, 18"),
    ("18", r"17 \pm 1"),
    ("18", r"x \leq 18"),
    ("18", r"\neq 18"),
    ("18", "-18"),
    ("18", r"18\\19"),
    ("235", "1 234"),
    ("5", "2 3"),
    ("8%", "0.08"),
    ("(2,4)", "(4,2)"),
    ("(2,4)", "[2,4]"),
    ("(2,4)", r"\{4,2\}"),
    ("1,3,5", "1,3"),
    ("1,3,5", "1,3,6"),
    ("2n", "2m"),
    ("2n", "2"),
    (r"\sqrt{2}", "1.41"),
    (r"k\ge 2", "k > 2"),
    ("...", "..."),
    ("0", "5e0"),
    ("5", "1e400"),
    # The problem, or a part of it, is not its answer.
    ("338350", r"\sum_{k=1}^{100} k^2"),
    (r"\frac{1}{3}", r"\int_0^1 x^2 dx"),
    ("1", r"\lim_{x\to 0}\frac{\sin x}{x}"),
    ("120", r"\binom{10}{3}"),
    ("120", "5!"),
    ("6", r"\gcd(12,18)"),
    ("3", r"\lfloor \pi \rfloor"),
    ("5", r"\frac{d}{dx}(5x)"),
    ("5", r"\det\begin{pmatrix}2&1\\1&3\end{pmatrix}"),
    ("51", r"3 \times 17"),
    ("51", "3*17"),
    ("72", "48/2+48"),
    ("24", r"2 \cdot (3+9)"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL + DIFFERENT)
def test_equal_forms_and_different_answers(one: str, other: str) -> None:
    gold, answer = parse_answer(box(one)), parse_answer(box(other))
    if (one, other) in EQUAL:
        assert same(gold, answer)
    else:
        assert not asyncio.run(equal(gold, answer))


def test_what_counts_as_an_answer() -> None:
    assert parse_answer("first \\boxed{3}, no:\n\\boxed{\\frac{1}{2}}.") == r"\frac{1}{2}"
    assert parse_answer(r"\boxed{\boxed{18}}") == "18"
    assert parse_answer(r"\boxed{\{1\}} }") == r"\{1\}"
    for none in ("18", r"\boxed{}", r"\boxed{...}", r"\boxed{18", r"\boxed{3} then \boxed{", r"\boxed", r"\boxed 18"):
        assert parse_answer(none) is None
    assert tidy("7" * 256) and not tidy("7" * 257)
    assert parse_answer(box("7" * 256)) and not parse_answer(box("7" * 257))
    # Thousands are separated by spaces or commas; a mixture is a list or does not parse.
    assert tidy("1 234 567.5") == "1234567.5"
    assert tidy("1,234 567") is tidy("12 34") is tidy("1. 2") is None
    assert tidy("1, 234") == "1, 234" and tidy("x y") == "x y"
    for none in ("()", "+", "", "  ", "...", "9^{99999}", "99999!"):
        assert tidy(none) is None
    assert parse_printed("working\n 18 \n\n") == "18"
    assert parse_printed("") is parse_printed(" \n") is None
    assert parse_printed("5*2**(2/3)") == r"5 \cdot 2^{\frac{2}{3}}"
    assert parse_printed("working\n  Answer: 18") == "18"
    assert parse_printed("working\n 2**3 ") == "2^{3}"
    assert parse_printed("[1e-05, 2.5e+16]") == "0.00001, 25000000000000000"


def test_gold_answers_in_every_form() -> None:
    assert parse_gold("18 eggs <<1+1=2>>\n#### 1,234") == "1234"
    assert parse_gold(33) == "33"
    assert parse_gold(r"Thus $x = \boxed{\frac{1}{2}}$, as wanted") == r"\frac{1}{2}"
    assert parse_gold(["$69$,$84$"]) == parse_gold(["69", "84"]) == "69, 84"
    assert same(parse_gold(["100,200"]), "100, 200") and not same(parse_gold(["100,200"]), "100200")
    for none in (None, "", [], "See the figure, please.", "#### ?"):
        assert parse_gold(none) is None


def test_a_rounded_decimal_equals_its_fraction() -> None:
    for decimal in ("0.333333", "0.33333333"):
        assert same("1/3", decimal) and same(decimal, "1/3")
    for decimal in ("0.3", "0.333", "0.333334"):
        assert not same("1/3", decimal)
    assert same(".5", "0.50") and same("2.", "2")


def test_plain_numbers_need_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "_matching", None)
    assert same("2/4", "1/2") and same("-3", "-3") and same("0.5", "1/2") and same("+7", "7")
    assert not same("3", "4") and not same("1/2", "1/3") and not same("-3", "3")


def test_a_list_is_matched_by_one_request() -> None:
    golds, answers = ("x+1", "2y", r"\sqrt{8}"), (r"2\sqrt{2}", "y+y", "1+x")
    unknown = ((None,) * 3,) * 3
    assert math_answers._matching(golds, answers, unknown)
    assert not math_answers._matching(golds, (*answers[:2], "y+y"), unknown)
    # What is known is not asked.
    assert math_answers._matching(("a",), ("b",), ((True,),))
    assert not math_answers._matching(golds, answers, (*unknown[:2], (False,) * 3))


def test_answers_of_agents_agree_whichever_is_the_gold_one() -> None:
    assert asyncio.run(equal("5!", "120")) and not asyncio.run(equal("120", "5!"))
    assert asyncio.run(agree("120", "5!")) and asyncio.run(agree("5!", "120"))
    assert asyncio.run(agree("7 p.m.", "7")) and not asyncio.run(equal("7 p.m.", "7"))
    assert not asyncio.run(agree("7 p.m.", "7 a.m.")) and not asyncio.run(agree(None, None))


def test_the_majority_is_of_equal_answers() -> None:
    assert asyncio.run(majority(["2", r"\frac12", None, "0.5", "3"])) == r"\frac12"
    assert asyncio.run(majority(["2", "3"])) == "2"
    assert asyncio.run(majority(["2", "120", "5!"])) == "120"
    assert asyncio.run(majority([None, None])) is None


# ------------------------------------------------------------------ hostile replies

HOSTILE = [
    box("9**9**9"),
    box("9^9^9"),
    box("9^{9^{9}}"),
    box("9^{99999999}"),
    box("(((9!)!)!)!"),
    box("99999999!"),
    box("1" * 100_000),
    box("{" * 5000 + "}" * 5000),
    "\\boxed{" * 20_000,
    "\\boxed{" * 2_000 + "}" * 2_000,
    "{" * 1_000_000,
    box("\x00\ud800 💥"),
    box("\N{FULLWIDTH DIGIT ONE}\N{FULLWIDTH DIGIT EIGHT}"),
    box("__import__('os').system('exit')"),
    box("\n18\n\n; raise SystemExit"),
    box("]\n[1"),
    box(r"\input{/etc/passwd}"),
    box("\\"),
    box(r"\text{"),
    box("1/0"),
    box("nan"),
    box(r"\infty"),
    box("x" * 200),
    box("^" * 200),
    box(""),
    "",
]


@pytest.mark.parametrize(
    "reply",
    [
        "(i, 2)",
        "[2, i)",
        r"\max(i, 2)",
        r"\lfloor i \rfloor",
        r"\min(i, j) + \{i\}",
        r"i < j",
        r"\frac{i}{0}",
        "i^{i!}",
    ],
)
def test_what_sympy_raises_for_is_not_equal(reply: str) -> None:
    """And ends nothing: intervals and comparisons of i raise in sympy."""
    for gold in ("(0, 2)", r"\max(a, 2)", r"\lfloor x \rfloor!", "n + i"):
        assert not asyncio.run(equal(gold, parse_answer(box(reply))))
        assert verifiable(gold)


@pytest.mark.parametrize("gold", ["18", r"\frac{1+\sqrt{5}}{2}"])
def test_hostile_replies_earn_only_the_format(gold: str) -> None:
    assert same(r"\sqrt{2}", "2^{1/2}")  # starts the process
    for reply in HOSTILE:
        answer = parse_answer(reply)
        assert not asyncio.run(equal(gold, answer)), reply[:50]  # without a limit, it takes hours


@pytest.mark.slow
def test_a_comparison_over_its_cpu_time_is_killed_and_the_next_one_works() -> None:
    assert not asyncio.run(equal("18", r"\binom{999999999}{99999999}"))
    assert not asyncio.run(equal("18", r"\prod_{k=1}^{9999999} k"))
    assert same(r"\sqrt{8}", r"2\sqrt{2}")


@pytest.mark.parametrize(
    "missing",
    [
        float("nan"), float("inf"), "nan", "NaN", " None ", "N/A", "null", "#N/A", "<NA>", "", "  ", "undefined",
        {"a": 1}, {"answer": "3"}, ["3", None], ["nan"], [], [["3"]], b"3", [{"value": 3}], complex(1, 2),
    ],
)  # fmt: skip
def test_what_stands_for_a_missing_value_is_no_gold(missing: object) -> None:
    assert parse_gold(missing) is None


@pytest.mark.parametrize("gold", ["0", 0, -2.5, "n", "N", r"\infty", ["1", "2"], "A"])
def test_short_golds_are_golds(gold: object) -> None:
    assert parse_gold(gold) is not None
