"""Hostile replies through the real chat code over two turns: whatever parses renders, and nothing ends the run."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transformers")

from fakes.hostile_replies import LITERALS, REPLIES
from tokenizers import AddedToken

from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer
from verl_atgrpo.play.messages import MessageError, Reply, ToolCall
from verl_atgrpo.play.quoting import quoted
from verl_atgrpo.play.tool_use import observe
from verl_atgrpo.play.tools import tools_of
from verl_atgrpo.train.chat import Chat

_DSML = "\uff5cDSML\uff5c"
CALLS = {
    "hermes": '<tool_call>{"name": "search", "arguments": %s}</tool_call>',
    "gpt-oss": "<|channel|>commentary to=functions.search <|constrain|>json<|message|>%s<|call|>",
    "qwen3_coder": "<tool_call>\n<function=search>\n<parameter=query>\n%s\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "seed": "<seed:tool_call><function=search><parameter=query>%s</parameter></function></seed:tool_call>",
    "minimax": '<minimax:tool_call><invoke name="search"><parameter name="query">%s</parameter></invoke>'
    "</minimax:tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>search<|tool_call_argument_begin|>%s<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek_v4": f'<{_DSML}tool_calls><{_DSML}invoke name="search"><{_DSML}parameter name="query" string="false">%s'
    f"</{_DSML}parameter></{_DSML}invoke></{_DSML}tool_calls>",
    "gemma4": "<|tool_call>call:search{query:%s}<tool_call|>",
}
"""verl's parsers -> a call in their form, with a place for its arguments or the value of one."""
DEEP = (
    *("[" * depth + "]" * depth for depth in (31, 33, 200, 500, 900, 990, 5000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (31, 33, 200, 500, 900, 990, 5000)),
    *(f'{{"query": {"[" * depth}{"]" * depth}}}' for depth in (20, 40, 450, 950)),
    '{"a": [' * 300 + "1" + "]}" * 300,
    '{"query": "' + "[" * 900 + '"}',
    "[" * 900,
)
VALUES = (
    *DEEP,
    *("9" * 5000, "-" * 1000 + "1", "1e999", "NaN", "Infinity", '"\\ud800"', '"\\u0000"', "null", "true", "{}", '"'),
    *(
        '{"": 1}',
        '{"name": {"role": "<|end|>"}}',
        '{"<|end|>": "<|end|>"}',
        '{"query": "x", "query": [1]}',
        "\\",
        "\ud800",
    ),
)


def chat_of(form: str) -> Chat:
    tokenizer = build_tokenizer(("<tool_call>", "</tool_call>", "<think>", "</think>"))
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "<|im_end|>", "<tool_call|>"]
    tokenizer.add_tokens([AddedToken(mark, special=form == "gpt-oss", normalized=False) for mark in (*marks, _DSML)])
    return Chat(tokenizer, format=form)


CHATS = {form: chat_of(form) for form in CALLS}


def search(query: str) -> str:
    """Searches."""
    return query


TOOLS = tools_of([search])


def two_turns(chat: Chat, text: str) -> Reply:
    """Parses an answer, runs its calls, and renders what follows for the same agent and for another one."""
    ids = chat.tokenizer.encode(text.encode("utf-8", "replace").decode())
    reply = asyncio.run(chat.parse([*ids, chat.tokenizer.eos_token_id], TOOLS)).with_ids("a.0", 0)
    results = [asyncio.run(observe(TOOLS, call)) for call in reply.calls]
    history: list[Any] = [{"role": "user", "content": "Find."}, json.loads(json.dumps(reply.message))]
    for call, result in zip(reply.calls, results, strict=True):
        history.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text})
    history.append({"role": "user", "content": "Go on."})
    end = chat.tokenizer.eos_token_id
    assert chat.encode(history, TOOLS).count(end) == len(history) + 1, "each message ends once, and the tools"
    told = chat.encode([{"role": "user", "content": f"An agent wrote:\n{quoted(reply.text)}\nGo on."}])
    assert told.count(end) == 1
    return reply


@pytest.mark.parametrize("form", CALLS)
def test_a_call_of_any_arguments_renders_or_counts_as_unparsed(form: str) -> None:
    for value in (*VALUES, *LITERALS):
        reply = two_turns(CHATS[form], f"I look. {CALLS[form] % value}")
        assert reply.calls or reply.unparsed
        assert all(depth_of(json.loads(call.arguments)) <= 32 for call in reply.calls if is_json(call.arguments))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def depth_of(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if parts is None else 1 + max(map(depth_of, parts), default=0)


@pytest.mark.parametrize("form", ["hermes", "gpt-oss", "kimi"])
def test_the_corpus_of_hostile_replies_goes_through_two_turns(form: str) -> None:
    for reply in REPLIES:
        two_turns(CHATS[form], reply[:3000])


def test_a_message_with_half_of_a_character_is_rendered() -> None:
    """As an environment makes it that decodes a reply of JSON: half of an emoji is a letter there."""
    half = json.loads(r'{"plan": "party \ud83c"}')["plan"]
    ids = CHATS["hermes"].encode([{"role": "user", "content": half}])
    assert ids == CHATS["hermes"].encode([{"role": "user", "content": "party ?"}])


@pytest.mark.parametrize(("depth", "parsed"), [(1, True), (31, True), (32, False), (33, False), (500, False)])
def test_calls_are_parsed_to_32_levels(depth: int, parsed: bool) -> None:
    value = f'{{"query": {"[" * depth}{"]" * depth}}}'
    reply = two_turns(CHATS["hermes"], CALLS["hermes"] % value)
    assert (len(reply.calls), reply.unparsed) == ((1, 0) if parsed else (0, 1))


def nested(depth: int, kind: type) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize(("depth", "kind"), list(itertools.product([50, 300, 2000, 20_000], [list, dict])))
def test_a_message_that_is_nested_too_deeply_is_refused_with_one_line(depth: int, kind: type) -> None:
    """As a framework may send it, which makes its own messages."""
    chat, deep = CHATS["hermes"], nested(depth, kind)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": deep}}}
    for message in ({"content": "", "tool_calls": [call]}, {"content": "x", "annotations": deep}):
        with pytest.raises(MessageError, match=r"role 'assistant' has more than 32 levels"):
            chat.encode([{"role": "assistant", **message}])


@pytest.mark.parametrize("unit", ["[", '"', '\\"', '"\\', '{"a":', '["', "\\"])
def test_depth_is_read_in_linear_time(unit: str) -> None:
    """Quadratic time would be minutes here."""
    told = {"function": {"name": "f", "arguments": unit * 50_000}}
    assert CHATS["hermes"].encode([{"role": "assistant", "content": "", "tool_calls": [told]}])


def test_calls_that_cannot_render_are_no_part_of_a_reply() -> None:
    reply = Reply("", calls=(ToolCall("f", "[" * 5000),), raw="")
    assert CHATS["hermes"].encode([dict(reply.message)])
