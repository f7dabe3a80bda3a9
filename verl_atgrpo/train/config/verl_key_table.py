"""The rules of verl's keys in a team's job: what is refused, and what a key accepts that its default does not say.

Every other key of verl's accepts what has the type of verl's default (`verl_keys.kind_of`). Keys are separated by
spaces; those of `actor_rollout_ref` are written without that. Tests compare the rules with the installed verl.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from verl_atgrpo.kinds import Count, Finite, Match, Share, Text, Weight, fits, one_of, whole, words
from verl_atgrpo.train.config.view import ACTOR, DEFAULT, Like, Place


@dataclass(frozen=True)
class KeyRule:
    """What some of verl's keys accept."""

    keys: str
    """Separated by spaces; `{a,b}` in one is either. A section stands for all keys below it."""
    kind: Any = None
    """An annotation (`kinds`) that values fit, None for the type of verl's default; Any if `refused` says it all."""
    refused: Callable[[Place], str | None] = lambda _: None
    """Returns why a value is refused: what follows `key=value` in the message."""


def _only(keys: str, why: str, *values: Any, remedy: str = "") -> KeyRule:
    """Keys with these values alone; without any, verl's default."""
    accepted = values or (DEFAULT,)

    def refused(place: Place) -> str | None:
        if any(map(place.accepts, accepted)):
            return None
        choices = " or ".join(place.shown(one) for one in accepted if not isinstance(one, Like))
        return f"{' ' if why.startswith('has no effect') else ': '}{why}, {remedy or f'set it to {choices}'}"

    return KeyRule(keys, Any, refused)


def _no_effect(why: str, keys: str, *values: Any, remedy: str = "") -> KeyRule:
    """Keys that nothing reads: these values alone, or verl's default."""
    return _only(keys, f"has no effect, {why}", *values, remedy=remedy)


def _follows(keys: str, why: str, other: str, *values: Any) -> KeyRule:
    """Keys that may only repeat the one that is read in their place, or have one of `values`."""
    return _only(keys, why, *values, Like(_whole(other)), remedy=f"set {other}")


def _needs(keys: str, other: str, needed: Any, kind: Any = None) -> KeyRule:
    """Keys that have an effect where another one has some values."""

    def refused(place: Place) -> str | None:
        shown, value = place.of(_whole(other))
        if place.accepts(DEFAULT) or fits(needed, value):
            return None
        default = place.shown(DEFAULT)
        return f" has no effect beside {shown}={place.shown(value)}: set it to {default}, or that to {words(needed)}"

    return KeyRule(keys, kind, refused)


_SHORT = ("actor", "model", "ref", "rollout", "nccl_timeout")
"""Sections of `actor_rollout_ref`, which is left out before them."""


def _whole(key: str) -> str:
    return f"{ACTOR}.{key}" if key.partition(".")[0] in _SHORT else key


# What keys accept.
_POSITIVE = Annotated[float, Gt(0), Le(1e300)]
_SECTION = dict[str, Any]
_SEED = whole(0, 2**32 - 1)
_DTYPE = Literal["fp32", "float32", "fp16", "float16", "bf16", "bfloat16", 16, 32]
_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_KL_LOSSES = [f"{kind}{end}" for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+")]
_THRESHOLD = r"\s*[0-9.eE+-]+\s*(_\s*[0-9.eE+-]+\s*)?"
_BOUNDS = Annotated[str, Match(_THRESHOLD, "a text <lower bound>_<upper bound>")]
_THRESHOLDS = Annotated[
    str, Match(rf"{_THRESHOLD}(,{_THRESHOLD})*", "a text with one threshold for each of rollout_rs")
]
_RATIOS = r"(token_k[123]|seq_(sum|mean)_k[123]|seq_max_k[23])"
_RS = Annotated[
    str,
    Match(
        rf"{_RATIOS}(\s*,\s*{_RATIOS})*",
        "token_k1 to token_k3, seq_sum_k1 to seq_sum_k3, seq_mean_k1 to seq_mean_k3, seq_max_k2 or seq_max_k3, with "
        "commas between several",
    ),
]
LOGGERS = {
    **{name: None for name in ("console", "file", "rl_insight")},
    **{name: name for name in ("wandb", "tensorboard", "mlflow", "swanlab", "clearml", "trackio")},
    "vemlp_wandb": "volcengine_ml_platform",
}
"""verl's loggers -> the module that it imports for one."""
_LOGGER = one_of(LOGGERS)
_NAMES = str | list[Text] | None
_TOOL = Literal["nsys", "npu", "torch", "torch_memory", "precision_debugger"]
_TRUE = Literal[True]
_D = "rollout.disaggregation"
_F = "model.fused_kernel_options"
_C = "algorithm.rollout_correction"

_ROWS_VARY = "the number of rows varies between steps"
_EXPERTS = "a team's rows hold no routed experts"
_DISTRIBUTION = "changes the sampling distribution but not the log-probs that are trained on"
_K = "K is at_grpo.candidates"
_MANAGER = "verl_atgrpo.train.rollout.manager.TeamRolloutManager"
_FORMULA = "set it to at_grpo and choose the formula with at_grpo.estimator"
_KL_LOSS = "set it to false and use actor_rollout_ref.actor.use_kl_loss"
_OTHER_KEY = "has no effect, the engine reads another key"
_ADVANTAGES = "at_grpo.estimator computes the advantages"
_FSDP = "policies are trained with FSDP; others have not been tried"
_IN_PARTS = (
    "{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing}"
)
_ENTROPY = "the entropy of the reference is not computed"

TYPES: dict[str, Any] = {
    "ray_kwargs.ray_init {actor,ref}.fsdp_config.mixed_precision": _SECTION,
    "ray_kwargs.ray_init.num_cpus": _POSITIVE | None,
    "ray_kwargs.ray_init.num_gpus": Weight | None,
    "ray_kwargs.ray_init.object_store_memory": whole(78_643_200, 10**15) | None,
    "transfer_queue.{metrics,backend.SimpleStorage,backend.MooncakeStore}": _SECTION,
    "transfer_queue.backend.SimpleStorage.total_storage_size": Count | None,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": whole(1, 1024),
    "data.seed": _SEED | None,
    "data.apply_chat_template_kwargs rollout.engine_kwargs.vllm": _SECTION | None,
    "data.dataloader_num_workers": whole(0, 1024),
    "trainer.{total_training_steps,max_actor_ckpt_to_keep}": Count | None,
    "rollout.max_model_len data.val_batch_size": Count | None,
    "trainer.logger": _LOGGER | list[_LOGGER],  # type: ignore[valid-type]
    "trainer.device": Literal["cuda", "cpu", "npu"],
    "trainer.resume_mode": Literal["disable", "auto", "resume_path"],
    "trainer.v1.colocate_async.num_warmup_batches": Finite | None,
    "trainer.v1.separate_async.num_warmup_batches": Finite | None,
    "trainer.v1.sampler.max_off_policy_threshold": Count | None,
    "trainer.v1.sampler.max_off_policy_strategy": Literal["drop", "wait"],
    "actor.{clip_ratio_low,clip_ratio_high}": Weight | None,
    "actor.clip_ratio_c": Annotated[float, Gt(1), Le(1e300)],
    "actor.loss_agg_mode": one_of(_AGGREGATIONS),
    "actor.entropy_coeff": Finite,
    "actor.checkpoint.{save_contents,load_contents}": list[Literal["model", "optimizer", "extra", "hf_model"]],
    "actor.optim.{lr,weight_decay,lr_warmup_steps_ratio}": Share,
    "actor.optim.betas": Annotated[list[Annotated[float, Ge(0), Lt(1)]], Len(2, 2)],
    "actor.optim.override_optimizer_config": _SECTION | None,
    "actor.optim.lr_warmup_steps": whole(-1, 1_000_000_000),
    "actor.optim.lr_scheduler_type": Literal["constant", "cosine"],
    "actor.optim.warmup_style": Literal["constant", "cosine"] | None,
    "actor.optim.clip_grad": _POSITIVE,
    "{actor,ref}.fsdp_config.fsdp_size": Literal[-1] | whole(1, 100_000),
    "{actor,ref}.fsdp_config.{model_dtype,mixed_precision.param_dtype}": _DTYPE,
    "{actor,ref}.fsdp_config.mixed_precision.{reduce_dtype,buffer_dtype}": _DTYPE,
    "model.lora_rank": whole(0, 512),
    "rollout.temperature": Annotated[float, Gt(0), Le(100)],
    "rollout.val_kwargs.temperature": Annotated[float, Ge(0), Le(100)],
    "rollout.{gpu_memory_utilization,val_kwargs.top_p}": Annotated[float, Gt(0), Le(1)],
    "rollout.dtype": Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
    "rollout.logprobs_mode": Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"],
    "rollout.scheduling_policy": Literal["fcfs", "priority"],
    "rollout.cudagraph_capture_sizes global_profiler.steps": list[Count] | None,
    "rollout.enable_sleep_mode": bool,
    "rollout.multi_turn.format": Text,
    "rollout.agent.num_workers": whole(1, 4096),
    "rollout.checkpoint_engine.backend rollout.trace.{project_name,experiment_name}": Text | None,
    "rollout.trace.max_samples_per_step_per_worker": whole(0, 1_000_000) | None,
    "rollout.profiler.tool_config.torch.{profile_token_start,profile_token_end}": whole(0, 10**9) | None,
    "{actor,ref,rollout}.profiler.tool global_profiler.tool": _TOOL | None,
    "{actor,ref,rollout}.profiler.save_path global_profiler.save_path": Text | None,
    "global_profiler.global_tool_config.nsys.{controller_nsight_options,worker_nsight_options}": _SECTION,
    f"{_C}.rollout_is": Literal["token", "sequence"] | None,
    f"{_C}.rollout_rs": _RS | None,
}
"""What keys accept where verl's default does not say it."""

NEEDED = (
    _needs("actor.{tau_pos,tau_neg}", "actor.policy_loss.loss_mode", Literal["sapo"], _POSITIVE),
    _needs("actor.policy_loss.dro_beta", "actor.policy_loss.loss_mode", Literal["dro"], _POSITIVE | None),
    _needs("actor.loss_scale_factor", "actor.loss_agg_mode", Literal["seq-mean-token-sum-norm"], _POSITIVE | None),
    _needs("actor.kl_loss_coef", "actor.use_kl_loss", _TRUE),
    _needs("actor.kl_loss_type", "actor.use_kl_loss", _TRUE, one_of(_KL_LOSSES)),
    _needs("actor.optim.min_lr_ratio", "actor.optim.lr_scheduler_type", Literal["cosine"], Share | None),
    _needs("actor.optim.{num_cycles,zero_indexed_step}", "actor.optim.lr_scheduler_type", Literal["cosine"]),
    _needs("actor.optim.lr_warmup_steps_ratio", "actor.optim.lr_warmup_steps", Literal[-1, 0], Share),
    _needs("actor.fsdp_config.pad_to_length_bucket", "actor.fsdp_config.pad_to_length", _TRUE),
    _needs("ref.fsdp_config.pad_to_length_bucket", "ref.fsdp_config.pad_to_length", _TRUE),
    _needs("actor.fsdp_config.seed", "actor.fsdp_config.full_determinism", _TRUE, _SEED),
    _needs("ref.fsdp_config.seed", "ref.fsdp_config.full_determinism", _TRUE, _SEED),
    _needs("actor.fsdp_config.offload_policy", "actor.strategy", Literal["fsdp2"]),
    _needs("{actor,ref}.fsdp_config.use_orig_params", "actor.strategy", Literal["fsdp"]),
    _needs("model.{lora_alpha,lora_adapter_path} rollout.layered_summon", "model.lora_rank", Count),
    _needs("model.{target_modules,exclude_modules,target_parameters}", "model.lora_rank", Count, _NAMES),
    _needs(_F, "model.use_fused_kernels", _TRUE, _SECTION),
    _needs(f"{_F}.impl_backend", "model.use_fused_kernels", _TRUE, Literal["torch", "triton"] | None),
    _needs("rollout.quantization_config_file", "rollout.quantization", Text),
    _needs("rollout.prometheus.enable", "rollout.disable_log_stats", Literal[False]),
    _needs("rollout.prometheus.{port,file}", "rollout.prometheus.enable", _TRUE),
    _needs("rollout.prometheus.served_model_name", "rollout.prometheus.enable", _TRUE, Text | None),
    _needs(f"{_D}.{{prefill_replicas,decode_replicas,transfer_backend}}", f"{_D}.enabled", _TRUE),
    _needs(f"{_D}.decode_tensor_model_parallel_size", f"{_D}.enabled", _TRUE, Count | None),
    _needs(f"{_C}.rollout_is_threshold", f"{_C}.rollout_is", Literal["token", "sequence"], _POSITIVE | _BOUNDS),
    _needs(f"{_C}.rollout_is_batch_normalize", f"{_C}.rollout_is", Literal["token", "sequence"]),
    _needs(f"{_C}.rollout_rs_threshold", f"{_C}.rollout_rs", Text, _POSITIVE | _THRESHOLDS | None),
    _needs("trainer.resume_from_path", "trainer.resume_mode", Literal["resume_path"]),
)
"""Keys that have an effect beside others alone."""

REFUSED = (
    _only("model_engine", _FSDP, "dp"),
    _only("actor.strategy", _FSDP, "fsdp", "fsdp2"),
    _no_effect("a group estimator has no critic", "critic trainer.{critic_warmup,max_critic_ckpt_to_keep}"),
    _no_effect("a group estimator has no critic", "critic.enable", None, False, remedy="set it to false"),
    _no_effect("the environment computes the rewards", "{reward,reward_model,custom_reward_function}"),
    _no_effect("the environment computes the rewards", "reward.reward_model.enable", False),
    _no_effect("environments use this package's sandbox", "{sandbox_fusion,reward.sandbox_fusion}"),
    _no_effect("a team has no teacher", "distillation"),
    _only("distillation.enabled", "a team has no teacher", False),
    _only("skip", "the trainer submits tasks itself, so no rollout would be skipped"),
    _only("_target_", "names verl's own class"),
    _no_effect(
        "verl's V1 trainer does not read it",
        "nccl_timeout actor.{freeze_vision_tower,calculate_sum_pi_squared} rollout.{over_sample_rate,"
        "multi_stage_wake_up,skip_tokenizer_init,agent.custom_async_server} "
        "trainer.{esi_redundant_time,ray_wait_register_center_timeout}",
    ),
    _no_effect("verl's V1 trainer never calls it", "actor.use_prefix_grouper"),
    # The actor and the reference.
    _only("{actor.use_dynamic_bsz,ref.log_prob_use_dynamic_bsz,rollout.log_prob_use_dynamic_bsz}", _ROWS_VARY, True),
    *(
        _no_effect(
            "micro-batches are filled up to a number of tokens",
            f"{section}.{kind}_micro_batch_size{{,_per_gpu}}",
            remedy=f"set it to null, and {section}.{kind}_max_token_len_per_gpu to that number",
        )
        for section, kind in (("actor", "ppo"), ("ref", "log_prob"), ("rollout", "log_prob"))
    ),
    _no_effect(_K, "{actor,ref}.rollout_n", DEFAULT, 1, remedy="leave it at 1"),
    _no_effect(_K, "rollout.n", 1, remedy="leave it at 1"),
    _no_effect("the trainer itself shuffles rows over mini-batches", "actor.shuffle"),
    _no_effect("the trainer shuffles rows with a seed of the step", "actor.data_loader_seed"),
    _follows("actor.grad_clip", "has no effect, another clips gradients", "actor.optim.clip_grad", DEFAULT),
    _follows("actor.use_torch_compile", _OTHER_KEY, "actor.fsdp_config.use_torch_compile", DEFAULT),
    _follows("actor.use_fused_kernels", _OTHER_KEY, "model.use_fused_kernels"),
    _follows("actor.use_remove_padding", _OTHER_KEY, "model.use_remove_padding"),
    _no_effect("the engine reads actor.fsdp_config.qat", "actor.qat"),
    _only("actor.checkpoint.async_save", "a checkpoint must be complete before the next step", False),
    _no_effect("only Megatron reads it", "actor.checkpoint.strict"),
    _only("actor.router_replay.mode", _EXPERTS, "disabled", "R2", None, remedy="set it to R2 or disabled"),
    _no_effect("loss_mode=clip_cov is refused", "actor.policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub}"),
    _no_effect("loss_mode=kl_cov is refused", "actor.policy_loss.{kl_cov_ratio,ppo_kl_coef}"),
    _only("actor.optim.grad_clip", "is an older name of clip_grad", None, remedy="set actor.optim.clip_grad"),
    _no_effect("it is the run's", "actor.optim.total_training_steps", remedy="set trainer.total_training_steps"),
    _only("{actor,ref}.fsdp_config.forward_only", "a policy is trained, the reference is not"),
    _only("{actor,ref}.fsdp_config.dtype", "has no effect with FSDP", remedy="set its mixed_precision.param_dtype"),
    _follows("{actor,ref}.fsdp_config.strategy", "has no effect, another replaces it", "actor.strategy", DEFAULT),
    _follows("ref.strategy", "the reference uses the policy's engine", "actor.strategy"),
    _no_effect(_ENTROPY, f"ref.{_IN_PARTS}"),
    _no_effect(_ENTROPY, f"ref.fsdp_config.{_IN_PARTS}", DEFAULT, False),
    _no_effect("the reference is not trained", "ref.fsdp_config.qat"),
    # The model.
    _no_effect("the engine does not pass it on", "model.tiled_mlp"),
    _only(
        "model.lora.merge",
        "verl rounds merged weights to bfloat16, so that servers sample with others than the actor has",
        remedy="leave it out: servers get the adapter",
    ),
    _no_effect("only Megatron reads it", "model.lora", remedy="set model.lora_rank, lora_alpha, target_modules"),
    _only("{model,rollout}.mtp", "multi-token prediction has not been tried with a team"),
    # The servers.
    _only("rollout.name", "a team is served by vllm", "vllm"),
    _no_effect("servers are asynchronous", "rollout.mode", "async"),
    _only("rollout.{top_p,repetition_penalty}", _DISTRIBUTION, 1.0),
    _only("rollout.top_k", _DISTRIBUTION, -1),
    _only("rollout.do_sample", "candidates of a decision must differ", True),
    _no_effect("every sample has its own", "rollout.{seed,engine_kwargs.vllm.seed}", remedy="set at_grpo.seed"),
    _follows("rollout.prompt_length", "has no effect, another is the limit", "data.max_prompt_length"),
    _follows("rollout.response_length", "has no effect, another is the limit", "data.max_response_length"),
    _only("rollout.pipeline_model_parallel_size", "verl's vllm servers have none", 1),
    _only("rollout.calculate_log_probs", "the server's log-probs show whether its weights are current", True),
    _only("rollout.enable_rollout_routing_replay", _EXPERTS, False),
    _no_effect(_EXPERTS, "rollout.moe_load_balance_metrics_interval", 0),
    _only(
        "rollout.engine_kwargs.vllm.{dtype,load_format,max_model_len,max_num_seqs,enable_chunked_prefill,"
        "max_num_batched_tokens,enable_prefix_caching,enable_sleep_mode,logprobs_mode,enforce_eager,"
        "gpu_memory_utilization,disable_log_stats,quantization,scheduling_policy}",
        "bypasses the checks of rollout",
        None,
        remedy="set rollout's key of the same name",
    ),
    _only(
        "rollout.engine_kwargs.vllm.{tensor_parallel_size,pipeline_parallel_size,data_parallel_size}",
        "bypasses the checks of rollout",
        None,
        remedy="set rollout.tensor_model_parallel_size or rollout.data_parallel_size",
    ),
    _no_effect(
        "a team's workflow is its environment's `run`; of `multi_turn` only `format` is used",
        "rollout.{multi_turn,agent.default_agent_loop,agent.agent_loop_config_path}",
    ),
    _only("rollout.agent.agent_loop_manager_class", "a team's episodes need this package's manager", None, _MANAGER),
    _only("rollout.qat", "servers are quantized as the policy is", remedy="set actor.fsdp_config.qat"),
    # The tasks.
    _no_effect(
        "the environment has the tasks", "data.{train_files,val_files}", remedy="name data sets in at_grpo.environment"
    ),
    _no_effect("the environment has the tasks", "data.custom_cls"),
    _no_effect("at_grpo.train_tasks is the number of tasks", "data.train_max_samples", -1),
    _no_effect("at_grpo.val_tasks is the number of tasks", "data.val_max_samples", -1),
    _no_effect("tasks are submitted one by one", "data.gen_batch_size", None, 1),
    _no_effect(
        "prompts are made during the episode, and one that is too long fails it",
        "data.{filter_overlong_prompts,filter_overlong_prompts_workers,truncation}",
    ),
    _no_effect(
        "prompts are made during the episode",
        "data.{prompt_key,tokenizer,use_shm,trust_remote_code,return_raw_input_ids,return_raw_chat,return_full_prompt,"
        "reward_fn_key,tool_config_path,function_tool_path}",
    ),
    _no_effect(
        "prompts are texts",
        "data.{image_patch_size,image_key,video_key,audio_key,return_multi_modal_inputs,mm_processor_kwargs}",
    ),
    # The advantages.
    _only("algorithm.adv_estimator", "does not compare a team's groups", "at_grpo", remedy=_FORMULA),
    _only(
        "algorithm.norm_adv_by_std_in_grpo",
        "the scale is the estimator's",
        True,
        remedy="set it to true, and at_grpo.estimator=dr_grpo, or scale: none in it",
    ),
    _no_effect(_ADVANTAGES, "algorithm.{gamma,lam}", remedy="leave it at 1; gigpo has step_gamma"),
    _no_effect(_ADVANTAGES, "algorithm.{use_pf_ppo,pf_ppo}"),
    _no_effect(_ADVANTAGES, "algorithm.{gdpo_reward_keys,gdpo_reward_weights}", None),
    _only("algorithm.filter_groups", "filters whole tasks", remedy="set it to false and use at_grpo.group_filter"),
    _no_effect(
        "algorithm.filter_groups is not for teams",
        "algorithm.filter_groups.{metric,max_num_gen_batches,max_inflight_gen_batches}",
        remedy="use at_grpo.group_filter",
    ),
    _only("algorithm.use_kl_in_reward", "would give equal answers different rewards", False, remedy=_KL_LOSS),
    _only(
        "algorithm.{kl_penalty,kl_ctrl}",
        "has no effect without use_kl_in_reward, which is refused",
        remedy="set actor_rollout_ref.actor.kl_loss_type and kl_loss_coef",
    ),
    _only(f"{_C}.loss_type", "is ignored by verl's V1 trainer", "ppo_clip"),
    _only("algorithm.at_grpo_estimator", "is for plain jobs", None, remedy="remove it, a team's is at_grpo.estimator"),
    # The trainer.
    _no_effect("verl deletes none on a local file system", "trainer.del_local_ckpt_after_load", None, False),
    _no_effect("verl's FSDP checkpoints go to default_local_dir alone", "trainer.default_hdfs_dir"),
    _only(
        "trainer.remove_previous_ckpt_in_save", "has no effect", None, False, remedy="set max_actor_ckpt_to_keep to 1"
    ),
    _no_effect("rows are always balanced over the devices", "trainer.balance_batch", True),
    _only("trainer.v1.separate_async.parameter_sync_step", "weights are synchronised after every step", DEFAULT, 1),
    _only("trainer.v1.separate_async.hybrid_rollout", "the trainer's devices are not used for the rollout"),
    _only("trainer.v1.sampler.{custom_sampler,sampler_kwargs}", "verl's own sampler replaces failed episodes"),
)
"""Keys with few values, or verl's default alone."""

NO_MEANING = (
    # Of another engine or other hardware.
    "{actor,ref}.fsdp_config.turbo_config {actor,ref,rollout}.profiler.tool_config.{npu,precision_debugger} "
    "global_profiler.global_tool_config.precision_debugger rollout.{engine_kwargs.sglang,engine_kwargs.trtllm} "
    "rollout.disaggregation.{bootstrap_port,ib_device} "
    # FSDP always keeps the reference on the host, without gradients.
    "ref.fsdp_config.{param_offload,optimizer_offload,offload_policy,use_no_sync_for_gradient_accumulation} "
    # verl does not use these, sets them itself, or they are empty; the trainer sets the rest.
    "global_profiler.global_tool_config.torch_memory.{context,stacks,kw_args} transfer_queue.enable trainer.v1.sync "
    "data.{at_grpo,at_grpo_tasks,at_grpo_data_sets} trainer.v1.sampler.sync_refill_failed_groups"
)
"""Keys that have no meaning, whatever their value."""


def keys_of(keys: str) -> Iterator[str]:
    """Yields the keys that a rule is about, in full."""
    for key in keys.split():
        parts = [part.split(",") for part in re.split(r"[{}]", key)]  # commas occur in braces only
        yield from (_whole("".join(choice)) for choice in itertools.product(*parts))


_ALL = (*itertools.starmap(KeyRule, TYPES.items()), *NEEDED, *REFUSED, KeyRule(NO_MEANING, Any))
KEY_RULES = {key: rule for rule in _ALL for key in keys_of(rule.keys)}
"""Key -> rule; `_target_` for all keys of this name. The rule of the longest key holds."""
