"""Mathematics: which answers are equal, hostile replies, rewards by hand, and whole episodes of every topology."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("math_verify", reason="needs the extra `math`")

from verl_atgrpo.environment import Environment, EnvironmentConfigError, make
from verl_atgrpo.environments import math_answers, math_team
from verl_atgrpo.environments.math_answers import equal, majority, parse_answer, parse_gold, parse_printed, tidy
from verl_atgrpo.environments.math_ensemble import MathDebate, MathEnsemble
from verl_atgrpo.environments.math_team import ASK_PROGRAM, ASK_REASONING, Math, MathTask, SingleMath
from verl_atgrpo.sandbox import extract_python, run_python
from verl_atgrpo.team import Decision, EpisodeRecord, ScriptedTeam, play

Script = Callable[[str, int], str]
DATA = Path("/work/shared/data")
NAMES = ["math", "math_single", "math_ensemble", "math_debate"]
QUESTION, GOLD = "Which number is it?", "738291"


def same(one: str | None, other: str | None) -> bool:
    forth, back = asyncio.run(equal(one, other)), asyncio.run(equal(other, one))
    assert forth == back
    return forth


def box(answer: str) -> str:
    return f"So it is \\boxed{{{answer}}}."


def program(answer: object) -> str:
    return f"```python\nprint({answer!r})\n```"


# ------------------------------------------------------------------ the data sets


@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
@pytest.mark.parametrize(
    ("name", "column", "total", "left_out"),
    [
        ("gsm8k_test", "answer", 1319, []),
        ("gsm8k_train_2000", "answer", 2000, []),
        ("aime24", "answer", 30, []),
        # An index `\max`, a sentence, and a slip in the data.
        ("olympiadbench_math", "final_answer", 675, ["m_{\\max }", "where $b$ is", "t(0,4]"]),
    ],
)
def test_gold_answers_verify_and_others_do_not(name: str, column: str, total: int, left_out: list[str]) -> None:
    raw = [json.loads(line)[column] for line in (DATA / f"{name}.jsonl").read_text().split("\n") if line]
    golds = [parse_gold(value) for value in raw]
    assert len(golds) == total
    refused = [str(value) for value, gold in zip(raw, golds, strict=True) if gold is None]
    assert len(refused) == len(left_out)
    assert all(part in text.replace("\\\\", "\\") for part, text in zip(left_out, refused, strict=True))
    pairs = [(value, gold) for value, gold in zip(raw, golds, strict=True) if gold]
    sample = random.Random(0).sample(pairs, 25)
    asyncio.run(_check(pairs, sample))


async def _check(pairs: list[tuple[Any, str]], sample: list[tuple[Any, str]]) -> None:
    async def right(gold: str, answer: str) -> bool:
        return await equal(gold, parse_answer(box(answer)))

    assert all([await right(gold, gold) for _, gold in pairs])
    for index, (value, gold) in enumerate(sample):
        # As the data set writes it, dollar signs and all, not as we tidied it.
        written = value[0] if isinstance(value, list) else str(value).rpartition("####")[2]
        assert await right(gold, written)
        other = sample[index - 1][1]
        assert other == gold or not await right(gold, other)
        if re.fullmatch("-?[0-9]+", gold):
            for wrong in (int(gold) + 1, -int(gold) or 1, int(gold) * 10 or 1, f"{gold}.5", f"1/{gold}1", f"{gold}1"):
                assert not await right(gold, str(wrong)), (gold, wrong)


@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
def test_the_data_sets_are_read_and_their_overlap_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    gsm8k = {"path": str(DATA / "gsm8k_test.jsonl")}
    aime = {"path": str(DATA / "aime24.jsonl"), "columns": {"question": "problem"}}
    env = Math(gsm8k, aime)
    assert (env.size("train"), env.size("val")) == (1319, 30)
    assert env.task("train", 0).answer == "18"
    prints = {
        split: {env.fingerprint(env.task(split, i)) for i in range(env.size(split))} for split in ("train", "val")
    }
    assert (len(prints["train"]), len(prints["val"])) == (1319, 30)
    assert not prints["train"] & prints["val"]
    assert not caplog.records


# ------------------------------------------------------------------ which answers are equal

EQUAL = [
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
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_forms(one: str, other: str) -> None:
    assert same(parse_answer(box(one)), parse_answer(box(other)))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers(one: str, other: str) -> None:
    assert not same(parse_answer(box(one)), parse_answer(box(other)))


def test_what_counts_as_an_answer() -> None:
    assert parse_answer(r"first \boxed{3}, no: \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert parse_answer(r"\boxed{\boxed{18}}") == "18"
    assert parse_answer(r"\boxed{\{1\}} }") == r"\{1\}"
    for none in ("18", r"\boxed{}", r"\boxed{...}", r"\boxed{18", r"\boxed{3} then \boxed{", r"\boxed", r"\boxed 18"):
        assert parse_answer(none) is None
    assert tidy("7" * 256) and not tidy("7" * 257)
    assert parse_printed("working\n 18 \n\n") == "18"
    assert parse_printed("") is parse_printed(" \n") is None
    assert parse_printed("5*2**(2/3)") == "5*2^(2/3)"


def test_gold_answers_in_every_form() -> None:
    assert parse_gold("18 eggs <<1+1=2>>\n#### 1,234") == "1234"
    assert parse_gold(33) == "33"
    assert parse_gold(r"Thus $x = \boxed{\frac{1}{2}}$, as wanted") == r"\frac{1}{2}"
    assert parse_gold(["$69$,$84$"]) == parse_gold(["69", "84"]) == "69, 84"
    assert same(parse_gold(["100,200"]), "100, 200") and not same(parse_gold(["100,200"]), "100200")
    for none in (None, "", [], "See the figure, please.", "#### ?"):
        assert parse_gold(none) is None


def test_the_majority_is_of_equal_answers() -> None:
    assert asyncio.run(majority(["2", r"\frac12", None, "0.5", "3"])) == r"\frac12"
    assert asyncio.run(majority(["2", "3"])) == "2"
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


@pytest.mark.parametrize("gold", ["18", r"\frac{1+\sqrt{5}}{2}"])
def test_hostile_replies_score_no_more_than_the_form(gold: str) -> None:
    assert same(r"\sqrt{2}", "2^{1/2}")  # the process is up
    for reply in HOSTILE:
        spent = time.monotonic()
        answer = parse_answer(reply)
        assert not asyncio.run(equal(gold, answer)), reply[:50]
        assert time.monotonic() - spent < 1, reply[:50]


def test_what_runs_away_is_ended_by_its_cpu_time_and_the_next_answer_is_verified() -> None:
    assert not same("18", r"\binom{999999999}{99999999}")
    assert not same("18", r"\prod_{k=1}^{9999999} k")
    assert same(r"\sqrt{8}", r"2\sqrt{2}")


def test_without_math_verify_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentConfigError, match=re.escape("pip install 'verl-atgrpo[math]'")):
        Math(*sources(tmp_path))


def test_a_process_that_cannot_work_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answers, "_WORKER", "verl_atgrpo.no_such_module")
    with pytest.raises(RuntimeError, match="math-verify cannot work"):
        math_answers._Worker().equal("1", "1.0")


# ------------------------------------------------------------------ episodes


def sources(folder: Path, **rows: list[dict[str, object]]) -> tuple[dict[str, str], dict[str, str]]:
    """Sections for `train` and `val`, one problem each where nothing is said."""
    paths = []
    for split in ("train", "val"):
        given = rows.get(split) or [{"question": QUESTION + split, "answer": f"It takes 12 steps.\n#### {GOLD}"}]
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        paths.append({"path": str(path)})
    return paths[0], paths[1]


def episode(env: Environment, scripts: Mapping[str, Script], candidates: int = 1) -> EpisodeRecord:
    return asyncio.run(play(env, env.task("train", 0), ScriptedTeam(scripts, candidates=candidates)))


def prompt_of(decision: Decision) -> str:
    return "".join(map(chr, decision.prompt_ids))


def of(agent: str, record: EpisodeRecord) -> list[Decision]:
    return sorted((d for d in record.decisions if d.agent == agent), key=lambda d: d.turn)


def turn_of(prompt: str) -> int:
    return 1 + prompt.count("The two do not agree")


def by_turn(*replies: str) -> Script:
    return lambda prompt, k: replies[turn_of(prompt) - 1]


def test_rewards_by_hand(tmp_path: Path) -> None:
    env = Math(*sources(tmp_path), max_turns=1)
    task = env.task("train", 0)
    assert task == MathTask(QUESTION + "train", GOLD)
    cases = {
        "tool_user": [
            (program(int(GOLD)), 1.0, 1.0),
            ("```python\nprint('so:')\nprint('738,291')\n```", 1.0, 1.0),
            (program(3), 0.0, 0.2),
            (program(""), 0.0, 0.2),
            (f"```python\nprint({GOLD})\n1 / 0\n```", 0.0, 0.1),
            ("```python\nprint(\n```", 0.0, 0.1),
            (f"print({GOLD})", 0.0, 0.0),
            (box(GOLD), 0.0, 0.0),
        ],
        "reasoner": [
            (box(GOLD), 1.0, 1.0),
            (box("738{,}291"), 1.0, 1.0),
            (box("3"), 0.0, 0.2),
            (GOLD, 0.0, 0.0),
            (program(int(GOLD)), 0.0, 0.0),
            (r"\boxed{}", 0.0, 0.0),
        ],
    }
    for agent, replies in cases.items():
        other = "reasoner" if agent == "tool_user" else "tool_user"
        scripts: dict[str, Script] = {agent: lambda prompt, k, r=replies: r[k][0], other: lambda prompt, k: "?"}  # type: ignore[misc]
        (decision,) = of(agent, episode(env, scripts, candidates=len(replies)))
        got = [(c.score.team, pytest.approx(c.score.local), c.reward) for c in decision.candidates]
        assert got == [(team, local, pytest.approx(team + local)) for _, team, local in replies]


def test_the_two_answer_at_once_and_see_each_other_from_turn_2(tmp_path: Path) -> None:
    env = Math(*sources(tmp_path), max_turns=3)
    record = episode(
        env,
        {
            "tool_user": by_turn(program(111), program(222), program(333)),
            "reasoner": by_turn(box("444"), box("555"), box(GOLD)),
        },
    )
    for agent, ask in (("tool_user", ASK_PROGRAM), ("reasoner", ASK_REASONING)):
        prompts = [prompt_of(decision) for decision in of(agent, record)]
        assert len(prompts) == 3
        seen = [[number for number in ("111", "444", "222", "555", "333") if number in p] for p in prompts]
        assert seen == [[], ["111", "444"], ["111", "444", "222", "555"]]
        assert all(QUESTION in p and p.endswith(ask) and GOLD not in p for p in prompts)
        assert "> print(111)\n> ```\n> The program printed:\n> 111" in prompts[1]
    assert record.outcome.success and record.outcome.team_reward == 1
    assert record.outcome.metrics == {"turns": 3, "agreed": 0}  # out of turns: what the reasoner said last counts


@pytest.mark.parametrize(
    ("tool", "reasoned", "success"), [(GOLD, "738291.0", True), ("0.5", r"\frac12", False), ("1,000", "1000", False)]
)
def test_agreement_ends_the_episode_right_or_wrong(tool: str, reasoned: str, success: bool, tmp_path: Path) -> None:
    env = Math(*sources(tmp_path))
    record = episode(env, {"tool_user": by_turn(program(tool)), "reasoner": by_turn(box(reasoned))})
    assert len(record.decisions) == 2
    assert record.outcome.success == success
    assert record.outcome.metrics == {"turns": 1, "agreed": 1}


def test_the_reasoner_s_answer_counts(tmp_path: Path) -> None:
    env = Math(*sources(tmp_path), max_turns=2)
    tool_user = by_turn(program(int(GOLD)), program(int(GOLD)))
    assert not episode(env, {"tool_user": tool_user, "reasoner": by_turn(box("1"), box("2"))}).outcome.success
    assert not episode(env, {"tool_user": tool_user, "reasoner": by_turn(box("1"), "none")}).outcome.success
    # Two without an answer do not agree.
    record = episode(env, {"tool_user": by_turn("?", "?"), "reasoner": by_turn("?", "?")})
    assert record.outcome.metrics["turns"] == 2


def test_one_agent_in_both_parts_sees_the_same_prompts(tmp_path: Path) -> None:
    tool_user, reasoner = by_turn(program(1), program(2), program(3)), by_turn(box("4"), box("5"), box("6"))

    def solo(prompt: str, k: int) -> str:
        return (tool_user if "You are the tool user" in prompt else reasoner)(prompt, k)

    team = episode(Math(*sources(tmp_path), max_turns=3), {"tool_user": tool_user, "reasoner": reasoner})
    alone = episode(SingleMath(*sources(tmp_path), max_turns=3), {"solo": solo})
    both = [of("tool_user", team), of("reasoner", team)]
    assert [d.prompt_ids for d in of("solo", alone)] == [
        d.prompt_ids for pair in zip(*both, strict=True) for d in pair
    ]
    assert [d.turn for d in of("solo", alone)] == list(range(6))
    assert alone.outcome == team.outcome


def test_equal_programs_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    async def run(code: str) -> Any:
        ran.append(code)
        return await run_python(code)

    monkeypatch.setattr(math_team, "run_python", run)
    env = Math(*sources(tmp_path), max_turns=1)
    replies = [program(1), program(2), program(1), program(1)]
    episode(env, {"tool_user": lambda prompt, k: replies[k], "reasoner": by_turn(box("3"))}, candidates=4)
    assert len(ran) == 2


def test_ensemble(tmp_path: Path) -> None:
    env = MathEnsemble(*sources(tmp_path), reasoners=3, tool_users=2)

    def numbered(answer: Callable[[object], str], start: int) -> Script:
        return lambda prompt, k: answer(start + int(re.findall(r"(?:reasoner|tool user) (\d)", prompt)[0]))

    judge: Script = lambda prompt, k: box(GOLD) if k else box("0")  # noqa: E731
    scripts = {"reasoner": numbered(lambda n: box(str(n)), 110), "tool_user": numbered(program, 220), "judge": judge}
    record = episode(env, scripts, candidates=2)
    assert [d.turn for d in of("reasoner", record)] == [0, 1, 2]
    assert [d.turn for d in of("tool_user", record)] == [0, 1]
    (verdict,) = of("judge", record)
    answers = ["111", "112", "113", "221", "222"]
    assert all(number in prompt_of(verdict) for number in answers)
    assert not any(number in prompt_of(d) for number in answers for d in record.decisions if d is not verdict)
    assert (verdict.committed, record.outcome.success) == (1, True)
    assert len({tuple(d.prompt_ids) for d in record.decisions}) == 6  # no two groups share a prompt


def test_debate(tmp_path: Path) -> None:
    env = MathDebate(*sources(tmp_path), debaters=3, rounds=2)
    first, second = ["111", "112", "113"], ["7", GOLD, "738,291"]

    def debater(prompt: str, k: int) -> str:
        number = int(re.findall(r"You are the debater (\d)", prompt)[0]) - 1
        return box((second if "The debater" in prompt else first)[number])

    record = episode(env, {"debater": debater})
    prompts = [prompt_of(decision) for decision in of("debater", record)]
    assert [all(number in prompt for number in first) for prompt in prompts] == [False] * 3 + [True] * 3
    assert not any(number in prompt for number in first for prompt in prompts[:3])
    assert record.outcome.success
    assert record.outcome.metrics == {"turns": 2}
    second = ["7", GOLD, "7.0"]
    assert not episode(env, {"debater": debater}).outcome.success


def test_nothing_in_a_prompt_counts_as_an_answer_and_long_replies_are_cut(tmp_path: Path) -> None:
    echo: Script = lambda prompt, k: prompt  # noqa: E731
    for name in NAMES:
        env = make(name, **dict(zip(("train", "val"), sources(tmp_path), strict=True)))
        record = episode(env, dict.fromkeys(env.agents, echo))
        assert not record.outcome.success
        for decision in record.decisions:
            prompt = prompt_of(decision)
            assert parse_answer(prompt) is extract_python(prompt) is None
            assert decision.candidates[0].reward == 0
            assert GOLD not in prompt and "12 steps" not in prompt
    env = Math(*sources(tmp_path), max_turns=2)
    long = episode(env, {"tool_user": by_turn("x" * 9999, "x"), "reasoner": by_turn("y" * 9999 + box("3"), "z")})
    prompt = prompt_of(of("reasoner", long)[1])
    assert len(prompt) < 2 * math_team.SHOWN + 1000 and box("3") in prompt


# ------------------------------------------------------------------ problems and options


def test_a_fingerprint_folds_the_layout_alone(tmp_path: Path) -> None:
    env = Math(*sources(tmp_path))

    def prints(*texts: str) -> set[str]:
        return {env.fingerprint(MathTask(text, "1")) for text in texts}

    text = r"Let $x = \frac{1}{2} + 1.5$. Find $\left(x, y\right)$, please."
    assert (
        len(prints(text, text.upper().replace("FRAC", "frac").replace("LEFT", "left").replace("RIGHT", "right"))) == 1
    )
    assert len(prints(text, r"let  \(x=\dfrac{1}{2}\,+\,1.5\)  find  \((x,\;y)\)  please!")) == 2  # a factorial
    assert len(prints(text, "let  \\(x=\\dfrac{1}{2}\\,+\\,1.5\\)\nfind  \\((x,\\;y)\\)  please")) == 1
    different = ["x + 1", "x - 1", "x * 1", "x = 1", "x^1", "x 1 2", "x 12", "x 1.2", "x < 12", "x! 12", "x_1 2"]
    assert len(prints(*different)) == len(different)


def test_problems_whose_answers_cannot_be_verified_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[object] = ["3", "see the figure.", None, r"\frac{1}{2}", ["$(1,2)$"]]
    rows: list[dict[str, object]] = [{"question": f"Problem {a}", "answer": a} for a in answers]
    with caplog.at_level(logging.WARNING):
        env = Math(*sources(tmp_path, train=rows))
    assert [env.task("train", index).answer for index in range(env.size("train"))] == ["3", r"\frac{1}{2}", "(1, 2)"]
    assert "train: 2 of 5 problems are left out" in caplog.text
    with pytest.raises(EnvironmentConfigError, match=r"environment\.train\.columns\.answer: no answer .* 'see the"):
        Math(*sources(tmp_path, train=rows[1:2]))


@pytest.mark.parametrize(
    ("names", "options", "named"),
    [
        (NAMES, {"train": None}, "train=None"),
        (NAMES, {"val": {"path": "/nowhere.jsonl"}}, "val.path='/nowhere.jsonl'"),
        (NAMES, {"style": "full"}, "style is not an option"),
        (NAMES[:2], {"max_turns": 0}, "max_turns=0"),
        (NAMES[:2], {"max_turns": "4"}, "max_turns='4'"),
        (NAMES[2:3], {"reasoners": 0}, "reasoners=0"),
        (NAMES[2:3], {"tool_users": 1.5}, "tool_users=1.5"),
        (NAMES[3:], {"debaters": 1}, "debaters=1"),
        (NAMES[3:], {"rounds": True}, "rounds=True"),
        (NAMES[2:], {"max_turns": 4}, "max_turns is not an option"),
    ],
)
def test_option_errors_name_key_and_value(
    names: list[str], options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    train, val = sources(tmp_path)
    for name in names:
        with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
            make(name, **{"train": train, "val": val, **options})
        assert "\n" not in str(caught.value)
