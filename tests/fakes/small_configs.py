"""Configurations of all causal language models of transformers, as narrow as they go."""

from __future__ import annotations

from typing import Any

NARROW = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_embd": 64,
    "n_head": 4,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "num_heads": 4,
}

MISSING = {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
"""Of kinds whose configuration has no default for them."""


def kinds() -> list[str]:
    """Returns the names of all kinds of models, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small(kind: str, **changes: Any) -> Any:
    """Returns a narrow configuration of a kind, with some of its values changed; raises whatever its class raises."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    text = config.get_text_config()
    as_many = getattr(text, "num_key_value_heads", 0) in (None, getattr(text, "num_attention_heads", None))
    for name, value in NARROW.items():
        # Where keys have a part with positions and one without, `head_dim` is that of positions.
        if hasattr(text, name) and (name, hasattr(text, "qk_rope_head_dim")) != ("head_dim", True):
            setattr(text, name, NARROW["num_attention_heads"] if as_many and name == "num_key_value_heads" else value)
    for name, value in MISSING.items():
        if getattr(text, name, 0) is None:
            setattr(text, name, value)
    for name in list(vars(text)):
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(getattr(text, name), float):
            setattr(text, name, 0.0)
    for name, value in changes.items():
        setattr(text, name, value)
    return config
