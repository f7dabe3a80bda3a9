"""A tiny Qwen3 with its tokenizer, the starting model of the CPU recipes, and a policy that samples from it.

The policy runs in this process with Hugging Face's `generate`, without server or Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl_atgrpo.play.environment import Environment, play
from verl_atgrpo.play.messages import Message, Reply
from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.tools import Tool
from verl_atgrpo.play.types import EVALUATE, EpisodeRecord, Generation, ReplyLimits, TeamOptions
from verl_atgrpo.train.chat import Chat

logger = logging.getLogger(__name__)

PAD, END = "<|pad|>", "<|end|>"
_SPECIAL = (PAD, END, "<|user|>", "<|assistant|>", "<|system|>", "<|unknown|>")
# Calls are written as models are to write them (`hermes`), so that a history continues the tokens that were sampled.
_CHAT_TEMPLATE = (
    "{% if tools %}<|system|>tools{% for tool in tools %} {{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(',') }}){% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>{{ message.content }}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|end|>{% endfor %}'
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per printable ASCII character, newline and each of `words`."""
    characters = ("\n", *(chr(code) for code in range(32, 127)))
    vocabulary = {token: index for index, token in enumerate(_SPECIAL + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token="<|unknown|>",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def build_model(tokenizer: Any, seed: int, hidden: int = 64, layers: int = 3, tied: bool = True) -> Qwen3ForCausalLM:
    """Returns a freshly initialised Qwen3 whose vocabulary is exactly the tokenizer's."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,  # the smallest that vLLM has a CPU kernel for
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


class LocalPolicy:
    """Samples at temperature 1 from a model in this process; concurrent requests are batched."""

    def __init__(self, model: Any, tokenizer: Any, max_response_length: int, seed: int = 0) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._chat = Chat(tokenizer)
        self._max_response_length = max_response_length
        self._seed = seed
        self._waiting: list[tuple[list[int], ReplyLimits, asyncio.Future[Generation]]] = []
        self._scheduled = False

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Applies the chat template."""
        return self._chat.encode(messages, tools)

    async def parse(self, generation: Generation, tools: Sequence[Tool]) -> Reply:
        """Returns calls, thought and text of an answer."""
        return await self._chat.parse(generation.token_ids, tools)

    async def generate(
        self, decision_id: str, prompt_ids: list[int], seed: int | None, limits: ReplyLimits | None = None
    ) -> Generation:
        """Samples an answer in a batch with concurrent requests; ignores `seed`, because a batch has one seed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        self._waiting.append((prompt_ids, limits or ReplyLimits(), future))
        if not self._scheduled:
            self._scheduled = True
            # All episodes that can continue send their requests before the timer, and join this batch.
            loop.call_later(0.005, self._answer)
        return await future

    def _answer(self) -> None:
        batch, self._waiting, self._scheduled = self._waiting, [], False
        rows = self._sample([ids for ids, *_ in batch])
        for (_, limits, future), row in zip(batch, rows, strict=True):
            if not future.cancelled():
                future.set_result(self._generation(row[: limits.max_tokens], limits))

    @torch.no_grad()
    def _sample(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Returns a row of tokens for each prompt; what follows an end is padding."""
        torch.manual_seed(stable_hash(self._seed, len(prompts), prompts[0]) % 2**31)
        padded = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        output = self.model.generate(
            **padded,
            max_new_tokens=self._max_response_length,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )
        rows: list[list[int]] = output[:, padded["input_ids"].shape[1] :].tolist()
        return rows

    def _generation(self, row: list[int], limits: ReplyLimits) -> Generation:
        end = self.tokenizer.eos_token_id
        tokens = row[: row.index(end) + 1] if end in row else row
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        cut = limits.cut(text)
        return Generation(tokens, [], cut, truncated=end not in row and cut == text)


def evaluate(environment: Environment, policy: LocalPolicy, tasks: int) -> list[EpisodeRecord]:
    """Plays the first `tasks` validation tasks once each, at temperature 1, and returns the episodes."""

    async def run() -> list[EpisodeRecord]:
        samplers = dict.fromkeys(environment.agents, policy)
        teams = [
            Team(samplers, TeamOptions(), EVALUATE, episode_id=str(index), on_score_error=_log)
            for index in range(tasks)
        ]
        episodes = (play(environment, environment.task("val", index), team) for index, team in enumerate(teams))
        return await asyncio.gather(*episodes)

    return asyncio.run(run())


def _log(agent: str, turn: int, reply: str, error: Exception) -> None:
    logger.warning("agent %r, turn %d: scoring %.200r raised %r", agent, turn, reply, error)
