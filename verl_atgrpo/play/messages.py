"""Messages in OpenAI's form: what a policy is shown, and what it replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.thoughts import split_thought

Message = Mapping[str, Any]
"""One chat message in OpenAI's form: `{"role": ..., "content": ...}`, perhaps with tool calls, or a tool's result. The
content is a text, or a list of parts `{"type": "text", "text": ...}`."""
Prompt = str | Sequence[Message]
_ID_LETTERS = 9
"""Length of a call's id; Mistral's templates require nine letters or digits."""


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


def as_messages(prompt: Prompt) -> list[Message]:
    """Returns `prompt` as chat messages: a text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


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
