"""Prompts by a model's chat template, with tools, and replies with calls by verl's parsers of tool calls."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from verl_atgrpo.environment import Message
from verl_atgrpo.tools import Reply, Tool, ToolCall, ToolError, split_thought, text_of, valid, with_system

_CHANNEL = re.compile(
    r"(?:<\|start\|>([^<]*))?<\|channel\|>(\w+)\b([^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|$)",
    re.DOTALL,
)
"""Role, channel, what is between it and the message, and the message, in the form of gpt-oss (OpenAI's harmony). The
recipient of a call is behind the role or the channel."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="parser")
_MOST_CALLS = 100
"""An answer that begins more calls has none: some of verl's parsers take cubic time for calls that do not end."""


def tool_formats() -> list[str]:
    """Returns the names of verl's parsers of tool calls."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    return sorted(ToolParser._registry)


@dataclass
class Chat:
    """A model's chat template, and the form in which it calls tools."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    format: str = "hermes"
    """Name of verl's parser, `rollout.multi_turn.format`."""
    system: str | None = None
    """Text of a system message before the others, or of the first part of theirs."""
    _own: dict[str, Chat] = field(default_factory=dict, init=False, repr=False)

    def with_own(self, template_kwargs: Mapping[str, Any] | None, system: str | None) -> Chat:
        """Returns the chat with an agent's own template arguments and system text; the same one for equal ones."""
        if not template_kwargs and system is None:
            return self
        key = repr((template_kwargs, system))
        if key not in self._own:
            arguments = {**self.template_kwargs, **(template_kwargs or {})}
            self._own[key] = replace(self, template_kwargs=arguments, system=system)
        return self._own[key]

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the token ids of a prompt.

        Raises ToolError if there are tools and the template does not show them.
        """
        if tools and not self._shows_tools:
            raise ToolError(
                f"model.path: the chat template of {self.tokenizer.name_or_path!r} shows no tools, and an agent is "
                "given some; set actor_rollout_ref.model.path, or that of its policy, to a model that calls tools, or "
                "describe them in the prompt"
            )
        return self._render(messages, [tool.schema for tool in tools])

    def _render(self, messages: Sequence[Message], schemas: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            [self._plain(_for_template(message)) for message in with_system(self.system, messages)],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **({"tools": schemas} if schemas else {}),
            **self.template_kwargs,
        )
        return ids

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        tokens = sorted({*self.tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in tokens if len(token) > 1) or "(?!)")

    def _plain(self, value: Any) -> Any:
        """Returns a message in which no text is a special token.

        What one agent writes is in the prompts of others: spelt out there, the end of a message would be one.
        """
        if isinstance(value, str):
            return self._special.sub(lambda token: f"{token[0][0]} {token[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(part) for key, part in value.items()}
        return [self._plain(part) for part in value] if isinstance(value, list) else value

    @cached_property
    def _shows_tools(self) -> bool:
        tool = Tool("lookup", "Looks up.", {"type": "object", "properties": {}})
        asked: list[Message] = [{"role": "user", "content": "?"}]
        return self._render(asked, [tool.schema]) != self._render(asked, [])

    @cached_property
    def _parser(self) -> Any:
        from verl.experimental.agent_loop.tool_parser import ToolParser

        try:
            return ToolParser.get_tool_parser(self.format, self.tokenizer)
        except ValueError as error:
            known = ", ".join(tool_formats())
            raise ToolError(
                f"actor_rollout_ref.rollout.multi_turn.format={self.format!r}: there is no such parser of tool calls; "
                f"use one of {known}"
            ) from error

    @cached_property
    def _call_marks(self) -> list[str]:
        """What a call, or a section of calls, begins with; each of verl's parsers has some of these."""
        names = ("tool_call_start_token", "tool_call_begin_token", "tool_calls_section_start_token")
        return [mark for name in (*names, "tool_calls_start_token") if (mark := getattr(self._parser, name, None))]

    @cached_property
    def call_ends(self) -> list[int]:
        """Tokens with which the model family ends an answer that has calls, beside the end of a sequence."""
        ends: list[int] = self._parser.stop_token_ids
        return ends

    async def parse(self, token_ids: Sequence[int], tools: Sequence[Tool], text: str | None = None) -> Reply:
        """Returns calls, thought and text of an answer; an answer that cannot be read has no calls.

        Args:
            token_ids: the answer's.
            tools: what it could call.
            text: the answer's, if it is less than its tokens (`Limits.stop`).
        """
        ids = list(token_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()  # the parsers keep it in the text
        raw, whole, after = self._decoded(ids, text)
        if self.format == "gpt-oss":
            thought, said, begun = _channels(whole, raw)
            said = said.removesuffix(after)
        else:
            thought, said = split_thought(raw)
            whole = split_thought(whole.removesuffix(after))[1]
            begun = max((whole.count(mark) for mark in self._call_marks), default=0)
            if said != raw + after:  # what it thought may contain calls that it did not make
                ids = self.tokenizer.encode(whole, add_special_tokens=False)
        if begun > _MOST_CALLS:
            return Reply(said.strip(), thought, unparsed=begun, raw=raw)
        # In a thread and loop of its own: the parsers wait for asyncio's pool, which sync frameworks may have filled.
        extract = functools.partial(self._parser.extract_tool_calls, ids, _schemas(tools))
        left, found = await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: asyncio.run(extract()))
        calls = tuple(ToolCall(valid(call.name), valid(call.arguments)) for call in found)
        # What is left has the token that ended it, of which a family may have several.
        kept = self._special.sub("", left) if calls and self.format != "gpt-oss" else said
        return Reply(kept.strip(), thought, calls, unparsed=max(0, begun - len(calls)), raw=raw)

    def with_thought(self, token_ids: Sequence[int], text: str) -> str:
        """Returns the text of an answer without tools with its thought in `<think>`, as other families write it.

        Args:
            token_ids: the answer's.
            text: the same, or less (`Limits.stop`), without special tokens.
        """
        if self.format != "gpt-oss":
            return text
        raw, whole, after = self._decoded(token_ids, text)
        thought, said, _ = _channels(whole, raw)
        said = said.removesuffix(after)
        return f"<think>{thought}</think>{said}" if thought else said

    def _decoded(self, token_ids: Sequence[int], text: str | None) -> tuple[str, str, str]:
        """Returns an answer up to where it was stopped, all of it with its special tokens, and what followed there.

        In some families the tokens that mark calls are special ones.
        """
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        raw = decoded if text is None else text
        return raw, self.tokenizer.decode(token_ids, skip_special_tokens=False), decoded[len(raw) :]


def _channels(whole: str, otherwise: str) -> tuple[str, str, int]:
    """Returns what an answer of gpt-oss thought and said, by its channels, and how many calls it began.

    Args:
        whole: the answer with its special tokens.
        otherwise: what it said if it has no channel.
    """
    parts = [(name, f"{before}{after}", body.strip()) for before, name, after, body in _CHANNEL.findall(whole)]
    if not parts:
        return "", otherwise, 0
    calls = [to for _, to, _ in parts if " to=" in to]
    thought = "\n".join(body for name, to, body in parts if name == "analysis" and " to=" not in to)
    said = "\n".join(body for name, to, body in parts if name != "analysis" and " to=" not in to)
    return thought, said, len(calls)


def _schemas(tools: Sequence[Tool]) -> list[Any]:
    """Returns tools as verl's parsers read them: the types of arguments, which verl's schema needs one by one."""
    from verl.tools.schemas import OpenAIFunctionToolSchema

    def typed(tool: Tool) -> dict[str, Any]:
        properties = tool.parameters.get("properties") or {}
        known = {name: one for name, one in properties.items() if isinstance(one, Mapping)}  # `true` is a schema, too
        types = {name: {"type": one.get("type", "object")} for name, one in known.items()}
        return {**tool.schema["function"], "parameters": {"type": "object", "properties": types}}

    return [OpenAIFunctionToolSchema(type="function", function=typed(tool)) for tool in tools]


def _for_template(message: Message) -> dict[str, Any]:
    """Returns a message in the form that chat templates take: contents as texts, arguments as mappings."""
    shown = {**{key: value for key, value in message.items() if value is not None}, "content": text_of(message)}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown


def _parsed(arguments: Any) -> Mapping[str, Any]:
    """Returns a call's arguments as a mapping: templates ask for its items, and models write what they like."""
    try:
        known = json.loads(arguments) if isinstance(arguments, str) else arguments
        known = json.loads(valid(json.dumps(known, ensure_ascii=False)))
    except (ValueError, RecursionError):
        known = valid(str(arguments))
    return known if isinstance(known, Mapping) else {"arguments": known}
