"""No reply ends a training: every environment scores whatever a model writes, and soon."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.coding_problems import test_block as tester_reply
from fakes.coding_problems import write
from fakes.hostile_replies import LITERALS, REPLIES, UNITS, replies
from growth import MOST, ratio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_atgrpo import Environment, Message, Team, make, play
from verl_atgrpo.play.messages import Reply, ToolCall
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import Generation, TeamOptions

TOKENS = 2048
TESTS = (
    *(tester_reply(literal, "1") for literal in LITERALS),
    *(tester_reply("1", literal) for literal in LITERALS),
)


def _files(folder: Path, row: dict[str, str]) -> dict[str, Any]:
    rows = {split: {**row, "question": f"{row['question']} {split}"} for split in ("train", "val")}
    return {split: {"path": write(folder, [mine], f"{split}.jsonl")} for split, mine in rows.items()}


def _math(name: str, folder: Path, **options: Any) -> Environment:
    return make(name, **_files(folder, {"question": "What is 3 times 17?", "answer": "51"}), **options)


def _code(name: str, folder: Path, entry_point: str | None, **options: Any) -> Environment:
    tests = (
        {"inputs": ["1\n"], "outputs": ["2\n"]}
        if entry_point is None
        else {"fn_name": "f", "inputs": [[1]], "outputs": [2]}
    )
    row = {
        "question": "Double a number.",
        "input_output": json.dumps(tests),
        "starter_code": "def f(a):",
        "solutions": json.dumps(["pass"]),
    }
    sections = {split: {**section, "format": "apps"} for split, section in _files(folder, row).items()}
    return make(name, **sections, **options)


def _needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


# Single agents of these families parse and score as their team does.
ENVIRONMENTS: dict[str, tuple[Callable[[Path], Environment], tuple[Any, ...]]] = {}
for _name, _tool in (("plan_path", "moves"), ("sokoban", "moves"), ("sudoku", "grid")):
    _compact = [] if _name == "sokoban" else [{"style": "compact", "tool": _tool}]
    for _options in ({"tool": _tool}, *_compact, {"tool": "python"}):
        ENVIRONMENTS[f"{_name} {' '.join(_options.values())}"] = (
            lambda folder, name=_name, options=_options: make(name, max_turns=1, **options),
            (),
        )
for _name, _turns in (
    ("math", {"max_turns": 1}),
    ("math_ensemble", {}),
    ("math_debate", {"rounds": 1}),
    ("math_refined", {}),
    ("math_judged", {}),
):
    ENVIRONMENTS[_name] = (
        lambda folder, name=_name, turns=_turns: _math(name, folder, **turns),
        (_needs("math_verify"),),
    )
for _name in ("walk", "walk_single", "walk_walls", "walk_walls_single", "number_search", "number_search_single"):
    ENVIRONMENTS[_name] = (lambda folder, name=_name: make(name), ())
for _name in ("search", "search_routed", "search_single"):
    ENVIRONMENTS[_name] = (lambda folder, name=_name: make(name, max_turns=2), (_needs("bm25s"),))
for _entry in (None, "f"):
    ENVIRONMENTS[f"code {'program' if _entry is None else 'function'}"] = (
        lambda folder, entry=_entry: _code("code", folder, entry, max_turns=1),
        (pytest.mark.slow,),
    )
for _game, _players in (
    ("ConnectFour-v0", 2),
    ("TicTacToe-v0", 2),
    ("Nim-v0", 2),
    ("GuessTheNumber-v0", 1),
    ("FrozenLake-v0-random", 1),
):
    ENVIRONMENTS[f"textarena {_game}"] = (
        lambda folder, game=_game, players=_players: make(
            "textarena", game=game, players=players, max_steps=4, shared_openings=players == 2
        ),
        (_needs("textarena"), *[pytest.mark.slow] * (_game == "ConnectFour-v0")),
    )
for _data in ("basic_arithmetic", "knights_knaves", "simple_equations", "spell_backward"):
    ENVIRONMENTS[f"reasoning_gym {_data}"] = (
        lambda folder, data=_data: make("reasoning_gym", dataset=data, max_turns=1),
        (_needs("reasoning_gym"), *[pytest.mark.slow] * (_data == "spell_backward")),
    )


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks) for name, (_, marks) in ENVIRONMENTS.items()])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    made = ENVIRONMENTS[request.param][0](tmp_path_factory.mktemp("data"))
    cpu_of(made, "warm up")  # the sandbox, math-verify and compiled patterns
    yield made


class Parrot:
    """A policy that always gives the same reply, whatever its length at once.

    Given tools it calls each with the reply as all arguments and as the first of them, and answers the next time.
    """

    def __init__(self, reply: str) -> None:
        self.generation = Generation([0], [0.0], reply)
        self.parsed = 0

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        return [0]

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        self.parsed += 1
        text = generation.text
        calls = [ToolCall(tool.name, text) for tool in tools]
        calls += [ToolCall(tool.name, json.dumps({next(iter(tool.parameters["properties"])): text})) for tool in tools]
        return Reply(text, calls=tuple(calls if self.parsed % 2 else ()), raw=text)

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None, *limits: Any) -> Generation:
        return self.generation


@functools.cache
def task_of(env: Environment) -> Any:
    return env.task("train", 0)


def cpu_of(env: Environment, reply: str) -> float:
    """Plays an episode in which every reply is this one; returns this process's CPU time per decision."""
    team = Team(dict.fromkeys(env.agents, Parrot(reply)), TeamOptions())
    task = task_of(env)

    async def timed() -> float:
        began = time.process_time()
        record = await play(env, task, team)
        return (time.process_time() - began) / len(record.decisions)

    return asyncio.run(timed())


def test_no_reply_raises_or_takes_long(environment: Environment) -> None:
    """A decision, prompt and score, takes time in proportion to the reply: it blocks all other episodes."""
    slow = {}
    for half, reply in zip(replies(2), REPLIES, strict=True):
        small, large = functools.partial(cpu_of, environment, half), functools.partial(cpu_of, environment, reply)
        if (found := ratio(small, large)) > MOST:
            slow[f"{reply[:40]!r} of {len(reply)}"] = round(found, 1)
    assert slow == {}
    for reply in TESTS if "tester" in environment.agents else ():
        cpu_of(environment, reply)


_TEXT = st.one_of(
    st.text(st.characters(), max_size=60),
    st.lists(st.sampled_from([*UNITS, *LITERALS]), max_size=12).map("".join),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ).map(repr),
)


@functools.cache
def _games() -> list[Environment]:
    """The environments without files and sandbox, which take thousands of replies a second."""
    names = [name for name in ENVIRONMENTS if "python" not in name and not name.startswith(("math", "code"))]
    return [
        ENVIRONMENTS[name][0](Path()) for name in names if not any(m.args and m.args[0] for m in ENVIRONMENTS[name][1])
    ]


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(_TEXT, st.sampled_from(["", "Moves: ", "Grid:\n", "Final answer: ", "\\boxed{", "<answer>", "```\n"]))
def test_no_text_raises(text: str, mark: str) -> None:
    for environment in _games():
        cpu_of(environment, mark + text or " ")
