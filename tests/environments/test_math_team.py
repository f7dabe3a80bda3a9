"""Mathematics: problems, options, rewards computed by hand, whole episodes of a tool user and a reasoner."""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("math_verify", reason="needs the extra `math`")

from fakes.math_problems import DATA, GOLD, NAMES, QUESTION, box, by_turn, episode, program, sources
from fakes.scripted_episodes import Script, of, prompt_of

from verl_atgrpo import EnvironmentConfigError, EpisodeFailed, make
from verl_atgrpo.environments.common.replies import extract_python
from verl_atgrpo.environments.math import MathDebate
from verl_atgrpo.environments.math import team as math_team
from verl_atgrpo.environments.math.answers import parse_answer
from verl_atgrpo.environments.math.team import ASK_REASONING, Math, MathTask, ask_program
from verl_atgrpo.play.quoting import SHOWN
from verl_atgrpo.sandbox.runner import run_python

# ------------------------------------------------------------------ episodes


def test_rewards_by_hand(tmp_path: Path) -> None:
    env = Math(**sources(tmp_path), max_turns=1)
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


@pytest.mark.parametrize(
    ("question", "gold", "copied", "right"),
    [
        (r"Compute $2^{10}$.", "1024", "2^{10}", "1024"),
        (r"Factor $x^2 - 9$.", "(x-3)(x+3)", "x^2-9", "(x+3)(x-3)"),
        (r"Expand $\left(a+b\right)^2$.", "a^2+2ab+b^2", "(a+b)^2", "b^2+2ab+a^2"),
        (r"Add $\dfrac{1}{2}$ and 1/3, that is $\dfrac12 + \dfrac13$.", r"\frac{5}{6}", r"\frac12+\frac13", "5/6"),
        (r"What is $7 \cdot 8$?", "56", r"7\cdot 8", "56"),
        (r"Write $\sqrt{8}$ as a multiple of a smaller root.", r"2\sqrt{2}", r"\sqrt{8}", r"2\sqrt2"),
    ],
)
def test_an_expression_of_the_question_is_no_answer(
    question: str, gold: str, copied: str, right: str, tmp_path: Path
) -> None:
    rows = [{"question": question, "answer": gold}]
    env = make("math_single", **sources(tmp_path, train=rows), max_turns=1)
    replies = [box(copied), box(right), box(gold)]
    (decision,) = episode(env, {"solo": lambda prompt, k: replies[k]}, candidates=3).decisions
    assert [candidate.score.local for candidate in decision.candidates] == pytest.approx([0.2, 1.0, 1.0])


def test_both_answer_in_parallel_and_see_each_other_from_turn_2(tmp_path: Path) -> None:
    env = Math(**sources(tmp_path), max_turns=3)
    record = episode(
        env,
        {
            "tool_user": by_turn(program(111), program(222), program(333)),
            "reasoner": by_turn(box("444"), box("555"), box(GOLD)),
        },
    )
    for agent, ask in (("tool_user", ask_program(env.packages)), ("reasoner", ASK_REASONING)):
        prompts = [prompt_of(decision) for decision in of(agent, record)]
        assert len(prompts) == 3
        seen = [[number for number in ("111", "444", "222", "555", "333") if number in p] for p in prompts]
        assert seen == [[], ["111", "444"], ["111", "444", "222", "555"]]
        assert all(QUESTION in p and p.endswith(ask) and GOLD not in p for p in prompts)
        assert "> print(111)\n> ```\n> The program printed:\n> 111" in prompts[1]
    assert record.outcome.success and record.outcome.team_reward == 1
    assert record.outcome.metrics == {"turns": 3, "agreed": 0}  # out of turns: the reasoner's last answer counts


@pytest.mark.parametrize(
    ("tool", "reasoned", "success"), [(GOLD, "738291.0", True), ("0.5", r"\frac12", False), ("1,000", "1000", False)]
)
def test_agreement_ends_the_episode_right_or_wrong(tool: str, reasoned: str, success: bool, tmp_path: Path) -> None:
    env = Math(**sources(tmp_path))
    record = episode(env, {"tool_user": by_turn(program(tool)), "reasoner": by_turn(box(reasoned))})
    assert len(record.decisions) == 2
    assert record.outcome.success == success
    assert record.outcome.metrics == {"turns": 1, "agreed": 1}


def test_the_reasoner_s_answer_counts(tmp_path: Path) -> None:
    env = Math(**sources(tmp_path), max_turns=2)
    tool_user = by_turn(program(int(GOLD)), program(int(GOLD)))
    assert not episode(env, {"tool_user": tool_user, "reasoner": by_turn(box("1"), box("2"))}).outcome.success
    assert not episode(env, {"tool_user": tool_user, "reasoner": by_turn(box("1"), "none")}).outcome.success
    # Two without an answer do not agree.
    record = episode(env, {"tool_user": by_turn("?", "?"), "reasoner": by_turn("?", "?")})
    assert record.outcome.metrics["turns"] == 2


def test_equal_programs_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    async def run(code: str, **options: Any) -> Any:
        ran.append(code)
        return await run_python(code, **options)

    monkeypatch.setattr(math_team, "run_python", run)
    env = Math(**sources(tmp_path), max_turns=1)
    replies = [program(1), program(2), program(1), program(1)]
    episode(env, {"tool_user": lambda prompt, k: replies[k], "reasoner": by_turn(box("3"))}, candidates=4)
    assert len(ran) == 2


def test_programs_import_what_the_prompt_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_team, "LIMITS", replace(math_team.LIMITS, wall_seconds=600.0))  # on a busy machine
    replies = [
        "```python\nfrom sympy import *\nx = symbols('x')\nprint(solve(x - 738291)[0])\n```",
        "```python\nimport numpy\nprint(int(numpy.arange(738292).max()))\n```",
        "```python\nimport pytest\nprint(738291)\n```",
    ]
    for options, said, scores in (
        ({}, "the standard library, sympy and numpy alone", [1, 1, 0.1]),
        ({"libraries": ["numpy"]}, "the standard library and numpy alone", [0.1, 1, 0.1]),
        ({"libraries": []}, "the standard library alone", [0.1, 0.1, 0.1]),
    ):
        env = Math(**sources(tmp_path), max_turns=1, **options)  # type: ignore[arg-type]
        record = episode(env, {"tool_user": lambda p, k: replies[k], "reasoner": lambda p, k: "-"}, candidates=3)
        (decision,) = of("tool_user", record)
        assert said in prompt_of(decision)
        assert [candidate.score.local for candidate in decision.candidates] == pytest.approx(scores)


def test_nothing_in_a_prompt_counts_as_an_answer_and_long_replies_are_cut(tmp_path: Path) -> None:
    echo: Script = lambda prompt, k: prompt  # noqa: E731
    for name in NAMES:
        env = make(name, **sources(tmp_path))
        record = episode(env, dict.fromkeys(env.agents, echo))
        assert not record.outcome.success
        for decision in record.decisions:
            prompt = prompt_of(decision)
            assert parse_answer(prompt) is extract_python(prompt) is None
            # A vote that says nothing earns -2, and a wrong answer that nobody votes on -1.
            worst = {"judge": -2 * decision.trained, "solver": -1} if name == "math_judged" else {}
            assert decision.candidates[0].reward == worst.get(decision.agent, 0)
            assert GOLD not in prompt and "12 steps" not in prompt
    env = Math(**sources(tmp_path), max_turns=2)
    long = episode(env, {"tool_user": by_turn("x" * 9999, "x"), "reasoner": by_turn("y" * 9999 + box("3"), "z")})
    prompt = prompt_of(of("reasoner", long)[1])
    assert len(prompt) < 2 * SHOWN + 1000 and box("3") in prompt


# ------------------------------------------------------------------ problems and options


@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
def test_the_data_sets_are_read_and_their_overlap_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    gsm8k = {"path": str(DATA / "gsm8k_test.jsonl")}
    aime = {"path": str(DATA / "aime24.jsonl"), "columns": {"question": "problem"}}
    env = Math(train=gsm8k, val=aime)
    assert (env.num_tasks("train"), env.num_tasks("val")) == (1319, 30)
    assert env.task("train", 0).answer == "18"
    prints = {
        split: {env.fingerprint(env.task(split, i)) for i in range(env.num_tasks(split))} for split in ("train", "val")
    }
    assert (len(prints["train"]), len(prints["val"])) == (1319, 30)
    assert not prints["train"] & prints["val"]
    assert not caplog.records


def test_without_math_verify_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentConfigError, match=re.escape("pip install 'verl-atgrpo[math]'")):
        Math(**sources(tmp_path))


def test_a_fingerprint_ignores_only_the_layout(tmp_path: Path) -> None:
    env = Math(**sources(tmp_path))

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


def test_problems_without_an_answer_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[object] = ["3", "see the figure.", None, r"\frac{1}{2}", ["$(1,2)$"], "t(0,4]"]
    rows: list[dict[str, object]] = [{"question": f"Problem {a}", "answer": a} for a in answers]
    with caplog.at_level(logging.WARNING):
        env = Math(**sources(tmp_path, train=rows))
    assert [env.task("train", i).answer for i in range(env.num_tasks("train"))] == [
        "3",
        r"\frac{1}{2}",
        "(1, 2)",
        "t(0,4]",
    ]
    assert "train: 2 of 6 problems left out" in caplog.text
    for none in (rows[1:2], rows[5:]):
        with pytest.raises(EnvironmentConfigError, match=r"train\.columns\.answer: no answer .* '(see the|t\(0)"):
            Math(**sources(tmp_path, train=none))


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_cannot_be_verified_fails_its_episode_before_any_prompt(name: str, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"question": "A", "answer": "t(0,4]"}, {"question": "B", "answer": "1"}]
    train, val = sources(tmp_path, train=rows).values()
    env = make(name, train=train, val=val)

    def never(prompt: str, k: int) -> str:
        raise AssertionError("asked")

    with pytest.raises(EpisodeFailed, match=r"'t\(0,4\]' cannot be verified") as failure:
        episode(env, dict.fromkeys(env.agents, never))
    assert failure.value.reason == "gold"


def test_several_data_sets_are_read_in_their_order(tmp_path: Path) -> None:
    train, val = sources(tmp_path).values()
    env = MathDebate(train=train, val={"one": val, "gone": None, "two": train})
    assert [env.task("val", index).question for index in range(2)] == [QUESTION + "val", QUESTION + "train"]
    assert env.data_sets("val") == {"one": 1, "two": 1} and env.num_tasks("val") == 2
    assert MathDebate(train=train, val={"gone": None, **val}).data_sets("val") == env.data_sets("train") == {}


@pytest.mark.skipif(not DATA.exists(), reason=f"the data sets are not at {DATA}")
def test_the_validation_sets_of_the_recipes_are_read() -> None:
    sets = {
        "aime24": {"path": str(DATA / "aime24.jsonl"), "columns": {"question": "problem"}},
        "olympiadbench": {"path": str(DATA / "olympiadbench_math.jsonl"), "columns": {"answer": "final_answer"}},
    }
    env = MathDebate(train={"path": str(DATA / "gsm8k_test.jsonl")}, val=sets)
    assert env.data_sets("val")["aime24"] == 30 and env.data_sets("val")["olympiadbench"] >= 670


@pytest.mark.parametrize(
    ("names", "options", "named"),
    [
        (NAMES, {"train": None}, "train=None"),
        (NAMES, {"val": {"path": "/nowhere.jsonl"}}, "val.path='/nowhere.jsonl'"),
        (NAMES, {"val": {"a": {"path": "/nowhere.jsonl"}}}, "val.a.path='/nowhere.jsonl'"),
        (NAMES, {"val": {"a": {"path": "x"}, "path": "y"}}, "val.path='y' is beside the named data sets a"),
        (NAMES, {"val": {"a/b": {"path": "x"}}}, "val.a/b: a data set's name"),
        (["math_ensemble", "math_debate"], {"style": "full"}, "style is not an option"),
        (NAMES[1:3], {"libraries": "sympy"}, "libraries='sympy'"),
        (NAMES[1:3], {"libraries": ["a b"]}, "libraries=['a b']"),
        (NAMES[1:3], {"libraries": ["nonesuch"]}, "libraries=['nonesuch']"),
        ([NAMES[0], NAMES[3]], {"libraries": []}, "libraries is not an option"),
        (NAMES[:2], {"max_turns": 0}, "max_turns=0"),
        (NAMES[:2], {"max_turns": "4"}, "max_turns='4'"),
        (NAMES[2:3], {"reasoners": 0}, "reasoners=0"),
        (NAMES[2:3], {"tool_users": 1.5}, "tool_users=1.5"),
        (NAMES[3:4], {"debaters": 1}, "debaters=1"),
        (NAMES[3:4], {"rounds": True}, "rounds=True"),
        (NAMES[2:], {"max_turns": 4}, "max_turns is not an option"),
    ],
)
def test_option_errors_name_key_and_value(
    names: list[str], options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    train, val = sources(tmp_path).values()
    for name in names:
        with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
            make(name, **{"train": train, "val": val, **options})
        assert "\n" not in str(caught.value)


USER, SYSTEM = {"role": "user", "content": "What is 1 + 2?"}, {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("question", "kept"),
    [
        ("What is 1 + 2?", True),
        ([USER], True),  # verl's own form
        ([SYSTEM, USER], False),
        ([USER, {"role": "assistant", "content": "3"}], False),
        ([{"role": "assistant", "content": "3"}], False),
        ([{**USER, "content": ["What is 1 + 2?"]}], False),
        ("  \n", False),
        ("", False),
        (None, False),
        (["What is 1 + 2?"], False),
        ({"content": "What is 1 + 2?"}, False),
        (12, False),
    ],
)
def test_a_question_is_a_text_or_one_message(question: Any, kept: bool, tmp_path: Path) -> None:
    def read(*rows: dict[str, Any]) -> MathDebate:
        return MathDebate(**sources(tmp_path, train=[*rows]))

    good, row = {"question": "What is 5?", "answer": "5"}, {"question": question, "answer": "3"}
    tasks = [read(good, row).task("train", index).question for index in range(1 + kept)]
    assert tasks == ["What is 5?", "What is 1 + 2?"][: 1 + kept] and read(good, row).num_tasks("train") == 1 + kept
    if not kept:
        with pytest.raises(
            EnvironmentConfigError, match=r"columns\.question: no row of it has a text, or one message"
        ):
            read(row)
