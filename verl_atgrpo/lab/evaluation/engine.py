"""vLLM in this process, with the interface of verl's servers that `ServedPolicy` uses."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import compat
from verl_atgrpo.play.types import EpisodeFailed, PolicyUnusable
from verl_atgrpo.train.serving.server import ADAPTER

# Its workers mask logits beyond the tokenizer's vocabulary, as in training, and end with the process that starts them.
_WORKER_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
_SAME = (
    *("dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    *("enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "data_parallel_size"),
)
"""Keys of verl's `rollout` section that vLLM has under the same name."""


def engine_args(key: str, path: str, policy: DictConfig) -> dict[str, Any]:
    """Returns vLLM's arguments to serve the model at `path` as in training.

    `policy` is its `actor_rollout_ref`, `key` names that. Raises ValueError for settings that are not supported here.
    """
    rollout = policy.rollout
    if rollout.quantization is not None:
        raise ValueError(
            f"{key}.rollout.quantization={rollout.quantization}: verl quantizes weights on their way to the server, "
            "which an evaluation does not; set it to null"
        )
    own: Any = OmegaConf.to_container(rollout.engine_kwargs.get("vllm") or OmegaConf.create(), resolve=True)
    return {
        "model": path,
        **{name: rollout[name] for name in _SAME},
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "trust_remote_code": bool(policy.model.get("trust_remote_code")),
        "worker_extension_cls": _WORKER_EXTENSION,
        "disable_log_stats": True,
        **{name: value for name, value in own.items() if value is not None},
    }


class Engine:
    """One model in vLLM, with the interface of verl's client that `ServedPolicy` uses."""

    def __init__(self, args: Mapping[str, Any], tokenizer: Any, processor: Any) -> None:
        """Keeps vLLM's arguments (`engine_args`); ids beyond the tokenizer's are never sampled. See `async with`."""
        self._args = dict(args)
        self._tokenizer = tokenizer
        self._processor = processor
        self._engine: Any = None
        self._numbers = itertools.count()

    async def __aenter__(self) -> Engine:
        """Loads the model, which blocks the event loop; raises compat.CompatError if vLLM is missing."""
        compat.check_distributions()
        compat.check_symbols(compat.EVALUATION_SYMBOLS)
        from verl.plugin.platform import get_platform

        # As in verl's servers. Spawned: a forked engine would inherit this process's threads.
        os.environ.update(get_platform().rollout_env_vars())
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from verl.workers.rollout.utils import get_vision_placeholder_token_ids
        from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config, get_vllm_max_lora_rank
        from vllm import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        # Parsed as in verl's servers, so that recipes can use JSON in strings.
        if "max_lora_rank" in self._args:
            self._args["max_lora_rank"] = get_vllm_max_lora_rank(self._args["max_lora_rank"])
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="engine_kwargs.vllm"))
        args = parser.parse_args(build_cli_args_from_config(self._args))
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        banned = get_vision_placeholder_token_ids(self._processor)
        vocabulary = {"vocab_size": len(self._tokenizer), "banned_token_ids": banned}
        await self._engine.collective_rpc(method="monkey_patch_model", kwargs=vocabulary)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.shutdown()

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Mapping[str, Any]) -> Any:
        """Returns verl's TokenOutput for one prompt.

        Raises EpisodeFailed if the prompt leaves no room for an answer, PolicyUnusable if the engine is dead.
        """
        from verl.workers.rollout.replica import TokenOutput
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        room = self._engine.model_config.max_model_len - len(prompt_ids)
        if room < 1:
            told = f"a prompt of {len(prompt_ids)} tokens leaves no room in rollout.max_model_len"
            raise EpisodeFailed("engine", told)
        params = {**sampling_params, "max_tokens": min(sampling_params["max_tokens"], room)}
        adapter = params.pop(ADAPTER, None)
        lora = None if adapter is None else LoRARequest(**adapter)
        last, name = None, f"{request_id}.{next(self._numbers)}"
        prompt = {"prompt_token_ids": prompt_ids}
        try:
            async for output in self._engine.generate(prompt, SamplingParams(**params), name, lora_request=lora):
                last = output
        except EngineDeadError as error:
            raise PolicyUnusable(f"vLLM with {self._args['model']} died; its log is above") from error
        if last is None or not last.outputs or last.outputs[0].finish_reason == "abort":
            return TokenOutput(token_ids=[], stop_reason="aborted")
        return TokenOutput(token_ids=list(last.outputs[0].token_ids), stop_reason="completed")
