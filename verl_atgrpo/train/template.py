"""What a model's chat template writes around messages: marks between them, tags of thoughts, and whom it leaves out.

All of it is found by rendering conversations whose contents are words that nothing else contains, so that it holds for
a template of any family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from verl_atgrpo.play.thoughts import marks

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""(messages, whether the prompt of an answer follows) -> text; raises `jinja2.TemplateError` for what it refuses."""
_WORD = re.compile("Word[0-9]+Word")
_TAG = re.compile(r"<{1,2}[^<>\s]{1,40}>{1,2}|\[[^\[\]\s]{1,40}\]|\u25c1[^\s\u25c1\u25b7]{1,40}\u25b7")
_LONGEST = 40
"""Characters of a line between messages; a longer one is a text, such as a system prompt that the template has."""
_THOUGHT = re.compile(r"(?i)(?:think(?:ing)?|thoughts?|reasoning)(?:_(?:start|begin|end))?\W{1,2}$")
_END = re.compile(r"(?i)/|(?:^|[^a-z])end(?:[^a-z]|$)")


def word(number: int) -> str:
    """Returns the content of a message by its number."""
    return f"Word{number}Word"


def between(render: Render) -> tuple[list[str], list[str]]:
    """Returns what marks the end or the beginning of a message: texts, and words that do it alone in a line.

    A reply that spells one would end its message in the prompt of another agent, and begin one of another role. Tags
    of thoughts are none of them: prompts may ask for thoughts in such tags.
    """
    said = [{"role": role, "content": word(number)} for number, role in enumerate(("user", "assistant", "user"), 1)]
    called = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
    asked: list[dict[str, Any]] = [said[0], {"role": "assistant", "content": "", "tool_calls": [called]}]
    told = {"role": "tool", "content": word(4), "tool_call_id": "abcdefghi", "name": "f"}
    texts: dict[str, None] = {}
    alone: dict[str, None] = {}
    for messages in ([{"role": "system", "content": word(0)}, *said], said):
        before, *parts = _WORD.split(_rendered(render, messages))
        texts.update(dict.fromkeys(_TAG.findall(before)))
        for part in parts:
            tags = _TAG.findall(part)
            texts.update(dict.fromkeys(tags))
            for line in map(str.strip, _TAG.sub("\n", part).splitlines()):
                if line.isalnum() and not tags:
                    alone[line] = None
                elif not line.isalnum() and re.search(r"\w", line) and len(line) <= _LONGEST:
                    texts[line] = None
    # The answer's own marks of a call are none.
    of_call = _TAG.findall(_rendered(render, asked))
    texts.update(dict.fromkeys(set(_TAG.findall(_rendered(render, [*asked, told]))) - set(of_call)))
    return [text for text in texts if not _is_thought(text) and not _WORD.search(text)], list(alone)


def thought_tags(render: Render, names: Sequence[str]) -> Mapping[str, bool]:
    """Returns a model's tags of thoughts -> whether they end one, beside those that `split_thought` reads.

    `names` are the tokens that its tokenizer was given, and the template's source.
    """
    found = {tag: ends_thought(tag) for name in names for tag in _TAG.findall(name) if _is_thought(tag)}
    thought = {"reasoning_content": word(1), "reasoning": word(1), "thinking": word(1)}
    asked: Mapping[str, Any] = {"role": "user", "content": word(0)}
    answered = _rendered(render, [asked, {"role": "assistant", "content": word(2), **thought}], False)
    parts = {one[0]: one.start() for one in _WORD.finditer(answered)}
    if word(1) in parts and parts[word(1)] < parts.get(word(2), 0):
        before = answered[answered.index(word(0)) + len(word(0)) : parts[word(1)]]
        header = _rendered(render, [asked]).rpartition(word(0))[2]
        same = next((at for at, pair in enumerate(zip(before, header, strict=False)) if len(set(pair)) == 2), None)
        begins = before[min(len(before), len(header)) if same is None else same :].strip()
        begins = begins or "".join(_TAG.findall(before)[-1:])  # where the prompt of an answer begins its thought
        ends = answered[parts[word(1)] + len(word(1)) : parts[word(2)]].strip()
        if begins and ends and not begins.isalnum() and not ends.isalnum():
            found |= {begins: False, ends: True}
    return {tag: ends for tag, ends in found.items() if not marks(tag)}


def ends_thought(tag: str) -> bool:
    """Returns whether a tag of thoughts ends one."""
    return bool(_END.search(tag))


def left_out(render: Render, messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields the messages that the template does not show; an answer with calls may lack its text."""
    shown = render([{**message, "content": word(number)} for number, message in enumerate(messages)], True)
    for number, message in enumerate(messages):
        if word(number) not in shown and message["content"].strip() and not message.get("tool_calls"):
            yield message


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], ask: bool = True) -> str:
    try:
        return render(messages, ask)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError):  # a role, or an order, that it refuses
        return ""


def _is_thought(text: str) -> bool:
    return marks(text) or bool(_TAG.fullmatch(text) and _THOUGHT.search(text))
