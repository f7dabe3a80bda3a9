"""Coding: tests in replies, rewards, prompts, whole episodes of a coder and a tester, options."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.coding_problems import (
    ADD,
    ASSERTED,
    DOUBLE,
    EXCHANGES,
    HUMANEVAL,
    ROWS,
    block,
    needs_humaneval,
    test_block,
    verdict,
    write,
)
from fakes.scripted_episodes import Script, of, prompt_of, scripted

from verl_atgrpo import EnvironmentConfigError, make
from verl_atgrpo.environments.code import programs as judging
from verl_atgrpo.environments.code.environment import Code, State, parse_test
from verl_atgrpo.environments.code.programs import Call, Exchange, Problem, Test
from verl_atgrpo.play.types import EpisodeRecord
from verl_atgrpo.sandbox.runner import ExecutionResult, Limits

# ------------------------------------------------------------------ the environment


def sections(folder: Path, name: str = "apps") -> dict[str, Any]:
    rows = [row for row, _ in ROWS[name]]
    return {
        "train": {"path": write(folder, rows), "format": name},
        "val": {"path": write(folder, rows), "format": name},
    }


def environment(folder: Path, **options: Any) -> Code:
    env = make("code", **{**sections(folder), "cpu_seconds": 9, **options})
    assert isinstance(env, Code)
    return env


def episode(env: Code, problem: Problem, coder: Script, tester: Script, candidates: int = 1) -> EpisodeRecord:
    return scripted(env, problem, {"coder": coder, "tester": tester}, candidates)


def test_tasks(tmp_path: Path) -> None:
    env = environment(tmp_path, max_tests=1)
    assert env.num_tasks("train") == env.num_tasks("val") == 3
    assert env.task("train", 1).tests == (Call((1, 2), [3], wrapped=True),)
    assert len(env.task("val", 1).tests) > 1  # validation counts them all
    assert environment(tmp_path, val_max_tests=1).task("val", 1).tests == (Call((1, 2), [3], wrapped=True),)
    section = sections(tmp_path)["val"]
    assert environment(tmp_path, val={"a": section, "b": section}).data_sets("val") == {"a": 3, "b": 3}
    one, other = Problem(" Double\n it. ", EXCHANGES), Problem("double it.", EXCHANGES[:1])
    assert env.fingerprint(one) == env.fingerprint(other) != env.fingerprint(DOUBLE)


@pytest.mark.parametrize(
    ("reply", "problem", "test"),
    [
        (test_block("3", "6"), DOUBLE, Exchange("3\n", "6\n")),
        (test_block("", "6"), DOUBLE, Exchange("\n", "6\n")),
        ("Input:\n```\n```\n\nOutput:\n```text\n6\n```", DOUBLE, Exchange("", "6\n")),
        (test_block("1", "2") + "\nno:\n" + test_block("3", "6"), DOUBLE, Exchange("3\n", "6\n")),
        (test_block("1, [2, (3,)]", "{'a': None}"), ADD, Call((1, [2, (3,)]), {"a": None})),
        (test_block("1,\n2,", "3"), ADD, Call((1, 2), 3)),
        (test_block("", "3"), ADD, Call((), 3)),
        ("Input: 3\nOutput: 6", DOUBLE, Exchange("3\n", "6\n")),
        ("```\n3\n```\n```\n6\n```", DOUBLE, None),
        (test_block("0", " "), DOUBLE, None),  # of no test cases
        ("Output:\n```\n3\n```\nInput:\n```\n6\n```", DOUBLE, None),
        (test_block("1, x", "3"), ADD, None),
        (test_block("__import__('os').system('echo')", "3"), ADD, None),
        (test_block("1, 2", "1 +"), ADD, None),
        (test_block("{[]}", "3"), ADD, None),
        (test_block("1] + [2", "3"), ADD, None),
        *((test_block(deep * 1000, "3"), ADD, None) for deep in ("-", "[", "(", "{1:", "~", "not ")),
        (test_block("[" * 900 + "]" * 900, "3"), ADD, None),
        (test_block("9" * 3000, "3"), ADD, None),
        (test_block("[1, ...], 2", "3"), ADD, None),
        (test_block("1, 2", "..."), ADD, None),
        ("Input:\n```\n" * 3000, ADD, None),
        ("Input:\n" + "```\n" * 3000, ADD, None),
    ],
)
def test_parse_test(reply: str, problem: Problem, test: Test | None) -> None:
    assert parse_test(reply, problem) == test


def test_rewards(tmp_path: Path) -> None:
    programs = {
        "no program": (0, 0),
        "```python\nprint(2 * int(input()))": (0, 0),
        block("print(("): (0, 0),
        block("1 / 0"): (0, 0.1),
        block("import os; os._exit(0)"): (0, 0.2),
        block("print(6)"): (0.25, 0.4),
        block("print(abs(2 * int(input())))"): (0.75, 0.8),
        block("print(2 * int(input()))"): (1, 1),
    }
    tests = {
        "no test": 0,
        test_block("5", "11"): 0.2,
        test_block("five", "10"): 0.2,
        test_block("5", "10"): 1,
    }
    said, asked = list(programs), list(tests)
    env = environment(tmp_path, max_turns=1)
    record = episode(env, DOUBLE, lambda p, k: said[k], lambda p, k: asked[k % 4], candidates=len(said))
    (coder,), (tester,) = of("coder", record), of("tester", record)
    assert [c.score.team for c in coder.candidates] == pytest.approx([team for team, _ in programs.values()])
    assert [c.score.local for c in coder.candidates] == pytest.approx([local for _, local in programs.values()])
    assert coder.committed == len(said) - 1
    assert [c.score.local for c in tester.candidates] == pytest.approx([*tests.values()] * 2)
    assert [c.score.team for c in tester.candidates] == [0] * len(said)
    assert record.outcome.success and record.outcome.team_reward == 1
    assert record.outcome.metrics == {"turns": 1, "passed": 1, "agreed": 1}


def test_rewards_without_solutions(tmp_path: Path) -> None:
    for env, problem in (
        (environment(tmp_path, tester_reward="format"), DOUBLE),
        (environment(tmp_path), Problem("", DOUBLE.tests)),
    ):
        for reply, local in (("no test", 0), (test_block("5", "10"), 0.2), (test_block("5", "11"), 0.2)):
            assert asyncio.run(env.score_test(problem, reply)).local == local


def test_hostile_replies_earn_no_more_than_the_floor(tmp_path: Path) -> None:
    replies = [
        " ", "```python", "\0", "\udc80", "Input:" * 500, "`" * 5000,
        block("'\udc80'"), block("\0"), block("import os; os.kill(0, 9)"), block("print('x' * 10**8)"),
        block("import sys; sys.stdout.buffer.write(b'\\xff' * 99)"), block("x = bytearray(1 << 40)"),
        test_block("\0", "\udc80"), test_block("1e999", "-" * 2000), test_block("{", "}"),
    ]  # fmt: skip
    env = environment(tmp_path, max_turns=1, tester_reward="golden")
    for problem in (replace(DOUBLE, tests=DOUBLE.tests[:1]), ADD):
        record = episode(env, problem, lambda p, k: replies[k], lambda p, k: replies[k], len(replies))
        assert not record.outcome.success and record.outcome.team_reward == 0
        for decision in record.decisions:
            assert all(c.score.team == 0 and c.score.local <= 0.2 for c in decision.candidates)


def test_agents_act_in_parallel_and_both_see_a_failed_test(tmp_path: Path) -> None:
    programs = [block("print(int(input()) + 3)"), block("print(int(input()) * 2)  # better"), "never asked"]
    tests = [test_block("2041", "4082"), "nothing new"]
    seen: list[str] = []

    def coder(prompt: str, k: int) -> str:
        seen.append(prompt)
        return programs[len(seen) - 1]

    def tester(prompt: str, k: int) -> str:
        return tests["so far" in prompt]

    record = episode(environment(tmp_path), DOUBLE, coder, tester)
    first, second = of("coder", record), of("tester", record)
    assert len(first) == len(second) == 2  # they agree in the second turn
    assert record.outcome.success and record.outcome.metrics == {"turns": 2, "passed": 1, "agreed": 1}
    for decisions in (first, second):
        before, after = map(prompt_of, decisions)
        assert "2041" not in before and "+ 3" not in before and "so far" not in before
        for part in ("> print(int(input()) + 3)", "> 2041", "> 4082", "On this input the program gave:\n> 2044\n"):
            assert part in after
        assert "better" not in after
        assert DOUBLE.statement in before and DOUBLE.statement in after


def test_feedback_on_functions(tmp_path: Path) -> None:
    replies = {"coder": block("def add(a, b): return [a]"), "tester": test_block("2041, 'x'", "{1: 2}")}
    env = environment(tmp_path, max_turns=2)
    record = episode(env, ADD, lambda p, k: replies["coder"], lambda p, k: replies["tester"])
    for agent in env.agents:
        for part in ("> def add(a, b): return [a]", "> 2041, 'x'\n", "> {1: 2}\n", "gave:\n> [2041]\n"):
            assert part in prompt_of(of(agent, record)[1])
        assert "Start from:\n```python\ndef add(a, b):\n```" in prompt_of(of(agent, record)[0])
    assert not record.outcome.success and record.outcome.metrics == {"turns": 2, "passed": 0, "agreed": 0}


def test_prompts_say_what_is_missing_and_what_a_test_is(tmp_path: Path) -> None:
    env = environment(tmp_path)
    kinds = {DOUBLE: "what the program reads", ADD: "the arguments of one call of `add`"}
    for problem, kind in kinds.items():
        asked = env.tester_prompt(State(problem))[-1]["content"]
        assert [text in asked for text in kinds.values()] == [text == kind for text in kinds.values()]
        assert ("Python literals" in asked) is (problem is ADD)
        assert "so far" not in asked
    with_test, with_program = State(DOUBLE, None, EXCHANGES[0]), State(DOUBLE, "print(1)", None)
    assert "No program is written yet." in env.coder_prompt(with_test)[-1]["content"]
    assert "The program so far:\n> print(1)\nNo test is written yet." in env.coder_prompt(with_program)[-1]["content"]


def test_the_last_program_counts_and_agreement_is_not_success(tmp_path: Path) -> None:
    wrong, right = block("print(6)"), block("print(2 * int(input()))")
    env = environment(tmp_path, max_turns=2)
    agreeing = episode(env, DOUBLE, lambda p, k: wrong, lambda p, k: test_block("3", "6"))
    assert not agreeing.outcome.success and agreeing.outcome.team_reward == 0.25
    assert agreeing.outcome.metrics == {"turns": 1, "passed": 0.25, "agreed": 1}
    for success, programs in ((False, (right, wrong)), (True, (wrong, right))):
        record = episode(
            env, DOUBLE, lambda p, k, said=programs: said["so far" in p], lambda p, k: test_block("1", "99")
        )
        assert record.outcome.success is success and record.outcome.metrics["agreed"] == 0
    standing = episode(env, DOUBLE, lambda p, k: "-" if "so far" in p else right, lambda p, k: test_block("1", "99"))
    assert standing.outcome.success  # no new program: the last one is kept
    nothing = episode(env, DOUBLE, lambda p, k: "-", lambda p, k: "-")
    assert nothing.outcome.team_reward == 0 and len(nothing.decisions) == 4


def test_programs_get_the_configured_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    async def run(code: str, *, stdin: str = "", limits: Limits) -> ExecutionResult:
        given.append(limits)
        return ExecutionResult("", "", 1, False, False)

    monkeypatch.setattr(judging, "run_python", run)
    env = environment(tmp_path, cpu_seconds=3, memory_mb=333)
    episode(env, DOUBLE, lambda prompt, k: block("print(1)"), lambda prompt, k: "nothing")
    # Wall-clock time depends on the machine's load; correct output may be long.
    assert {replace(limits, output_bytes=0) for limits in given} == {Limits(3, 14.0, 333, output_bytes=0)}
    assert min(limits.output_bytes for limits in given) >= 1 << 20


def test_no_golden_test_or_solution_is_in_a_prompt(tmp_path: Path) -> None:
    env = environment(tmp_path)
    for problem in (DOUBLE, ADD, ASSERTED):
        own = Call((1, 1), 5) if problem.entry_point else Exchange("7", "5")
        shown = verdict(problem, "print(4)\ndef add(a, b): return 4", own)
        for state in (State(problem), State(problem, "print(4)", own, shown)):
            for ask in (env.coder_prompt, env.tester_prompt):
                text = "\n".join(message["content"] for message in ask(state))
                for hidden in ("500", "1000", "777", "222", "999", "0.5", "a + b", "2 * int", "twice", "candidate"):
                    assert hidden not in text


@needs_humaneval
def test_no_golden_test_of_humaneval_is_in_a_prompt() -> None:
    section = {"path": str(HUMANEVAL), "format": "humaneval"}
    env = Code(train=section, val=section)
    for index in range(env.num_tasks("val")):
        problem = env.task("val", index)
        bodies = str(problem.solution).removeprefix(problem.statement).strip()
        for ask in (env.coder_prompt, env.tester_prompt):
            text = "\n".join(message["content"] for message in ask(State(problem)))
            assert "assert candidate" not in text and "METADATA" not in text and bodies not in text


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_tests": 0}, "max_tests=0"),
        ({"max_tests": 2.5}, "max_tests=2.5"),
        ({"cpu_seconds": 0}, "cpu_seconds=0"),
        ({"memory_mb": 1}, "memory_mb=1"),
        ({"tester_reward": "solution"}, "tester_reward='solution'"),
        ({"train": None}, "train=None"),
        ({"val": "x.jsonl"}, "val='x.jsonl'"),
        ({"val": {"path": "x.jsonl"}}, "val.format=None"),
        ({"val": {"path": "x.jsonl", "format": "codeforces"}}, "val.format='codeforces'"),
        ({"val": {"path": "x.jsonl", "format": ["apps"]}}, "val.format=['apps']"),
        ({"val": {"path": "/nowhere/x.jsonl", "format": "apps"}}, "val.path='/nowhere/x.jsonl'"),
        ({"val": {"format": "apps"}}, "val="),
    ],
)
def test_option_errors_name_key_and_value(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentConfigError, match=re.escape(f"at_grpo.environment.{named}")) as caught:
        make("code", **{**sections(tmp_path), **options})
    assert "\n" not in str(caught.value)


def test_golden_tester_reward_needs_solutions(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentConfigError, match=r"environment\.tester_reward='golden': .* use format"):
        make("code", **sections(tmp_path, "livecodebench"))
    assert make("code", **sections(tmp_path, "livecodebench"), tester_reward="format").num_tasks("train") == 2
    assert (
        make("code_single", **sections(tmp_path, "livecodebench")).num_tasks("train") == 2
    )  # no tester, no solutions
    row = {key: ROWS["apps"][0][0][key] for key in ("question", "input_output")}  # no column at all
    section = {"path": write(tmp_path, [row]), "format": "apps"}
    with pytest.raises(EnvironmentConfigError, match="tester_reward='golden'"):
        Code(train=section, val=section)
