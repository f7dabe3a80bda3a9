"""A model on an OpenAI-compatible server as a policy: chat messages in, text and token counts out."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from verl_atgrpo.play.messages import Message, Reply, ToolCall, with_system
from verl_atgrpo.play.thoughts import split_thought
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import EpisodeFailed, Generation, PolicyUnusable, ReplyLimits

KEY_VARIABLE = "OPENAI_API_KEY"

_RETRIES = 8
"""Retries with the client's back-off of at most 8 s, within the request's time-out."""
_SHOWN = 300
"""Most characters of a server's message in errors."""


@dataclass(frozen=True)
class RemoteModel:
    """A model that an OpenAI-compatible server serves."""

    model: str
    base_url: str
    key_variable: str = KEY_VARIABLE
    """The environment variable with the key, which is never written or logged."""

    def __str__(self) -> str:
        return f"{self.model}@{self.base_url}"

    @classmethod
    def parse(cls, text: str) -> RemoteModel | None:
        """Returns what `MODEL@http(s)://host/v1[#KEY_VARIABLE]` names, None for a text without a URL.

        Raises ValueError for a URL without a model, or with more than that.
        """
        model, at, url = re.match(r"(.*?)(@?)(https?://.*)?$", text, re.DOTALL).groups()  # type: ignore[union-attr]
        if url is None:
            return None
        parts = urlsplit(url)
        # The message does not repeat the URL, which may contain a secret.
        if parts.username or parts.password or parts.query:
            raise ValueError("an endpoint's URL takes no user, password or query; its key comes from the environment")
        if not model or not at:
            raise ValueError(f"{url.partition('#')[0]} names no model: write MODEL@URL")
        if parts.fragment and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", parts.fragment):
            raise ValueError(f"{model}@...: after # comes the name of the environment variable that holds the key")
        return cls(model, url.partition("#")[0].rstrip("/"), parts.fragment or KEY_VARIABLE)

    def key(self) -> str | None:
        """Returns the server's key; raises ValueError if a variable was named and is not set."""
        key = os.environ.get(self.key_variable)
        if not key and self.key_variable != KEY_VARIABLE:
            raise ValueError(f"{self}: the environment variable {self.key_variable} is not set")
        return key or None


class RemotePolicy:
    """Samples answers by chat completions; retries on 429, 5xx and lost connections.

    The server's interface has no token ids. A prompt's ids are the code points of its messages as JSON, an answer's
    the code points of its text, and `Generation.usage` has the server's token counts.
    """

    def __init__(
        self,
        endpoint: RemoteModel,
        own: Mapping[str, Any] | None = None,
        *,
        sampling: Mapping[str, Any],
        max_response_length: int,
        chat_template_kwargs: Mapping[str, Any],
        request_timeout: float,
    ) -> None:
        """Makes the client; the first request connects.

        Args:
            endpoint: the server and its model.
            own: an agent's own settings (`at_grpo.sampling`), which come before the following.
            sampling: `temperature`, `top_p`, `top_k`; `top_k` is sent only if positive, because OpenAI's own servers
                do not support it.
            max_response_length: tokens.
            chat_template_kwargs: sent only if not empty, for the same reason.
            request_timeout: seconds, including retries, after which a request without answer fails its episode.

        Raises:
            ImportError: the package openai is missing.
            ValueError: the key's environment variable is not set.
        """
        try:
            import openai
        except ImportError as error:
            raise ImportError("endpoints need the package openai: pip install 'verl-atgrpo[endpoints]'") from error
        self._openai = openai
        self._endpoint = endpoint
        self._key = endpoint.key()
        self._timeout = request_timeout
        self._client = openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=self._key or "none",  # the client requires a key even if the server does not
            timeout=request_timeout,
            max_retries=_RETRIES,
        )
        own = own or {}
        sampling = {name: own.get(name, value) for name, value in sampling.items()}
        chat_template_kwargs = {**chat_template_kwargs, **own.get("chat_template_kwargs", {})}
        self._system, self._stop = own.get("system"), tuple(own.get("stop", ()))
        extra: dict[str, Any] = {}
        if sampling["top_k"] > 0:
            extra["top_k"] = sampling["top_k"]
        if sampling.get("ignore_eos"):
            extra["ignore_eos"] = True
        if chat_template_kwargs:
            extra["chat_template_kwargs"] = dict(chat_template_kwargs)
        self._request = {
            "model": endpoint.model,
            "temperature": sampling["temperature"],
            "top_p": sampling["top_p"],
            # Not max_completion_tokens: servers without support ignore it silently and generate without limit.
            "max_tokens": own.get("max_response_length", max_response_length),
            "extra_body": extra or None,
        }

    async def __aenter__(self) -> RemotePolicy:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the code points of messages and tools as JSON, in place of token ids."""
        request: dict[str, Any] = {"messages": [dict(message) for message in with_system(self._system, messages)]}
        if tools:
            request["tools"] = [tool.schema for tool in tools]
        return [ord(char) for char in json.dumps(request)]

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        """Returns the answer as the server parsed it."""
        assert generation.reply is not None
        return generation.reply

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: ReplyLimits | None = None
    ) -> Generation:
        """Samples one answer.

        Raises:
            EpisodeFailed: the request timed out or was refused.
            PolicyUnusable: the server refuses every request, or does not count tokens.
        """
        asked = json.loads("".join(map(chr, prompt_ids)))
        openai = self._openai
        if stop := (*self._stop, *(limits.stop if limits is not None else ())):
            asked["stop"] = list(stop)
        if limits is not None and limits.max_tokens is not None:
            asked["max_tokens"] = min(limits.max_tokens, self._request["max_tokens"])
        if seed is not None:
            asked["seed"] = seed
        try:
            answer = await asyncio.wait_for(
                self._client.chat.completions.create(**{**self._request, **asked}), self._timeout
            )
        except (asyncio.TimeoutError, openai.APITimeoutError) as error:
            raise EpisodeFailed("timeout", f"{self._endpoint}: no answer within {self._timeout} s") from error
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            # Without the server's message, which may contain a part of the key.
            raise PolicyUnusable(
                f"{self._endpoint} returns HTTP {error.status_code}: check the URL, the model's name and the key in "
                f"{self._endpoint.key_variable}"
            ) from None
        except openai.RateLimitError as error:
            raise EpisodeFailed("rate_limit", self._message(error)) from None
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise EpisodeFailed("refused", self._message(error)) from None
        except (openai.APIError, json.JSONDecodeError) as error:
            raise EpisodeFailed("endpoint", self._message(error)) from None
        return self._generation(answer)

    def _message(self, error: Exception) -> str:
        text = f"{self._endpoint}: {type(error).__name__}: {error}"
        return (text.replace(self._key, "***") if self._key else text)[:_SHOWN]

    def _generation(self, answer: Any) -> Generation:
        choices = getattr(answer, "choices", None)
        if not choices:
            raise EpisodeFailed("endpoint", f"{self._endpoint}: the answer is no chat completion")
        if choices[0].finish_reason == "content_filter":
            raise EpisodeFailed("content_filter", f"{self._endpoint}: the answer was filtered")
        if answer.usage is None:
            raise PolicyUnusable(f"{self._endpoint} sends no usage: the tokens of its answers cannot be counted")
        message = choices[0].message
        text = message.content or ""
        # Servers of reasoning models have either name, and those that do not know the model's tags leave them in.
        thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""
        left_in, said = split_thought(text)
        called = [call for call in message.tool_calls or () if call.type == "function"]
        calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in called)
        return Generation(
            token_ids=[ord(char) for char in text],
            log_probs=[],
            text=text,
            truncated=choices[0].finish_reason == "length",
            reply=Reply(said, thought or left_in, calls, raw=text),
            usage=(answer.usage.prompt_tokens, answer.usage.completion_tokens),
        )
