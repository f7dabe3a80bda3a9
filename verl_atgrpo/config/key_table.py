"""The status of each key of verl's configuration in a team's job: it works, is refused, or has no meaning.

`key_check` refuses by this table and docs/configuration.md prints it. Tests compare it with the installed verl: every
key has one row, every row matches a key, and the reader of a key that works contains its name.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["works", "refused", "no meaning"]


@dataclass(frozen=True)
class Like:
    """Stands for the value of another key."""

    key: str


@dataclass(frozen=True)
class Default:
    """Stands for verl's default."""


@dataclass(frozen=True)
class Given:
    """Stands for every value but null."""


@dataclass(frozen=True)
class Positive:
    """Stands for every number above 0."""


def without_braces(pattern: str) -> tuple[str, ...]:
    """Returns the patterns that one with `{a,b}` stands for."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]  # commas occur in braces only
    return tuple("".join(choice) for choice in itertools.product(*parts))


DEFAULT, GIVEN, POSITIVE = Default(), Given(), Positive()


@dataclass(frozen=True)
class Row:
    """The status of the keys that a pattern matches."""

    pattern: str
    """Below its section's prefix. `{a,b}` is either, `*` one part of a key, `**` any number of parts. The pattern with
    the most fixed characters wins."""
    status: Status
    text: str
    """Why it is refused or has no meaning, or a note on a key that works."""
    values: tuple[Any, ...] = ()
    """Accepted values; empty: any."""
    remedy: str = ""
    """End of the message; empty: the accepted values."""
    reader: str = ""
    """`module:name` of the code that reads a key that works."""
    beside: tuple[str, tuple[Any, ...]] | None = None
    """Another key, and its values with which this one has an effect."""
    added: bool = False
    """verl reads the key but does not list it in its configuration."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns without braces."""
        return without_braces(self.pattern)


@dataclass(frozen=True)
class Section:
    """Rows whose keys share a prefix."""

    prefix: str
    """Without the final dot; empty for top-level keys."""
    rows: tuple[Row, ...]


def _works(
    pattern: str,
    reader: str,
    text: str = "",
    *,
    values: tuple[Any, ...] = (),
    beside: tuple[str, tuple[Any, ...]] | None = None,
    added: bool = False,
) -> Row:
    return Row(pattern, "works", text, values, reader=reader, beside=beside, added=added)


def _refused(
    pattern: str, why: str, values: tuple[Any, ...] = (DEFAULT,), remedy: str = "", *, added: bool = False
) -> Row:
    return Row(pattern, "refused", why, values, remedy, added=added)


def _nothing(pattern: str, why: str, *, added: bool = False) -> Row:
    return Row(pattern, "no meaning", why, added=added)


_A, _M, _R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
# Readers: modules of verl and of this package.
_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
_ENGINES = "verl.workers.engine.fsdp.transformer_impl"
_HEAD = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_LOSSES = "verl.trainer.ppo.core_algos"
_LOSS = "verl.workers.utils.losses:ppo_loss"
_WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
_SERVERS = "verl.workers.rollout.llm_server:LLMServerManager"
_REPLICA = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMReplica"
_HF = "verl.workers.config.model:HFModelConfig"
_OPTIM = "verl.workers.config.optimizer"
_BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_MAIN = "verl.trainer.main_ppo:run_ppo"
_LOOP = "verl.trainer.ppo.v1.agent_loop_tq"
_PROFILER = "verl.utils.profiler.config:ProfilerConfig"
_CORRECT = "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch"
_OURS = "verl_atgrpo"
_UNIT = "verl_atgrpo.trainer.policy_unit:PolicyUnit"
_TRAINER = "verl_atgrpo.trainer.trainer:AtGrpoTrainer"
_CHECKPOINTS = "verl_atgrpo.trainer.checkpoints"
_ROLLOUT = "verl_atgrpo.rollout.worker:TeamRolloutWorker"
_MODE = "verl_atgrpo.config.mode_check"

_DYNAMIC = "has no effect, micro-batches are filled up to a number of tokens"
_EPISODES = "has no effect, prompts are made during the episode"
_NOBODY = "has no effect, verl's V1 trainer does not read it"
_CRITIC = "has no effect, a group estimator has no critic"
_SCORES = "has no effect, the environment computes the rewards"
_LOOPS = "has no effect, a team's workflow is its environment's `run`"
_GROUPS = "has no effect, at_grpo.estimator computes the advantages"
_ENTROPY = "has no effect, the entropy of the reference is not computed"
_MEGATRON = "has no effect, only Megatron reads it"
_OTHER_ENGINE = "for another engine or other hardware"

TABLE: tuple[Section, ...] = (
    Section(
        "",
        (
            _refused("**._target_", "names verl's own class"),
            _refused("model_engine", "policies are trained with FSDP; others have not been tried", ("dp",)),
            _refused("critic.**", _CRITIC),
            _refused("critic.enable", _CRITIC, (None, False), remedy="set it to false"),
            _refused("{reward,reward_model,custom_reward_function}.**", _SCORES),
            _refused(
                "{sandbox_fusion,reward.sandbox_fusion}.**", "has no effect, environments use this package's sandbox"
            ),
            _refused("reward.reward_model.enable", _SCORES, (False,)),
            _refused("distillation.**", "has no effect, a team has no teacher"),
            _refused("distillation.enabled", "a team has no teacher", (False,)),
            _refused("skip.**", "the trainer submits tasks itself, so no rollout would be skipped"),
            _works("ray_kwargs.ray_init.**", _MAIN),
            _works("ray_kwargs.timeline_json_file", _MAIN),
        ),
    ),
    Section(
        "actor_rollout_ref",
        (
            _works("hybrid_engine", _MODE, "false with `at_grpo.mode: separate_async` alone"),
            _refused("nccl_timeout", _NOBODY),
        ),
    ),
    Section(
        _A,
        (
            _refused("strategy", "policies are trained with FSDP; others have not been tried", ("fsdp", "fsdp2")),
            _works("ppo_mini_batch_size", _UNIT, "`data.train_batch_size` over it is the number of optimizer steps"),
            _refused("use_dynamic_bsz", "the number of rows varies between steps", (True,)),
            _works("ppo_max_token_len_per_gpu", _WORKER, "at least a prompt and an answer of full length"),
            _refused(
                "{ppo_micro_batch_size,ppo_micro_batch_size_per_gpu}",
                _DYNAMIC,
                remedy="set it to null, and actor.ppo_max_token_len_per_gpu to that number",
            ),
            _works("clip_ratio", f"{_LOSSES}:compute_policy_loss_vanilla", "where one of the next two is null"),
            _works("{clip_ratio_low,clip_ratio_high,clip_ratio_c}", f"{_LOSSES}:compute_policy_loss_vanilla"),
            _works(
                "{tau_pos,tau_neg}",
                f"{_LOSSES}:compute_policy_loss_sapo",
                beside=(f"{_A}.policy_loss.loss_mode", ("sapo",)),
            ),
            _works("loss_agg_mode", _LOSS),
            _works(
                "loss_scale_factor",
                _LOSS,
                "which that mode needs",
                beside=(f"{_A}.loss_agg_mode", ("seq-mean-token-sum-norm",)),
            ),
            _works("entropy_coeff", _LOSS),
            _works("calculate_entropy", _UNIT),
            _works("use_kl_loss", _LOSS),
            _works("kl_loss_coef", _LOSS, beside=(f"{_A}.use_kl_loss", (True,))),
            _works(
                "kl_loss_type",
                _LOSS,
                beside=(f"{_A}.use_kl_loss", (True,)),
                values=tuple(
                    f"{kind}{end}"
                    for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
                    for end in ("", "+")
                ),
            ),
            _works("ppo_epochs", _UNIT),
            _refused("shuffle", "has no effect, the trainer itself shuffles rows over mini-batches"),
            _refused(
                "data_loader_seed",
                "has no effect, the trainer shuffles rows with a seed of the step",
            ),
            _refused(
                "grad_clip",
                "has no effect, gradients are clipped to actor.optim.clip_grad",
                (DEFAULT, Like(f"{_A}.optim.clip_grad")),
                remedy="set that instead",
            ),
            _refused("use_prefix_grouper", "has no effect, verl's V1 trainer never calls it"),
            _refused("{freeze_vision_tower,calculate_sum_pi_squared}", _NOBODY),
            _refused(
                "use_torch_compile",
                "has no effect, the engine reads another key",
                (DEFAULT, Like(f"{_A}.fsdp_config.use_torch_compile")),
                remedy="set actor.fsdp_config.use_torch_compile",
            ),
            _refused(
                "use_fused_kernels",
                "has no effect, the engine reads another key",
                (Like(f"{_M}.use_fused_kernels"),),
                remedy="set model.use_fused_kernels",
            ),
            _refused(
                "use_remove_padding",
                "has no effect, the engine reads another key",
                (Like(f"{_M}.use_remove_padding"),),
                remedy="set model.use_remove_padding",
            ),
            _refused("rollout_n", "has no effect, K is at_grpo.candidates", (DEFAULT, 1), remedy="leave it at 1"),
            _works("ulysses_sequence_parallel_size", "verl.workers.config.actor:FSDPActorConfig"),
            _works(
                "{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing,pad_to_length}",
                _ENGINES,
                "through `fsdp_config`",
            ),
            _refused("qat.**", "has no effect, the engine reads actor.fsdp_config.qat"),
            _works(
                "checkpoint.{save_contents,load_contents}",
                "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager",
            ),
            _refused("checkpoint.async_save", "a checkpoint must be complete before the next step", (False,)),
            _refused("checkpoint.strict", _MEGATRON),
            _works(
                "profiler.**",
                _PROFILER,
                "on every worker; the tools `npu` and `precision_debugger` are for other hardware",
            ),
            _refused(
                "router_replay.mode",
                "a team's rows hold no routed experts",
                ("disabled", "R2", None),
                remedy="set it to R2 or disabled",
                added=True,
            ),
        ),
    ),
    Section(
        f"{_A}.policy_loss",
        (
            _works("loss_mode", _LOSS, "`geo_mean` is refused: it is a mean over each micro-batch"),
            _works(
                "{clip_cov_ratio,clip_cov_lb,clip_cov_ub}",
                f"{_LOSSES}:compute_policy_loss_clip_cov",
                beside=(f"{_A}.policy_loss.loss_mode", ("clip_cov",)),
            ),
            _works(
                "{kl_cov_ratio,ppo_kl_coef}",
                f"{_LOSSES}:compute_policy_loss_kl_cov",
                beside=(f"{_A}.policy_loss.loss_mode", ("kl_cov",)),
            ),
            _works(
                "dro_beta",
                f"{_LOSSES}:compute_policy_loss_dro",
                "which that loss needs",
                beside=(f"{_A}.policy_loss.loss_mode", ("dro",)),
            ),
        ),
    ),
    Section(
        f"{_A}.optim",
        (
            _works(
                "{lr,weight_decay,betas,optimizer,optimizer_impl,override_optimizer_config}",
                f"{_OPTIM}:build_optimizer",
            ),
            _works("{lr_warmup_steps,lr_warmup_steps_ratio}", _ENGINE),
            _works("lr_scheduler_type", _ENGINE, values=("constant", "cosine")),
            _works(
                "warmup_style",
                f"{_OPTIM}:FSDPOptimizerConfig",
                "an older name of `lr_scheduler_type`, which it overrides",
            ),
            _works(
                "{min_lr_ratio,num_cycles,zero_indexed_step}",
                _ENGINE,
                beside=(f"{_A}.optim.lr_scheduler_type", ("cosine",)),
            ),
            _works("clip_grad", _ENGINE),
            _refused(
                "grad_clip",
                "is an older name of clip_grad",
                (None,),
                remedy="set actor.optim.clip_grad",
                added=True,
            ),
            _refused(
                "total_training_steps",
                "has no effect, it is set to the run's",
                remedy="set trainer.total_training_steps",
            ),
        ),
    ),
    Section(
        f"{_A}.fsdp_config",
        (
            _works("wrap_policy.min_num_params", "verl.utils.fsdp_utils:get_fsdp_wrap_policy"),
            _works(
                "{param_offload,optimizer_offload,reshard_after_forward,fsdp_size,model_dtype,full_determinism,"
                "ulysses_sequence_parallel_size,use_torch_compile,entropy_from_logits_with_chunking,pad_to_length,"
                "use_no_sync_for_gradient_accumulation}",
                _ENGINE,
            ),
            _works("{entropy_checkpointing,entropy_from_logits_chunk_size}", _HEAD),
            _works("pad_to_length_bucket", _ENGINE, beside=(f"{_A}.fsdp_config.pad_to_length", (True,))),
            _works("seed", _ENGINE, beside=(f"{_A}.fsdp_config.full_determinism", (True,))),
            _works("{forward_prefetch,use_orig_params}", _ENGINE, beside=(f"{_A}.strategy", ("fsdp",))),
            _works("offload_policy", _ENGINE, beside=(f"{_A}.strategy", ("fsdp2",))),
            _works("mixed_precision.**", _ENGINE, added=True),
            _refused("forward_only", "a policy is trained"),
            _refused(
                "strategy",
                "has no effect, actor.strategy is copied over it",
                (DEFAULT, Like(f"{_A}.strategy")),
                remedy="set that",
            ),
            _refused("dtype", "has no effect with FSDP", remedy="set actor.fsdp_config.mixed_precision.param_dtype"),
            _works("qat.**", _ENGINE, "quantization-aware training: not tried with a team"),
            _nothing("turbo_config.**", _OTHER_ENGINE),
        ),
    ),
    Section(
        "actor_rollout_ref.ref",
        (
            _refused(
                "strategy",
                "the reference uses the policy's engine",
                (Like(f"{_A}.strategy"),),
                remedy="set actor.strategy",
            ),
            _works("log_prob_max_token_len_per_gpu", _WORKER, "at least a prompt and an answer of full length"),
            _refused("log_prob_use_dynamic_bsz", "the number of rows varies between steps", (True,)),
            _refused(
                "{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu}",
                _DYNAMIC,
                remedy="set it to null, and ref.log_prob_max_token_len_per_gpu to that number",
            ),
            _refused("rollout_n", "has no effect, K is at_grpo.candidates", (DEFAULT, 1), remedy="leave it at 1"),
            _refused(
                "{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,"
                "entropy_checkpointing}",
                _ENTROPY,
            ),
            _works("pad_to_length", _ENGINE, "through `fsdp_config`"),
            _works("ulysses_sequence_parallel_size", "verl.workers.config.actor:FSDPActorConfig"),
            _works("profiler.**", _PROFILER),
            _works("fsdp_config.wrap_policy.min_num_params", "verl.utils.fsdp_utils:get_fsdp_wrap_policy"),
            _works(
                "fsdp_config.{reshard_after_forward,fsdp_size,model_dtype,full_determinism,"
                "ulysses_sequence_parallel_size,pad_to_length}",
                _ENGINE,
            ),
            _works(
                "fsdp_config.pad_to_length_bucket",
                _ENGINE,
                beside=("actor_rollout_ref.ref.fsdp_config.pad_to_length", (True,)),
            ),
            _works(
                "fsdp_config.seed", _ENGINE, beside=("actor_rollout_ref.ref.fsdp_config.full_determinism", (True,))
            ),
            _works("fsdp_config.{forward_prefetch,use_orig_params}", _ENGINE, beside=(f"{_A}.strategy", ("fsdp",))),
            _works("fsdp_config.mixed_precision.**", _ENGINE, added=True),
            _nothing(
                "fsdp_config.{param_offload,optimizer_offload,offload_policy,use_no_sync_for_gradient_accumulation}",
                "FSDP always keeps the reference on the host, without gradients",
            ),
            _refused(
                "fsdp_config.{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,"
                "entropy_checkpointing}",
                _ENTROPY,
                (DEFAULT, False),
            ),
            _refused("fsdp_config.forward_only", "the reference is not trained"),
            _refused(
                "fsdp_config.strategy",
                "has no effect, actor.strategy is copied over it",
                (DEFAULT, Like(f"{_A}.strategy")),
                remedy="set that",
            ),
            _refused(
                "fsdp_config.dtype",
                "has no effect with FSDP",
                remedy="set ref.fsdp_config.mixed_precision.param_dtype",
            ),
            _refused("fsdp_config.qat.**", "has no effect, the reference is not trained"),
            _nothing("fsdp_config.turbo_config.**", _OTHER_ENGINE),
        ),
    ),
    Section(
        _M,
        (
            _works(
                "{path,hf_config_path,tokenizer_path,use_shm,trust_remote_code,custom_chat_template,external_lib}",
                _HF,
            ),
            _works("override_config.**", _HF),
            _works(
                "{enable_gradient_checkpointing,enable_activation_offload,use_remove_padding,use_liger,"
                "use_fused_kernels,lora_rank}",
                _ENGINE,
            ),
            _works(
                "{lora_alpha,target_modules,exclude_modules,lora_adapter_path}",
                _ENGINE,
                beside=(f"{_M}.lora_rank", (POSITIVE,)),
            ),
            _works("target_parameters", _ENGINE, beside=(f"{_M}.lora_rank", (POSITIVE,)), added=True),
            _works("fused_kernel_options.**", _ENGINE, beside=(f"{_M}.use_fused_kernels", (True,))),
            _refused("tiled_mlp.**", "has no effect, the engine does not pass it on"),
            _works("lora.merge", _ENGINE, "servers get the merged model", beside=(f"{_M}.lora_rank", (POSITIVE,))),
            _refused("lora.**", _MEGATRON, remedy="set model.lora_rank, lora_alpha, target_modules"),
            _refused("mtp.**", "multi-token prediction has not been tried with a team"),
        ),
    ),
    Section(
        _R,
        (
            _refused("name", "a team is served by vllm", ("vllm",)),
            _refused("mode", "has no effect, servers are asynchronous", ("async",)),
            _works(
                "{nnodes,n_gpus_per_node}",
                f"{_MODE}:devices_of",
                "the servers' devices with `at_grpo.mode: separate_async`; else refused",
            ),
            _works("temperature", f"{_LOOP}:AgentLoopWorkerTQ", "above 0, in training"),
            _refused("top_p", "changes the sampling distribution but not the log-probs that are trained on", (1.0,)),
            _refused("top_k", "changes the sampling distribution but not the log-probs that are trained on", (-1,)),
            _refused(
                "repetition_penalty",
                "changes the sampling distribution but not the log-probs that are trained on",
                (1.0,),
                added=True,
            ),
            _refused("do_sample", "candidates of a decision must differ", (True,)),
            _refused("n", "has no effect, K is at_grpo.candidates", (1,), remedy="leave it at 1"),
            _refused("over_sample_rate", _NOBODY),
            _refused("seed", "has no effect, every sample has a seed of its own", remedy="set at_grpo.seed"),
            _works("full_determinism", _SERVER, "in `mode: sync`"),
            _refused(
                "prompt_length",
                "has no effect, data.max_prompt_length is the limit",
                (Like("data.max_prompt_length"),),
                remedy="set data.max_prompt_length",
            ),
            _refused(
                "response_length",
                "has no effect, data.max_response_length is the limit",
                (Like("data.max_response_length"),),
                remedy="set data.max_response_length",
            ),
            _works("val_kwargs.{temperature,top_p,top_k}", f"{_LOOP}:AgentLoopWorkerTQ"),
            _works("val_kwargs.n", _ROLLOUT),
            _refused(
                "val_kwargs.do_sample",
                "has no effect beside a val_kwargs.temperature above 0",
                (True, False),
                remedy="set val_kwargs.temperature to 0 for greedy answers",
            ),
            _works(
                "{dtype,gpu_memory_utilization,ignore_eos,enforce_eager,cudagraph_capture_sizes,free_cache_engine,"
                "tensor_model_parallel_size,data_parallel_size,expert_parallel_size,max_num_batched_tokens,max_model_len,"
                "enable_chunked_prefill,enable_prefix_caching,scheduling_policy,load_format,disable_log_stats,"
                "quantization}",
                _SERVER,
            ),
            _works("quantization_config_file", _SERVER, beside=(f"{_R}.quantization", (GIVEN,))),
            _works("max_num_seqs", _SERVER),
            _works("enable_sleep_mode", _SERVER, added=True),
            _works("logprobs_mode", _SERVER, "`processed_logprobs`, unless temperature is 1"),
            _refused("pipeline_model_parallel_size", "verl's vllm servers have none", (1,)),
            _works("layered_summon", _WORKER, beside=(f"{_M}.lora_rank", (POSITIVE,))),
            _refused("multi_stage_wake_up", _NOBODY),
            _refused("skip_tokenizer_init", _NOBODY),
            _works("log_prob_max_token_len_per_gpu", _WORKER, "at least a prompt and an answer of full length"),
            _refused("log_prob_use_dynamic_bsz", "the number of rows varies between steps", (True,)),
            _refused(
                "{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu}",
                _DYNAMIC,
                remedy="set it to null, and rollout.log_prob_max_token_len_per_gpu to that number",
            ),
            _refused(
                "calculate_log_probs",
                "the server's log-probs show whether its weights are current",
                (True,),
            ),
            _refused("enable_rollout_routing_replay", "a team's rows hold no routed experts", (False,)),
            _refused("moe_load_balance_metrics_interval", "has no effect, a team's rows hold no routed experts", (0,)),
            _works("engine_kwargs.vllm.**", _SERVER, "any argument of vLLM's"),
            _refused(
                "engine_kwargs.vllm.{dtype,load_format,max_model_len,max_num_seqs,enable_chunked_prefill,"
                "max_num_batched_tokens,enable_prefix_caching,enable_sleep_mode,logprobs_mode,enforce_eager,"
                "gpu_memory_utilization,disable_log_stats,quantization,scheduling_policy}",
                "bypasses the checks of rollout",
                (None,),
                remedy="set rollout's key of the same name",
                added=True,
            ),
            _refused(
                "engine_kwargs.vllm.{tensor_parallel_size,pipeline_parallel_size,data_parallel_size}",
                "bypasses the checks of rollout",
                (None,),
                remedy="set rollout.tensor_model_parallel_size or rollout.data_parallel_size",
                added=True,
            ),
            _refused(
                "engine_kwargs.vllm.seed",
                "has no effect, every sample has a seed of its own",
                (None,),
                remedy="set at_grpo.seed",
                added=True,
            ),
            _nothing("engine_kwargs.{sglang,trtllm}.**", _OTHER_ENGINE),
            _works("router_config_path", _SERVERS),
            _refused("multi_turn.**", _LOOPS),
            _works("agent.num_workers", "verl_atgrpo.serving.client:DecisionClient"),
            _refused("agent.{default_agent_loop,agent_loop_config_path}", _LOOPS),
            _refused(
                "agent.agent_loop_manager_class",
                "a team's episodes need this package's manager",
                (None, "verl_atgrpo.rollout.manager.TeamRolloutManager"),
                added=True,
            ),
            _refused("agent.custom_async_server.**", _NOBODY),
            _works(
                "checkpoint_engine.{backend,engine_kwargs.**,custom_backend_module}", _WORKER, "see `at_grpo.mode`"
            ),
            _works("checkpoint_engine.update_weights_bucket_megabytes", _WORKER),
            _works(
                "trace.{project_name,experiment_name,backend}",
                "verl.experimental.agent_loop.agent_loop:AgentLoopWorker",
            ),
            _works("trace.token2text", "verl.experimental.agent_loop.agent_loop:AgentLoopWorker"),
            _works("trace.max_samples_per_step_per_worker", _ROLLOUT),
            _works("profiler.**", _PROFILER, "of the servers: the tools `torch` and `npu`"),
            _works("prometheus.enable", _SERVERS, beside=(f"{_R}.disable_log_stats", (False,))),
            _works(
                "prometheus.{port,file}",
                "verl.workers.rollout.utils:update_prometheus_config",
                beside=(f"{_R}.prometheus.enable", (True,)),
            ),
            _works("prometheus.served_model_name", _SERVER, beside=(f"{_R}.prometheus.enable", (True,))),
            _refused("mtp.**", "multi-token prediction has not been tried with a team"),
            _refused("qat.**", "servers are quantized as the policy is", remedy="set actor.fsdp_config.qat"),
            _works("disaggregation.enabled", _SERVERS, "in `mode: sync`; not tried with a team"),
            _works(
                "disaggregation.{prefill_replicas,decode_replicas,decode_tensor_model_parallel_size}",
                _SERVERS,
                beside=(f"{_R}.disaggregation.enabled", (True,)),
            ),
            _works(
                "disaggregation.transfer_backend",
                "verl.workers.rollout.vllm_rollout.vllm_async_server",
                beside=(f"{_R}.disaggregation.enabled", (True,)),
            ),
            _nothing("disaggregation.{bootstrap_port,ib_device}", _OTHER_ENGINE),
        ),
    ),
    Section(
        "data",
        (
            _works("train_batch_size", _TRAINER),
            _works("{seed,shuffle}", "verl.trainer.ppo.utils:create_rl_sampler"),
            _works("{max_prompt_length,max_response_length,apply_chat_template_kwargs.**}", _ROLLOUT),
            _works("{val_batch_size,dataloader_num_workers,validation_shuffle}", _BASE),
            _refused(
                "{train_files,val_files}",
                "has no effect, the environment provides the tasks",
                remedy="name data sets in at_grpo.environment",
            ),
            _refused("train_max_samples", "has no effect, at_grpo.train_tasks is the number of tasks", (-1,)),
            _refused("val_max_samples", "has no effect, at_grpo.val_tasks is the number of tasks", (-1,)),
            _refused("gen_batch_size", "has no effect, tasks are submitted one by one", (None, 1)),
            _refused("custom_cls.**", "has no effect, the environment provides the tasks"),
            _refused(
                "{filter_overlong_prompts,filter_overlong_prompts_workers,truncation}",
                "has no effect, prompts are made during the episode, and one that is too long fails it",
            ),
            _refused(
                "{prompt_key,tokenizer,use_shm,trust_remote_code,return_raw_input_ids,return_raw_chat,"
                "return_full_prompt,reward_fn_key,tool_config_path,function_tool_path}",
                _EPISODES,
            ),
            _refused(
                "{image_patch_size,image_key,video_key,audio_key,return_multi_modal_inputs,mm_processor_kwargs.**}",
                "has no effect, prompts are texts",
            ),
            _nothing("{at_grpo,at_grpo_tasks}.**", "set by the trainer", added=True),
        ),
    ),
    Section(
        "algorithm",
        (
            _refused(
                "adv_estimator",
                "does not compare a team's groups",
                ("at_grpo",),
                remedy="set it to at_grpo and choose the formula with at_grpo.estimator",
            ),
            _works("norm_adv_by_std_in_grpo", f"{_OURS}.estimators.kernel", "of the presets `at_grpo` and `grpo`"),
            _refused("{gamma,lam}", _GROUPS, remedy="leave it at 1; gigpo has step_gamma"),
            _refused("{use_pf_ppo,pf_ppo.**}", _GROUPS),
            _refused("{gdpo_reward_keys,gdpo_reward_weights}", _GROUPS, (None,), added=True),
            _refused(
                "filter_groups.**",
                "filters whole tasks, not a team's groups",
                remedy="set it to false and use at_grpo.group_filter",
            ),
            _refused(
                "filter_groups.{metric,max_num_gen_batches,max_inflight_gen_batches}",
                "has no effect, algorithm.filter_groups is not for teams",
                remedy="use at_grpo.group_filter",
            ),
            _refused(
                "use_kl_in_reward",
                "would give equal answers of a group different rewards",
                (False,),
                remedy="set it to false and use actor_rollout_ref.actor.use_kl_loss",
            ),
            _refused(
                "{kl_penalty,kl_ctrl.**}",
                "has no effect without use_kl_in_reward, which is refused",
                remedy="set actor_rollout_ref.actor.kl_loss_type and kl_loss_coef",
            ),
            _works("rollout_correction.{rollout_is,rollout_rs}", _CORRECT),
            _works(
                "rollout_correction.{rollout_is_threshold,rollout_is_batch_normalize}",
                _CORRECT,
                beside=(f"{_CORRECTION}.rollout_is", ("token", "sequence")),
            ),
            _works(
                "rollout_correction.rollout_rs_threshold", _CORRECT, beside=(f"{_CORRECTION}.rollout_rs", (GIVEN,))
            ),
            _works("rollout_correction.bypass_mode", _UNIT),
            _refused("rollout_correction.loss_type", "is ignored by verl's V1 trainer", ("ppo_clip",)),
            _refused(
                "at_grpo_estimator",
                "is for plain jobs",
                (None,),
                "remove it, a team's is at_grpo.estimator",
                added=True,
            ),
        ),
    ),
    Section(
        "transfer_queue",
        (
            _nothing("enable", "verl sets it"),
            _works("metrics.**", "transfer_queue.controller"),
            _works("backend.{storage_backend,SimpleStorage.**,MooncakeStore.**}", "transfer_queue.interface"),
        ),
    ),
    Section(
        "trainer",
        (
            _refused("use_v1", "the legacy trainer is not supported", (True,)),
            _works(
                "{total_epochs,total_training_steps,project_name,experiment_name,logger,log_val_generations}", _BASE
            ),
            _works("{save_freq,test_freq,val_before_train,val_only,rollout_data_dir,validation_data_dir}", _BASE),
            _works("{nnodes,n_gpus_per_node}", _TRAINER),
            _works("device", _UNIT),
            _works("resume_mode", _CHECKPOINTS, values=("disable", "auto", "resume_path")),
            _works("resume_from_path", _CHECKPOINTS, beside=("trainer.resume_mode", ("resume_path",))),
            _works("{default_local_dir,del_local_ckpt_after_load,max_actor_ckpt_to_keep}", _CHECKPOINTS),
            _works("checkpoint_callback_class", "verl.trainer.ppo.checkpoint_callback:build_checkpoint_callback"),
            _refused("default_hdfs_dir", "has no effect, verl's FSDP checkpoints go to default_local_dir alone"),
            _refused("{critic_warmup,max_critic_ckpt_to_keep}", _CRITIC),
            _refused(
                "remove_previous_ckpt_in_save",
                "has no effect",
                (None, False),
                remedy="set trainer.max_actor_ckpt_to_keep to 1",
                added=True,
            ),
            _refused("balance_batch", "has no effect, rows are always balanced over the devices", (True,)),
            _refused("{esi_redundant_time,ray_wait_register_center_timeout}", _NOBODY),
            _works("v1.trainer_mode", _MAIN.replace("run_ppo", "TaskRunnerV1")),
            _nothing("v1.sync.**", "it is empty"),
            _works("v1.{colocate_async,separate_async}.num_warmup_batches", f"{_OURS}.trainer.schedule"),
            _refused(
                "v1.separate_async.parameter_sync_step", "weights are synchronised after every step", (DEFAULT, 1)
            ),
            _refused("v1.separate_async.hybrid_rollout.**", "the trainer's devices are not used for the rollout"),
            _works("v1.sampler.{max_off_policy_threshold,max_off_policy_strategy}", _BASE, "see `at_grpo.mode`"),
            _nothing("v1.sampler.sync_refill_failed_groups", "the trainer sets it"),
            _refused(
                "v1.sampler.{custom_sampler,sampler_kwargs}.**",
                "the trainer relies on verl's own sampler to replace failed episodes",
            ),
        ),
    ),
    Section(
        "global_profiler",
        (
            _works("{steps,tool,profile_continuous_steps}", _BASE),
            _works("{save_path,relocate_results,finish_hook_cmd,finish_hook_all_ranks,finish_hook_ranks}", _PROFILER),
            _works("global_tool_config.nsys.**", _UNIT),
            _works(
                "global_tool_config.torch_memory.{trace_alloc_max_entries,stack_depth,memory_snapshot_num_steps}",
                "verl.utils.profiler.config:TorchMemoryToolConfig",
            ),
            _nothing("global_tool_config.torch_memory.{context,stacks,kw_args.**}", "verl does not use these"),
            _nothing("global_tool_config.precision_debugger.**", _OTHER_ENGINE),
        ),
    ),
)
