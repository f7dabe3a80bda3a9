"""A sampler over verl's LLM servers."""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_atgrpo.play.messages import Message, Reply, text_of
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import EpisodeFailed, Generation, ReplyLimits
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config.schema import SamplingSettings

SAMPLED = ("temperature", "top_p", "top_k")
"""Sampling parameters that an agent may have of its own."""
_MOST_CHARACTERS = 256
"""Characters for each token of the longest prompt. Longer ones are not tokenized, which would take seconds in which no
other episode goes on; templates may drop some of them, such as earlier thoughts."""


@dataclass
class ServedPolicy:
    """Samples candidates from verl's LLM servers."""

    client: Any
    """Has verl's `LLMServerClient.generate`."""
    chat: Chat
    sampling_params: dict[str, Any]
    max_prompt_length: int
    max_response_length: int
    request_timeout: float | None
    """Seconds for an answer; None: the client has its own time-out."""
    stop: tuple[str, ...] = ()
    """Texts at which every answer ends, beside those of a decision."""
    counts: Counter[str] = field(default_factory=Counter)
    """Requested answers (`candidates`), and over the received ones the tokens of their prompts (`prompt_tokens`) and
    those in the server's prefix cache (`cached_prompt_tokens`)."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Returns the token ids of a prompt, with the model's chat template; training uses the same ids.

        Raises EpisodeFailed if it is too long: a truncated one would hide part of the task; or as `Chat.encode`.
        """
        characters = sum(len(text_of(message)) for message in messages)
        if characters > _MOST_CHARACTERS * self.max_prompt_length:
            raise EpisodeFailed(
                "prompt_too_long",
                f"a prompt of {characters} characters is longer than data.max_prompt_length={self.max_prompt_length} "
                "tokens",
            )
        prompt_ids = self.chat.encode(messages, tools)
        if len(prompt_ids) > self.max_prompt_length:
            raise EpisodeFailed(
                "prompt_too_long",
                f"a prompt of {len(prompt_ids)} tokens is longer than data.max_prompt_length={self.max_prompt_length}",
            )
        return prompt_ids

    @classmethod
    def of(
        cls, sampling: SamplingSettings, chat: Chat, *, sampling_params: Mapping[str, Any], **others: Any
    ) -> ServedPolicy:
        """Returns the policy as an agent with these settings (`at_grpo.sampling`) samples it; `others` are fields."""
        own = {name: value for name in SAMPLED if (value := getattr(sampling, name)) is not None}
        if sampling.max_response_length is not None:
            others["max_response_length"] = sampling.max_response_length
        chat = chat.with_own(sampling.chat_template_kwargs, sampling.system)
        params = {**sampling_params, **own}
        return cls(chat=chat, sampling_params=params, stop=tuple(sampling.stop or ()), **others)

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        """Returns calls, thought and text of an answer."""
        return await self.chat.parse(generation.token_ids, tools, generation.text, generation.opened)

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: ReplyLimits | None = None
    ) -> Generation:
        """Samples one answer; raises EpisodeFailed on a time-out or an aborted request, and what the client does."""
        self.counts["candidates"] += 1
        given = limits or ReplyLimits()
        within = replace(given, stop=(*self.stop, *given.stop))
        most = min(self.max_response_length, within.max_tokens or self.max_response_length)
        params = {**self.sampling_params, "max_tokens": most}
        if within.stop:
            params |= {"stop": list(within.stop), "detokenize": True}  # vLLM looks for it in the text
        ends = {self.chat.tokenizer.eos_token_id, *(self.chat.call_ends if within.calls else ())}
        if len(ends) > 1:
            params["stop_token_ids"] = sorted(ends)
        if seed is not None:
            params["seed"] = seed
        try:
            output = await asyncio.wait_for(
                self.client.generate(decision_id, prompt_ids=prompt_ids, sampling_params=params), self.request_timeout
            )
        except asyncio.TimeoutError as error:
            raise EpisodeFailed("timeout", f"no answer within {self.request_timeout} s") from error
        if output.stop_reason == "aborted":
            raise EpisodeFailed("engine", "the server aborted the request")
        token_ids = list(output.token_ids)
        decoded = self.chat.tokenizer.decode(token_ids, skip_special_tokens=True)
        text = within.cut(decoded)
        log_probs = list(output.log_probs or ())
        if text != decoded:
            # vLLM ends there itself, but where an interrupted answer was resumed inside of the stop text.
            def has_stop(count: int) -> bool:
                part: str = self.chat.tokenizer.decode(token_ids[:count], skip_special_tokens=True)
                return within.cut(part) != part

            count = bisect.bisect_left(range(len(token_ids)), True, key=has_stop)
            token_ids, log_probs = token_ids[:count], log_probs[:count]
        ended = text != decoded or (bool(token_ids) and token_ids[-1] in ends)
        extra = output.extra_fields
        cached_tokens = extra.get("num_cached_tokens") or 0
        self.counts["prompt_tokens"] += len(prompt_ids)
        self.counts["cached_prompt_tokens"] += cached_tokens
        return Generation(
            token_ids=token_ids,
            log_probs=log_probs,
            text=text if within.calls else self.chat.with_thought(token_ids, text),
            truncated=len(token_ids) >= most and not ended,
            weights_version=(extra.get("min_global_steps") or 0, extra.get("max_global_steps") or 0),
            resumed=extra.get("resumed", 0),
            temperature=float(params.get("temperature", 1.0)),
            cached_tokens=cached_tokens,
            opened=self.chat.opens_thought(prompt_ids),
        )
