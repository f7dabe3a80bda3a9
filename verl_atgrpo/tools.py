"""Tools for agents: typed functions, JSON schemas, MCP servers, and the loop that calls them.

    def search(query: str) -> str:
        "Searches the corpus."

    done = await use_tools(team.worker, question, [search], score, max_turns=6)

Every reply of the agent is one decision (`Agent.act` with `tools`). The policy parses its calls; sync functions run at
the same time in threads, coroutine functions one after another. What a tool returns or raises goes back as a message.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from verl_atgrpo.environment import Ended, Message, Score, contained, stable_hash
from verl_atgrpo.thoughts import split_thought

if TYPE_CHECKING:
    from verl_atgrpo.team import Agent, Candidate

ToolSource: TypeAlias = "Callable[..., Any] | Mapping[str, Any] | Tool"
"""A typed function, sync or async; an OpenAI schema `{"type": "function", "function": {...}}`; or a `Tool`."""
_ID_LETTERS = 9
"""Length of a call's id; Mistral's templates require nine letters or digits."""
_SHOWN = 300
"""Most characters of an error in an observation."""


class MessageError(ValueError):
    """A message that a policy cannot be shown: its role, its place or its form."""


def text_of(message: Message) -> str:
    """Returns the content of a message as one text; raises MessageError if a part of it is no text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content or ()]
    for part, text in zip(content or (), texts, strict=True):
        if not isinstance(text, str):
            raise MessageError(f"a message has a part that is no text: {str(part)[:100]}; policies read text alone")
    return "\n".join(map(str, texts))


def with_system(text: str | None, messages: Sequence[Message]) -> Sequence[Message]:
    """Returns messages with a system text before them, or before that of their own system message."""
    if text is None:
        return messages
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{text}\n\n{text_of(messages[0])}"}, *messages[1:]]


def valid(text: str) -> str:
    """Returns a text without lone surrogates, which JSON can name and no tokenizer can encode."""
    return text.encode("utf-8", "replace").decode()


class ToolError(ValueError):
    """A tool, or the policy that is to call it, cannot be used; ends the run."""


@dataclass(frozen=True)
class ToolCall:
    """A call in a reply."""

    name: str
    arguments: str
    """JSON, as the model wrote it; it may be invalid."""
    id: str = ""


@dataclass(frozen=True)
class Reply:
    """A reply to a prompt with tools."""

    text: str
    """What it says beside reasoning and calls; of some families verl's parsers drop what follows the first call."""
    reasoning: str = ""
    """What it thought."""
    calls: tuple[ToolCall, ...] = ()
    unparsed: int = 0
    """Calls that begin and cannot be parsed."""
    raw: str = ""
    """All of it, as decoded, with its thought in `<think>`."""

    @property
    def message(self) -> Message:
        """The reply as a message of the history, in OpenAI's form; with what could not be parsed, if nothing could."""
        unread = bool(self.unparsed and not self.calls)
        message: dict[str, Any] = {"role": "assistant", "content": split_thought(self.raw)[1] if unread else self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    def with_ids(self, decision: str, candidate: int) -> Reply:
        """Returns the reply with an id for every call: the same when its episode is played again."""
        numbered = [
            replace(call, id=f"{stable_hash(decision, candidate, number):x}".zfill(16)[:_ID_LETTERS])
            for number, call in enumerate(self.calls)
        ]
        return replace(self, calls=tuple(numbered))


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    function: Callable[[str], Awaitable[str]] | None = None
    """JSON arguments -> result; None for a schema without a function, whose calls the environment handles."""
    in_order: bool = False
    """Whether calls run one after another, as coroutine functions may make decisions, which are numbered by start."""

    @classmethod
    def of(cls, source: ToolSource) -> Tool:
        """Makes a tool of a function or a schema.

        A function's name and docstring are the tool's; its arguments are validated by their types before it is called.
        A sync one runs in a thread. What it returns is given to the model as text, or as JSON if it is no text.

        Raises ToolError if it is neither, or a function whose arguments have no types.
        """
        if isinstance(source, Tool):
            return source
        if isinstance(source, Mapping):
            return _of_schema(source)
        if not callable(source) or isinstance(source, type):
            raise ToolError(f"{source!r} is no tool: use a typed function or an OpenAI schema of one")
        # Here, because environments without tools are imported by programs that need no pydantic.
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError

        name = getattr(source, "__name__", type(source).__name__)
        untyped = [
            parameter.name
            for parameter in inspect.signature(source).parameters.values()
            if parameter.annotation is inspect.Parameter.empty
        ]
        if untyped:
            raise ToolError(f"the tool {name!r} has arguments without types: {', '.join(untyped)}")
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, source))
            parameters = adapter.json_schema()
        except PydanticUserError as error:
            raise ToolError(f"the tool {name!r}: {str(error).splitlines()[0]}") from error

        decides = inspect.iscoroutinefunction(inspect.unwrap(source))

        async def call(arguments: str) -> str:
            run = functools.partial(adapter.validate_json, arguments or "{}")
            result = run() if decides else await _in_thread(run)
            if inspect.isawaitable(result):  # of a decorated coroutine function, too
                result = await result
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

        return cls(name, inspect.getdoc(source) or "", _untitled(parameters), call, in_order=decides)

    @property
    def schema(self) -> dict[str, Any]:
        """Its schema in OpenAI's form, as chat templates read it."""
        of_function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": of_function}


async def _in_thread(run: Callable[[], Any]) -> Any:
    """Runs a sync tool in a thread of its own.

    Not in a pool: tools that hang would fill it. And not in asyncio's, which waits for them when the process ends.
    """
    done: Future[Any] = Future()

    def work() -> None:
        try:
            with contained("the tool"):
                result = run()
        except StopIteration as error:  # no future takes it
            done.set_exception(Ended(f"the tool raised StopIteration: {error}"))
        except BaseException as error:  # noqa: BLE001  (raised again where it is awaited)
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(done))


def tools_of(sources: Sequence[ToolSource]) -> tuple[Tool, ...]:
    """Returns the tools of an agent.

    Raises ToolError if two have the same name, or as `Tool.of`.
    """
    tools = tuple(map(Tool.of, sources))
    counts = Counter(tool.name for tool in tools)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ToolError(f"two tools have the name {min(twice)!r}")
    return tools


def _of_schema(schema: Mapping[str, Any]) -> Tool:
    function = schema.get("function") if schema.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ToolError(
            f'{str(dict(schema))[:_SHOWN]} is no tool: {{"type": "function", "function": {{"name": ...}}}}'
        )
    return Tool(
        function["name"],
        function.get("description") or "",
        function.get("parameters") or {"type": "object", "properties": {}},
    )


def _untitled(schema: Any) -> Any:
    """Returns a JSON schema without pydantic's titles, which repeat the names of arguments."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    # `title` is a text; an argument of that name has a schema.
    return {key: _untitled(part) for key, part in schema.items() if not (key == "title" and isinstance(part, str))}


@dataclass(frozen=True)
class Observation:
    """What a call came to."""

    text: str
    failed: bool = False


async def observe(
    tools: Sequence[Tool], call: ToolCall, *, timeout: float | None = 60.0, most: int = 4000
) -> Observation:
    """Runs a call; errors of the model's or the tool's are observations, too.

    Failures of decisions that the tool makes itself are raised.

    Args:
        tools: those that may be called.
        call: what to call.
        timeout: seconds; None for no limit. A sync tool that takes longer goes on in its thread.
        most: characters of a result, from its start.
    """
    from verl_atgrpo.team import EpisodeFailed, ReplayError

    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None or tool.function is None:
        names = ", ".join(tool.name for tool in tools if tool.function is not None)
        return Observation(f"Error: there is no tool {call.name[:_SHOWN]!r}; the tools are {names}", failed=True)
    running = asyncio.wait_for(_run(tool.function, call.arguments), timeout)
    (text,) = await asyncio.gather(running, return_exceptions=True)
    if isinstance(text, Exception) and not isinstance(text, EpisodeFailed | ReplayError | ToolError):
        return Observation(valid(f"Error: {_told(text)[:_SHOWN]}"), failed=True)
    if isinstance(text, BaseException):
        raise text
    text = valid(text)
    return Observation(text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} characters left out)")


async def _run(function: Callable[[str], Awaitable[str]], arguments: str) -> str:
    with contained("the tool"):
        return await function(arguments)


def _told(error: Exception) -> str:
    """Returns what a model is told of an error of a tool."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        wrong = error.errors()
        return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in wrong)
    if isinstance(error, asyncio.TimeoutError):
        return "it took too long"
    if isinstance(error, Ended):
        return str(error)
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ToolUse:
    """How an agent used tools."""

    answer: Candidate | None
    """The first reply without a call; None if the limits came first."""
    messages: list[Message]
    """The whole conversation, with the answer."""
    calls: int
    """Calls that were run or could not be parsed."""
    failed: int
    """Those among them whose observation is an error."""


ConversationScore = Callable[[Sequence[Message], Reply], Score | Awaitable[Score]]


async def use_tools(
    agent: Agent,
    prompt: str | Sequence[Message],
    tools: Sequence[ToolSource],
    score: ConversationScore | None = None,
    *,
    max_turns: int = 8,
    max_tokens: int | None = None,
    timeout: float | None = 60.0,
    max_characters: int = 4000,
) -> ToolUse:
    """Lets an agent call tools until it replies without a call.

    Each reply is one decision. Sync tools of a reply run at the same time; coroutine functions, which may make
    decisions, one after another, so that the order of decisions does not depend on time.

    Args:
        agent: replies.
        prompt: a text or chat messages.
        tools: typed functions, `Tool`s (`mcp_tools`) or schemas; calls of a schema without function are errors.
        score: (messages before the reply, reply) -> Score.
        max_turns: most replies.
        max_tokens: replies that were committed may have this many tokens in all; no reply follows beyond.
        timeout: seconds for a call; None for no limit, for tools that make decisions.
        max_characters: of a result.

    Raises:
        EpisodeFailed: a reply could not be sampled.
        ToolError: the policy's chat template knows no tools, or something is no tool.
        ValueError: a limit is not above 0.
    """
    from verl_atgrpo.team import as_messages

    limits = {"max_turns": max_turns, "max_tokens": max_tokens, "timeout": timeout, "max_characters": max_characters}
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"use_tools: {name}={limit!r} is not above 0")

    known, messages = tools_of(tools), as_messages(prompt)
    calls = failed = tokens = 0
    for _ in range(max_turns):
        before = tuple(messages)
        reply_score = None if score is None else lambda reply, before=before: score(before, reply)
        candidate = await agent.act(messages, reply_score, tools=known)
        reply = candidate.reply
        assert reply is not None  # every decision with tools has one
        messages.append(reply.message)
        calls, failed = calls + len(reply.calls) + reply.unparsed, failed + reply.unparsed
        tokens += candidate.generation.tokens
        if not reply.calls and not reply.unparsed:
            return ToolUse(candidate, messages, calls, failed)
        observations = await _observe_all(known, reply.calls, timeout, max_characters)
        failed += sum(one.failed for one in observations)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": one.text}
            for call, one in zip(reply.calls, observations, strict=True)
        ]
        if reply.unparsed:  # no call that an observation could belong to
            which = "another" if reply.calls else "the"
            messages.append({"role": "user", "content": f"Error: {which} tool call could not be parsed"})
        if max_tokens is not None and tokens >= max_tokens:
            break
    return ToolUse(None, messages, calls, failed)


async def _observe_all(
    tools: Sequence[Tool], calls: Sequence[ToolCall], timeout: float | None, most: int
) -> list[Observation]:
    """Returns what each call came to."""
    from verl_atgrpo.team import gather_or_cancel

    ordered = {tool.name for tool in tools if tool.in_order}
    run = functools.partial(observe, tools, timeout=timeout, most=most)

    async def one_after_another() -> list[Observation]:
        return [await run(call) for call in calls if call.name in ordered]

    async def at_once() -> list[Observation]:
        return await gather_or_cancel([run(call) for call in calls if call.name not in ordered])

    first, second = map(iter, await gather_or_cancel([one_after_another(), at_once()]))
    return [next(first if call.name in ordered else second) for call in calls]


async def mcp_tools(client: Any) -> list[Tool]:
    """Returns the tools of an MCP server.

    Args:
        client: a connected `mcp.Client` (or a `ClientSession` of mcp 1).
    """

    def function(name: str) -> Callable[[str], Awaitable[str]]:
        async def call(arguments: str) -> str:
            given = json.loads(arguments or "{}")
            if not isinstance(given, dict):
                raise ValueError("the arguments are no JSON object")
            # Fields have the protocol's names in every version of the package.
            result = (await client.call_tool(name, given)).model_dump(by_alias=True)
            text = "\n".join(part["text"] for part in result["content"] if part["type"] == "text")
            if result.get("isError"):
                raise RuntimeError(text)
            return text

        return call

    found: list[Tool] = []
    cursor = None
    while True:
        page = (await client.list_tools(cursor=cursor)).model_dump(by_alias=True)
        for one in page["tools"]:
            schema = _untitled(one["inputSchema"])
            found.append(Tool(one["name"], one["description"] or "", schema, function(one["name"])))
        cursor = page.get("nextCursor")
        if cursor is None:
            return found
