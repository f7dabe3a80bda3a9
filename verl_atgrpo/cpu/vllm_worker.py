"""Weight sync in vLLM for CPU, set by `engine_kwargs.vllm.worker_extension_cls`.

vLLM on CPU packs every linear weight after loading and drops the parameter, so verl's plain `load_weights` has nothing
to write to. vLLM's layer-wise reload rebuilds, loads and packs again.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_atgrpo.train.serving.vllm_worker import AdapterWorkerExtension


class CpuWorkerExtension(AdapterWorkerExtension):
    """The worker extension with a weight update for packed weights."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Loads the actor's weights, or its LoRA adapter, from the trainer."""
        if peft_config is not None and base_sync_done:
            # Adapters are not packed.
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        # Without `.base_layer`, because vLLM's reload resolves adapter layers itself.
        weights = ((name.replace(".base_layer.", "."), tensor) for name, tensor in self.received(use_shm))
        self.reload_weights(weights_iterator=weights)
        self._repack_tied_head()

    def _repack_tied_head(self) -> None:
        """Packs a tied head again: it has no tensor in the checkpoint, so the reload leaves its packed copy stale."""
        if not getattr(self.model_runner.model_config.hf_config, "tie_word_embeddings", False):
            return
        model = self.model_runner.get_model()
        head, embedding = _without_adapter(model.lm_head), _without_adapter(model.model.embed_tokens)
        head.tie_weights(embedding)
        head.quant_method.process_weights_after_loading(head)


def _without_adapter(layer: torch.nn.Module) -> Any:
    return getattr(layer, "base_layer", layer)
