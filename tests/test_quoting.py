"""No reply costs the next agent's episode: prompts are made with quotes that their policies can take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.coding_problems import write
from fakes.hostile_replies import REPLIES

from verl_atgrpo import Environment, EpisodeFailed, Message, Score, Team, make, play
from verl_atgrpo.environments.common.judging import grade, rank
from verl_atgrpo.play.messages import MessageError
from verl_atgrpo.play.quoting import READ, SHARES, SHOWN, quoted, sharing, shortened
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import TeamOptions


class Narrow(ScriptedPolicy):
    """A policy that takes prompts of at most `most` tokens; a token is a byte."""

    most = 2000

    def encode(self, messages: Sequence[Message]) -> list[int]:
        ids = super().encode(messages)
        if len("".join(map(chr, ids)).encode("utf-8", "replace")) > self.most:
            raise EpisodeFailed("prompt_too_long", "too long")
        return ids


def team_of(script: Callable[[str, int], str], agents: Sequence[str], most: int = 2000) -> Team:
    policy = Narrow(script)
    policy.most = most
    return Team(dict.fromkeys(agents, policy), TeamOptions(1))


@pytest.mark.parametrize("share", SHARES)
def test_quotes_have_a_share_of_their_length_at_the_end(share: float) -> None:
    text = "".join(chr(97 + number % 26) for number in range(READ + 5000))
    with sharing(share):
        for most, shown in ((SHOWN, shortened(text)), (100, shortened(text, 100)), (READ, quoted(text)[2:])):
            assert shown == "[...]" + text[len(text) - int(share * most) :]
        assert shortened("") == quoted("") == ""
    assert shortened(text) == "[...]" + text[-SHOWN:]
    assert shortened("short") == "short"


@pytest.mark.parametrize("most", [2000, 900, 400, 200, 60])
@pytest.mark.parametrize("reply", ["word " * 4000, "a\n" * 6000, "\U0001f600" * 3000, "}\n" * 3000, "> " * 5000, "x"])
def test_a_prompt_is_made_again_with_shorter_quotes_until_it_fits(reply: str, most: int) -> None:
    team = team_of(lambda prompt, k: "7", ["solo"], most)
    asyncio.run(team.solo.act(lambda: f"A draft:\n{quoted(reply)}\nRight?", lambda said: Score()))
    prompt = "".join(map(chr, team.decisions[0].prompt_ids))
    assert prompt.startswith("A draft:\n> ") and prompt.endswith("\nRight?")
    fits = len(f"A draft:\n{quoted(reply)}\nRight?".encode()) <= most
    assert team.counts["prompts_shortened"] == (0 if fits else 1)
    assert ("[...]" not in prompt) == (fits and len(reply) <= READ)


def test_the_longest_quotes_that_fit_are_taken() -> None:
    text = "a" * 10_000
    for most, share in ((10_050, 1.0), (9_000, 0.25), (4_000, 0.125), (700, 0.03125), (30, 0.0)):
        team = team_of(lambda prompt, k: "7", ["solo"], most)
        asyncio.run(team.solo.act(lambda: quoted(text)))
        assert sum(one == ord("a") for one in team.decisions[0].prompt_ids) == min(len(text), int(READ * share))


def test_a_prompt_that_is_too_long_without_quotes_fails_the_episode() -> None:
    made: list[str] = []

    def prompt() -> str:
        made.append(quoted("a" * 100))
        return "x" * 3000 + made[-1]

    team = team_of(lambda prompt, k: "7", ["solo"])
    with pytest.raises(EpisodeFailed, match="too long"):
        asyncio.run(team.solo.act(prompt))
    assert made[-1] == "> [...]" and len(made) == len(SHARES)
    assert isinstance(team.failure, EpisodeFailed)


@pytest.mark.parametrize("error", [MessageError("no such role"), EpisodeFailed("engine", "gone")])
def test_other_failures_are_the_decisions(error: Exception) -> None:
    class Broken(ScriptedPolicy):
        def encode(self, messages: Sequence[Message]) -> list[int]:
            raise error

    team = Team({"solo": Broken(lambda prompt, k: "7")}, TeamOptions(1))
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(team.solo.act(lambda: "?"))


def test_the_descriptions_of_tools_count() -> None:
    class Described(Narrow):
        def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
            return super().encode([{"role": "system", "content": "t" * 1000 * bool(tools)}, *messages])

    team = Team({"solo": Described(lambda prompt, k: "7")}, TeamOptions(1))
    tool = Tool("look", "", {"type": "object", "properties": {}})
    asyncio.run(team.solo.act(lambda: quoted("a" * 1500), tools=[tool]))
    assert team.counts["prompts_shortened"] == 1
    asyncio.run(team.solo.act(lambda: quoted("a" * 1500)))
    assert team.counts["prompts_shortened"] == 1


def test_shares_of_concurrent_prompts_are_their_own() -> None:
    """A prompt is made without waiting, so no other one is made with its share."""
    team = team_of(lambda prompt, k: "7", ["one", "two"])

    async def both() -> None:
        await asyncio.gather(
            team.one.act(lambda: quoted("a" * 9000)), team.two.act(lambda: quoted("b" * 1500)), asyncio.sleep(0)
        )

    asyncio.run(both())
    assert team.counts["prompts_shortened"] == 1
    assert shortened("a" * SHOWN) == "a" * SHOWN


# ------------------------------------------------------------------ environments

Flood = Mapping[str, Any]


def _math(folder: Path, name: str, **options: Any) -> Environment:
    pytest.importorskip("math_verify")
    rows = {split: {"question": f"What is 3 times 17? {split}", "answer": "51"} for split in ("train", "val")}
    files = {split: {"path": write(folder, [row], f"{split}.jsonl")} for split, row in rows.items()}
    return make(name, **files, **options)


def _code(folder: Path, name: str) -> Environment:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    rows = {
        split: {"question": f"Double it. {split}", "input_output": tests, "starter_code": "", "solutions": '["pass"]'}
        for split in ("train", "val")
    }
    sections = {
        split: {"path": write(folder, [row], f"{split}.jsonl"), "format": "apps"} for split, row in rows.items()
    }
    return make(name, **sections, max_turns=3)


def _gym(folder: Path, name: str) -> Environment:
    pytest.importorskip("reasoning_gym")
    return make(name, dataset="basic_arithmetic", max_turns=3)


ENVIRONMENTS: dict[str, Callable[[Path], Environment]] = {
    "math": lambda folder: _math(folder, "math", max_turns=4),
    "math_single": lambda folder: _math(folder, "math_single", max_turns=4),
    "math_refined": lambda folder: _math(folder, "math_refined"),
    "math_drafts": lambda folder: _math(folder, "math_drafts"),
    "math_judged": lambda folder: _math(folder, "math_judged"),
    "math_ensemble": lambda folder: _math(folder, "math_ensemble", reasoners=6),
    "math_debate": lambda folder: _math(folder, "math_debate", debaters=8),
    "code": lambda folder: _code(folder, "code"),
    "code_single": lambda folder: _code(folder, "code_single"),
    "plan_path": lambda folder: make("plan_path", max_turns=2),
    "sudoku": lambda folder: make("sudoku", max_turns=2),
    "reasoning_gym": lambda folder: _gym(folder, "reasoning_gym"),
    "reasoning_gym_single": lambda folder: _gym(folder, "reasoning_gym_single"),
}
FLOODS = (
    "```python\n" + "#\n" * 4000 + "print('a\\n' * 5000)\n```",
    "```python\nx = 1\n```\n" + "b\n" * 3000 + "\\boxed{5}",
    "Input:\n```\n"
    + "1\n" * 3000
    + "```\nOutput:\n```\n"
    + "2\n" * 3000
    + "```\n<answer>"
    + "7\n" * 3000
    + "</answer>",
    "\U0001f600\n" * 3000,
)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_floods_drop_no_episode(name: str, tmp_path: Path) -> None:
    """Episodes whose prompts are too long would have no gradient against the reply that made them so."""
    environment = ENVIRONMENTS[name](tmp_path)
    task = environment.task("train", 0)

    def longest(reply: str, most: int) -> int:
        team = team_of(lambda prompt, k: reply, environment.agents, most)
        record = asyncio.run(play(environment, task, team))
        return max(len("".join(map(chr, one.prompt_ids)).encode()) for one in record.decisions)

    most = longest("x", 10**9) + 800  # with what stands between the quotes
    for reply in FLOODS:
        assert longest(reply, most) <= most


def test_judges_read_what_fits() -> None:
    flood = "a\n" * 5000
    team = team_of(lambda prompt, k: "Grade: 7", ["judge"], 400)
    assert asyncio.run(grade(team.judge, "Q?", flood, "Good?")) == 0.7
    team = team_of(lambda prompt, k: "Order: 1, 2, 3", ["judge"], 400)
    assert sorted(asyncio.run(rank(team.judge, "Q?", [flood, flood + "b", flood + "c"], "Good?"))) == [0.0, 0.5, 1.0]


def test_the_corpus_of_hostile_replies_fits() -> None:
    for reply in REPLIES:
        team = team_of(lambda prompt, k: "7", ["solo"], 300)
        asyncio.run(team.solo.act(lambda reply=reply: f"It wrote:\n{quoted(shortened(reply))}\nGo on."))
