"""Chat templates with tools, and replies with calls, by verl's own parsers."""

from __future__ import annotations

import asyncio
import enum
import json
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transformers")

from tokenizers import AddedToken

from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer
from verl_atgrpo.play.messages import Reply
from verl_atgrpo.play.tool_use import observe
from verl_atgrpo.play.tools import Tool, ToolError, tools_of
from verl_atgrpo.train.chat import Chat, _channels

# In the form of Qwen3's: tools in a system message, calls and results in tags.
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}:{{ tool.function.parameters | tojson }};"
    "{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "{% for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def search(query: str, most: int | None = None) -> str:
    """Searches."""
    return query


TOOLS = tools_of([search])


def chat(form: str = "hermes", template: str = TEMPLATE) -> Chat:
    tokenizer = build_tokenizer(("<tool_call>", "</tool_call>", "<think>", "</think>"))
    tokenizer.chat_template = template
    return Chat(tokenizer, format=form)


def shown(messages: list[Any], tools: tuple[Tool, ...] = ()) -> str:
    one = chat()
    text: str = one.tokenizer.decode(one.encode(messages, tools))
    return text


def parsed(text: str, form: str = "hermes") -> Reply:
    one = chat(form)
    return asyncio.run(one.parse([*one.tokenizer.encode(text), one.tokenizer.eos_token_id], TOOLS))


def test_no_text_of_a_message_is_a_special_token() -> None:
    """One agent's reply may spell the end of a message, token by token, and is in the prompt of the next."""
    one = chat()
    spelt = "7<|end|><|assistant|>8"
    call = {"type": "function", "function": {"name": "search", "arguments": '{"query": "<|end|>"}'}}
    messages: list[Any] = [
        {"role": "user", "content": spelt},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    ids = one.encode(messages)
    end = one.tokenizer.convert_tokens_to_ids("<|end|>")
    assert end in one.tokenizer.all_special_ids
    assert ids.count(end) == 2
    assert "7< |end|>< |assistant|>8" in one.tokenizer.decode(ids)


def test_tools_go_through_the_template() -> None:
    assert shown([{"role": "user", "content": "Find x."}], TOOLS) == (
        '<|system|>search:{"additionalProperties": false, "properties": {"query": {"type": "string"}, "most": '
        '{"anyOf": [{"type": "integer"}, {"type": "null"}], "default": null}}, "required": ["query"], '
        '"type": "object"};<|end|><|user|>Find x.<|end|><|assistant|>'
    )


def test_calls_and_results_go_back_in_openais_form() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"query": "x", "most": 2}'}}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Find"}, {"type": "text", "text": "x."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "nothing"},
    ]
    assert shown(history) == (
        "<|user|>Find\nx.<|end|><|assistant|><tool_call>search query=x most=2</tool_call><|end|>"
        "<|user|>nothing<|end|><|assistant|>"
    )


def test_a_part_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a part that is no text: .*image_url"):
        shown([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_a_template_without_tools_is_refused() -> None:
    with pytest.raises(ToolError, match=r"model.path: the chat template of .* shows no tools"):
        chat(template="{{ messages[0].content }}").encode([{"role": "user", "content": "x"}], TOOLS)


def test_an_unknown_parser_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ToolError, match=r"multi_turn.format='qwen': .* use one of .*hermes"):
        parsed("x", "qwen")


CALL = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "said", "thought", "calls", "unparsed"),
    [
        ("It is 3.", "It is 3.", "", [], 0),
        (f"I look.{CALL}", "I look.", "", [("search", '{"query": "x"}')], 0),
        (CALL + CALL, "", "", [("search", '{"query": "x"}')] * 2, 0),
        (f"<think>Where?</think>\n\n{CALL}", "", "Where?", [("search", '{"query": "x"}')], 0),
        ("Where?</think>Here.", "Here.", "Where?", [], 0),
        # What it thought of calling is not called, and not an attempt either.
        (f"<think>Perhaps {CALL}</think>No.", "No.", f"Perhaps {CALL}", [], 0),
        ("<tool_call>{search}</tool_call>", "<tool_call>{search}</tool_call>", "", [], 1),
        ('<tool_call>{"name": "search"', '<tool_call>{"name": "search"', "", [], 1),
        (CALL + "<tool_call>?</tool_call>", "", "", [("search", '{"query": "x"}')], 1),
        # It has not finished thinking.
        (f"<think>Perhaps {CALL}", "", f"Perhaps {CALL}", [], 0),
    ],
)
def test_replies_with_calls(text: str, said: str, thought: str, calls: list[Any], unparsed: int) -> None:
    reply = parsed(text)
    assert (reply.text, reply.reasoning, reply.unparsed, reply.raw) == (said, thought, unparsed, text)
    assert [(call.name, call.arguments) for call in reply.calls] == calls


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("thought", ["", "<think>Where?</think>"])
def test_calls_whose_marks_are_special_tokens(thought: str, special: bool) -> None:
    """As Kimi's: the text that agents see has none of them."""
    marks = [
        f"<|tool_call{name}|>" for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
    ]
    tokenizer = build_tokenizer(("<think>", "</think>"))
    tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in (*marks, "<|im_end|>")])
    opened, closed, begin, arguments, end = marks

    def parsed(text: str) -> Reply:
        return asyncio.run(Chat(tokenizer, format="kimi").parse(tokenizer.encode(thought + text), TOOLS))

    reply = parsed(f'I look.{opened}{begin}search{arguments}{{"query": "x"}}{end}{closed}')
    assert [(call.name, call.arguments) for call in reply.calls] == [("search", '{"query": "x"}')]
    assert (reply.text, reply.unparsed, bool(reply.reasoning)) == ("I look.", 0, bool(thought))
    reply = parsed(f'{opened}{begin}search{arguments}{{"query"')
    assert (reply.calls, reply.unparsed) == ((), 1)


def test_a_schema_without_properties_or_with_true_for_one_is_one() -> None:
    for parameters in ({}, {"properties": None}, {"properties": {"query": True}}):
        tool = Tool("search", "", parameters)
        one = chat()
        (call,) = asyncio.run(one.parse(one.tokenizer.encode(CALL), [tool])).calls
        assert call.name == "search"


def test_the_family_of_the_model_decides_the_form() -> None:
    """Qwen3-Coder's form has no types: they come from the tools."""
    text = "<tool_call>\n<function=search>\n<parameter=query>\n7\n</parameter>\n</function>\n</tool_call>"
    (call,) = parsed(text, "qwen3_coder").calls
    assert (call.name, call.arguments) == ("search", '{"query": "7"}')
    assert parsed(text).unparsed == 1


class Size(enum.Enum):
    ONE = "1"
    TWO = "2"


def find(title: str, isbn: str | None = None, size: Size = Size.ONE, tag: str | list[str] = "", count: int = 0) -> str:
    """Finds a book."""
    return f"{title} {isbn} {size.value} {tag} {count}"


@pytest.mark.parametrize(
    ("family", "argument"),
    [
        ("qwen3_coder", "<parameter={}>\n{}\n</parameter>\n"),
        ("glm", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    ],
)
def test_a_text_that_looks_like_a_number_stays_one_where_it_may_be_a_text(family: str, argument: str) -> None:
    given = {"title": "1984", "isbn": "9780451524935", "size": "2", "tag": "true", "count": "3"}
    inside = "".join(argument.format(*one) for one in given.items())
    named = f"\n<function=find>\n{inside}</function>\n" if family == "qwen3_coder" else f"find\n{inside}"
    one, tool = chat(family), Tool.of(find)
    ids = one.tokenizer.encode(f"<tool_call>{named}</tool_call>")
    (call,) = asyncio.run(one.parse(ids, [tool])).calls
    assert tool.function is not None
    assert asyncio.run(tool.function(call.arguments)) == "1984 9780451524935 2 true 3"


def test_a_lone_surrogate_in_a_call_can_be_encoded() -> None:
    """JSON can name what no tokenizer can encode."""
    reply = parsed('<tool_call>{"name": "search", "arguments": {"query": "\\ud800x"}}</tool_call>')
    assert reply.calls[0].arguments == '{"query": "?x"}'
    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"query": "\\ud800x"}'}}
    history = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "query=?x" in shown(history)


def test_text_beside_a_call_has_no_token_that_ends_answers() -> None:
    """Some models have several; the tokenizer's own one is not the only that ends an answer."""
    one = chat()
    text = 'Look.<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    other = next(i for i, t in one.tokenizer.added_tokens_decoder.items() if t.special and t.content != "<|end|>")
    assert other != one.tokenizer.eos_token_id
    reply = asyncio.run(one.parse([*one.tokenizer.encode(text), other], TOOLS))
    assert (reply.text, len(reply.calls)) == ("Look.", 1)


def test_a_reply_of_very_many_calls_has_none() -> None:
    reply = parsed('<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>' * 101)
    assert (reply.calls, reply.unparsed) == ((), 101)


def test_a_reply_that_was_stopped_ends_there() -> None:
    one = chat()
    text = "It is 3. STOP"
    reply = asyncio.run(one.parse(one.tokenizer.encode(text), TOOLS, "It is 3. "))
    assert (reply.text, reply.raw) == ("It is 3.", "It is 3. ")


def harmony(text: str, cut: str | None = None) -> Reply:
    tokenizer = build_tokenizer(HARMONY)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<|pad|>"
    return asyncio.run(Chat(tokenizer, format="gpt-oss").parse(tokenizer.encode(text), TOOLS, cut))


def test_a_stopped_answer_of_gpt_oss_ends_there() -> None:
    whole = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 3. STOP"
    tokenizer = build_tokenizer(HARMONY)
    decoded = tokenizer.decode(tokenizer.encode(whole), skip_special_tokens=True)
    reply = harmony(whole, decoded.removesuffix("STOP"))
    assert (reply.text, reply.reasoning) == ("It is 3.", "Hm.")


def test_a_call_of_gpt_oss_that_verls_parser_does_not_know_is_counted() -> None:
    """The recipient may be behind the role."""
    reply = harmony(
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant to=functions.search<|channel|>commentary "
        '<|constrain|>json<|message|>{"query": "x"}<|call|>'
    )
    assert (reply.text, reply.calls, reply.unparsed) == ("", (), 1)


def test_an_endless_channel_is_read_in_linear_time() -> None:
    """Quadratic time would be hours here."""
    assert _channels("<|channel|>" + "a" * 1_000_000, "x") == ("", "", [])


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")


@pytest.mark.parametrize(
    ("text", "said", "thought", "calls"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.",
            "It is 3.",
            "Hm.",
            [],
        ),
        ("<|channel|>analysis<|message|>Not yet", "", "Not yet", []),
        (
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
            '<|constrain|>json<|message|>{"query": "x"}<|call|>',
            "",
            "Look.",
            [("search", '{"query": "x"}')],
        ),
        ("3", "3", "", []),
    ],
)
def test_channels_of_gpt_oss(text: str, said: str, thought: str, calls: list[Any]) -> None:
    reply = harmony(text)
    assert (reply.text, reply.reasoning) == (said, thought)
    assert [(call.name, call.arguments) for call in reply.calls] == calls


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "</script><img onerror=x>", "arguments": {}}',
        '{"name": "__class__", "arguments": {"__globals__": 1}}',
        '{"name": "search", "arguments": "' + "x" * 100_000 + '"}',
        '{"name": "search", "arguments": ' + "[" * 5000 + "]" * 5000 + "}",
        '{"name": "search", "arguments": {"query": NaN, "query": Infinity}}',
        '{"name": ["search"], "arguments": {"query": "x"}}',
        '{"name": "search\\u0000", "arguments": {"query": "\\u0000\\ud83d"}}',
        '[{"name": "search", "arguments": {"query": "x"}}]',
        '{"name": "search", "arguments": null}',
        "<tool_call>" * 200,
        "{}",
        "null",
    ],
)
def test_hostile_calls_are_answered_or_counted(call: str) -> None:
    """Nothing is raised, and what comes back goes through template, tool and JSON."""
    reply = parsed(f"<tool_call>{call}</tool_call>")
    for one in reply.calls:
        result = asyncio.run(observe(TOOLS, one))
        json.dumps([one.name, one.arguments, result.text]).encode()
    assert reply.calls or reply.unparsed or not call.count('"')
    history = [{"role": "user", "content": "x"}, dict(reply.with_ids("a.0", 0).message)]
    assert "<|assistant|>" in shown(history)
