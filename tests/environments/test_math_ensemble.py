"""Mathematics with an ensemble and a judge, and with a debate: prompts and which answer counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs the extra `math`")

from fakes.math_problems import GOLD, box, episode, program, sources
from fakes.scripted_episodes import Script, of, prompt_of

from verl_atgrpo.environments.math import MathDebate, MathEnsemble


def test_ensemble(tmp_path: Path) -> None:
    env = MathEnsemble(**sources(tmp_path), reasoners=3, tool_users=2)

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
    env = MathDebate(**sources(tmp_path), debaters=3, rounds=2)
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
