"""Prompts by a model's chat template, with tools, and replies with calls by verl's parsers of tool calls."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jinja2

from verl_atgrpo.play.messages import Message, MessageError, Reply, ToolCall, text_of, valid, with_system
from verl_atgrpo.play.thoughts import CLOSE, OPEN, begins, marks, split_thought
from verl_atgrpo.play.tools import Tool, ToolError
from verl_atgrpo.train import template

_CHANNEL = re.compile(
    r"(?:<\|start\|>([^<]*))?<\|channel\|>(\w+)\b([^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|$)",
    re.DOTALL,
)
"""Role, channel, what is between it and the message, and the message, in the form of gpt-oss (OpenAI's harmony). The
recipient of a call is behind the role or the channel."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="parser")
_MOST_CALLS = 100
"""An answer that begins more calls has none: some of verl's parsers take cubic time for calls that do not end."""
_DEEPEST = 32
"""Levels of lists and mappings in the arguments of a call, and in a message; templates and parsers recurse."""
_TAIL = 16
"""Tokens at the end of a prompt in which a template may begin a thought."""
_SHAPES = 4096
"""Conversations by their roles that are remembered."""
_WITHOUT_TYPES = ("glm", "minimax", "seed")
"""verl's parsers that read what looks like JSON as that, whatever the tool says."""
_SAME = {"developer": "system", "function": "tool"}
"""OpenAI's other names of roles, which chat templates do not know."""
_NO_WORD = r"(?<![^\W\d_])"
_JSON = re.compile(r'"(?:[^"\\]|\\.?)*"?|[\[{]|[\]}]', re.DOTALL)
"""Strings, to the end if they have none, and brackets."""


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
    _shown: set[tuple[tuple[str, bool], ...]] = field(default_factory=set, init=False, repr=False)
    """Conversations, by their roles and whether a message has calls, that the template shows whole."""

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

        Raises MessageError if the template leaves a message out or refuses it, or a message is nested too deeply, and
        ToolError if the template does not show the tools.
        """
        if tools and not self._shows_tools:
            raise ToolError(
                f"model.path: the chat template of {self.tokenizer.name_or_path!r} shows no tools, and an agent is "
                "given some; set actor_rollout_ref.model.path, or that of its policy, to a model that calls tools, or "
                "describe them in the prompt"
            )
        return self._render(messages, [tool.schema for tool in tools])

    def _render(self, messages: Sequence[Message], schemas: list[dict[str, Any]]) -> list[int]:
        plain = [self._plain(_for_template(message)) for message in with_system(self.system, messages)]
        given = {"tools": schemas} if schemas else {}
        try:
            self._check_shown(plain)
            ids: list[int] = self.tokenizer.apply_chat_template(
                plain, add_generation_prompt=True, tokenize=True, return_dict=False, **given, **self.template_kwargs
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in plain)
            raise MessageError(f"{self._named} refuses messages of the roles {roles:.200}: {error}") from error
        return ids

    @property
    def _named(self) -> str:
        return f"model.path: the chat template of {getattr(self.tokenizer, 'name_or_path', '')!r}"

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def _text(self, messages: Sequence[Mapping[str, Any]], ask: bool = True) -> str:
        """Returns a conversation as text; see `template.Render`."""
        text: str = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=ask, tokenize=False, **self.template_kwargs
        )
        return text

    def _check_shown(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raises MessageError if the template would leave one of the messages out, whatever its content is."""
        shape = tuple((message["role"], bool(message.get("tool_calls"))) for message in messages)
        if shape in self._shown or not self._has_template:
            return
        for message in template.left_out(self._text, messages):
            raise MessageError(
                f"{self._named} shows no message of the role {message['role']!r} at its place among "
                f"{', '.join(role for role, _ in shape):.200}; use system (at the start), user, assistant, or tool "
                "after a call"
            )
        if all(message["content"].strip() for message in messages):
            if len(self._shown) >= _SHAPES:
                self._shown.clear()
            self._shown.add(shape)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return _any_of(self._special_tokens)

    @cached_property
    def _special_tokens(self) -> set[str]:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return {token for token in (*self.tokenizer.all_special_tokens, *added) if len(token) > 1}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """What is a token that no text should have, or ends or begins a message in the template."""
        texts, alone = template.between(self._text) if self._has_template else ([], [])
        lines = [rf"^[ \t]*{re.escape(line)}[ \t]*$" for line in alone]
        return re.compile("|".join([_any_of({*self._special_tokens, *texts}).pattern, *lines]), re.MULTILINE)

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns a message in which no text is a special token or a mark between messages.

        What one agent writes is in the prompts of others: spelt out there, the end of a message would be one.
        """

        def plain(value: Any) -> Any:
            if isinstance(value, str):
                return self._marks.sub(_apart, value)
            if isinstance(value, Mapping):
                return {plain(name): plain(part) for name, part in value.items()}
            return [plain(part) for part in value] if isinstance(value, list) else value

        return {name: part if name == "role" else plain(part) for name, part in message.items()}

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

    async def parse(
        self, token_ids: Sequence[int], tools: Sequence[Tool], text: str | None = None, opened: bool = False
    ) -> Reply:
        """Returns calls, thought and text of an answer; an answer that cannot be read has no calls.

        `text` is the answer's, if it is less than its tokens (`Limits.stop`); `opened` says whether its prompt has
        begun a thought.
        """
        ids = list(token_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()  # the parsers keep it in the text
        raw, whole, after = self._decoded(ids, text)
        if self.format == "gpt-oss":
            thought, said, called = _channels(whole, raw)
            said = said.removesuffix(after)
            begun, written = len(called), "\n".join([said, *called])
        else:
            whole = self._marked(whole.removesuffix(after))
            thought, left = split_thought(whole, opened)
            said = raw if left == whole else self._special.sub("", left).strip()
            begun, written = max((left.count(mark) for mark in self._call_marks), default=0), said
            if left != whole or after:  # what it thought may contain calls that it did not make
                ids = self.tokenizer.encode(left, add_special_tokens=False)
        if thought:
            thought = self._special.sub("", thought)
            raw = f"{OPEN}{thought}{CLOSE}{written}" if opened or self.format == "gpt-oss" else raw
        if begun > _MOST_CALLS:
            return Reply(said.strip(), thought, unparsed=begun, raw=raw)
        # In a thread and loop of its own: the parsers wait for asyncio's pool, which sync frameworks may have filled.
        extract = functools.partial(self._parser.extract_tool_calls, ids, _schemas(tools))
        left, found = await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: asyncio.run(extract()))
        calls = tuple(ToolCall(valid(call.name), valid(call.arguments)) for call in found)
        calls = tuple(call for call in calls if _depth(call.arguments) <= _DEEPEST)
        if self.format in _WITHOUT_TYPES:
            calls = tuple(ToolCall(call.name, _with_texts(call, tools)) for call in calls)
        # What is left has the token that ended it, of which a family may have several.
        kept = self._special.sub("", left) if calls and self.format != "gpt-oss" else said
        unparsed = max(0, max(begun, len(found)) - len(calls))
        return Reply(kept.strip(), thought, calls, unparsed=unparsed, raw=raw)

    def with_thought(self, token_ids: Sequence[int], text: str) -> str:
        """Returns an answer without tools, or less of it (`Limits.stop`), with its thought in `<think>`."""
        if self.format != "gpt-oss" and not self._thought_tags:
            return text
        raw, whole, after = self._decoded(token_ids, text)
        if self.format == "gpt-oss":
            thought, said, _ = _channels(whole, raw)
            said = said.removesuffix(after)
            return f"{OPEN}{thought}{CLOSE}{said}" if thought else said
        if not _any_of(self._thought_tags).search(whole):
            return text
        marked = self._special.sub(lambda token: token[0] if marks(token[0]) else "", self._marked(whole))
        return marked.removesuffix(after)

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Returns whether a prompt ends in the beginning of a thought."""
        return begins(self._marked(self.tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False)))

    @cached_property
    def _thought_tags(self) -> Mapping[str, bool]:
        """Tags of thoughts that decoding drops, or that no other family has -> whether they end one."""
        if not self._has_template:
            return {}
        names = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        own = template.thought_tags(self._text, [*names, str(self.tokenizer.chat_template)])
        dropped = {token: template.ends_thought(token) for token in self._special_tokens if marks(token)}
        return {**own, **dropped}

    def _marked(self, text: str) -> str:
        """Returns an answer, with its special tokens, in which the model's own tags of thoughts are `<think>`."""
        tags = self._thought_tags
        return _any_of(tags).sub(lambda tag: CLOSE if tags[tag[0]] else OPEN, text) if tags else text

    def _decoded(self, token_ids: Sequence[int], text: str | None) -> tuple[str, str, str]:
        """Returns an answer up to where it was stopped, all of it with its special tokens, and what followed there.

        In some families the tokens that mark calls are special ones.
        """
        decoded = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        raw = decoded if text is None else text
        return raw, self.tokenizer.decode(token_ids, skip_special_tokens=False), decoded[len(raw) :]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of any of some texts, the longest that fits; the end of a word is none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join((_NO_WORD if one[0].isalpha() else "") + re.escape(one) for one in ordered) or "(?!)")


def _apart(mark: re.Match[str]) -> str:
    """Returns a mark that is none any more."""
    return f"{mark[0][0]} {mark[0][1:]}"


def _channels(whole: str, otherwise: str) -> tuple[str, str, list[str]]:
    """Returns what an answer with its special tokens thought and said, by gpt-oss' channels, and the calls it began.

    `otherwise` is what it said if it has no channel.
    """
    parts = [(name, f"{before}{after}", body.strip()) for before, name, after, body in _CHANNEL.findall(whole)]
    if not parts:
        return "", "" if "<|channel|>" in whole else otherwise, []
    calls = [f"{to.strip()} {body}" for _, to, body in parts if " to=" in to]
    spoken = [(name in ("final", "commentary"), body) for name, to, body in parts if " to=" not in to]
    thought = "\n".join(body for said, body in spoken if not said)
    return thought, "\n".join(body for said, body in spoken if said), calls


def _schemas(tools: Sequence[Tool]) -> list[Any]:
    """Returns tools as verl's parsers read them: the types of arguments, which verl's schema needs one by one."""
    from verl.tools.schemas import OpenAIFunctionToolSchema

    def typed(tool: Tool) -> dict[str, Any]:
        types = {name: {"type": kind} for name, kind in _kinds(tool).items()}
        return {**tool.schema["function"], "parameters": {"type": "object", "properties": types}}

    return [OpenAIFunctionToolSchema(type="function", function=typed(tool)) for tool in tools]


def _kinds(tool: Tool) -> dict[str, str]:
    """Returns the type of each argument: a text, if it may be one, as what looks like a number may be a text, too."""
    properties, known = tool.parameters.get("properties") or {}, tool.parameters.get("$defs") or {}

    def kind_of(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        schema = {**schema, **known.get(name, {})}
        inner = {other: one for other, one in known.items() if other != name}
        parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
        given = schema.get("type", [])
        kinds = [given] if isinstance(given, str) else list(given)
        kinds += [kind_of(part, inner) for part in parts if isinstance(part, Mapping)]
        kinds = [kind for kind in kinds if kind != "null"]
        return "string" if "string" in kinds else kinds[0] if kinds else "object"

    # `true` is a schema, too.
    return {name: kind_of(one, known) for name, one in properties.items() if isinstance(one, Mapping)}


def _with_texts(call: ToolCall, tools: Sequence[Tool]) -> str:
    """Returns a call's arguments with those as texts that are to be: verl's parser has taken 1984 for a number."""
    (kinds,) = [_kinds(tool) for tool in tools if tool.name == call.name] or [{}]
    given = json.loads(call.arguments)
    for name, value in given.items():
        if kinds.get(name) == "string" and not isinstance(value, str | None):
            given[name] = json.dumps(value, ensure_ascii=False)
    return json.dumps(given, ensure_ascii=False)


def _for_template(message: Message) -> dict[str, Any]:
    """Returns a message in the form that chat templates take: contents as texts, arguments as mappings."""
    role = message.get("role")
    if not isinstance(role, str) or not role.isidentifier():
        raise MessageError(f"a message has the role {role!r:.80}; use system, user, assistant or tool")
    if not _is_flat(message, _DEEPEST + 8):
        raise MessageError(f"a message of the role {role!r} has more than {_DEEPEST} levels of lists and mappings")
    shown = {key: value for key, value in message.items() if value is not None}
    shown |= {"role": _SAME.get(role, role), "content": valid(text_of(message))}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown


def _parsed(arguments: Any) -> Mapping[str, Any]:
    """Returns a call's arguments as a mapping: templates ask for its items, and models write what they like."""
    try:
        if _depth(arguments) > _DEEPEST:
            known: Any = arguments
        else:
            known = json.loads(arguments) if isinstance(arguments, str) else arguments
            known = json.loads(valid(json.dumps(known, ensure_ascii=False)))
    except (ValueError, RecursionError):
        known = valid(str(arguments))
    return known if isinstance(known, Mapping) else {"arguments": known}


def _depth(arguments: Any) -> int:
    """Returns how many lists and mappings of a JSON text are open at once, at most; 0 for what is no text."""
    depth = most = 0
    for mark in _JSON.finditer(arguments) if isinstance(arguments, str) else ():
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        most = max(most, depth)
    return most


def _is_flat(value: Any, levels: int) -> bool:
    """Returns whether a value has at most so many levels of lists and mappings."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels >= 0 and all(_is_flat(part, levels - 1) for part in parts)
