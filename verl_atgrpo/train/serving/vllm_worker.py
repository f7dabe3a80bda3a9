"""verl's extension of vLLM's workers, with adapters under numbers of their own. Imported only in vLLM's processes."""

from __future__ import annotations

from typing import Any

import torch
from verl.utils.vllm import TensorLoRARequest
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_atgrpo.train.serving.server import ADAPTER, adapter_request


class AdapterWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    """Loads several adapters of one base, where verl's loads one."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Loads the trainer's weights, or the adapter whose number is in its configuration."""
        number = (peft_config or {}).get(ADAPTER)
        if number is None or not base_sync_done:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        tensors = dict(self.received(use_shm))
        self.remove_lora(number)
        self.add_lora(TensorLoRARequest(**adapter_request(number), peft_config=peft_config, lora_tensors=tensors))

    def received(self, use_shm: bool) -> list[tuple[str, torch.Tensor]]:
        """Returns all tensors that the trainer sends now."""
        weights: list[tuple[str, torch.Tensor]] = []

        def keep(bucket: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
            # Cloned, because the bucket is a view of shared memory that the next bucket overwrites.
            weights.extend((name, tensor.clone()) for name, tensor in bucket)

        BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm).receive_weights(
            on_bucket_received=keep
        )
        return weights
