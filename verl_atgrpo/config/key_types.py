"""The type and the bounds of each key of verl's configuration that works in a team's job (`key_table`).

`key_check.check_types` refuses by this table and docs/configuration.md prints it. A key whose row in `key_table` lists
its values needs no entry, and neither has one that takes anything, such as an argument of vLLM's. A test asserts that
every other key that works has an entry, and that verl's default and all recipes fit it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from verl_atgrpo.config.kinds import Count, Finite, Match, Share, Text, Weight, listed, one_of, whole

_A, _M, _R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_POSITIVE = Annotated[float, Gt(0), Le(1e300)]
_PARALLEL = whole(1, 1024)
"""Devices that work together."""
_TOKENS = whole(1, 10_000_000)
"""Lengths of rows, and of what is computed at once."""
_SEED = whole(0, 2**32 - 1)
_DTYPE = Literal["fp32", "float32", "fp16", "float16", "bf16", "bfloat16", 16, 32]
_PORT = whole(1, 65535)
_NAMES = str | list[Text] | None
_THRESHOLD = r"\s*[0-9.eE+-]+\s*(_\s*[0-9.eE+-]+\s*)?"
_RATIOS = r"(token_k[123]|seq_(sum|mean)_k[123]|seq_max_k[23])"
_RS = Match(
    rf"{_RATIOS}(\s*,\s*{_RATIOS})*",
    "token_k1 to token_k3, seq_sum_k1 to seq_sum_k3, seq_mean_k1 to seq_mean_k3, seq_max_k2 or seq_max_k3, with "
    "commas between several",
)
LOGGERS = {
    "console": None,
    "file": None,
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "trackio": "trackio",
    "vemlp_wandb": "volcengine_ml_platform",
    "rl_insight": None,
}
"""verl's loggers -> the module that it imports for one."""
_LOGGER = one_of(LOGGERS)
_RANKS = listed(whole(0, 100_000))
_TOOL = Literal["nsys", "npu", "torch", "torch_memory", "precision_debugger"]

TYPES: dict[str, Any] = {
    # ------------------------------------------------------------------ the policy
    "actor_rollout_ref.hybrid_engine": bool,
    f"{_A}.ppo_mini_batch_size": whole(1, 1_000_000),
    f"{_A}.ppo_max_token_len_per_gpu": _TOKENS,
    f"{_A}.clip_ratio": Weight,
    f"{_A}.{{clip_ratio_low,clip_ratio_high}}": Weight | None,
    f"{_A}.clip_ratio_c": Annotated[float, Gt(1), Le(1e300)],
    f"{_A}.{{tau_pos,tau_neg}}": _POSITIVE,
    f"{_A}.loss_agg_mode": Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ],
    f"{_A}.loss_scale_factor": _POSITIVE | None,
    f"{_A}.entropy_coeff": Finite,
    f"{_A}.{{calculate_entropy,use_kl_loss,entropy_from_logits_with_chunking,entropy_checkpointing}}": bool,
    f"{_A}.pad_to_length": bool,
    f"{_A}.kl_loss_coef": Weight,
    f"{_A}.ppo_epochs": whole(1, 1000),
    f"{_A}.entropy_from_logits_chunk_size": _TOKENS,
    f"{_A}.ulysses_sequence_parallel_size": _PARALLEL,
    f"{_A}.checkpoint.{{save_contents,load_contents}}": list[Literal["model", "optimizer", "extra", "hf_model"]],
    f"{_A}.policy_loss.loss_mode": Text,
    f"{_A}.policy_loss.{{clip_cov_ratio,kl_cov_ratio}}": Share,
    f"{_A}.policy_loss.{{clip_cov_lb,clip_cov_ub}}": Finite,
    f"{_A}.policy_loss.ppo_kl_coef": Weight,
    f"{_A}.policy_loss.dro_beta": _POSITIVE | None,
    f"{_A}.optim.lr": Share,
    f"{_A}.optim.weight_decay": Share,
    f"{_A}.optim.betas": Annotated[list[Annotated[float, Ge(0), Lt(1)]], Len(2, 2)],
    f"{_A}.optim.{{optimizer,optimizer_impl}}": Text,
    f"{_A}.optim.override_optimizer_config": dict[str, Any] | None,
    f"{_A}.optim.lr_warmup_steps": whole(-1, 1_000_000_000) | None,
    f"{_A}.optim.lr_warmup_steps_ratio": Share,
    f"{_A}.optim.warmup_style": Literal["constant", "cosine"] | None,
    f"{_A}.optim.min_lr_ratio": Share | None,
    f"{_A}.optim.num_cycles": Weight,
    f"{_A}.optim.zero_indexed_step": bool,
    f"{_A}.optim.clip_grad": _POSITIVE,
    f"{_A}.fsdp_config.qat.enable": bool,
    f"{_A}.fsdp_config.qat.{{mode,activation_observer}}": Text,
    f"{_A}.fsdp_config.qat.group_size": Count,
    f"{_A}.fsdp_config.qat.ignore_patterns": list[Text],
    f"{_A}.fsdp_config.qat.quantization_config_path": Text | None,
    # ------------------------------------------------------------------ its engine, and the reference's
    "actor_rollout_ref.*.fsdp_config.wrap_policy.min_num_params": whole(0, 10**12),
    "actor_rollout_ref.*.fsdp_config.{param_offload,optimizer_offload,offload_policy,reshard_after_forward,"
    "forward_prefetch,use_orig_params,full_determinism,use_torch_compile,use_no_sync_for_gradient_accumulation,"
    "entropy_from_logits_with_chunking,entropy_checkpointing,pad_to_length}": bool,
    "actor_rollout_ref.*.fsdp_config.fsdp_size": Literal[-1] | whole(1, 100_000),
    "actor_rollout_ref.*.fsdp_config.model_dtype": _DTYPE,
    "actor_rollout_ref.*.fsdp_config.mixed_precision.{param_dtype,reduce_dtype,buffer_dtype}": _DTYPE,
    "actor_rollout_ref.*.fsdp_config.seed": _SEED,
    "actor_rollout_ref.*.fsdp_config.ulysses_sequence_parallel_size": _PARALLEL,
    "actor_rollout_ref.*.fsdp_config.{entropy_from_logits_chunk_size,pad_to_length_bucket}": _TOKENS,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _TOKENS,
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": _PARALLEL,
    "actor_rollout_ref.ref.pad_to_length": bool,
    # ------------------------------------------------------------------ its model
    f"{_M}.path": Text,
    f"{_M}.{{hf_config_path,tokenizer_path,custom_chat_template,external_lib,lora_adapter_path}}": Text | None,
    f"{_M}.{{use_shm,trust_remote_code,enable_gradient_checkpointing,enable_activation_offload,use_remove_padding,"
    "use_liger,use_fused_kernels,lora.merge}": bool,
    f"{_M}.override_config": dict[str, Any],
    f"{_M}.lora_rank": whole(0, 512),
    f"{_M}.lora_alpha": Count,
    f"{_M}.{{target_modules,exclude_modules,target_parameters}}": _NAMES,
    f"{_M}.fused_kernel_options.impl_backend": Literal["torch", "triton"] | None,
    # ------------------------------------------------------------------ its servers
    f"{_R}.nnodes": whole(0, 100_000),
    f"{_R}.n_gpus_per_node": _PARALLEL,
    f"{_R}.temperature": Annotated[float, Gt(0), Le(100)],
    f"{_R}.val_kwargs.temperature": Annotated[float, Ge(0), Le(100)],
    f"{_R}.val_kwargs.top_p": Annotated[float, Gt(0), Le(1)],
    f"{_R}.val_kwargs.top_k": whole(-1, 1_000_000),
    f"{_R}.val_kwargs.n": whole(1, 1024),
    f"{_R}.{{full_determinism,ignore_eos,enforce_eager,free_cache_engine,enable_chunked_prefill,enable_prefix_caching,"
    "disable_log_stats,layered_summon,enable_sleep_mode}": bool,
    f"{_R}.dtype": Literal["auto", "bfloat16", "float16", "half", "float32", "float"],
    f"{_R}.gpu_memory_utilization": Annotated[float, Gt(0), Le(1)],
    f"{_R}.cudagraph_capture_sizes": listed(_TOKENS) | None,
    f"{_R}.{{tensor_model_parallel_size,data_parallel_size,expert_parallel_size}}": _PARALLEL,
    f"{_R}.{{max_num_batched_tokens,log_prob_max_token_len_per_gpu}}": _TOKENS,
    f"{_R}.max_model_len": _TOKENS | None,
    f"{_R}.max_num_seqs": whole(1, 1_000_000),
    f"{_R}.scheduling_policy": Literal["fcfs", "priority"],
    f"{_R}.logprobs_mode": Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"],
    f"{_R}.load_format": Text,
    f"{_R}.{{quantization,quantization_config_file,router_config_path}}": Text | None,
    f"{_R}.agent.num_workers": whole(1, 4096),
    f"{_R}.checkpoint_engine.{{backend,custom_backend_module}}": Text | None,
    f"{_R}.checkpoint_engine.update_weights_bucket_megabytes": whole(1, 1_000_000),
    f"{_R}.checkpoint_engine.engine_kwargs": dict[str, Any],
    f"{_R}.engine_kwargs.vllm": dict[str, Any] | None,
    f"{_R}.trace.{{project_name,experiment_name,backend}}": Text | None,
    f"{_R}.trace.token2text": bool,
    f"{_R}.trace.max_samples_per_step_per_worker": whole(0, 1_000_000) | None,
    f"{_R}.prometheus.enable": bool,
    f"{_R}.prometheus.port": _PORT,
    f"{_R}.prometheus.file": Text,
    f"{_R}.prometheus.served_model_name": Text | None,
    f"{_R}.disaggregation.enabled": bool,
    f"{_R}.disaggregation.{{prefill_replicas,decode_replicas}}": _PARALLEL,
    f"{_R}.disaggregation.decode_tensor_model_parallel_size": _PARALLEL | None,
    f"{_R}.disaggregation.transfer_backend": Text,
    # ------------------------------------------------------------------ tasks and rows
    "data.train_batch_size": whole(1, 1_000_000),
    "data.val_batch_size": Count | None,
    "data.{max_prompt_length,max_response_length}": _TOKENS,
    "data.seed": _SEED | None,
    "data.dataloader_num_workers": whole(0, 1024),
    "data.{shuffle,validation_shuffle}": bool,
    "data.apply_chat_template_kwargs": dict[str, Any] | None,
    "algorithm.norm_adv_by_std_in_grpo": bool,
    f"{_CORRECTION}.rollout_is": Literal["token", "sequence"] | None,
    f"{_CORRECTION}.rollout_is_threshold": _POSITIVE
    | Annotated[str, Match(_THRESHOLD, "a text <lower bound>_<upper bound>")],
    f"{_CORRECTION}.rollout_rs": Annotated[str, _RS] | None,
    f"{_CORRECTION}.rollout_rs_threshold": _POSITIVE
    | Annotated[str, Match(rf"{_THRESHOLD}(,{_THRESHOLD})*", "a text with one threshold for each of rollout_rs")]
    | None,
    f"{_CORRECTION}.{{bypass_mode,rollout_is_batch_normalize}}": bool,
    "transfer_queue.metrics.enabled": bool,
    "transfer_queue.metrics.port": whole(0, 65535),
    "transfer_queue.backend.storage_backend": Text,
    "transfer_queue.backend.SimpleStorage.total_storage_size": Count | None,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": whole(1, 1024),
    "transfer_queue.backend.MooncakeStore.auto_init": bool,
    "transfer_queue.backend.MooncakeStore.{global_segment_size,local_buffer_size}": whole(1, 10**15),
    "transfer_queue.backend.MooncakeStore.{metadata_server,master_server_address,local_hostname}": str,
    "transfer_queue.backend.MooncakeStore.{protocol,device_name}": str,
    # ------------------------------------------------------------------ the run
    "trainer.nnodes": whole(1, 100_000),
    "trainer.n_gpus_per_node": _PARALLEL,
    "trainer.device": Literal["cuda", "cpu", "npu"],
    "trainer.total_epochs": Count,
    "trainer.total_training_steps": Count | None,
    "trainer.{save_freq,test_freq}": whole(-1, 1_000_000_000),
    "trainer.{val_before_train,val_only,del_local_ckpt_after_load}": bool,
    "trainer.log_val_generations": whole(0, 1_000_000),
    "trainer.max_actor_ckpt_to_keep": Count | None,
    "trainer.{project_name,experiment_name,default_local_dir}": Text,
    "trainer.{rollout_data_dir,validation_data_dir,resume_from_path,checkpoint_callback_class}": Text | None,
    "trainer.logger": _LOGGER | listed(_LOGGER),
    "trainer.v1.trainer_mode": Text,
    "trainer.v1.{colocate_async,separate_async}.num_warmup_batches": Finite | None,  # see `mode_check`
    "trainer.v1.sampler.max_off_policy_threshold": Finite | None,  # likewise
    "trainer.v1.sampler.max_off_policy_strategy": Literal["drop", "wait"],
    "ray_kwargs.ray_init.num_cpus": _POSITIVE | None,
    "ray_kwargs.ray_init.num_gpus": Weight | None,
    "ray_kwargs.ray_init.object_store_memory": whole(78_643_200, 10**15) | None,
    "ray_kwargs.ray_init.runtime_env.py_executable": Text | None,
    "ray_kwargs.timeline_json_file": Text | None,
    # ------------------------------------------------------------------ profiling
    "global_profiler.tool": _TOOL | None,
    "global_profiler.steps": list[Count] | None,
    "global_profiler.{profile_continuous_steps,relocate_results,finish_hook_all_ranks}": bool,
    "global_profiler.save_path": Text | None,
    "global_profiler.finish_hook_cmd": Text | None,
    "global_profiler.finish_hook_ranks": _RANKS,
    "global_profiler.global_tool_config.nsys.discrete": bool,
    "global_profiler.global_tool_config.torch_memory.{trace_alloc_max_entries,stack_depth}": Count,
    "global_profiler.global_tool_config.torch_memory.memory_snapshot_num_steps": Count,
    "actor_rollout_ref.*.profiler.tool": _TOOL | None,
    "actor_rollout_ref.*.profiler.{enable,all_ranks,relocate_results,finish_hook_all_ranks}": bool,
    "actor_rollout_ref.*.profiler.{ranks,finish_hook_ranks}": _RANKS,
    "actor_rollout_ref.*.profiler.{save_path,finish_hook_cmd}": Text | None,
    "actor_rollout_ref.*.profiler.tool_config.*.contents": list[Text],
    "actor_rollout_ref.*.profiler.tool_config.*.{analysis,discrete}": bool,
    "actor_rollout_ref.*.profiler.tool_config.*.{profile_token_start,profile_token_end}": (
        whole(0, 1_000_000_000) | None
    ),
    "actor_rollout_ref.*.profiler.tool_config.torch.schedule.{skip_first,wait,warmup,active,repeat}": (
        whole(0, 1_000_000_000)
    ),
    "actor_rollout_ref.*.profiler.tool_config.torch_memory.{trace_alloc_max_entries,stack_depth,"
    "memory_snapshot_num_steps}": Count,
}
"""Pattern of keys, as in `key_table` but with the section's prefix -> annotation. The longest pattern wins."""
