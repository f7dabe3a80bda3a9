"""An OpenAI-compatible endpoint for every agent of an episode, so that a team of another framework can be trained.

    async with team.serve(score) as urls:
        client = urls["planner"].client()  # or .base_url and .api_key
        ...  # LangGraph, OpenAI Agents SDK, smolagents, Pydantic AI

A chat completion is a decision of the agent whose key the request has: its candidates, their group, seeds and failures
are those of `Agent.act`, and the committed candidate is the answer. A key is valid within its `async with`, and opens
its own episode and agent alone.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import resource
import secrets
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from verl_atgrpo.play.decision import Agent
from verl_atgrpo.play.messages import Message, MessageError, Reply
from verl_atgrpo.play.types import Candidate, Decision, EpisodeFailed, Score
from verl_atgrpo.play.user_code import cancel, gather_or_cancel

logger = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20
"""Largest body of a request."""
MOST_REFUSALS = 100
"""Requests beyond a limit, of one agent, after which the episode is ended: its framework does not stop."""
GRACE = 30.0
"""Seconds that a framework has to end by itself after its episode's time is over."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message in which frameworks and chat templates have thoughts."""
CallScore = Callable[[str, Sequence[Message], Reply], Score | Awaitable[Score]]
"""(agent, messages, reply) -> score."""


class ServedTeam(Protocol):
    """What the endpoints of an episode need of its `Team`."""

    decisions: list[Decision]
    failure: Exception | None

    def __getitem__(self, name: str) -> Agent: ...

    def policy_name(self, agent: str) -> str: ...

    def sampling_of(self, agent: str) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Endpoint:
    """Where an agent answers."""

    base_url: str
    """Ends with /v1."""
    api_key: str = field(repr=False)
    model: str = ""
    """The policy's name; requests may name any model."""

    def client(self) -> Any:
        """Returns an `openai.AsyncOpenAI` without time-outs.

        By default it would give up a connection after five seconds, which a busy machine may take, and load the web's
        certificates, which takes 20 ms.

        Raises ImportError if openai is missing.
        """
        import openai

        http = openai.DefaultAsyncHttpxClient(verify=False, timeout=None)  # plain HTTP, so there is nothing to verify
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, timeout=None, http_client=http)


class _Open(BaseModel):
    """May have fields of its framework, such as `strict`, which chat templates do not show."""

    model_config = ConfigDict(extra="allow")


class _Part(_Open):
    type: Literal["text"] = "text"
    text: str


class _CalledFunction(_Open):
    name: str
    arguments: str | dict[str, Any]


class _Call(_Open):
    function: _CalledFunction


class _MessageForm(_Open):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message as it came, with the fields of its framework; raises ValidationError if it is none."""
    _MessageForm.model_validate(message)
    return message


class _Function(_Open):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _ToolSchema(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Open):
    include_usage: bool = False


_Text = Annotated[str, Field(min_length=1)]


class _Asked(BaseModel):
    """A request. What is listed here is heeded, or has no effect on the answer; all else is refused."""

    model_config = ConfigDict(extra="forbid")
    messages: list[Annotated[dict[str, Any], AfterValidator(_checked)]] = Field(min_length=1)
    model: str = ""
    n: int | None = Field(None, ge=1, le=64)
    stop: _Text | list[_Text] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    tools: list[_ToolSchema] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    # For the books of a provider.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @field_validator("tools")
    @classmethod
    def _distinct(cls, tools: list[_ToolSchema] | None) -> list[_ToolSchema] | None:
        counts = Counter(tool.function.name for tool in tools or ())
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two tools have the name {min(twice)!r}")
        return tools


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class _Session:
    """An agent's access to one episode."""

    team: ServedTeam
    agent: str
    score: CallScore | None
    max_turns: int
    deadline: float | None
    """On the event loop's clock."""
    end: Callable[[str, str], None]
    """Ends the episode: limit, and why."""
    turns: int = 0
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    defect: Exception | None = None
    """What a decision raised that is no failure of the episode; ends the run."""
    limit: tuple[str, str] | None = None
    """The limit that refused a request, and why."""
    over: int = 0
    """Requests beyond a limit."""
    thoughts: set[str] = field(default_factory=set)
    """What the agent has thought; a history may have thoughts of others, which it is not shown."""

    async def answer(self, asked: _Asked) -> list[Candidate]:
        """Makes as many decisions as a request asks for answers; raises _Refused if it cannot be had."""
        left = None if self.deadline is None else self.deadline - asyncio.get_running_loop().time()
        number = asked.n or 1
        if (failure := self.team.failure) is not None:  # nothing that follows is trained on
            why = f"the episode has failed: {failure}"
            raise self._over(getattr(failure, "reason", "defect"), why, 503, "episode_failed")
        if left is not None and left <= 0:
            raise self._over("time_limit", "the episode's time is over")
        if self.turns + number > self.max_turns:
            raise self._over("turn_limit", f"{self.agent} has {self.max_turns} turns")
        # A framework asks for the same in evaluation, which has settings of its own: there they are those that apply.
        own = self.team.sampling_of(self.agent)
        for name in ("temperature", "top_p"):
            given = getattr(asked, name)
            if given is not None and name in own and given != own[name]:
                why = f"{name}={given:g}: the policy samples with {own[name]:g}, as its recipe says; leave it out"
                raise _Refused(400, why, "sampling_parameter")
        self.turns += number
        deciding = gather_or_cancel([self._decide(asked) for _ in range(number)])
        try:
            candidates = await asyncio.wait_for(deciding, left)
            self.thoughts.update(candidate.reasoning for candidate in candidates)
            return candidates
        except EpisodeFailed as failed:
            if failed.reason == "prompt_too_long":
                raise _Refused(400, str(failed), "context_length_exceeded") from failed
            raise _Refused(503, str(failed), "episode_failed") from failed
        except MessageError as error:
            raise _Refused(400, str(error), "invalid_request") from error
        except Exception as error:
            # Timers fire up to the clock's resolution early.
            over = self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline - 0.05
            if over and isinstance(error, asyncio.TimeoutError):
                raise self._over("time_limit", "the episode's time is over") from None
            self.defect = self.defect or error
            raise _Refused(500, f"{type(error).__name__}: {error}", "defect") from error

    def _over(self, limit: str, why: str, status: int = 403, code: str | None = None) -> _Refused:
        """Returns a refusal by a limit, after which the episode cannot go on as its team would."""
        self.limit = self.limit or (limit, why)
        self.over += 1
        if self.over > MOST_REFUSALS and self.over % MOST_REFUSALS == 1:  # again, if it is caught
            self.end(limit, f"{why}, and {self.over} requests came after that")
        return _Refused(status, why, code or limit)

    async def _decide(self, asked: _Asked) -> Candidate:
        """Makes the decision that a request asks for."""
        messages = [self._without_others_thoughts(message) for message in asked.messages]
        limit = min(filter(None, (asked.max_tokens, asked.max_completion_tokens)), default=None)
        tools = [] if asked.tool_choice == "none" else asked.tools or []
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        score = None if self.score is None else functools.partial(self._scored, messages)
        schemas = [tool.model_dump(exclude_none=True) for tool in tools]
        return await self.team[self.agent].act(messages, score, tools=schemas, max_tokens=limit, stop=stop)

    def _without_others_thoughts(self, message: dict[str, Any]) -> dict[str, Any]:
        own = self.thoughts
        return {key: value for key, value in message.items() if key not in _THOUGHTS or str(value).strip() in own}

    async def _scored(self, messages: Sequence[Message], reply: str | Reply) -> Score:
        assert self.score is not None
        if isinstance(reply, str):
            reply = Reply(reply, raw=reply)
        made = self.score(self.agent, messages, reply)
        return await made if inspect.isawaitable(made) else made


def _most_strangers() -> int:
    """Returns how many connections may be open that have shown no key: half of the process's files, within reason."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else max(1, min(4096, soft // 2))


class EndpointServer:
    """Serves the agents of all episodes that run in one event loop."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.sessions: dict[str, _Session] = {}
        self.refused = 0
        """Requests that were answered with an error."""
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.AbstractServer | None = None
        self._strangers: dict[Any, None] = {}
        """Connections that have shown no key yet, the oldest first."""
        self.most_strangers = _most_strangers()
        self._changing = asyncio.Lock()
        self.port = 0

    async def start(self) -> None:
        """Listens on a free port, unless it does already."""
        async with self._changing:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._refuse])
            app.router.add_post("/v1/chat/completions", self._complete)
            app.router.add_get("/v1/models", self._models)
            app.router.add_route("*", "/{path:.*}", self._unknown)
            # A client that disconnects cancels its decision.
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            loop = asyncio.get_running_loop()
            admit = functools.partial(self._admit, runner)
            listening = await loop.create_server(admit, self.host, 0, backlog=1024)
            # Only now: it may have failed, or been cancelled.
            self._runner, self._listening = runner, listening
            self.port = listening.sockets[0].getsockname()[1]

    def _admit(self, runner: web.AppRunner) -> Any:
        """Returns the protocol of a new connection, and closes the oldest of too many that have shown no key."""
        assert runner.server is not None
        if len(self._strangers) >= self.most_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.force_close()
        made = runner.server()
        self._strangers[made] = None
        return made

    async def close(self) -> None:
        """Stops listening, unless an episode has begun in the meantime."""
        async with self._changing:
            runner, listening = self._runner, self._listening
            if runner is not None and listening is not None and not self.sessions:
                self._runner = self._listening = None  # first: the rest may be cancelled
                listening.close()
                self._strangers.clear()
                await runner.cleanup()

    def _session(self, request: web.Request) -> _Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self.sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise _Refused(401, "this key opens no agent of a running episode", "invalid_api_key")
        self._strangers.pop(request.protocol, None)
        return session

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers a request that is refused with an error in OpenAI's form."""
        try:
            return await handler(request)
        except _Refused as refused:
            self.refused += 1
            logger.warning("a request to an agent's endpoint was refused (%d): %s", refused.status, refused)
            error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}
            # Clients would try again: a decision that failed is another decision then.
            return web.json_response({"error": error}, status=refused.status, headers={"x-should-retry": "false"})

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        raise _Refused(404, f"{request.method} {request.path}: use POST /v1/chat/completions")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model = {"id": self._session(request).agent, "object": "model", "created": 0, "owned_by": "verl-atgrpo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        running = asyncio.current_task()
        assert running is not None
        session = None
        try:
            self._session(request)
            asked = await self._asked(request)
            session = self._session(request)  # again: the episode may have ended while the body arrived
            session.running.add(running)
            try:
                candidates = await session.answer(asked)
            finally:
                session.running.discard(running)
            body = _completion(asked, session, candidates)
            made = None if asked.stream else web.json_response(body)
        except _Refused:
            raise
        except Exception as error:  # a defect of ours: in OpenAI's form, and it ends the run
            logger.exception("a request to an agent's endpoint raises")
            if session is not None:
                session.defect = session.defect or error
            raise _Refused(500, f"{type(error).__name__}: {error}", "defect") from error
        return await _stream(request, asked, body) if made is None else made

    async def _asked(self, request: web.Request) -> _Asked:
        """Returns a request's content; raises _Refused if it is none that can be answered."""
        try:
            return _Asked.model_validate_json(await request.read())
        except web.HTTPRequestEntityTooLarge:
            raise _Refused(413, f"the body has more than {MOST_BYTES} bytes", "body_too_large") from None
        except web.RequestPayloadError as error:  # not compressed as it says, for instance
            raise _Refused(400, f"the body cannot be read: {error}", "invalid_request") from None
        except ValidationError as error:
            wrong = max(error.errors(), key=lambda one: len(one["loc"]))  # of a union's members the one it nearly is
            what = ".".join(map(str, wrong["loc"])) or "body"
            raise _Refused(400, f"{what}: {wrong['msg']}", "invalid_request") from None


def _completion(asked: _Asked, session: _Session, candidates: Sequence[Candidate]) -> Any:
    """Returns an OpenAI chat completion, whose id ends with the name of the first answer's decision."""
    choices = []
    for index, candidate in enumerate(candidates):
        message = (candidate.reply or Reply(candidate.text, candidate.reasoning)).message
        ended = "tool_calls" if candidate.tool_calls else "length" if candidate.generation.truncated else "stop"
        choices.append({"index": index, "message": message, "finish_reason": ended, "logprobs": None})
    asked_of = [one for one in session.team.decisions if one.candidates[one.committed] is candidates[0]]
    prompt = sum(len(one.prompt_ids) for one in asked_of)
    new = sum(one.generation.tokens for one in candidates)
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    name = ",".join(one.name for one in asked_of)
    made = {"id": f"chatcmpl-{secrets.token_hex(8)}:{name}", "object": "chat.completion", "created": 0}
    return {**made, "model": asked.model or session.agent, "choices": choices, "usage": usage}


async def _stream(request: web.Request, asked: _Asked, body: Mapping[str, Any]) -> web.StreamResponse:
    """Sends a completion as server-sent events: whole, because it is chosen among complete candidates."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    base = {**{key: body[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}

    async def send(choices: list[dict[str, Any]], **more: Any) -> None:
        await response.write(f"data: {json.dumps({**base, 'choices': choices, **more})}\n\n".encode())

    for choice in body["choices"]:
        delta = dict(choice["message"])
        calls = delta.pop("tool_calls", [])
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        await send([{"index": choice["index"], "delta": delta, "finish_reason": None}])
        await send([{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}])
    if asked.stream_options is not None and asked.stream_options.include_usage:
        await send([], usage=body["usage"])
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


_SERVERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, EndpointServer]] = weakref.WeakKeyDictionary()


def drain_refused() -> int:
    """Returns how many requests the servers of this process have refused since the last call."""
    servers = [server for of_loop in _SERVERS.values() for server in of_loop.values()]
    refused = sum(server.refused for server in servers)
    for server in servers:
        server.refused = 0
    return refused


def server_of(host: str) -> EndpointServer:
    """Returns the server of the running event loop at an address; made when it is first asked for."""
    servers = _SERVERS.setdefault(asyncio.get_running_loop(), {})
    return servers.setdefault(host, EndpointServer(host))


@asynccontextmanager
async def serve(
    team: ServedTeam,
    agents: Sequence[str],
    score: CallScore | None,
    *,
    host: str,
    max_turns: int,
    timeout: float | None,
) -> AsyncIterator[Mapping[str, Endpoint]]:
    """Opens an endpoint for each agent of an episode; see `Team.serve`."""
    server, loop, owner = server_of(host), asyncio.get_running_loop(), asyncio.current_task()
    assert owner is not None  # coroutines run in tasks
    deadline = None if timeout is None else loop.time() + timeout
    ended: list[tuple[str, str]] = []
    inside = True

    def end(limit: str, why: str) -> None:
        if inside:  # again each time, as the block may catch it
            ended.append((limit, why))
            owner.cancel()

    # A wildcard is no address to connect to; from elsewhere it is the machine's, with the same port.
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    keys = {agent: f"atgrpo-{secrets.token_urlsafe(24)}" for agent in agents}
    sessions = [_Session(team, agent, score, max_turns, deadline, end) for agent in keys]
    server.sessions.update(zip(keys.values(), sessions, strict=True))  # before it starts, or it might just be closed
    timer = None
    if timeout is not None:
        why = f"the episode had not ended {GRACE:g} s after its {timeout:g} s were over"
        timer = loop.call_later(timeout + GRACE, end, "time_limit", why)
    try:
        await server.start()
        base_url = f"http://{shown}:{server.port}/v1"
        yield {agent: Endpoint(base_url, key, team.policy_name(agent)) for agent, key in keys.items()}
        if ended:
            await asyncio.sleep(0)  # a cancellation that is still due is raised here
            raise asyncio.CancelledError  # or the block has caught it
    except asyncio.CancelledError:
        if not ended:
            raise
        if sys.version_info >= (3, 11):
            for _ in ended:
                owner.uncancel()
        raise EpisodeFailed(*ended[0]) from None
    except Exception as error:
        limits = [session.limit for session in sessions if session.limit is not None]
        if limits and team.failure is None:  # what the framework made of the refusal
            raise EpisodeFailed(*limits[0]) from error
        raise
    finally:
        inside = False
        if timer is not None:
            timer.cancel()
        for key in keys.values():
            del server.sessions[key]
        await cancel({task for session in sessions for task in session.running} - {asyncio.current_task()})
        await server.close()
        for session in sessions:
            if session.defect is not None:
                raise session.defect
