"""A copy of a model with permuted token ids and another chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def renumber(source: Path, target: Path, shift: int = 50) -> None:
    """Copies a tied model; token `i` becomes `(i + shift) % vocabulary`, and prompts start with `<|system|>`."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = torch.roll(embedding, shift, dims=0)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})

    def new(token: int) -> int:
        return (token + shift) % len(embedding)

    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {text: new(token) for text, token in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = new(added["id"])
    tokenizer["added_tokens"].sort(key=lambda added: added["id"])
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((source / name).read_text())
        config.update({key: new(config[key]) for key in ("eos_token_id", "pad_token_id")})
        (target / name).write_text(json.dumps(config))
    template = target / "chat_template.jinja"
    template.write_text("<|system|>" + template.read_text())
