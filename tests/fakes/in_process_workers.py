"""A policy's workers in this process: verl's worker and engine with a lookup table as the model.

verl's are the mini-batches, epochs and shuffling (`TrainingWorker`), temperature, entropy, loss scale and optimizer
steps (`FSDPEngineWithLMHead`, `ppo_loss`), and disabling the adapter for reference log-probs. Only the model, the
checkpoint files and the transport are fake.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fakes.local_queue import LocalQueue
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from transformers import AutoConfig
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.flops_counter import FlopsCounter
from verl.utils.profiler import DistProfiler
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from verl_atgrpo.lab.tiny_models.tiny import build_model, build_tokenizer
from verl_atgrpo.train.engine.prefix_tree.engine import STATES
from verl_atgrpo.train.serving.workers import PolicyWorker


@contextmanager
def process_group() -> Iterator[None]:
    """A process group of one process, which verl's engine needs."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def save_model_folder(folder: Path, chat_template: str | None = "default") -> None:
    """Writes a tokenizer and a model configuration: all that the driver reads of a model."""
    tokenizer = build_tokenizer(())
    if chat_template != "default":
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    config = build_model(tokenizer, seed=0, hidden=8, layers=1).config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


@cache
def _model_config(path: str) -> Any:
    return AutoConfig.from_pretrained(path)


class Table(torch.nn.Module):
    """A bigram language model; with an adapter, only that is trained."""

    def __init__(self, base: Tensor, adapter: bool) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(base.clone(), requires_grad=not adapter)
        self.adapter = torch.nn.Parameter(torch.zeros_like(base)) if adapter else None
        self._adapted = adapter

    @property
    def logits(self) -> Tensor:
        """Logits (last token, next token): (V, V)."""
        return self.base + self.adapter if self.adapter is not None and self._adapted else self.base

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[input_ids])

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        assert self.adapter is not None, "the model has no adapter"
        self._adapted = False
        yield
        self._adapted = True


class TableEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine without sharding, with SGD; records the rows of every optimizer step."""

    def __init__(self, module: Table, section: Any) -> None:
        self.module = module
        self.engine_config, self.optimizer_config = section.engine, section.optim
        self._autocast_dtype, self.scaler = torch.float32, None
        self._is_offload_param = self._is_offload_optimizer = self._qat_enabled = False
        self.ulysses_device_mesh = self.ulysses_parallel_group = None
        self.ulysses_sequence_parallel_size, self.use_ulysses_sp = 1, False
        self.pad_to_length = False
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=section.optim.lr)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.steps: list[list[str]] = []
        """Keys of the rows of every optimizer step, in order."""
        self.schedule_steps = 0
        self._seen: list[str] = []

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        if not forward_only:
            self._seen += micro_batch["key"]
        return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_outputs(self, output: Any, output_args: Any, micro_batch: TensorDict, **more: Any) -> Any:
        """As ours: beside log-probs, what the head reads at the end of a prompt, here the logits."""
        made = super().prepare_model_outputs(output, output_args, micro_batch, **more)
        if tu.get_non_tensor_data(micro_batch, STATES, False):
            lasts = torch.stack([prompt[-1] for prompt in micro_batch["prompts"].unbind()])
            made[STATES] = torch.nested.as_nested_tensor([*self.module.logits[lasts].detach()], layout=torch.jagged)
        return made

    def optimizer_step(self) -> float:
        norm: float = super().optimizer_step()
        self.steps.append(self._seen)
        self._seen = []
        return norm

    def lr_scheduler_step(self) -> float:
        self.schedule_steps += 1
        return float(self.optimizer.param_groups[0]["lr"])

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: Any = None
    ) -> None:
        for folder in [local_path, *([hdfs_path] if hdfs_path else [])]:
            Path(folder).mkdir(parents=True)
            states = {"optimizer": self.optimizer.state_dict(), "schedule": self.lr_scheduler.state_dict()}
            content = {"weights": self.module.state_dict(), "step": global_step, **states}
            torch.save(content, Path(folder) / "weights.pt")

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True
    ) -> None:
        saved = torch.load(Path(local_path) / "weights.pt")
        self.module.load_state_dict(saved["weights"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.lr_scheduler.load_state_dict(saved["schedule"])
        if del_local_after_load:
            shutil.rmtree(local_path)


class _Trainer(TrainingWorker):  # type: ignore[misc]
    """verl's training worker with a table as the model."""

    def __init__(self, module: Table, config: Any, section: Any) -> None:
        self.model_config = {"use_remove_padding": config.model.use_remove_padding}
        self.engine = TableEngine(module, section)
        self.engine_config = section.engine
        # Set by verl's worker in `init_model`.
        self.engine_config.use_dynamic_bsz = True
        self.engine_config.max_token_len_per_gpu = config.actor.ppo_max_token_len_per_gpu
        self.engine_config.infer_max_token_len_per_gpu = config.rollout.log_prob_max_token_len_per_gpu
        self.profiler = DistProfiler(rank=0)
        self.device_name = "cpu"
        self.flops_counter = FlopsCounter(_model_config(config.model.path))
        self.loss_fn = partial(ppo_loss, config=section)


class _Worker(PolicyWorker):
    """The worker of a policy, with the models of its role."""

    def __init__(self, config: Any, role: str, base: Tensor) -> None:
        self.config, self.role, self.enable_routing_replay = config, role, False
        self.profiler = DistProfiler(rank=0)
        section = omega_conf_to_dataclass(config.actor)
        adapter = config.model.lora_rank > 0
        self.actor = _Trainer(Table(base, adapter), config, section)
        self.ref = None
        if "ref" in role:
            self.ref = _Trainer(Table(base, adapter=False), config, omega_conf_to_dataclass(config.actor))


class InProcessWorkers:
    """A fake `RayWorkerGroup` of one process; its rows are in `queue`."""

    def __init__(self, config: Any, role: str, queue: LocalQueue, base: Tensor, ranks: int = 1) -> None:
        self.config, self.role, self.queue = config, role, queue
        self._dispatch_info: dict[str, list[int]] = {}
        self._ranks = ranks
        self._worker = _Worker(config, role, base)

    def empty_cache(self) -> None:
        """Does nothing: there is no device."""

    def tree_refusal(self) -> list[str | None]:
        return [self._worker.tree_refusal()]

    @property
    def table(self) -> Table:
        """The policy's model."""
        module: Table = self._worker.actor.engine.module
        return module

    @property
    def engine(self) -> TableEngine:
        """The policy's training engine."""
        engine: TableEngine = self._worker.actor.engine
        return engine

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        # Two processes per rank: the number of ranks is not that of processes.
        return {"actor": [rank for rank in range(self._ranks) for _ in range(2)]}[mesh]

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._compute(self._worker.compute_log_prob, batch)

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        assert "ref" in self.role, "these workers have no reference model"
        return self._compute(self._worker.compute_ref_log_prob, batch)

    def update_actor(self, batch: KVBatchMeta) -> TensorDict:
        output: TensorDict = self._worker.update_actor(self._fetch(batch))
        return output

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._worker.save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._worker.load_checkpoint(*args, **kwargs)

    def _compute(self, compute: Callable[[TensorDict], TensorDict], batch: KVBatchMeta) -> KVBatchMeta:
        output = compute(self._fetch(batch))
        self.queue.kv_batch_put(batch.keys, batch.partition_id, output.exclude("metrics"))
        return batch

    def _fetch(self, batch: KVBatchMeta) -> TensorDict:
        """Returns rows as verl's workers receive them: fields and a copy of `extra_info`."""
        data = self.queue.kv_batch_get(batch.keys, batch.partition_id, batch.fields)
        data["key"] = NonTensorStack(*map(NonTensorData, batch.keys))
        for name, value in copy.deepcopy(batch.extra_info).items():
            tu.assign_non_tensor_data(data, name, value)
        return data
