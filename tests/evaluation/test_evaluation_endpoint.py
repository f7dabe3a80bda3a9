"""A policy on an OpenAI-compatible HTTP server, including servers that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("openai")

from fakes.scripted_policy import Numbered
from waiting import HANG

from verl_atgrpo import EpisodeFailed, Outcome
from verl_atgrpo.lab.evaluation.episodes import Lineup, play_one
from verl_atgrpo.lab.evaluation.results import EpisodeKey
from verl_atgrpo.play.remote import RemoteModel, RemotePolicy
from verl_atgrpo.play.types import Generation, PolicyUnusable
from verl_atgrpo.train.config.schema import SamplingSettings

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wörter? 🙂"}]


def completion(content: str | None = "yes", finish: str = "stop", **changes: Any) -> dict[str, Any]:
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24},
        **changes,
    }


class Server(ThreadingHTTPServer):
    """Returns its answers in order, then repeats the last one; records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Any]] = [(200, completion())]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers["Authorization"])
        status, answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        if answer == "never":
            self.server.over.wait()
        content = answer if isinstance(answer, str) else json.dumps(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("retry-after-ms", "1")  # the client's own back-off is half a second at least
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.over.set()
        running.shutdown()


def policy(server: Server, **changes: Any) -> RemotePolicy:
    settings: dict[str, Any] = {
        "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": -1},
        "max_response_length": 16,
        "chat_template_kwargs": {},
        "request_timeout": HANG,
    }
    return RemotePolicy(RemoteModel("big/model", server.url), **{**settings, **changes})


def sample(served: RemotePolicy, seed: int | None = 7) -> Generation:
    async def run() -> Generation:
        async with served:
            return await served.generate("d", served.encode(MESSAGES), seed)

    return asyncio.run(run())


def test_messages_are_sent_unchanged_and_tokens_are_the_servers_count(server: Server) -> None:
    made = sample(policy(server))
    assert (made.text, made.truncated, made.usage, made.tokens) == ("yes", False, (21, 3), 3)
    assert server.requests == [
        {
            "messages": MESSAGES,
            "model": "big/model",
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 16,
            "seed": 7,
        }
    ]


def test_an_agents_own_settings_are_sent(server: Server) -> None:
    own = {"temperature": 0.0, "max_response_length": 8, "stop": ["END"], "system": "In English."}
    sample(policy(server, own=SamplingSettings(**own).model_dump(exclude_none=True)))
    (request,) = server.requests
    assert (request["temperature"], request["top_p"], request["max_tokens"]) == (0.0, 0.9, 8)
    assert request["stop"] == ["END"]
    assert request["messages"] == [{"role": "system", "content": "In English.\n\nBe brief."}, *MESSAGES[1:]]


def test_parameters_that_not_all_servers_support_are_sent_only_if_set(server: Server) -> None:
    sample(
        policy(
            server,
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 20},
            chat_template_kwargs={"enable_thinking": False},
        )
    )
    assert server.requests[0]["top_k"] == 20
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("content", "thought", "said"),
    [
        ("<think>5</think>7", "5", "7"),
        ("5</think>7", "5", "7"),
        ("<think>5", "5", ""),
        ("[THINK]5[/THINK]7", "5", "7"),
        ("7", "", "7"),
    ],
)
def test_a_server_that_leaves_thoughts_in_its_answers(server: Server, content: str, thought: str, said: str) -> None:
    """One without a parser of the model's reasoning."""
    server.answers = [(200, completion(content))]
    made = sample(policy(server))
    assert made.text == content and made.parts == (thought, said)
    assert made.reply is not None and (made.reply.reasoning, made.reply.text) == (thought, said)


def test_truncated_and_empty_answers_are_answers(server: Server) -> None:
    server.answers = [(200, completion(None, "length"))]
    made = sample(policy(server))
    assert (made.text, made.truncated, made.tokens) == ("", True, 3)


def test_requests_to_busy_and_failing_servers_are_retried(server: Server) -> None:
    server.answers = [(429, {}), (503, {}), (500, "oh"), (200, completion())]
    assert sample(policy(server)).text == "yes"
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((429, {"error": {"message": "slow down"}}), "rate_limit"),
        ((500, {}), "endpoint"),
        ((400, {"error": {"message": "longer than my context"}}), "refused"),
        ((200, completion(choices=[])), "endpoint"),
        ((200, {"hello": 1}), "endpoint"),
        ((200, "<html>"), "endpoint"),
        ((200, completion("", "content_filter")), "content_filter"),
    ],
)
def test_a_refused_request_fails_the_episode(server: Server, answer: tuple[int, Any], reason: str) -> None:
    server.answers = [answer]
    with pytest.raises(EpisodeFailed) as caught:
        sample(policy(server))
    assert caught.value.reason == reason


def test_a_timeout_fails_the_episode(server: Server) -> None:
    server.answers = [(200, "never")]
    with pytest.raises(EpisodeFailed, match=r"within 0\.1 s") as caught:
        sample(policy(server, request_timeout=0.1))
    assert caught.value.reason == "timeout"


def test_a_missing_server_fails_the_episode(server: Server) -> None:
    gone = policy(server, request_timeout=0.3)
    server.server_close()
    with pytest.raises(EpisodeFailed):
        sample(gone)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_server_that_refuses_all_requests_stops_the_run_without_showing_the_key(
    server: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server.answers = [(status, {"error": {"message": "sk-secret is wrong"}})]
    with pytest.raises(PolicyUnusable, match=f"HTTP {status}.*OPENAI_API_KEY") as caught:
        sample(policy(server))
    assert "sk-secret" not in str(caught.value)
    assert server.keys == ["Bearer sk-secret"]


def test_a_key_in_the_servers_message_is_masked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server.answers = [(400, {"error": {"message": "not with sk-secret"}})]
    with pytest.raises(EpisodeFailed, match=r"not with \*\*\*"):
        sample(policy(server))


def test_a_key_of_another_name(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = RemoteModel("m", server.url, "MY_KEY")
    settings: dict[str, Any] = {"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1}, "max_response_length": 4}
    settings |= {"chat_template_kwargs": {}, "request_timeout": HANG}
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ValueError, match="MY_KEY is not set"):
        RemotePolicy(endpoint, **settings)
    monkeypatch.setenv("MY_KEY", "other")
    sample(RemotePolicy(endpoint, **settings))
    assert server.keys == ["Bearer other"]


def test_a_server_without_token_counts_stops_the_run(server: Server) -> None:
    server.answers = [(200, completion(usage=None))]
    with pytest.raises(PolicyUnusable, match="sends no usage"):
        sample(policy(server))


class Ask(Numbered):
    agents = ("asker",)

    async def run(self, task: int, team: Any) -> Outcome:
        replies: Sequence[Any] = [await team.asker.act(MESSAGES) for _ in range(2)]
        return Outcome(success=all(reply.text == "yes" for reply in replies))


def test_an_episode_has_the_servers_token_counts_and_its_own_seeds(server: Server) -> None:
    async def run() -> Any:
        async with policy(server) as served:
            return await play_one(Ask(), Lineup({"asker": "big"}, {"asker": served}), EpisodeKey(0, 0, 0))

    row = asyncio.run(run())
    assert row.success
    assert (row.agents["asker"].prompt_tokens, row.generated_tokens) == (42, 6)
    seeds = [request["seed"] for request in server.requests]
    assert len(set(seeds)) == 2
