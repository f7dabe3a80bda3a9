"""OpenEnv: the protocol of the real server and of the fake, rewards, replays, sessions, failures, invalid options."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("uvicorn")

from fakes.scripted_episodes import prompt_of, scripted

from verl_atgrpo import EnvironmentConfigError, EpisodeFailed, Score, ScriptedTeam, check_environment, make, play
from verl_atgrpo.environments.ports.openenv_server import Session
from verl_atgrpo.play.testing import Script
from verl_atgrpo.play.types import EpisodeRecord

ROOT = Path(__file__).parents[2]
GAMES = ROOT / "tests" / "fakes" / "openenv_games"
EXCHANGE = json.loads((GAMES / "exchange.json").read_text())
FAKE = {"app": "fake:app", "folder": str(GAMES), "sessions": 4}
REAL_PYTHON = os.environ.get("OPENENV_PYTHON", str(ROOT / ".venv-openenv" / "bin" / "python"))
"""An interpreter with the package, which does not fit into the one of training (fastmcp wants another mcp)."""
REAL = {**FAKE, "app": "served:app", "python": REAL_PYTHON, "sessions": 8}
PLAYERS = {"agents": ["left", "right"], "turn": "mover", "observe": "heap", "rewards": "gains"}


def guess(prompt: str, k: int) -> str:
    return re.findall(r"\d+", prompt)[-1]


def alone(*replies: str) -> Mapping[str, Script]:
    """Says the replies at the first turn, one for each candidate, and the number after it."""
    return {"player": lambda prompt, k: replies[k % len(replies)] if "Say" in prompt else guess(prompt, k)}


def scores(record: EpisodeRecord, turn: int = 0) -> list[Score]:
    return [candidate.score for candidate in record.decisions[turn].candidates]


@pytest.fixture(scope="module")
def fake() -> str:
    return make("openenv", **FAKE)._server.url()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def real() -> str:
    has = [REAL_PYTHON, "-c", "import openenv.core"]
    if not Path(REAL_PYTHON).exists() or subprocess.run(has, capture_output=True).returncode:
        pytest.skip(f"{REAL_PYTHON} has no openenv: python3 -m venv .venv-openenv; pip install openenv==0.10.0 in it")
    return make("openenv", **REAL)._server.url()  # type: ignore[attr-defined]


# ------------------------------------------------------------------ the protocol, and their client


def said(url: str, messages: list[Any]) -> list[Any]:
    """What a server answers; of errors the type and the code, as the rest are words."""

    async def talk() -> list[Any]:
        async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:
            answers = []
            for message in messages:
                await socket.send_json(message)
                answer = await socket.receive_json()
                code = {"code": answer["data"].get("code")}
                answers.append({**answer, "data": code} if answer["type"] == "error" else answer)
            return answers

    return asyncio.run(talk())


@pytest.mark.parametrize("kind", ["fake", pytest.param("real", marks=pytest.mark.slow)])
def test_both_servers_answer_as_recorded(kind: str, request: pytest.FixtureRequest) -> None:
    for path, known in EXCHANGE.items():
        url = request.getfixturevalue(kind) + path
        with urllib.request.urlopen(f"{url}/schema") as answer:
            assert {kind: schema for kind, schema in json.load(answer).items() if kind in known["schema"]} == known[
                "schema"
            ]
        asked = urllib.request.Request(f"{url}/reset", b'{"seed": 5}', {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer) == known["reset"]
        assert said(url, [message for message, _ in known["session"]]) == [answer for _, answer in known["session"]]


@pytest.mark.slow
def test_rewards_are_those_of_their_client_to_the_last_bit(real: str) -> None:
    def theirs(url: str, seed: int, actions: list[dict[str, Any]]) -> list[str]:
        script = [REAL_PYTHON, str(ROOT / "tests" / "fakes" / "openenv_client.py")]
        return json.loads(subprocess.check_output(script, input=json.dumps([url, seed, actions]), text=True))

    env = make("openenv", **REAL, max_steps=6)
    task = env.task("train", 0)
    record = scripted(env, task, {"player": lambda prompt, k: str(len(prompt) + 7 * k)}, candidates=3)
    taken = [decision.candidates[decision.committed] for decision in record.decisions]
    assert len(taken) == 6 and len({one.reward for one in taken}) == 6
    for committed in range(3):  # also those that were not committed
        at = [*taken[:3], record.decisions[3].candidates[committed]]
        rewards = theirs(real, task, [{"number": int(one.text)} for one in at])
        assert [one.score.local.hex() for one in at] == [one.score.team.hex() for one in at] == rewards
    heaps = make("openenv", url=f"{real}/nim", **{**PLAYERS, "rewards": "shared"}, sessions=8)
    task = heaps.task("val", 0)
    record = scripted(heaps, task, dict.fromkeys(heaps.agents, lambda prompt, k: "3" if int(prompt) > 3 else prompt))
    taken = [decision.candidates[0] for decision in record.decisions]
    assert [one.score.team.hex() for one in taken] == theirs(f"{real}/nim", task, [{"count": c.text} for c in taken])
    assert {decision.agent for decision in record.decisions} == {"left", "right"}


@pytest.mark.slow
def test_a_real_server_with_one_session_is_played_with_one(real: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=r"plays 1 at once: set at_grpo\.environment\.sessions=1, less"):
        make("openenv", url=f"{real}/single")
    env = make("openenv", url=f"{real}/single", sessions=1)
    assert [record.outcome.success for record in at_once(env, 5)] == [True] * 5


# ------------------------------------------------------------------ episodes


def at_once(env: Any, number: int, candidates: int = 2) -> list[EpisodeRecord]:
    async def played() -> list[EpisodeRecord]:
        teams = [ScriptedTeam(alone("1", "x", "2"), candidates=candidates) for _ in range(number)]
        tasks = [env.task("train", index) for index in range(number)]
        return await asyncio.gather(*(play(env, *both) for both in zip(tasks, teams, strict=True)))

    return asyncio.run(played())


def test_it_keeps_the_contract() -> None:
    check_environment(
        "openenv", {**FAKE, "max_steps": 3}, gold=lambda task: {"player": guess}, tasks=6, episodes=1, floor=0.2
    )


def test_candidates_are_scored_without_one_changing_what_another_earns(fake: str) -> None:
    env = make("openenv", url=fake, sessions=4)
    task = env.task("train", 0)
    one_by_one = [scores(scripted(env, task, alone(reply)))[0] for reply in ("1", "2", "3", "2")]
    record = scripted(env, task, alone("1", "2", "3", "2"), candidates=4)
    assert scores(record) == one_by_one and len({*scores(record)}) == 3
    assert record.outcome.success and [decision.agent for decision in record.decisions] == ["player", "player"]


def test_what_cannot_be_played_earns_the_least_and_disturbs_nothing(fake: str) -> None:
    env = make("openenv", url=fake, sessions=4, max_steps=3, on_illegal="again")
    replies = ("x", "-1", "13", "1000", "[1]", "9" * 9_999, "7")
    record = scripted(env, env.task("train", 0), alone(*replies), candidates=len(replies))
    assert scores(record)[:-1] == [Score(-1, -1)] * 6 and scores(record)[-1].team > 0
    assert record.outcome.success and record.outcome.metrics["illegal"] == 0
    record = scripted(env, env.task("train", 0), {"player": lambda prompt, k: "13"})
    assert record.outcome.metrics == {"steps": 3, "illegal": 3, "return_player": -3}
    assert prompt_of(record.decisions[1]).startswith("Your last reply was not a legal action")


def test_episodes_share_the_sessions_that_there_are(fake: str) -> None:
    env = make("openenv", url=fake, sessions=2)
    together = at_once(env, 12, candidates=3)
    assert [record.decisions for record in together] == [
        scripted(env, env.task("train", index), alone("1", "x", "2"), candidates=3).decisions for index in range(12)
    ]
    with pytest.raises(EnvironmentConfigError, match=r"plays 1 at once: set at_grpo\.environment\.sessions=1"):
        make("openenv", url=f"{fake}/single")


def test_two_agents_act_in_turn_and_earn_their_own(fake: str) -> None:
    env = make("openenv", url=f"{fake}/nim", **PLAYERS, team=["left"], sessions=4)
    players = {"left": lambda prompt, k: str(int(prompt) % 4 or 1), "right": lambda prompt, k: "1"}
    record = scripted(env, env.task("train", 1), players)
    assert [one.agent for one in record.decisions] == ["left", "right"] * (len(record.decisions) // 2) + ["left"]
    assert scores(record, -1) == [Score(1, 1)] and scores(record, 1)[0].team == 0 < scores(record, 1)[0].local
    assert record.outcome.success and record.outcome.metrics["return_right"] < 0
    env = make("openenv", url=f"{fake}/nim", **{**PLAYERS, "rewards": "acting", "turn": None}, sessions=4)
    assert [one.agent for one in scripted(env, 3, players).decisions[:3]] == ["left", "right", "left"]
    three = make("openenv", url=fake, sessions=4, agents=["a", "b", "c"], max_steps=9)
    record = scripted(three, 3, dict.fromkeys("abc", lambda prompt, k: "99"))
    earned = [scores(record, turn)[0] for turn in range(9)]
    assert any(sum([one.local] * 3) / 3 != one.local for one in earned)  # as a mean would be computed
    assert [one.team for one in earned] == [one.local for one in earned]
    assert record.outcome.team_reward == sum(one.local for one in earned) == record.outcome.metrics["return_c"]


def test_options_say_what_agents_see_and_what_replies_mean(fake: str) -> None:
    env = make("openenv", url=fake, sessions=4, observe=f"{__name__}:tries", action=f"{__name__}:half", history=True)
    record = scripted(env, env.task("train", 0), {"player": lambda prompt, k: "20"}, candidates=1)
    assert record.decisions[0].candidates[0].score.team > 0  # 10
    assert prompt_of(record.decisions[2]).count("player, 0 tries") == 1 and "2 tries" in prompt_of(record.decisions[2])
    env = make("openenv", url=f"{fake}/nim", action="json", sessions=4, reset={})
    (first, *_) = scripted(env, 3, {"player": lambda prompt, k: ['{"count": "1"}', "1"][k]}, candidates=2).decisions
    assert json.loads(prompt_of(first)).keys() == {"heap", "mover", "gains"}
    assert [candidate.score == Score(-1, -1) for candidate in first.candidates] == [False, True]


def test_what_cannot_be_replayed_is_refused_or_played_in_parallel(fake: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=r"is not deterministic.*replays=false and at_grpo\.scheme=par"):
        make("openenv", url=f"{fake}/noisy", sessions=4)
    late = make("openenv", url=f"{fake}/late", sessions=4)
    with pytest.raises(EnvironmentConfigError, match="is not deterministic"):
        scripted(late, late.task("train", 0), {"player": lambda prompt, k: str(k + 1)}, candidates=2)
    env = make("openenv", url=f"{fake}/noisy", sessions=4, replays=False)
    assert env.schemes == {"player": ("parallel",)}
    team = ScriptedTeam(alone("1", "2"), scheme="parallel")
    assert asyncio.run(play(env, env.task("train", 0), team)).outcome.success
    with pytest.raises(EnvironmentConfigError, match=r"replays=false: several replies.*at_grpo\.scheme=parallel"):
        scripted(env, env.task("train", 0), alone("1", "2"), candidates=2)


# ------------------------------------------------------------------ servers


def test_a_server_that_dies_or_hangs_fails_the_episode_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = make("openenv", **FAKE, variables={"FOR": "this test alone"})
    first, task = env._server.process, env.task("train", 0)
    with pytest.raises(EpisodeFailed, match=r"environment\.app='fake:app' has closed the connection before") as died:
        scripted(env, task, alone("666"))
    assert died.value.reason == "openenv" and "\n" not in str(died.value)
    assert first.wait() == 3
    assert scripted(env, task, alone("1")).outcome.success  # on a new one
    assert env._server.process is not first
    step = Session.step

    async def hasty(self: Any, action: Mapping[str, Any]) -> Any:
        self.seconds = 0
        return await step(self, action)

    monkeypatch.setattr(Session, "step", hasty)
    with pytest.raises(EpisodeFailed, match="does not answer to step within 0 s"):
        scripted(env, task, alone("404"))


def test_a_server_of_ours_ends_when_our_process_is_killed() -> None:
    source = (
        f"from verl_atgrpo import make\nprint(make('openenv', **{FAKE!r})._server.process.pid, flush=True)\ninput()"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert user.stdin and user.stdout
    server = os.pidfd_open(int(user.stdout.readline()))
    user.kill()
    user.communicate()
    assert select.select([server], [], [], 300)[0]
    os.close(server)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set either app='module:app' or url="),
        ({"url": "localhost:1"}, "url='localhost:1': set either"),
        ({"url": "http://127.0.0.1:1"}, "does not answer to /schema: URLError"),
        ({"url": "http://127.0.0.1:1", "python": "python3"}, "python='python3': has no effect on a url"),
        ({"app": "fakes:app", "folder": str(GAMES)}, "app='fakes:app' did not start; its process ended .*fakes"),
        ({"app": "fake:app", "python": "/no/python"}, "cannot be started by python=/no/python in .*FileNotFoundError"),
        ({"app": "fake:app", "folder": "/no/folder"}, "cannot be started .* in folder=/no/folder: FileNotFoundError"),
        ({**FAKE, "replays": False, "on_illegal": "again"}, "replays=false: .*set on_illegal: end"),
        ({**FAKE, "action": "guess"}, "action='guess': .* has no such field, but number"),
        ({**FAKE, "observe": "board"}, "observe='board': .* observes no such field, but text, tries"),
        ({**FAKE, "rewards": "gainz"}, "rewards='gainz': .* observes no such field, but text, tries"),
        ({**FAKE, "agents": []}, r"agents=\[\]: name at least one"),
        ({**FAKE, "variables": {"A": None}}, "variables.A=null: give a text, or leave it out"),
        ({**FAKE, "agents": ["a", "b"], "turn": "text"}, "turn='text': the observation says 'Say .*one of a, b"),
        ({**FAKE, "reset": {"most": 0}}, "all its seeds make the same opening.*shared_openings=true"),
        ({**FAKE, "reset": {"seed": 1}}, "every task has its own seed"),
        ({**FAKE, "timeout": 0}, "timeout=0"),
    ],
)
def test_options_are_refused_with_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message) as caught:
        make("openenv", **options)
    assert str(caught.value).startswith("at_grpo.environment.") and "\n" not in str(caught.value)


def test_rewards_have_to_be_numbers_of_agents_not_below_an_illegal_reply_s(fake: str) -> None:
    for options, message in (
        ({"illegal_reward": 0.5}, "illegal_reward=0.5: 'player' earned 0.0"),
        ({"rewards": "text"}, "the rewards 'Not 1.*are none"),
    ):
        env = make("openenv", url=fake, sessions=4, **options)
        with pytest.raises(EnvironmentConfigError, match=message):
            scripted(env, random.Random(0).getrandbits(31), alone("1"))


def tries(agent: str, observation: Mapping[str, Any]) -> str:
    return f"{agent}, {observation['tries']} tries"


def half(agent: str, reply: str) -> dict[str, int]:
    return {"number": int(reply) // 2}
