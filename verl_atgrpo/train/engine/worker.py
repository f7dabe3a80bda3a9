"""verl's training worker of a policy: its engines, the optimizer step, the port of its process group."""

from __future__ import annotations

import os
from typing import Any

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils, torch_functional
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils import losses

from verl_atgrpo.train.config.policies import ADAPTERS
from verl_atgrpo.train.engine import arrival, row_loops
from verl_atgrpo.train.engine.loss_scale import repeat_overflows
from verl_atgrpo.train.engine.optimizer_settings import keeping_settings
from verl_atgrpo.train.engine.prefix_tree.engine import VENDOR


class TrainerWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """A training worker of one policy, whose process group has a port that rank 0 has bound."""

    def __init__(self, *args: Any, prefix_tree: bool = True, dither: int | None = None, **kwargs: Any) -> None:
        """Takes verl's arguments, whether to use prefix trees, and the seed of dithered weights; None for none."""
        super().__init__(*args, **kwargs)
        self._prefix_tree, self._dither = prefix_tree, dither

    @property
    def _shares(self) -> bool:
        """Whether policies share this worker's model, each with an adapter."""
        return bool(OmegaConf.select(self.config, f"model.lora.{ADAPTERS}"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def init_model(self) -> None:
        """Builds the engines, over prefix trees if they are wanted; ours has adapters, too."""
        if self._prefix_tree or self._shares:
            os.environ.setdefault("VERL_ENGINE_VENDOR", VENDOR)
        elif os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
            del os.environ["VERL_ENGINE_VENDOR"]
        row_loops.replace(tensordict_utils, losses, torch_functional)
        super().init_model()
        if self._shares and not self._prefix_tree:
            self.actor.engine.refusal = "at_grpo.prefix_tree=False"
        if self.actor is not None:
            self._dither_weights()
            repeat_overflows(self.actor.engine)

    def _dither_weights(self) -> None:
        if self._dither is not None:
            engine = self.actor.engine
            # Ranks with the same shard, of which fsdp_size has several, draw the same.
            shard = engine.device_mesh.get_local_rank(engine.device_mesh.ndim - 1)
            weights = arrival.trained_weights(engine.optimizer)
            arrival.dither(weights, arrival.served_dtype(self.config.rollout), self._dither + (shard << 32))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))  # type: ignore[untyped-decorator]
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        """Updates the policy as verl does; its metrics also say how much of that arrives at the servers."""
        before = self._sampled()
        output: TensorDict | None = super().update_actor(data)
        # Every step ends with a weight sync (`parameter_sync_step`), so this is what the next one changes.
        total = arrival.sums(before, self._sampled(), arrival.served_dtype(self.config.rollout)).to(get_device_name())
        torch.distributed.all_reduce(total)
        if output is not None:
            output["metrics"].update(arrival.figures(total))
        return output

    def _sampled(self) -> torch.Tensor:
        get_torch_device().synchronize()  # verl moves parameters to the CPU and does not wait
        return arrival.sample(arrival.trained_weights(self.actor.engine.optimizer))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Loads weights, moments and the schedule's step; the optimizer's settings stay the job's."""
        engine = self.actor.engine
        with keeping_settings(engine.optimizer, engine.lr_scheduler):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def with_adapter(self, what: str, *given: Any) -> None:
        """Calls a method of the engine with adapters (`engine.adapters.AdapterEngine`), such as `use` with a name."""
        getattr(self.actor.engine, what)(*given)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def tree_refusal(self) -> str | None:
        """Returns why this worker's models run every row with its whole prompt; None if they use prefix trees."""
        engines = [worker.engine for worker in (self.actor, self.ref) if worker is not None]
        refusals = [getattr(engine, "refusal", f"{type(engine).__name__} has none") for engine in engines]
        return next((refusal for refusal in refusals if refusal is not None), None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)  # type: ignore[untyped-decorator]
    def reserve_port(self) -> int:
        """Opens the store of the process group in rank 0's process, which torch then uses; returns its free port."""
        self._store = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return int(self._store.port)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def use_port(self, port: int) -> None:
        """Sets the port of the process group in every process."""
        os.environ["MASTER_PORT"] = str(port)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def empty_cache(self) -> None:
        """Frees the device memory in torch's cache, which other processes could not use.

        Not by verl's `aggressive_empty_cache`: it collects Python's garbage up to three times, .4 s each in a training
        worker, and no tensor of a step waits for that (tests/serving/test_device_calls.py).
        """
        get_torch_device().empty_cache()
