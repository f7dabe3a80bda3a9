"""The models of the parts, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size")
SIZES: dict[str, dict[str, int]] = {
    name: {**dict(zip(_KEYS, values, strict=True)), "num_key_value_heads": 2}
    for name, values in {
        "0p5b": (896, 4864, 24, 14, 64, 151_936),
        "1p5b": (1536, 8960, 28, 12, 128, 151_936),
        "small": (256, 768, 6, 4, 64, 128),
    }.items()
}
"""Those of Qwen2.5 of .5 and 1.5 billion parameters, and one of 4.8 million, as in a config.json."""


def random_model(folder: Path, size: str) -> Path:
    """Writes a Qwen3 with random weights in bfloat16 and a tokenizer with a token for each letter; returns the folder.

    The tokenizer's vocabulary is the model's, as servers sample no token that the tokenizer lacks. Half of the tokens
    have a U in their text, which is what `bench_against_grpo` rewards.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verl_atgrpo.files import move_into, temporary_folder
    from verl_atgrpo.lab.tiny_models.tiny import build_tokenizer

    if (folder / "config.json").exists():
        return folder
    tokenizer = build_tokenizer(())
    with temporary_folder(folder) as partial:
        tokenizer.save_pretrained(partial)
        _fill_vocabulary(partial / "tokenizer.json", SIZES[size]["vocab_size"])
        config = Qwen3Config(
            **SIZES[size],
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            Qwen3ForCausalLM(config).save_pretrained(partial)
        finally:
            torch.set_default_dtype(before)
        move_into(partial, folder, last="config.json")
    return folder


def _fill_vocabulary(path: Path, words: int) -> None:
    made: dict[str, Any] = json.loads(path.read_text())
    vocabulary = made["model"]["vocab"]
    for number in range(len(vocabulary), words):
        vocabulary[f"{'UD'[number % 2]}{number}"] = number
    path.write_text(json.dumps(made))


def config_of(folder: Path) -> dict[str, Any]:
    """Returns a model's config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def start_model(folder: Path, given: Path | None, reduced: bool) -> Path:
    """Returns the model of the trainings: the given one, SmolLM2, or where it is reduced a barely trained tiny one.

    Args:
        folder: where it is made if it is not there.
        given: `--model`.
        reduced: on the CPU.

    Raises RuntimeError if the packages that SmolLM2 is made of are missing.
    """
    if given is not None:
        return given.expanduser().resolve()
    if reduced:
        from verl_atgrpo.lab.tiny_models.warm_start import WarmStart, make

        make(folder / "tiny", WarmStart(clean_steps=60, noisy_steps=0))
        return folder / "tiny"
    there = Path(__file__).resolve().parents[2] / "runs/models/smollm2"
    if (there / "config.json").exists():
        return there
    from verl_atgrpo.lab.tiny_models.smollm2 import convert

    convert(folder / "smollm2")
    return folder / "smollm2"
