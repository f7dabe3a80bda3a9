"""Tools: schemas of functions, calls and their observations, the loop, and what scores and episodes see of them."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any

import pytest
from fakes.scripted_policy import Numbered, Play, bounded, run
from pydantic import Field
from waiting import HANG

from verl_atgrpo import EpisodeFailed, Message, Outcome, Score, ScriptedTeam, Team, check_environment, play
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.messages import Reply, ToolCall
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.tool_use import observe, use_tools
from verl_atgrpo.play.tools import Tool, ToolError, mcp_tools, tools_of
from verl_atgrpo.play.types import EpisodeRecord, PlayMode, TeamOptions
from verl_atgrpo.train.config.schema import BranchSettings

Search = Annotated[str, Field(description="words to look for")]


def search(query: Search, most: int = 3) -> list[str]:
    """Searches the corpus."""
    return [f"{query} {number}" for number in range(most)]


async def price(thing: str) -> float:
    """Returns what a thing costs."""
    if thing == "moon":
        raise LookupError("nobody sells the moon")
    return 2.5


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def run_call(name: str, arguments: str, **limits: Any) -> tuple[str, bool]:
    seen = bounded(observe(tools_of([search, price]), ToolCall(name, arguments), **limits))
    return seen.text, seen.failed


# ------------------------------------------------------------------ tools


def test_the_schema_of_a_function_by_hand() -> None:
    assert Tool.of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the corpus.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for"},
                    "most": {"type": "integer", "default": 3},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }
    assert Tool.of(Tool.of(search).schema).schema == Tool.of(search).schema


def test_an_argument_may_be_called_title() -> None:
    def book(title: str) -> str:
        return title

    assert Tool.of(book).parameters["properties"] == {"title": {"type": "string"}}


def untyped(query):  # type: ignore[no-untyped-def]
    return query


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (untyped, "arguments without types: query"),
        ({"name": "search"}, "is no tool"),
        ({"type": "function", "function": {}}, "is no tool"),
        (3, "is no tool"),
        (str, "is no tool"),
    ],
)
def test_what_is_no_tool_is_refused(source: Any, told: str) -> None:
    with pytest.raises(ToolError, match=told):
        Tool.of(source)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolError, match="two tools have the name 'search'"):
        tools_of([search, Tool.of(search).schema])


@pytest.mark.parametrize(
    ("name", "arguments", "text", "failed"),
    [
        ("search", '{"query": "lamp", "most": 2}', '["lamp 0", "lamp 1"]', False),
        ("search", '{"query": "lamp", "most": "1"}', '["lamp 0"]', False),
        ("price", '{"thing": "lamp"}', "2.5", False),
        ("price", '{"thing": "moon"}', "Error: LookupError: nobody sells the moon", True),
        ("search", "{}", "Error: query: Missing required argument", True),
        ("search", '{"query": 3}', "Error: query: Input should be a valid string", True),
        ("search", '{"query": "a", "where": 1}', "Error: where: Unexpected keyword argument", True),
        ("search", "lamp", "Error: arguments: Invalid JSON: expected value at line 1 column 1", True),
        ("find", "{}", "Error: there is no tool 'find'; the tools are search, price", True),
    ],
)
def test_a_call_and_what_it_comes_to(name: str, arguments: str, text: str, failed: bool) -> None:
    assert run_call(name, arguments) == (text, failed)


@dataclass
class Hit:
    title: str
    stock: int


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ([Hit("lamp", 7)], '[{"title": "lamp", "stock": 7}]'),
        ({(0, 1): "wall"}, '{"0,1": "wall"}'),
        ({"at": date(2026, 11, 30)}, '{"at": "2026-11-30"}'),
        ({"of": Tool}, '{"of": "<class \'verl_atgrpo.play.tools.Tool\'>"}'),
    ],
)
def test_typed_results_are_json(result: Any, told: str) -> None:
    def give() -> Any:
        return result

    assert bounded(observe(tools_of([give]), ToolCall("give", "{}"))).text == told


def test_a_partial_function_has_the_functions_name_and_docstring() -> None:
    def move(board: str, way: str) -> str:
        """Moves the box."""
        return f"{board} {way}"

    tool = Tool.of(functools.partial(functools.partial(move), "A board:"))
    assert (tool.name, tool.description) == ("move", "Moves the box.")
    assert bounded(observe((tool,), ToolCall("move", '{"way": "up"}'))).text == "A board: up"


def first(word: str) -> str:
    return next(one for one in ("lamp", "moon") if one == word)


def checked(number: str) -> str:
    return str(int(number)) if number.isdigit() else sys.exit(f"{number} is no number")


async def awaited(number: str) -> str:
    return checked(number)


def interrupted() -> None:
    raise KeyboardInterrupt


async def cancelled() -> None:
    raise asyncio.CancelledError


async def closed() -> None:
    raise GeneratorExit


def closed_in_thread() -> None:
    raise GeneratorExit


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        (first, '{"word": "sun"}', "StopIteration: "),
        (checked, '{"number": "x"}', "SystemExit: x is no number"),
        (awaited, '{"number": "x"}', "SystemExit: x is no number"),
        (interrupted, "", "KeyboardInterrupt: "),
        (cancelled, "", "CancelledError: "),
        (closed, "", "GeneratorExit: "),
        (closed_in_thread, "", "GeneratorExit: "),
    ],
)
def test_what_asyncio_does_not_carry_is_an_observation(tool: Any, arguments: str, told: str) -> None:
    """A future takes no StopIteration, and SystemExit ends the loop of all episodes."""
    call = ToolCall(tool.__name__, arguments)
    seen = bounded(observe(tools_of([tool]), call, timeout=None))
    assert (seen.text, seen.failed) == (f"Error: the tool raised {told}", True)


def test_long_results_are_cut_and_slow_tools_end() -> None:
    text, failed = run_call("search", '{"query": "lamp", "most": 9}', most=10)
    assert text == '["lamp 0", ... (80 characters left out)' and not failed

    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    seen = bounded(observe(tools_of([never]), ToolCall("never", "{}"), timeout=0.01))
    assert seen.text == "Error: it took too long" and seen.failed


@pytest.mark.parametrize(
    ("name", "limit"),
    [("max_turns", 0), ("max_turns", -1), ("max_tokens", 0), ("timeout", 0.0), ("timeout", -2), ("max_characters", 0)],
)
def test_limits_of_tools_are_above_0(name: str, limit: float) -> None:
    team = ScriptedTeam({"worker": lambda prompt, k: "x"})
    with pytest.raises(ValueError, match=f"use_tools: {name}={limit!r} is not above 0"):
        bounded(use_tools(team.worker, "?", [], **{name: limit}))
    assert not team.decisions


def test_the_tools_of_an_mcp_server() -> None:
    mcp = pytest.importorskip("mcp")
    if not hasattr(mcp, "Client"):
        pytest.skip("needs mcp 2")
    from mcp.server import MCPServer

    server = MCPServer("shop")

    @server.tool()
    def stock(thing: str) -> str:
        """How many there are."""
        if thing == "moon":
            raise ValueError("none for sale")
        return f"7 of {thing}"

    async def asked() -> list[Any]:
        async with mcp.Client(server) as client:
            tools = await mcp_tools(client)
            calls = [ToolCall("stock", json.dumps({"thing": thing})) for thing in ("lamp", "moon")]
            team = ScriptedTeam(
                {"clerk": lambda prompt, k: "seven" if "7 of lamp" in prompt else called("stock", thing="lamp")}
            )
            done = await use_tools(team.clerk, "How many lamps?", tools)
            assert done.answer is not None
            found = [await observe(tools, call) for call in (*calls, ToolCall("stock", "[1]"))]
            return [tools[0], *found, (done.answer.text, done.calls, done.failed)]

    tool, lamp, moon, bad, used = asyncio.run(asked())
    assert used == ("seven", 1, 0)
    assert tool.schema["function"]["name"] == "stock"
    assert tool.description == "How many there are."
    assert tool.parameters["properties"] == {"thing": {"type": "string"}}
    assert (lamp.text, lamp.failed) == ("7 of lamp", False)
    assert moon.failed and "stock" in moon.text
    assert bad.failed and "no JSON object" in bad.text


# ------------------------------------------------------------------ decisions


def test_scores_get_the_parsed_reply_and_the_episode_the_committed_one() -> None:
    seen: list[Reply] = []

    def score(reply: Reply) -> Score:
        seen.append(reply)
        return Score(local=float(len(reply.calls)))

    says = ["The answer is 3.", f"Looking.{called('search', query='x')}", "<tool_call>{search}</tool_call>"]
    team = ScriptedTeam({"worker": lambda prompt, k: says[k]}, candidates=3)
    chosen = bounded(team.worker.act("Find x.", score, tools=[search]))
    assert [(one.text, len(one.calls), one.unparsed, one.raw) for one in seen] == [
        ("The answer is 3.", 0, 0, says[0]),
        ("Looking.", 1, 0, says[1]),
        ("", 0, 1, says[2]),
    ]
    assert chosen.text == "Looking." and chosen.tool_calls[0].name == "search"
    assert chosen.generation.text == says[1]
    assert team.counts == {"tool_calls_parsed": 1, "tool_calls_unparsed": 1}
    prompt = "".join(map(chr, team.decisions[0].prompt_ids))
    assert prompt == "tools: search\nFind x."


def test_without_tools_replies_are_texts() -> None:
    team = ScriptedTeam({"worker": lambda prompt, k: called("search", query="x")})
    said: list[Any] = []
    chosen = bounded(team.worker.act("?", lambda reply: said.append(reply) or Score()))
    assert said == [called("search", query="x")] == [chosen.text]
    assert chosen.reply is None and chosen.tool_calls == () and chosen.reasoning == ""


def test_score_all_gets_parsed_replies() -> None:
    says = [called("search", query="x"), "3"]
    team = ScriptedTeam({"worker": lambda prompt, k: says[k]}, candidates=2)
    chosen = bounded(
        team.worker.act(
            "?", score_all=lambda replies: [Score(local=-len(one.calls)) for one in replies], tools=[search]
        )
    )
    assert chosen.text == "3"


# ------------------------------------------------------------------ the loop


def test_a_conversation_with_tools_message_by_message() -> None:
    says = [f"I look.{called('search', query='lamp', most=1)}{called('price', thing='moon')}", "It costs 2.5."]
    seen: list[tuple[int, bool]] = []

    def score(before: Sequence[Message], reply: Reply) -> Score:
        seen.append((len(before), bool(reply.calls)))
        return Score(local=1.0)

    team = ScriptedTeam({"worker": lambda prompt, k: says["Error" in prompt]}, candidates=2)
    done = bounded(use_tools(team.worker, "What is a lamp?", [search, price], score))
    assert done.answer is not None and done.answer.text == "It costs 2.5."
    assert (done.calls, done.failed) == (2, 1)
    first, second = done.messages[1]["tool_calls"]
    assert done.messages == [
        {"role": "user", "content": "What is a lamp?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [first, second]},
        {"role": "tool", "tool_call_id": first["id"], "name": "search", "content": '["lamp 0"]'},
        {
            "role": "tool",
            "tool_call_id": second["id"],
            "name": "price",
            "content": "Error: LookupError: nobody sells the moon",
        },
        {"role": "assistant", "content": "It costs 2.5."},
    ]
    assert first["function"] == {"name": "search", "arguments": '{"query": "lamp", "most": 1}'}
    assert first["id"] != second["id"] and all(len(one["id"]) == 9 and one["id"].isalnum() for one in (first, second))
    assert seen == [(1, True), (1, True), (4, False), (4, False)]
    assert [(one.agent, one.turn, len(one.candidates)) for one in team.decisions] == [
        ("worker", 0, 2),
        ("worker", 1, 2),
    ]


def test_calls_of_a_reply_run_at_the_same_time() -> None:
    """Each of two tools waits until the other has begun: one after the other would never end."""
    barrier = threading.Barrier(2)

    def meet(who: str) -> str:
        barrier.wait(HANG)
        return who

    says = [called("meet", who="a") + called("meet", who="b"), "done"]
    team = ScriptedTeam({"worker": lambda prompt, k: says["\na\nb" in prompt]})
    done = bounded(use_tools(team.worker, "?", [meet]))
    assert [one["content"] for one in done.messages if one["role"] == "tool"] == ["a", "b"]


def test_coroutine_functions_run_in_the_order_of_the_calls() -> None:
    """The first waits until the second would have begun: numbers of decisions must not depend on that."""
    began: list[str] = []

    async def note(who: str) -> str:
        began.append(who)
        for _ in range(5):
            await asyncio.sleep(0)
        began.append(f"{who} ends")
        return who

    says = [called("note", who="a") + called("note", who="b"), "done"]
    team = ScriptedTeam({"worker": lambda prompt, k: says["\na\nb" in prompt]})
    bounded(use_tools(team.worker, "?", [note]))
    assert began == ["a", "a ends", "b", "b ends"]


def test_a_decorated_coroutine_function_is_awaited() -> None:
    async def find(what: str) -> str:
        await asyncio.sleep(0)
        return f"{what} found"

    @functools.wraps(find)
    def logged(what: str) -> Any:
        return find(what)

    observation = bounded(observe(tools_of([logged]), ToolCall("find", '{"what": "x"}')))
    assert (observation.text, observation.failed) == ("x found", False)


def test_decorated_coroutine_functions_run_in_order() -> None:
    """They may make decisions, which are numbered as they begin."""

    async def find(what: str) -> str:
        return what

    @functools.wraps(find)
    def logged(what: str) -> Any:
        return find(what)

    assert [tool.in_order for one in (find, logged) for tool in tools_of([one])] == [True, True]


def test_tools_that_hang_do_not_keep_others_from_running() -> None:
    """More than a pool of threads has, and than asyncio's own, which parsers and frameworks use."""
    stop = threading.Event()

    def hang() -> str:
        stop.wait(HANG)
        return ""

    def free() -> str:
        return "free"

    async def main() -> str:
        calls = [observe(tools_of([hang]), ToolCall("hang", "{}"), timeout=0.01) for _ in range(100)]
        assert {one.text for one in await asyncio.gather(*calls)} == {"Error: it took too long"}
        assert (await observe(tools_of([free]), ToolCall("free", "{}"), timeout=HANG)).text == "free"
        return await asyncio.to_thread(free)

    try:
        assert bounded(main()) == "free"
    finally:
        stop.set()


def test_a_defect_inside_a_tool_ends_the_run() -> None:
    def score(reply: str) -> Score:
        raise KeyError("goal")

    async def workflow(team: Team) -> Outcome:
        async def ask(task: str) -> str:
            """Asks the worker."""
            return (await team.right.act(task, score)).text

        await use_tools(team.left, "plan", [ask], max_turns=1)
        return Outcome(True)

    team = ScriptedTeam({"left": lambda prompt, k: called("ask", task="x"), "right": lambda prompt, k: "y"})
    with pytest.raises(KeyError, match="goal"):
        run(workflow, team)


def test_a_call_that_cannot_be_parsed_is_told_and_counted() -> None:
    says = ["<tool_call>{search", "3"]
    team = ScriptedTeam({"worker": lambda prompt, k: says["could not be parsed" in prompt]})
    done = bounded(use_tools(team.worker, "?", [search]))
    assert done.answer is not None and (done.calls, done.failed) == (1, 1)
    assert [one["role"] for one in done.messages] == ["user", "assistant", "user", "assistant"]
    assert done.messages[1]["content"] == "<tool_call>{search"


def test_a_call_that_cannot_be_parsed_beside_a_good_one_is_told() -> None:
    says = [called("search", query="lamp") + "<tool_call>{search", "3"]
    team = ScriptedTeam({"worker": lambda prompt, k: says["another tool call could not be parsed" in prompt]})
    done = bounded(use_tools(team.worker, "?", [search]))
    assert done.answer is not None and (done.calls, done.failed) == (2, 1)
    assert [one["role"] for one in done.messages] == ["user", "assistant", "tool", "user", "assistant"]


@pytest.mark.parametrize(("limits", "turns"), [({"max_turns": 3}, 3), ({"max_tokens": 100}, 2)])
def test_an_agent_that_never_answers_ends(limits: dict[str, int], turns: int) -> None:
    says = called("search", query="lamp")
    assert 50 < len(says) < 100
    team = ScriptedTeam({"worker": lambda prompt, k: says})
    done = bounded(use_tools(team.worker, "?", [search], **limits))
    assert done.answer is None and len(team.decisions) == done.calls == turns


def test_an_agent_as_a_tool_of_another_one() -> None:
    """A planner calls a worker with a context of its own; both are decisions, and a worker's failure the episode's."""

    async def workflow(team: Team) -> Outcome:
        async def ask_worker(task: str) -> str:
            """Asks the worker."""
            return (await team.right.act(f"work on {task}")).text

        done = await use_tools(team.left, "plan", [ask_worker])
        return Outcome(done.answer is not None and done.answer.text == "so it is 7")

    def left(prompt: str, k: int) -> str:
        return "so it is 7" if "seven" in prompt else called("ask_worker", task="sums")

    team = ScriptedTeam({"left": left, "right": lambda prompt, k: "seven"})
    record = run(workflow, team)
    assert record.outcome.success
    assert [one.name for one in record.decisions] == ["left.0", "right.0", "left.1"]
    assert "".join(map(chr, record.decisions[1].prompt_ids)) == "work on sums"
    silent = ScriptedTeam({"left": left, "right": lambda prompt, k: ""})
    with pytest.raises(EpisodeFailed, match="no tokens"):
        run(workflow, silent)


def test_episodes_with_tools_are_branched() -> None:
    """Calls have the same ids when the episode is played again, so prompts are the recorded ones."""

    async def workflow(team: Team) -> Outcome:
        done = await use_tools(team.worker, "?", [search])
        return Outcome(True, float(len(done.messages)))

    def script(prompt: str, k: int) -> str:
        return "3" if "lamp" in prompt else called("search", query="lamp", most=1)

    def make(mode: PlayMode) -> Team:
        return Team({"worker": ScriptedPolicy(script)}, TeamOptions(candidates=2), mode)

    at = BranchSettings(at={"worker": 1})

    async def branched() -> EpisodeRecord:
        return await play_branched(Play(workflow), 0, make, at, 0)

    (group,) = [one for one in bounded(branched()).decisions if one.trained]
    assert [(one.text, one.reward) for one in group.candidates] == [("3", 4.0)] * 2


def test_replays_differ_where_a_tool_does() -> None:
    count = iter(range(100))

    async def workflow(team: Team) -> Outcome:
        def clock() -> str:
            return f"{next(count)} o'clock"

        await use_tools(team.worker, "?", [clock])
        return Outcome(True)

    def make(mode: PlayMode) -> Team:
        says = lambda prompt, k: "late" if "o'clock" in prompt else called("clock")  # noqa: E731
        return Team({"worker": ScriptedPolicy(says)}, TeamOptions(candidates=2), mode)

    with pytest.raises(EpisodeFailed, match="another prompt"):
        bounded(play_branched(Play(workflow), 0, make, BranchSettings(at={"worker": 1}), 0))


def test_evaluation_samples_one_reply_a_turn() -> None:
    says = [called("search", query="lamp"), "3"]
    team = ScriptedTeam({"left": lambda prompt, k: says["lamp" in prompt]}, scheme="evaluate", candidates=4)

    async def workflow(team: Team) -> Outcome:
        return Outcome((await use_tools(team.left, "?", [search])).answer is not None)

    record = bounded(play(Play(workflow), 0, team))
    assert record.outcome.success and [len(one.candidates) for one in record.decisions] == [1, 1]


class Shop(Numbered):
    """A worker looks up a number and says it; a call of the right tool is worth something."""

    agents = ("worker",)

    def task(self, split: str, index: int) -> int:
        return 2 * index + (split == "val")

    async def run(self, task: int, team: Team) -> Outcome:
        def price(thing: str) -> int:
            """Returns a price."""
            return 7 * len(thing)

        def score(before: Sequence[Message], reply: Reply) -> Score:
            called = any(call.name == "price" for call in reply.calls) and len(before) == 1
            right = reply.text.strip() == str(7 * (task + 1))
            return Score(team=float(right), local=0.1 * (called or right))

        asked = f"What is the price of {'x' * (task + 1)}?"
        done = await use_tools(team.worker, asked, [price], score, max_turns=2)
        right = done.answer is not None and done.answer.text.strip() == str(7 * (task + 1))
        return Outcome(right, float(right))


def test_an_environment_with_tools_keeps_the_contract() -> None:
    def gold(task: int) -> dict[str, Any]:
        call = called("price", thing="x" * (task + 1))
        return {"worker": lambda prompt, k: str(7 * (task + 1)) if prompt.count("\n") > 1 else call}

    check_environment(Shop, gold=gold, tasks=4)


# ------------------------------------------------------------------ limits and dialogues


def test_limits_end_replies_early_also_at_branch_points() -> None:
    team = ScriptedTeam({"left": lambda prompt, k: "one. two. three"}, candidates=2)
    chosen = bounded(team.left.act("?", max_tokens=6))
    assert chosen.text == "one. t" and chosen.generation.truncated
    chosen = bounded(team.left.act("?", stop=[". ", "!"]))
    assert chosen.text == "one" and not chosen.generation.truncated
    again = bounded(team.sample_candidate(team.decisions[1], 5))
    assert again.text == "one", "a branch point's fresh candidates have its limits"
    with pytest.raises(ValueError, match="max_tokens=0 is less than 1"):
        bounded(team.left.act("?", max_tokens=0))


def test_a_prompt_that_does_not_continue_the_tokens_so_far_is_counted() -> None:
    """The script's second prompt has the first's tokens and its reply without the thought, as templates have them."""
    team = ScriptedTeam({"left": lambda prompt, k: "\nhello"})

    async def dialogue(said: str) -> None:
        messages: list[Message] = [{"role": "user", "content": "hi"}]
        await team.left.act(messages)
        await team.left.act([*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}])
        await team.left.act("hi, again")  # no history

    bounded(dialogue("hello"))
    assert team.counts == {"dialogue_turns": 1, "dialogue_turns_broken": 0}
    bounded(dialogue("hell"))
    assert team.counts == {"dialogue_turns": 2, "dialogue_turns_broken": 1}
