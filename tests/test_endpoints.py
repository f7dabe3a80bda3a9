"""The agents' endpoints, by the real OpenAI client: what a completion is, and what wrong requests come to."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from fakes.scripted_policy import Play
from waiting import HANG

openai = pytest.importorskip("openai")

import aiohttp
from aiohttp import web

from verl_atgrpo import EpisodeFailed, Message, Outcome, Score, ScriptedTeam, Team, play
from verl_atgrpo.play import endpoints
from verl_atgrpo.play.endpoints import MOST_BYTES, Endpoint, drain_refused, server_of
from verl_atgrpo.play.messages import MessageError, Reply
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.thoughts import split_thought
from verl_atgrpo.play.tools import Tool, tools_of
from verl_atgrpo.play.types import EVALUATE, Generation, TeamOptions

T = TypeVar("T")
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "hi"}]


def served(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main`, and closes the loop's server."""

    async def whole() -> T:
        try:
            return await main
        finally:
            await server_of("127.0.0.1").close()

    return asyncio.run(asyncio.wait_for(whole(), HANG))


@asynccontextmanager
async def client(endpoint: Endpoint) -> AsyncIterator[Any]:
    async with endpoint.client() as made:  # tries twice again where it may
        yield made.chat.completions


async def post(endpoint: Endpoint, body: Any, key: str | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key if key is None else key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{endpoint.base_url}/chat/completions", data=data, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


def team_of(script: Callable[[str, int], str], **options: Any) -> ScriptedTeam:
    return ScriptedTeam({"planner": script, "worker": lambda prompt, k: "worker"}, **options)


# ------------------------------------------------------------------ completions


def test_a_completion_is_a_decision() -> None:
    """Three candidates, scored by the environment's method; the best one is the answer."""
    seen: list[tuple[str, int, str]] = []

    def score(agent: str, messages: Sequence[Message], reply: Reply) -> Score:
        seen.append((agent, len(messages), reply.text))
        return Score(local=float(reply.text))

    team = team_of(lambda prompt, k: str(k % 2), candidates=3)

    async def main() -> Any:
        async with team.serve(score) as urls, client(urls["planner"]) as planner:
            return await planner.create(model="whatever", messages=ASK)

    answer = served(main())
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "1", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.model) == (2, 1, "whatever")
    assert seen == [("planner", 1, text) for text in ("0", "1", "0")]
    (decision,) = team.decisions
    assert [candidate.reward for candidate in decision.candidates] == [0, 1, 0] and decision.committed == 1
    assert answer.id.endswith(f":{decision.name}")


def test_rows_are_those_of_a_native_environment() -> None:
    """The same episode by `act`: token ids, log-probs, rewards, seeds and names are equal."""

    class Seeded(ScriptedPolicy):
        async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: Any = None) -> Any:
            text = f"{decision_id}/{seed}"
            return Generation([ord(char) for char in text], [-(seed or 0) / 7] * len(text), text)

    def score(agent: str, messages: Sequence[Message], reply: Reply) -> Score:
        return Score(team=float(len(messages)), local=float(int(reply.text.rpartition("/")[2]) % 5))

    def made() -> Team:
        policy = Seeded(lambda prompt, k: "")
        return Team(dict.fromkeys(("planner", "worker"), policy), TeamOptions(3), seed=11)

    async def native(team: Team) -> Outcome:
        first = await team.planner.act(ASK, lambda reply: score("planner", ASK, Reply(reply)))
        told = [*ASK, {"role": "assistant", "content": first.text}, {"role": "user", "content": "more"}]
        await team.worker.act(told, lambda reply: score("worker", told, reply), tools=[SEARCH])
        return Outcome(True)

    async def foreign(team: Team) -> Outcome:
        async with team.serve(score) as urls, client(urls["planner"]) as planner, client(urls["worker"]) as worker:
            first = (await planner.create(model="m", messages=ASK)).choices[0].message
            told: list[Any] = [*ASK, {"role": "assistant", "content": first.content}]
            told.append({"role": "user", "content": "more"})
            await worker.create(model="m", messages=told, tools=[SEARCH])
        return Outcome(True)

    records = [served(play(Play(workflow), 0, made())) for workflow in (native, foreign)]
    first, second = ([(one.name, one.prompt_ids, one.candidates) for one in record.decisions] for record in records)
    assert first == second
    assert len(first[1][2]) == 3


def test_tool_calls_in_openais_form_and_back() -> None:
    team = team_of(lambda prompt, k: "done" if "found" in prompt else f"I look.{CALL}")

    async def main() -> Any:
        async with team.serve() as urls, client(urls["planner"]) as planner:
            first = await planner.create(model="m", messages=ASK, tools=[SEARCH])
            message = first.choices[0].message
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "found"}
            history = [*ASK, message.model_dump(exclude_none=True), result]
            second = await planner.create(model="m", messages=history, tools=[SEARCH])
            none = await planner.create(model="m", messages=ASK, tools=[SEARCH], tool_choice="none")
            return first.choices[0], second.choices[0], none.choices[0]

    called, answered, none = served(main())
    assert called.finish_reason == "tool_calls" and called.message.content == "I look."
    assert called.message.tool_calls[0].function.name == "search"
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"query": "x"}
    assert (answered.finish_reason, answered.message.content, answered.message.tool_calls) == ("stop", "done", None)
    assert none.message.content == f"I look.{CALL}", "no tools are shown, so nothing is read as a call"


def test_thoughts_are_apart() -> None:
    team = team_of(lambda prompt, k: "<think>so</think>\nYes.")

    async def main() -> Any:
        async with team.serve() as urls, client(urls["planner"]) as planner:
            return (await planner.create(model="m", messages=ASK)).choices[0].message

    message = served(main())
    assert (message.content, message.reasoning_content) == ("Yes.", "so")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_no_agent_is_shown_what_another_has_thought(name: str) -> None:
    """A framework hands a history on as it came; what an agent has thought itself it may read again."""
    scored: list[tuple[str, Sequence[Message], str]] = []

    def score(agent: str, messages: Sequence[Message], reply: Reply) -> Score:
        scored.append((agent, messages, reply.text))
        return Score()

    team = team_of(lambda prompt, k: "<think>so</think>\nYes.")

    async def main() -> None:
        async with team.serve(score) as urls, client(urls["planner"]) as planner, client(urls["worker"]) as worker:
            message = (await planner.create(model="m", messages=ASK)).choices[0].message
            told: list[Any] = [*ASK, {"role": "assistant", "content": "Yes.", name: message.reasoning_content}, *ASK]
            await worker.create(model="m", messages=told)
            await planner.create(model="m", messages=told)
            await planner.create(model="m", messages=[*ASK, {**told[1], name: "another thought"}, *ASK])

    served(main())
    shown = [(agent, [one[name] for one in messages if name in one]) for agent, messages, _ in scored]
    assert shown == [("planner", []), ("worker", []), ("planner", ["so"]), ("planner", [])]
    assert [text for _, _, text in scored] == ["Yes.", "worker", "Yes.", "Yes."]


def test_thoughts_are_apart_with_tools_too() -> None:
    """The scripted policy does not split them, as verl's parsers do: what the parser says is sent."""
    message = Reply("Yes.", "so", raw="<think>so</think>\nYes.").message
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "so"}
    assert split_thought("<think>\n\n</think>\n\nYes") == ("", "Yes")


def test_a_message_that_the_policy_cannot_be_shown_is_the_frameworks_error() -> None:
    """Nothing was sampled, so the framework may ask otherwise, and the episode goes on."""

    class Strict(ScriptedPolicy):
        def encode(self, messages: Sequence[Message]) -> list[int]:
            if messages[0]["role"] == "developer":
                raise MessageError("shows no message of the role 'developer'")
            return super().encode(messages)

    team = Team({"planner": Strict(lambda prompt, k: "7")}, TeamOptions(1))

    async def workflow(team: Team) -> Outcome:
        async with team.serve() as urls:
            refused = await post(urls["planner"], {"messages": [{**ASK[0], "role": "developer"}]})
            answered = await post(urls["planner"], {"messages": [{**ASK[0], "role": "system"}]})
        statuses.extend([refused[0], answered[0]])
        assert "'developer'" in refused[1]["error"]["message"]
        return Outcome(True)

    statuses: list[int] = []
    record = served(play(Play(workflow), 0, team))
    assert (statuses, len(record.decisions)) == ([400, 200], 1)


def test_streams_have_the_same_content() -> None:
    team = team_of(lambda prompt, k: f"I look.{CALL}")

    async def main() -> tuple[list[Any], Any]:
        async with team.serve() as urls, client(urls["planner"]) as planner:
            stream = await planner.create(
                model="m", messages=ASK, tools=[SEARCH], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            return chunks[:-1], chunks[-1]

    chunks, last = served(main())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."
    (call,) = chunks[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name) == (0, "search")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert last.choices == [] and last.usage.completion_tokens == len(f"I look.{CALL}")


def test_limits_and_several_choices() -> None:
    team = team_of(lambda prompt, k: f"{k}: a. b. c", candidates=1)

    async def main() -> Any:
        async with team.serve() as urls, client(urls["planner"]) as planner:
            short = await planner.create(model="m", messages=ASK, max_completion_tokens=4)
            stopped = await planner.create(model="m", messages=ASK, stop=". ")
            several = await planner.create(model="m", messages=ASK, n=3)
            return short.choices[0], stopped.choices[0], several.choices

    short, stopped, several = served(main())
    assert (short.message.content, short.finish_reason) == ("0: a", "length")
    assert (stopped.message.content, stopped.finish_reason) == ("1: a", "stop")
    assert [(one.index, one.message.content) for one in several] == [(n, f"{n + 2}: a. b. c") for n in range(3)]
    assert [one.turn for one in team.decisions] == [0, 1, 2, 3, 4], "each choice is a decision of its own"


# ------------------------------------------------------------------ keys


def test_a_key_opens_its_own_agent_while_its_episode_lasts() -> None:
    first, second = (team_of(lambda prompt, k, name=name: name) for name in ("first", "second"))

    async def main() -> list[Any]:
        async with first.serve() as ours:
            async with second.serve() as theirs:
                late = theirs["planner"]
                ok = await post(theirs["planner"], {"messages": ASK})
                worker = await post(theirs["worker"], {"messages": ASK})
                wrong = [await post(late, {"messages": ASK}, key) for key in ("", "atgrpo-x", "planner")]
                assert (await post(ours["planner"], {"messages": ASK}))[1]["choices"][0]["message"][
                    "content"
                ] == "first"
            assert late.base_url == ours["planner"].base_url
            return [ok, worker, *wrong, await post(late, {"messages": ASK})]

    drain_refused()
    ok, worker, *refused = served(main())
    assert ok[1]["choices"][0]["message"]["content"] == "second"
    assert worker[1]["choices"][0]["message"]["content"] == "worker"
    assert [status for status, _ in refused] == [401] * 4
    assert {body["error"]["code"] for _, body in refused} == {"invalid_api_key"}
    assert drain_refused() == 4 and drain_refused() == 0
    assert [len(team.decisions) for team in (first, second)] == [1, 2]


def test_keys_do_not_appear_in_texts() -> None:
    async def main() -> tuple[Mapping[str, Endpoint], Mapping[str, Endpoint]]:
        async with team_of(lambda prompt, k: "").serve() as urls, team_of(lambda prompt, k: "").serve() as others:
            return urls, others

    urls, others = served(main())
    keys = [one.api_key for one in (*urls.values(), *others.values())]
    assert len(set(keys)) == 4 and min(map(len, keys)) > 30
    assert not any(key in repr(urls) for key in keys)


def test_only_the_loopback_listens_by_default() -> None:
    async def main() -> str:
        async with team_of(lambda prompt, k: "").serve(agents=["worker"]) as urls:
            assert set(urls) == {"worker"}
            return urls["worker"].base_url

    assert served(main()).startswith("http://127.0.0.1:")
    with pytest.raises(AttributeError, match="no agent 'boss'"):
        team_of(lambda prompt, k: "").serve(agents=["boss"])


# ------------------------------------------------------------------ wrong requests


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "body: Invalid JSON"),
        ({}, 400, "messages: Field required"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": ASK, "colour": "red"}, 400, "colour: Extra inputs are not permitted"),
        ({"messages": ASK, "seed": 3}, 400, "seed: Extra inputs are not permitted"),
        ({"messages": ASK, "tool_choice": "required"}, 400, "tool_choice: Input should be 'auto' or 'none'"),
        ({"messages": ASK, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": ASK, "presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"messages": ASK, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": ASK, "n": 65}, 400, "n: Input should be less than or equal to 64"),
        ({"messages": ASK, "tools": [{"type": "function"}]}, 400, "tools.0.function: Field required"),
        ({"messages": [{"content": "hi"}]}, 400, "messages.0.role: Field required"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages.0.role: Input should be"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            400,
            "messages.0.content.str: Input should be a valid string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "content.list[_Part].0.type: Input should be 'text'",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            400,
            "messages.0.tool_calls.0.function: Field req",
        ),
        ({"messages": ASK, "tools": [SEARCH, SEARCH]}, 400, "tools: Value error, two tools have the name 'search'"),
        ({"messages": ASK, "stop": ""}, 400, "at least 1 character"),
        ({"messages": ASK, "temperature": math.nan}, 400, "temperature: Input should be a finite number"),
        ({"messages": ASK, "temperature": -math.inf}, 400, "temperature: "),
        ({"messages": ASK, "temperature": -0.5}, 400, "temperature: "),
        ({"messages": ASK, "top_p": math.nan}, 400, "top_p: "),
        ({"messages": ASK, "top_p": 1.5}, 400, "top_p: "),
        ({"messages": ASK, "presence_penalty": math.nan}, 400, "presence_penalty: "),
        ({"messages": ASK, "n": math.inf}, 400, "n: "),
        (b'{"messages": [{"content": "' + b"x" * MOST_BYTES + b'"}]}', 413, "more than"),
    ],
)
def test_a_request_that_cannot_be_heeded_is_refused(body: Any, status: int, told: str) -> None:
    team = team_of(lambda prompt, k: "")

    async def main() -> tuple[int, Any]:
        async with team.serve() as urls:
            return await post(urls["planner"], body)

    found, said = served(main())
    assert found == status and told in said["error"]["message"]
    assert not team.decisions


def test_a_body_that_is_not_compressed_as_it_says_is_refused() -> None:
    team = team_of(lambda prompt, k: "")
    drain_refused()

    async def main() -> tuple[int, Any, Any]:
        async with team.serve() as urls, aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {urls['planner'].api_key}", "Content-Encoding": "gzip"}
            url = f"{urls['planner'].base_url}/chat/completions"
            async with session.post(url, data=json.dumps({"messages": ASK}).encode(), headers=headers) as answer:
                return answer.status, await answer.json(), answer.headers["x-should-retry"]

    status, said, again = served(main())
    assert (status, again, drain_refused()) == (400, "false", 1)
    assert said["error"]["message"].startswith("the body cannot be read")


def test_the_policys_own_sampling_parameters_are_accepted_and_others_not() -> None:
    team = team_of(lambda prompt, k: "x")
    team.policies["planner"].sampling_params = {"temperature": 1.0, "top_p": 1.0}  # type: ignore[attr-defined]

    async def main() -> list[Any]:
        async with team.serve() as urls:
            own = {"temperature": 1, "top_p": 1.0, "frequency_penalty": 0.0}
            return [await post(urls["planner"], {"messages": ASK, **more}) for more in (own, {"temperature": 0.2})]

    (first, _), (second, said) = served(main())
    assert (first, second) == (200, 400)
    team._mode = EVALUATE
    assert [status for status, _ in served(main())] == [200, 200], "evaluation has settings of its own"
    assert said["error"]["message"].startswith("temperature=0.2: the policy samples with 1, as its recipe says")


def test_other_paths_are_named() -> None:
    async def main() -> tuple[int, Any, Any]:
        async with team_of(lambda prompt, k: "").serve() as urls, aiohttp.ClientSession() as session:
            base, headers = urls["planner"].base_url, {"Authorization": f"Bearer {urls['planner'].api_key}"}
            async with session.post(f"{base}/responses", json={}) as answer:
                status, other = answer.status, await answer.json()
            async with session.get(f"{base}/models", headers=headers) as answer:
                return status, other, await answer.json()

    status, other, models = served(main())
    assert status == 404 and "use POST /v1/chat/completions" in other["error"]["message"]
    assert [one["id"] for one in models["data"]] == ["planner"]


# ------------------------------------------------------------------ limits, failures, disconnects


def test_turns_and_time_are_limited() -> None:
    async def hang(*_: Any) -> Score:
        await asyncio.Event().wait()
        return Score()

    team, slow = team_of(lambda prompt, k: "x"), team_of(lambda prompt, k: "x")

    async def main() -> list[Any]:
        async with team.serve(max_turns=2) as urls:
            turns = [await post(urls["planner"], {"messages": ASK}) for _ in range(3)]
            turns.append(await post(urls["worker"], {"messages": ASK}))
        async with slow.serve(hang, timeout=0.05) as urls:
            # The first is in flight when the time ends, the second comes later.
            return [*turns, *[await post(urls["planner"], {"messages": ASK}) for _ in range(2)]]

    answers = served(main())
    assert [status for status, _ in answers] == [200, 200, 403, 200, 403, 403]
    assert answers[2][1]["error"]["message"] == "planner has 2 turns"
    assert [answers[number][1]["error"]["code"] for number in (2, 4, 5)] == ["turn_limit", "time_limit", "time_limit"]
    assert len(team.decisions) == 3 and not slow.decisions


def test_a_limit_that_a_framework_does_not_catch_is_a_failure_of_the_episode_and_not_of_the_run() -> None:
    async def workflow(team: Team) -> Outcome:
        async with team.serve(max_turns=1) as urls, client(urls["planner"]) as planner:
            for _ in range(2):
                await planner.create(model="m", messages=ASK)
        return Outcome(True)

    with pytest.raises(EpisodeFailed, match="planner has 1 turns") as caught:
        served(play(Play(workflow), 0, team_of(lambda prompt, k: "x")))
    assert caught.value.reason == "turn_limit"


@pytest.mark.parametrize(
    ("asks", "limits"), [(True, {"max_turns": 2}), (True, {"timeout": 0.05}), (False, {"timeout": 0.05})]
)
def test_a_framework_that_never_ends_is_ended(
    asks: bool, limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "GRACE", 0.05)

    async def workflow(team: Team) -> Outcome:
        async with team.serve(**limits) as urls, client(urls["planner"]) as planner:  # type: ignore[arg-type]
            while asks:
                with suppress(openai.APIStatusError):
                    await planner.create(model="m", messages=ASK)
            await asyncio.Event().wait()
        return Outcome(True)

    with pytest.raises(EpisodeFailed, match=r"requests came after that|had not ended") as caught:
        served(play(Play(workflow), 0, team_of(lambda prompt, k: "x")))
    assert caught.value.reason in ("turn_limit", "time_limit")


@pytest.mark.parametrize("then", ["returns", "asks on"])
def test_a_framework_that_catches_its_cancellation_has_failed(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "GRACE", 0.01)
    monkeypatch.setattr(endpoints, "MOST_REFUSALS", 3)
    caught = []

    async def workflow(team: Team) -> Outcome:
        async with team.serve(max_turns=1, timeout=0.05) as urls, client(urls["planner"]) as planner:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                caught.append(then)
            while then == "asks on":
                with suppress(openai.APIStatusError):
                    await planner.create(model="m", messages=ASK)
        return Outcome(True)

    async def main() -> int:
        with pytest.raises(EpisodeFailed, match="had not ended") as failed:
            await play(Play(workflow), 0, team_of(lambda prompt, k: "x"))
        assert failed.value.reason == "time_limit"
        await asyncio.sleep(0)  # no cancellation is left over
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling() if sys.version_info >= (3, 11) else 0

    assert served(main()) == 0 and caught == [then]


def test_an_episode_that_is_cancelled_is_no_failure_of_its_framework() -> None:
    entered = asyncio.Event()

    async def workflow(team: Team) -> Outcome:
        async with team.serve(timeout=HANG):
            entered.set()
            await asyncio.Event().wait()
        return Outcome(True)

    async def main() -> None:
        playing = asyncio.ensure_future(play(Play(workflow), 0, team_of(lambda prompt, k: "x")))
        await entered.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    served(main())


def test_a_score_opens_no_endpoint() -> None:
    """Its requests would be decisions of the candidate for which the server was started."""

    async def workflow(team: Team) -> Outcome:
        async def by_judge(reply: str) -> Score:
            async with team.serve():
                return Score()

        await team.planner.act("x", by_judge)
        return Outcome(True)

    with pytest.raises(RuntimeError, match=r"serve\(\) in a score: .* call act, or serve in run"):
        served(play(Play(workflow), 0, team_of(lambda prompt, k: "x", candidates=2)))


def test_a_request_whose_body_arrives_after_the_episode_is_late() -> None:
    team, other = team_of(lambda prompt, k: "x"), team_of(lambda prompt, k: "y")

    async def main() -> int:
        body = json.dumps({"messages": ASK}).encode()
        async with other.serve():  # keeps the server
            async with team.serve() as urls:
                url = urls["planner"]
                port = int(url.base_url.rsplit(":", 1)[1].partition("/")[0])
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {url.api_key}\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
                await writer.drain()
                await post(url, {"messages": ASK})  # by its answer, the server has read the other request's head
            writer.write(body[5:])
            status = int((await reader.readline()).split()[1])
            writer.close()
            return status

    assert served(main()) == 401
    assert len(team.decisions) == 1


def test_no_socket_stays_open_after_the_last_episode() -> None:
    async def main() -> bool:
        async with team_of(lambda prompt, k: "x").serve() as urls:
            await post(urls["planner"], {"messages": ASK})
        try:
            await post(urls["planner"], {"messages": ASK})
        except aiohttp.ClientConnectionError:
            return True
        return False

    assert asyncio.run(asyncio.wait_for(main(), HANG))


def test_an_address_that_is_not_the_machines_is_an_error_that_says_so() -> None:
    async def main() -> None:
        for _ in range(2):
            with pytest.raises(OSError, match=r"203\.0\.113\.1"):
                async with team_of(lambda prompt, k: "x").serve(host="203.0.113.1"):
                    pass

    asyncio.run(asyncio.wait_for(main(), HANG))


@pytest.mark.parametrize("when", ["starts", "stops"])
def test_an_episode_that_is_cancelled_while_its_server_changes_leaves_no_dead_one(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = asyncio.Event()

    async def never(*_: Any, **__: Any) -> Any:
        changing.set()
        await asyncio.Event().wait()

    async def serve(ask: bool) -> int:
        async with team_of(lambda prompt, k: "x").serve() as urls:
            return (await post(urls["planner"], {"messages": ASK}))[0] if ask else 0

    async def main() -> int:
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(*((loop, "create_server") if when == "starts" else (web.AppRunner, "cleanup")), never)
            playing = asyncio.ensure_future(serve(ask=False))
            await changing.wait()
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
        return await serve(ask=True)

    assert asyncio.run(asyncio.wait_for(main(), HANG)) == 200


def test_failures_of_the_episode_are_errors_that_are_not_retried() -> None:
    async def workflow(team: Team) -> Outcome:
        async with team.serve() as urls, client(urls["planner"]) as planner:
            try:
                await planner.create(model="m", messages=ASK)
            except openai.APIStatusError as error:
                said.append((error.status_code, error.body["code"]))
        return Outcome(True)

    class Long(ScriptedPolicy):
        def encode(self, messages: Sequence[Message]) -> list[int]:
            raise EpisodeFailed("prompt_too_long", "too long")

    said: list[Any] = []
    for policy, reason in (
        (ScriptedPolicy(lambda prompt, k: ""), "no tokens"),
        (Long(lambda prompt, k: ""), "too long"),
    ):
        team = Team({"planner": policy}, TeamOptions(1))
        with pytest.raises(EpisodeFailed, match=reason):
            served(play(Play(workflow), 0, team))
        assert team._started["planner"] == 1, "the client did not try again"
    assert said == [(503, "episode_failed"), (400, "context_length_exceeded")]


@pytest.mark.parametrize("failing", ["", "defect"])
def test_nothing_is_sampled_after_the_episode_has_failed(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of it is trained on."""
    monkeypatch.setattr(endpoints, "MOST_REFUSALS", 5)

    def score(*_: Any) -> Score:
        raise KeyError("goal")

    async def workflow(team: Team) -> Outcome:
        async with team.serve(score if failing else None) as urls:
            for agent in ("planner", "worker", "planner", "worker"):
                said.append(await post(urls[agent], {"messages": ASK}))
            while True:  # a framework that does not stop is ended
                await post(urls["planner"], {"messages": ASK})
        return Outcome(True)

    said: list[tuple[int, Any]] = []
    team = team_of(lambda prompt, k: failing)
    with pytest.raises(KeyError if failing else EpisodeFailed, match="goal" if failing else "no tokens"):
        served(play(Play(workflow), 0, team))
    assert [status for status, _ in said] == [500 if failing else 503, 503, 503, 503]
    assert {answer["error"]["code"] for _, answer in said[1:]} == {"episode_failed"}
    assert team._started["planner"] == 1 and not team._started["worker"]


def test_a_defect_of_ours_is_an_error_in_openais_form_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def workflow(team: Team) -> Outcome:
        async with team.serve() as urls:
            said.append(await post(urls["planner"], {"messages": ASK}))
        return Outcome(True)

    def broken(*_: Any) -> Any:
        raise LookupError("no usage")

    monkeypatch.setattr(endpoints, "_completion", broken)
    said: list[tuple[int, Any]] = []
    with pytest.raises(LookupError, match="no usage"):
        served(play(Play(workflow), 0, team_of(lambda prompt, k: "x")))
    assert [(status, answer["error"]["code"]) for status, answer in said] == [(500, "defect")]


def test_connections_without_a_key_do_not_use_up_descriptors() -> None:
    """The oldest of too many is closed; those that have shown a key stay."""

    async def main() -> tuple[list[bytes], int]:
        team = team_of(lambda prompt, k: "x")
        async with team.serve() as urls, aiohttp.ClientSession() as session:
            server = server_of("127.0.0.1")
            server.most_strangers = 4
            url, headers = urls["planner"].base_url, {"Authorization": f"Bearer {urls['planner'].api_key}"}
            async with session.get(f"{url}/models", headers=headers) as known:
                await known.read()
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
            wrong = await asyncio.open_connection("127.0.0.1", server.port)
            wrong[1].write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\n\r\n")
            assert b" 401 " in await wrong[0].readline()
            fresh = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
            ended = [await reader.read() for reader, _ in silent]
            await wrong[0].read()  # it ends, too
            async with session.get(f"{url}/models", headers=headers) as again:  # on the same connection
                await again.read()
            for _, writer in [*silent, wrong, *fresh]:
                writer.close()
            return ended, len(server._strangers)

    ended, left = served(main())
    assert ended == [b""] * 4 and left == 4


@pytest.mark.parametrize("make", ["endpoint", "act"])
def test_many_tools_are_compared_in_linear_time(make: str) -> None:
    """By the number of comparisons: names of their own kind count them."""

    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = str.__hash__

    def comparisons(number: int) -> int:
        Name.compared = 0
        tools = [Tool(Name(f"f{index}"), "", {}) for index in range(number)]
        if make == "act":
            tools_of(tools)
        else:
            found = [SimpleNamespace(function=SimpleNamespace(name=tool.name)) for tool in tools]
            endpoints._Asked._distinct(found)  # type: ignore[arg-type]
        return Name.compared

    assert comparisons(4000) <= 2.5 * comparisons(2000) + 100


@pytest.mark.parametrize(
    ("defect", "timeout"), [(KeyError("goal"), None), (TimeoutError("the grader"), HANG)], ids=["error", "time-out"]
)
def test_a_defect_of_the_score_ends_the_run_and_is_no_limit(defect: Exception, timeout: float | None) -> None:
    def score(*_: Any) -> Score:
        raise defect

    async def workflow(team: Team) -> Outcome:
        async with team.serve(score, timeout=timeout) as urls:
            statuses.append((await post(urls["planner"], {"messages": ASK}))[0])
        return Outcome(True)

    statuses: list[int] = []
    with pytest.raises(type(defect), match=str(defect.args[0])):
        served(play(Play(workflow), 0, team_of(lambda prompt, k: "x")))
    assert statuses == [500]


@pytest.mark.parametrize("how", ["client", "episode"])
def test_a_client_or_an_episode_that_ends_cancels_the_decision_in_the_server(how: str) -> None:
    sampling, cancelled = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedPolicy):
        async def generate(self, *_: Any, **__: Any) -> Generation:
            sampling.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

    team = Team({"planner": Slow(lambda prompt, k: "")}, TeamOptions(1))

    async def main() -> None:
        async with team.serve() as urls:
            request = asyncio.create_task(post(urls["planner"], {"messages": ASK}))
            await sampling.wait()
            if how == "client":
                request.cancel()
                await cancelled.wait()
        await cancelled.wait()
        await asyncio.gather(request, return_exceptions=True)

    served(main())
    assert not team.decisions and not team._active


@pytest.mark.slow  # six seconds
@pytest.mark.parametrize("sessions", [200])
def test_many_sessions_at_once_keep_their_replies_apart(sessions: int) -> None:
    async def episode(number: int, go: Callable[[], Awaitable[Any]]) -> bool:
        team = team_of(lambda prompt, k: f"{number} said {prompt}", candidates=2)

        async def workflow(team: Team) -> Outcome:
            async with team.serve() as urls, client(urls["planner"]) as planner:
                await go()
                for turn in range(3):
                    asked = [{"role": "user", "content": f"{number}, turn {turn}"}]
                    said = (await planner.create(model="m", messages=asked)).choices[0].message.content
                    assert said == f"{number} said {number}, turn {turn}"
            return Outcome(True)

        record = await play(Play(workflow), 0, team)
        return record.outcome.success and len(record.decisions) == 3

    async def main() -> list[bool]:
        left = sessions
        all_there = asyncio.Event()

        async def go() -> None:
            nonlocal left
            left -= 1
            if not left:
                all_there.set()
            await all_there.wait()

        done = await asyncio.gather(*(episode(number, go) for number in range(sessions)))
        assert not server_of("127.0.0.1").sessions
        return done

    assert all(served(main()))


def test_an_endpoint_on_all_addresses_can_be_called_and_its_keys_still_protect_it() -> None:
    team = team_of(lambda prompt, k: "yes")

    async def main() -> Any:
        try:
            async with team.serve(host="0.0.0.0") as urls, client(urls["planner"]) as planner:
                assert urls["planner"].base_url.startswith("http://127.0.0.1:")
                await planner.create(model="", messages=[{"role": "user", "content": "x"}])
                return await post(urls["planner"], {"messages": [{"role": "user", "content": "x"}]}, key="guessed")
        finally:
            await server_of("0.0.0.0").close()

    status, _ = served(main())
    assert status == 401 and len(team.decisions) == 1
