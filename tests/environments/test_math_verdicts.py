"""The rules of grading, as a table: verdicts of the field's graders, ours, and those of Math-Verify.

A row is `gold answer, reply, verdict, source, options`; the table's head explains them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("math_verify", reason="needs the extra `math`")

import yaml
from fakes.math_problems import DATA, box

from verl_atgrpo.environments.math.answers import correct, parse_answer, parse_gold, parse_printed

TABLE = yaml.safe_load((Path(__file__).parent / "math_verdicts.yaml").read_text())
GRADERS = {"MATH", "PRM800K", "OlympiadBench", "Math-Verify", "GSM8K", "AIME", "mathematics"}


class Row(NamedTuple):
    gold: str
    reply: str
    right: bool
    sources: set[str]
    options: dict[str, Any]


def _row(gold: str, reply: str, verdict: str, source: str, options: dict[str, Any] | None = None) -> Row:
    assert verdict in ("right", "wrong")
    return Row(gold, reply, verdict == "right", set(source.split(", ")), options or {})


ROWS = [_row(*row) for row in TABLE["rows"]]


def rows(*sources: str) -> Any:
    chosen = [row for row in ROWS if not sources or row.sources & {*sources}]
    return pytest.mark.parametrize("row", chosen, ids=[f"{row.gold} | {row.reply}" for row in chosen])


def test_the_table_says_where_each_verdict_comes_from() -> None:
    assert len(ROWS) >= 300
    for row in ROWS:
        assert row.sources and all(source in GRADERS or re.fullmatch("#[0-9]+", source) for source in row.sources), row
        assert row.options.keys() <= {"printed", "question", "differs"}, row
        assert ("differs" in row.options) == ("Math-Verify" not in row.sources and row.sources != {"AIME"}), row
    assert {row.options["differs"] for row in ROWS if "differs" in row.options} == TABLE["reasons"].keys()


@rows()
def test_our_verdict(row: Row) -> None:
    gold = parse_gold(row.gold)
    assert gold is not None
    reply = parse_printed(row.reply) if row.options.get("printed") else parse_answer(box(row.reply))
    assert asyncio.run(correct(row.options.get("question", ""), gold, reply)) is row.right


@pytest.fixture(scope="module")
def math_reward() -> Any:
    """verl's copy of the grader of MATH, without importing verl, which takes seconds."""
    verl = importlib.util.find_spec("verl")
    assert verl is not None and verl.origin is not None
    spec = importlib.util.spec_from_file_location(
        "math_reward", Path(verl.origin).parent / "utils/reward_score/math_reward.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@rows("MATH")
def test_the_verdict_of_math(row: Row, math_reward: Any) -> None:
    assert math_reward.is_equiv(row.gold, row.reply) is row.right


@pytest.mark.slow
@rows()
def test_the_verdict_of_math_verify(row: Row) -> None:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    form = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    gold, reply = (parse(f"\\boxed{{{text}}}", form) for text in (row.gold, row.reply))
    assert (verify(gold, reply) is row.right) is ("differs" not in row.options)


# ------------------------------------------------------------------ golds of data sets

DATA_SETS = [("aime24", "problem", "answer"), ("olympiadbench_math", "question", "final_answer")]
DATA_SETS += [("gsm8k_test", "question", "answer"), ("gsm8k_train_2000", "question", "answer")]
UNREADABLE = "$t(0,4]$"
"""A slip in OlympiadBench."""


def problems(name: str, question: str, answer: str) -> list[tuple[str, Any, str]]:
    found = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines() if line]
    golds = [(row[question], row[answer], parse_gold(row[answer])) for row in found]
    return [(asked, written, gold) for asked, written, gold in golds if gold is not None and written != [UNREADABLE]]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
@pytest.mark.parametrize(("name", "question", "answer"), DATA_SETS)
def test_golds_of_data_sets_are_right_and_their_questions_are_not(name: str, question: str, answer: str) -> None:
    async def right(asked: str, gold: str, boxed: str) -> bool:
        return await correct(asked, gold, parse_answer(box(boxed)))

    async def check() -> None:
        for asked, written, gold in problems(name, question, answer):
            raw = written[0] if isinstance(written, list) else str(written).rpartition("####")[2].strip()
            assert await right(asked, gold, raw), gold
            assert not await right(asked, gold, "") and not await right(asked, gold, asked), gold
            for wrong in changed(gold):
                assert not await right(asked, gold, wrong), (gold, wrong)
            for formula in re.findall(r"\$([^$]+)\$", asked):
                if re.search(r"[-+*^]|\\[a-z]{3}", formula) and bare(formula.rpartition("=")[2]) not in bare(gold):
                    assert not await right(asked, gold, formula), (gold, formula)

    asyncio.run(check())


def changed(gold: str) -> list[str]:
    """The first and the last digit of an answer changed by one."""
    digits = list(re.finditer("[0-9]", gold))
    return [
        f"{gold[: digit.start()]}{(int(digit[0]) + 1) % 10}{gold[digit.end() :]}"
        for digit in {*digits[:1], *digits[-1:]}
    ]


def bare(text: str) -> str:
    return re.sub(r"[\s{}]|\\left|\\right", "", text)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
def test_what_sympy_prints_for_a_gold_is_right() -> None:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic

    normal = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    form = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal),)
    printed = 0
    for _, _, gold in problems(*DATA_SETS[1]):
        parsed = parse(f"\\boxed{{{gold}}}", form)
        if "=" in gold or len(parsed) == 0 or not isinstance(parsed[0], Basic):
            continue
        values = [value.doit() for value in getattr(parsed[0], "_unsorted_args", [parsed[0]])]
        lines = [str(values[0]) if len(values) == 1 else str(values)]
        if all(value.is_number for value in values):
            lines.append(str([float(value) for value in values]))
        for line in lines:
            if len(line) <= 256:
                assert asyncio.run(correct("", gold, parse_printed(line))), (gold, line)
                printed += 1
    assert printed > 1000
