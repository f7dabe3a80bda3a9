"""A tiny Qwen3 and its tokenizer, made on the spot: the starting model of the CPU recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END = "<|pad|>", "<|end|>"
_SPECIAL = (PAD, END, "<|user|>", "<|assistant|>", "<|system|>", "<|unknown|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
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
