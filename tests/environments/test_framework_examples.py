"""Teams of other frameworks, with their real packages: the same rows as a native environment; contract; recipes."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.scripted_policy import Numbered
from waiting import HANG

from verl_atgrpo import Environment, Message, Outcome, Score, Team, play
from verl_atgrpo.play.endpoints import server_of
from verl_atgrpo.play.messages import Reply
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.tool_use import use_tools
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import EpisodeRecord, Generation, PlayMode, ReplyLimits, TeamOptions

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
sys.path += [str(FOLDER), str(FOLDER.parent / "router")]
EXTRA = "needs the extra `frameworks`"

pytest.importorskip("openai")
pytestmark = pytest.mark.slow  # the frameworks' imports take seconds


class Seeded(ScriptedPolicy):
    """Replies by a function of the prompt and the seed, as an engine does."""

    def __init__(self, reply: Callable[[str, int], str]) -> None:
        super().__init__(lambda prompt, k: "")
        self.reply = reply

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: ReplyLimits | None = None
    ) -> Generation:
        assert seed is not None
        text = self.reply("".join(map(chr, prompt_ids)), seed)
        return Generation([ord(char) for char in text], [-(seed % 1000) / 997] * len(text), text)


def played(
    env: Environment, index: int, reply: Callable[[str, int], str], scheme: Any = "tree", candidates: int = 4
) -> EpisodeRecord:
    async def main() -> EpisodeRecord:
        policies = {agent: Seeded(reply) for agent in env.agents}
        team = Team(policies, TeamOptions(candidates), PlayMode(scheme), seed=index)
        try:
            return await play(env, env.task("train", index), team)
        finally:
            await server_of("127.0.0.1").close()

    return asyncio.run(asyncio.wait_for(main(), HANG))


def moves(prompt: str, seed: int) -> str:
    return "".join("UDLR"[seed >> shift & 3] for shift in range(0, 2 + seed % 8, 2))


def test_a_langgraph_graph_has_the_rows_of_the_native_environment() -> None:
    pytest.importorskip("langgraph", reason=EXTRA)
    pytest.importorskip("langchain_openai", reason=EXTRA)
    from langgraph_plan_path import PlanPathGraph

    from verl_atgrpo.environments.plan_path import PlanPath

    options: dict[str, Any] = {"size": 4, "max_turns": 4, "max_moves": 8, "tool": "moves", "style": "compact"}
    lengths = set()
    for index in range(6):
        native, graph = (played(made(**options), index, moves) for made in (PlanPath, PlanPathGraph))
        assert graph.decisions == native.decisions
        assert graph.outcome == native.outcome
        lengths.add(len(native.decisions))
    assert len(lengths) > 1, "episodes of different lengths"


def handed_over(prompt: str, seed: int) -> str:
    if "transfer_to" not in prompt.partition("\n")[0]:
        return prompt.partition("\n")[2].partition("\n")[0] if seed % 3 else "7"
    desk = ("red", "green", "blue", "lamp")[seed % 4]  # there is no desk "lamp"
    return (
        f'<tool_call>{{"name": "transfer_to_{desk}", "arguments": {{}}}}</tool_call>' if seed % 7 else "I do not know."
    )


def test_a_hand_off_of_the_agents_sdk_is_a_tool_call_of_the_one_and_a_decision_of_the_other() -> None:
    pytest.importorskip("agents", reason=EXTRA)
    from desks_handoff import HandOff

    env, outcomes = HandOff(), set()
    for index in range(12):
        record = played(env, index, handed_over, "parallel", 1)
        router, *clerk = record.decisions
        called = router.candidates[0].tool_calls
        there = bool(called) and called[0].name != "transfer_to_lamp"
        assert [one.agent for one in record.decisions] == ["router", "clerk"][: 1 + there]
        if clerk:
            prompt = "".join(map(chr, clerk[0].prompt_ids))
            thing = env.task("train", index).thing
            assert prompt.startswith(f"number of {thing}\n") and f"desk of {thing}" in prompt
        outcomes.add((record.outcome.success, record.outcome.metrics["right_desk"], bool(clerk)))
    assert {(True, 1.0, True), (False, 0.0, True)} <= outcomes
    assert any(not clerk for _, _, clerk in outcomes)


def rows(record: EpisodeRecord) -> list[Any]:
    """Everything that a row is made of."""
    return [(one.name, one.prompt_ids, one.committed, one.candidates) for one in record.decisions]


def test_a_hand_off_has_the_rows_of_a_native_environment() -> None:
    pytest.importorskip("agents", reason=EXTRA)
    from desks_handoff import DESKS, HandOff, Visit

    class Native(HandOff):
        """The same two decisions, without the SDK."""

        async def run(self, task: Visit, team: Team) -> Outcome:
            asked = self.router_prompt(task)
            tools = [Tool(f"transfer_to_{desk}", "", {"properties": {}}) for desk in DESKS]
            said = await team.router.act(asked, tools=tools)
            desk = said.tool_calls[0].name.removeprefix("transfer_to_") if said.tool_calls else ""
            if desk not in DESKS:
                return Outcome(False, 0.0, {"right_desk": 0.0})
            assert said.reply is not None
            handed = {"role": "tool", "content": json.dumps({"assistant": desk})}
            told = await team.clerk.act([*self.clerk_prompt_of(task, desk), *asked, said.reply.message, handed])
            right = told.text == str(task.number)
            return Outcome(right, float(right), {"right_desk": float(task.thing in DESKS[desk])})

        def clerk_prompt_of(self, task: Visit, desk: str) -> list[Message]:
            return [{"role": "system", "content": self.clerk_prompt(task, desk)[0]["content"]}]

    for index in range(12):
        foreign, native = (played(env, index, handed_over, "parallel", 1) for env in (HandOff(), Native()))
        assert rows(foreign) == rows(native)
        assert foreign.outcome == native.outcome


@pytest.mark.parametrize(("module", "replies"), [("desks_handoff", "handed_over"), ("typed_tool", "priced")])
def test_demonstrated_prompts_are_the_frameworks(module: str, replies: str) -> None:
    pytest.importorskip("agents" if module == "desks_handoff" else "pydantic_ai", reason=EXTRA)
    pytest.importorskip("transformers")
    pytest.importorskip("verl")
    from verl_atgrpo.lab.tiny_models.demonstrations import demonstrator_of
    from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer
    from verl_atgrpo.train.chat import Chat

    shown = demonstrator_of(f"{module}:SHOWN")
    chat, env, rng = Chat(build_tokenizer(shown.words)), shown.make_environment(), random.Random(0)
    demonstrations = [shown.demonstrate(env, rng, 0.0) for _ in range(200)]
    assert all(len(one.answer) < shown.response_length for one in demonstrations)
    asked: list[tuple[int, ...]] = []

    class Model(Seeded):
        """Encodes as the tiny model does, too."""

        def encode(self, messages: Any, tools: Any = ()) -> list[int]:
            asked.append(tuple(chat.encode(messages, tools)))
            return super().encode(messages, tools[:1])

    async def main() -> None:
        for index in range(20):
            policies = {agent: Model(globals()[replies]) for agent in env.agents}
            team = Team(policies, TeamOptions(1), PlayMode("parallel"), seed=index)
            await play(env, env.task("train", index), team)
        await server_of("127.0.0.1").close()

    asyncio.run(asyncio.wait_for(main(), HANG))

    def forms(prompts: Any) -> set[str]:
        """Prompts without numbers, things and desks."""
        texts = {chat.tokenizer.decode(ids) for ids in prompts if chat.tokenizer.unk_token_id not in ids}
        names = re.compile(rf"\b([0-9]+|none|red|green|blue|{'|'.join(words)})\b")
        return {names.sub("N", text) for text in texts}

    words = [word for word in shown.words if word.isalpha()]
    assert forms(chat.encode(one.prompt, one.tools) for one in demonstrations) <= forms(asked)
    assert max(map(len, asked)) <= 112


def priced(prompt: str, seed: int) -> str:
    if "+" in prompt:
        return str(sum(map(int, re.findall("[0-9]+", prompt))) + (seed % 3 == 0))
    found = re.findall(r"\n([0-9]+)$", prompt)
    if found:
        return found[0]
    thing = re.findall(r"price of ([a-z]+)\?", prompt)[0] if seed % 4 else "moon"
    return f'<tool_call>{{"name": "price_of", "arguments": {{"thing": "{thing}"}}}}</tool_call>'


def test_a_tool_of_pydantic_ai_is_run_by_the_framework() -> None:
    pytest.importorskip("pydantic_ai", reason=EXTRA)
    from typed_tool import Prices

    env, ends = Prices(), Counter[str]()
    for index in range(12):
        record = played(env, index, priced, "tree", 2)
        names = [one.name for one in record.decisions]
        ends["/".join(names)] += 1
        called = record.decisions[0].candidates
        assert [one.reward for one in called] == [1.0 if "moon" not in one.generation.text else 0.2 for one in called]
        if names[-1] == "teller.0":
            asked = "".join(map(chr, record.decisions[-2].prompt_ids))
            assert asked.endswith(f"\n{env.task('train', index).price}"), "the tool's result is in the prompt"
            assert record.outcome.success == any(one.reward for one in record.decisions[-1].candidates)
    assert "worker.0/worker.1/teller.0" in ends


def test_pydantic_ai_has_the_rows_of_a_native_environment() -> None:
    """`use_tools` tells of a tool's error in other words, so where a tool fails the prompts differ from there on."""
    pytest.importorskip("pydantic_ai", reason=EXTRA)
    from typed_tool import Prices, Purchase

    class Native(Prices):
        async def run(self, task: Purchase, team: Team) -> Outcome:
            def price_of(thing: str) -> str:
                """Returns the price of a thing."""
                return str(task.price) if thing == task.thing else "unknown"

            def score(before: Sequence[Message], reply: Reply) -> Score:
                return self.score(task, "worker", before, reply)

            done = await use_tools(team.worker, self.worker_prompt(task), [price_of], score, max_turns=3)
            if done.answer is None:
                return Outcome(False)
            told = await team.teller.act(
                self.teller_prompt(done.answer.text.strip(), task),
                lambda reply: self.score(task, "teller", [], Reply(reply)),
            )
            right = told.text == str(task.price + task.delivery)
            return Outcome(right, float(right))

    equal = 0
    for index in range(12):
        foreign, native = (played(env, index, priced, "tree", 2) for env in (Prices(), Native()))
        committed = foreign.decisions[0].candidates[foreign.decisions[0].committed]
        same = len(foreign.decisions) if "moon" not in committed.generation.text else 1
        assert rows(foreign)[:same] == rows(native)[:same]
        equal += same == len(foreign.decisions) and foreign.outcome == native.outcome
    assert equal > 3


def test_an_agent_of_smolagents_calls_a_tool_and_answers() -> None:
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool  # type: ignore[untyped-decorator]
    def search(query: str) -> str:
        """Searches.

        Args:
            query: words
        """
        return f"{query}: 7"

    def replies(prompt: str, seed: int) -> str:
        name, value = ("final_answer", "answer"), "7"
        if "x: 7" not in prompt:
            name, value = ("search", "query"), "x"
        return f'<tool_call>{{"name": "{name[0]}", "arguments": {{"{name[1]}": "{value}"}}}}</tool_call>'

    class Asked(Numbered):
        agents = ("solo",)

        async def run(self, task: int, team: Team) -> Outcome:
            async with team.serve() as urls:
                url = urls["solo"]
                options = {"api_base": url.base_url, "api_key": url.api_key, "tool_choice": "auto"}
                model = smolagents.OpenAIServerModel(url.model, **options)
                agent = smolagents.ToolCallingAgent(tools=[search], model=model, max_steps=3, verbosity_level=0)
                answer = await asyncio.to_thread(agent.run, "How many?")
            return Outcome(answer == "7", float(answer == "7"))

    record = played(Asked(), 3, replies, "parallel", 1)
    assert record.outcome.success and [one.name for one in record.decisions] == ["solo.0", "solo.1"]


@pytest.mark.parametrize(
    ("recipe", "package"),
    [("langgraph_cpu", "langgraph"), ("handoff_cpu", "agents"), ("typed_tool_cpu", "pydantic_ai")],
)
def test_the_recipes_would_start(recipe: str, package: str) -> None:
    pytest.importorskip("verl")
    pytest.importorskip(package, reason=EXTRA)
    from verl_atgrpo.recipes import compose
    from verl_atgrpo.train.config.run_check import check_run

    check_run(compose(recipe, folder=FOLDER))
