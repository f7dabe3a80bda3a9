"""The loop that calls an agent's tools.

    def search(query: str) -> str:
        "Searches the corpus."

    done = await use_tools(team.worker, question, [search], score, max_turns=6)

Every reply of the agent is one decision (`Agent.act` with `tools`). The policy parses its calls; sync functions run at
the same time in threads, coroutine functions one after another. What a tool returns or raises goes back as a message.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from verl_atgrpo.play.decision import Agent
from verl_atgrpo.play.messages import Message, Reply, ToolCall, as_messages, valid
from verl_atgrpo.play.tools import SHOWN, Tool, ToolError, ToolSource, tools_of
from verl_atgrpo.play.types import Candidate, EpisodeFailed, ReplayError, Score
from verl_atgrpo.play.user_code import Ended, contained, gather_or_cancel


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
    tool = next((tool for tool in tools if tool.name == call.name), None)
    if tool is None or tool.function is None:
        names = ", ".join(tool.name for tool in tools if tool.function is not None)
        return Observation(f"Error: there is no tool {call.name[:SHOWN]!r}; the tools are {names}", failed=True)
    running = asyncio.wait_for(_run(tool.function, call.arguments), timeout)
    (text,) = await asyncio.gather(running, return_exceptions=True)
    if isinstance(text, Exception) and not isinstance(text, EpisodeFailed | ReplayError | ToolError):
        return Observation(valid(f"Error: {_told(text)[:SHOWN]}"), failed=True)
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
    ordered = {tool.name for tool in tools if tool.in_order}
    run = functools.partial(observe, tools, timeout=timeout, most=most)

    async def one_after_another() -> list[Observation]:
        return [await run(call) for call in calls if call.name in ordered]

    async def at_once() -> list[Observation]:
        return await gather_or_cancel([run(call) for call in calls if call.name not in ordered])

    first, second = map(iter, await gather_or_cancel([one_after_another(), at_once()]))
    return [next(first if call.name in ordered else second) for call in calls]
