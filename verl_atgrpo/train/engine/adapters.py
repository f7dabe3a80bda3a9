"""Several LoRA adapters on one base model in verl's FSDP2 engine, each with an optimizer and a schedule of its own.

All adapters require gradients all the time, and `use` chooses the one that the model runs with: FSDP2 fixes at the
first forward pass which unsharded parameters require gradients, so peft's `set_adapter`, which switches that, would
leave all but the first without any. Parameters that a pass does not use have no gradient, and no optimizer step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree as pytree
from verl.utils.device import get_device_id
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu, offload_fsdp_optimizer

from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.train.config.policies import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS, PAST
from verl_atgrpo.train.engine.optimizer_settings import keeping_settings

_STATE, _FILE = "optimizer.pt", ".safetensors"


@dataclass
class _Training:
    """What an adapter is trained with."""

    config: Any
    """verl's optimizer section."""
    optimizer: Any
    schedule: Any


if TYPE_CHECKING:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as _Engine
else:
    _Engine = object  # verl's engines import ours (`plugin`), which is also one of theirs: `prefix_tree.engine`


class AdapterEngine(_Engine):  # type: ignore[misc]
    """What makes verl's FSDP engine train the adapters of `model.lora.adapters`, if there are any, one at a time."""

    optimizer_config: Any
    past: dict[int, tuple[str, dict[str, Tensor]]]
    """Slot -> a past self: its policy, and its adapter's whole tensors by peft's names, on the CPU of every rank."""
    _training: dict[str, _Training]

    @property
    def _settings(self) -> Mapping[str, Any]:
        every = (self.model_config.lora or {}).get(ADAPTERS) or {}
        return {name: settings for name, settings in every.items() if settings["trainable"]}

    def initialize(self) -> None:
        """Builds the model with its adapters, and an optimizer for each; the first is in use."""
        super().initialize()
        self.past = {}
        if self._settings:
            self._training = {name: self._training_of(name) for name in self._settings}
            self.use(next(iter(self._settings)))

    def _training_of(self, name: str) -> _Training:
        from verl.workers.config.optimizer import build_optimizer

        config = self._settings[name]["optim"]  # verl has made its dataclass of it, as of all sections within `model`
        optimizer = build_optimizer(list(self._parameters(name).values()), config)
        before, self.optimizer_config = self.optimizer_config, config
        schedule = self._build_lr_scheduler(optimizer)
        self.optimizer_config = before
        return _Training(config, optimizer, schedule)

    def _build_lora_module(self, module: Any) -> Any:
        """Returns the model with all adapters; their initial weights depend on their names alone."""
        if not self._settings:
            return super()._build_lora_module(module)
        from peft import LoraConfig, TaskType, get_peft_model

        module.enable_input_require_grads()
        dtype = next(module.parameters()).dtype
        for number, (name, settings) in enumerate(self._settings.items()):
            config = LoraConfig(
                task_type=TaskType.CAUSAL_LM,
                r=settings["rank"],
                lora_alpha=settings["alpha"],
                target_modules=settings["target_modules"],
                exclude_modules=settings["exclude_modules"],
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(stable_hash("adapter", name))
                if number:
                    module.add_adapter(_inner(name), config)
                else:
                    module = get_peft_model(module, config, adapter_name=_inner(name))
        for key, parameter in module.named_parameters():
            if "lora_" in key:
                parameter.data = parameter.data.to(dtype)  # FSDP shards parameters of one dtype together
                parameter.requires_grad_(True)
        return module

    def use(self, name: str) -> None:
        """Runs and trains the model with adapter `name` from now on."""
        for layer in self._layers():
            layer._active_adapter = [_inner(name)]
        self.module.active_adapter = _inner(name)
        chosen = self._training[name]
        self.optimizer, self.lr_scheduler, self.optimizer_config = chosen.optimizer, chosen.schedule, chosen.config

    def _layers(self) -> Iterator[Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return (layer for layer in self.module.modules() if isinstance(layer, BaseTunerLayer))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Runs the base model alone, without changing which parameters require gradients."""
        if not self._settings:
            with super().disable_adapter():
                yield
            return
        for layer in self._layers():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers():
                layer._disable_adapters = False

    def _parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Returns an adapter's parameters by peft's names."""
        inner = f".{_inner(name)}."
        return {key.replace(inner, "."): one for key, one in self.module.named_parameters() if inner in key}

    # ------------------------------------------------------------ servers

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Any, dict[str, Any] | None]:
        """As verl's: the base's weights, or with `base_sync_done` those of the first adapter."""
        if not self._settings:
            made: tuple[Any, dict[str, Any] | None] = super().get_per_tensor_param(
                layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs
            )
            return made
        first = next(iter(self._settings))
        if base_sync_done:
            return self.adapter_weights(first), self.adapter_config(first)
        # verl knows one adapter of this name, and reads which layers have one in its configuration.
        known = self.module.peft_config
        known["default"] = known[_inner(first)]
        try:
            weights, _ = super().get_per_tensor_param(layered_summon=False, base_sync_done=False, **kwargs)
        finally:
            del known["default"]
        return weights, self.adapter_config(first)

    def adapter_config(self, name: str) -> dict[str, Any]:
        """Returns an adapter's configuration as vLLM reads it."""
        config: dict[str, Any] = self.module.peft_config[_inner(name)].to_dict()
        return config

    def adapter_weights(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yields an adapter's whole tensors by peft's names; to be exhausted on every rank together."""
        for key, parameter in self._parameters(name).items():
            yield key, _whole(parameter.detach().to(get_device_id()))

    def freeze_self(self, name: str, slot: int) -> None:
        """Keeps an adapter as it is as a past self, in place of the one in the slot; on every rank together."""
        self.past[slot] = name, {key: one.to("cpu", copy=True) for key, one in self.adapter_weights(name)}

    # ------------------------------------------------------------ checkpoints

    def save_adapter(self, name: str, folder: Path) -> None:
        """Writes an adapter in peft's format, its optimizer, schedule and past selves; on every rank together."""
        weights = {key: tensor.cpu().contiguous() for key, tensor in self.adapter_weights(name)}
        training = self._training[name]
        state = {"optimizer": training.optimizer.state_dict(), "schedule": training.schedule.state_dict()}
        device = get_device_id()  # where the state may not be, and the ranks gather
        state = pytree.tree_map(lambda one: _whole(one.to(device)).cpu() if isinstance(one, Tensor) else one, state)
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # an earlier run may have saved other things at this step
            (folder / ADAPTER).mkdir(parents=True)
            self.model_config.tokenizer.save_pretrained(folder / ADAPTER)
            base = str(self.model_config.path)  # a folder, or a name on the hub
            base = str(Path(base).resolve()) if Path(base).is_dir() else base
            config = {**_plain(self.adapter_config(name)), "base_model_name_or_path": base}
            (folder / ADAPTER / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))
            save_file(weights, folder / ADAPTER / ADAPTER_WEIGHTS)
            torch.save(state, folder / _STATE)
            for slot, (policy, kept) in self.past.items():
                if policy == name:
                    (folder / PAST).mkdir(exist_ok=True)
                    save_file({key: one.contiguous() for key, one in kept.items()}, folder / PAST / f"{slot}{_FILE}")
        torch.distributed.barrier()

    def load_adapter(self, name: str, folder: Path) -> None:
        """Loads what `save_adapter` has written."""
        if self._is_offload_param:
            load_fsdp_model_to_gpu(self.module)
        weights = load_file(folder / ADAPTER / ADAPTER_WEIGHTS)
        parameters = self._parameters(name)
        if weights.keys() != parameters.keys():
            raise ValueError(f"{folder / ADAPTER / ADAPTER_WEIGHTS} has other layers than adapter {name!r}")
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(_like(parameter, weights[key]))
        saved = torch.load(folder / _STATE, weights_only=True, map_location="cpu")
        training, states = self._training[name], saved["optimizer"]["state"]
        for number, parameter in enumerate(parameters.values()):
            if number in states:
                states[number] = _sharded(states[number], parameter)
        with keeping_settings(training.optimizer, training.schedule):
            training.optimizer.load_state_dict(saved["optimizer"])
            training.schedule.load_state_dict(saved["schedule"])
        if self.model_config.lora.get(PAST):  # else no past self plays in this job
            self.past |= {int(one.stem): (name, load_file(one)) for one in (folder / PAST).glob(f"*{_FILE}")}
        if self._is_offload_param:
            offload_fsdp_model_to_cpu(self.module)
        if self._is_offload_optimizer:
            offload_fsdp_optimizer(training.optimizer)
        torch.distributed.barrier()


def _inner(name: str) -> str:
    """Returns peft's name of a policy's adapter: some names would be methods of its containers."""
    return f"policy_{name}"


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Returns a whole tensor, sharded as a parameter is."""
    moved = whole.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return moved
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements)


def _sharded(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Returns an optimizer's state of a parameter, sharded as it is; some optimizers have numbers in it."""
    return {
        key: _like(parameter, value) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
    }


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a peft configuration as JSON has it: sets as sorted lists, enumerations as their values."""
    made = json.loads(json.dumps(config, default=lambda one: sorted(one) if isinstance(one, set) else str(one)))
    return {**made, "task_type": "CAUSAL_LM", "peft_type": "LORA", "inference_mode": True}
