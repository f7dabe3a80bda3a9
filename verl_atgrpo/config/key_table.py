"""The status of each key of verl's configuration in a team's job: it works, is refused, or has no meaning.

`key_check` refuses by this table and docs/configuration.md prints it. Tests compare it with the installed verl: every
key has one row, every row matches a key, and the reader of a key that works contains its name.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from verl_atgrpo.config.kinds import Count, Finite, Match, Share, Text, Weight, listed, one_of, whole

Status = Literal["works", "refused", "no meaning"]


@dataclass(frozen=True)
class Like:
    """Stands for the value of another key."""

    key: str


@dataclass(frozen=True)
class Default:
    """Stands for verl's default."""


DEFAULT = Default()


@dataclass(frozen=True)
class Row:
    """The status of the keys that a pattern matches."""

    pattern: str
    """Below its section's prefix. `{a,b}` is either, `*` one part of a key, `**` any number of parts. The pattern with
    the most fixed characters wins."""
    status: Status
    text: str
    """Why it is refused or has no meaning, or a note on a key that works."""
    kind: Any = None
    """What a key that works accepts, as an annotation (`kinds`); of a pattern with `**` the section itself. None:
    anything, such as an argument of vLLM's."""
    values: tuple[Any, ...] = ()
    """Accepted values of a key that is refused otherwise."""
    remedy: str = ""
    """End of the message; empty: the accepted values."""
    reader: str = ""
    """`module:name` of the code that reads a key that works."""
    beside: tuple[str, Any] | None = None
    """Another key, and the kind of its values with which this one has an effect."""
    added: bool = False
    """verl reads the key but does not list it in its configuration."""


def without_braces(pattern: str) -> tuple[str, ...]:
    """Returns the patterns that one with `{a,b}` stands for."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]  # commas occur in braces only
    return tuple("".join(choice) for choice in itertools.product(*parts))


def _works(
    pattern: str,
    kind: Any,
    reader: str,
    text: str = "",
    *,
    beside: tuple[str, Any] | None = None,
    added: bool = False,
) -> Row:
    return Row(pattern, "works", text, kind, reader=reader, beside=beside, added=added)


def _refused(
    pattern: str, why: str, values: tuple[Any, ...] = (DEFAULT,), remedy: str = "", *, added: bool = False
) -> Row:
    return Row(pattern, "refused", why, None, values, remedy, added=added)


def _follows(pattern: str, why: str, key: str, *values: Any) -> Row:
    """A key that may only repeat the one that is read in its place, or have one of `values`."""
    return _refused(pattern, why, (*values, Like(key)), f"set {key.removeprefix('actor_rollout_ref.')}")


def _of_loss(loss: str, pattern: str, kind: Any, text: str = "") -> Row:
    """A parameter of one of verl's policy losses."""
    reader = f"{_LOSSES}:compute_policy_loss_{loss}"
    return _works(pattern, kind, reader, text, beside=(_LOSS_MODE, one_of([loss])))


def _micro_batches(section: str, kind: str) -> Row:
    """The sizes of micro-batches, in whose place a number of tokens is read."""
    remedy = f"set it to null, and {section}.{kind}_max_token_len_per_gpu to that number"
    return _refused(f"{kind}_micro_batch_size{{,_per_gpu}}", _DYNAMIC, remedy=remedy)


def _nothing(pattern: str, why: str, *, added: bool = False) -> Row:
    return Row(pattern, "no meaning", why, added=added)


_A, _M, _R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_REF, _CORRECTION = "actor_rollout_ref.ref", "algorithm.rollout_correction"
# Readers: modules of verl and of this package.
_ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
_ENGINES = "verl.workers.engine.fsdp.transformer_impl"
_HEAD = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
_QAT = "verl.workers.config.engine"
_LOSSES = "verl.trainer.ppo.core_algos"
_VANILLA = "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla"
_LOSS = "verl.workers.utils.losses:ppo_loss"
_ACTOR = "verl.workers.config.actor:FSDPActorConfig"
_WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker"
_WRAP = "verl.utils.fsdp_utils:get_fsdp_wrap_policy"
_SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
_SERVERS = "verl.workers.rollout.llm_server:LLMServerManager"
_PROMETHEUS = "verl.workers.rollout.utils:update_prometheus_config"
_HF = "verl.workers.config.model:HFModelConfig"
_OPTIM = "verl.workers.config.optimizer"
_OPTIMIZER = "verl.workers.config.optimizer:build_optimizer"
_BASE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_SAMPLER = "verl.trainer.ppo.utils:create_rl_sampler"
_MAIN = "verl.trainer.main_ppo:run_ppo"
_RAY = "ray._private.worker:init"
_LOOP = "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ"
_TRACE = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker"
_PROFILER = "verl.utils.profiler.config:ProfilerConfig"
_TOOLS = "verl.utils.profiler.config"
_CORRECT = "verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_add_to_batch"
_QUEUE_METRICS = "transfer_queue.controller"
_SIMPLE = "transfer_queue.storage.simple_storage"
_MOONCAKE = "transfer_queue.storage.clients.mooncake_client"
_OURS = "verl_atgrpo"
_UNIT = "verl_atgrpo.trainer.policy_unit:PolicyUnit"
_TRAINER = "verl_atgrpo.trainer.trainer:AtGrpoTrainer"
_CHECKPOINTS = "verl_atgrpo.trainer.checkpoints"
_ROLLOUT = "verl_atgrpo.rollout.worker:TeamRolloutWorker"
_MODE = "verl_atgrpo.config.mode_check"

# Kinds.
_POSITIVE = Annotated[float, Gt(0), Le(1e300)]
_PARALLEL = whole(1, 1024)
"""Devices that work together."""
_TOKENS = whole(1, 10_000_000)
"""Lengths of rows, and of what is computed at once."""
_SEED = whole(0, 2**32 - 1)
_DTYPE = Literal["fp32", "float32", "fp16", "float16", "bf16", "bfloat16", 16, 32]
_PORT = whole(1, 65535)
_NAMES = str | list[Text] | None
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
_TORCH_MEMORY = "{trace_alloc_max_entries,stack_depth,memory_snapshot_num_steps}"

# What a key needs beside it.
_LOSS_MODE = f"{_A}.policy_loss.loss_mode"
_KL_LOSS = (f"{_A}.use_kl_loss", Literal[True])
_COSINE = (f"{_A}.optim.lr_scheduler_type", Literal["cosine"])
_WITH_ADAPTER = (f"{_M}.lora_rank", Count)
_FUSED = (f"{_M}.use_fused_kernels", Literal[True])
_WITH_PROMETHEUS = (f"{_R}.prometheus.enable", Literal[True])
_DISAGGREGATED = (f"{_R}.disaggregation.enabled", Literal[True])
_CORRECTED = (f"{_CORRECTION}.rollout_is", Literal["token", "sequence"])

# Texts.
_A_ROW = "at least a prompt and an answer of full length"
_SEPARATE = "the servers' devices with `at_grpo.mode: separate_async`; else refused"
_DYNAMIC = "has no effect, micro-batches are filled up to a number of tokens"
_EPISODES = "has no effect, prompts are made during the episode"
_NOBODY = "has no effect, verl's V1 trainer does not read it"
_CRITIC = "has no effect, a group estimator has no critic"
_SCORES = "has no effect, the environment computes the rewards"
_TASKS = "has no effect, the environment provides the tasks"
_LOOPS = "has no effect, a team's workflow is its environment's `run`"
_GROUPS = "has no effect, at_grpo.estimator computes the advantages"
_ENTROPY = "has no effect, the entropy of the reference is not computed"
_MEGATRON = "has no effect, only Megatron reads it"
_OTHER_KEY = "has no effect, the engine reads another key"
_K = "has no effect, K is at_grpo.candidates"
_ROWS_VARY = "the number of rows varies between steps"
_EXPERTS = "a team's rows hold no routed experts"
_DISTRIBUTION = "changes the sampling distribution but not the log-probs that are trained on"
_BYPASS = "bypasses the checks of rollout"
_OTHER_ENGINE = "for another engine or other hardware"

TABLE: dict[str, tuple[Row, ...]] = {
    "": (
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
        _works("ray_kwargs.ray_init.num_cpus", _POSITIVE | None, _RAY),
        _works("ray_kwargs.ray_init.num_gpus", Weight | None, _RAY, added=True),
        _works("ray_kwargs.ray_init.object_store_memory", whole(78_643_200, 10**15) | None, _RAY, added=True),
        _works("ray_kwargs.ray_init.runtime_env.py_executable", Text | None, "ray.runtime_env.runtime_env"),
        _works("ray_kwargs.ray_init.**", None, _MAIN, added=True),
        _works("ray_kwargs.timeline_json_file", Text | None, _MAIN),
    ),
    "actor_rollout_ref": (
        _works("hybrid_engine", bool, _MODE, "false with `at_grpo.mode: separate_async` alone"),
        _refused("nccl_timeout", _NOBODY),
    ),
    _A: (
        _refused("strategy", "policies are trained with FSDP; others have not been tried", ("fsdp", "fsdp2")),
        _works(
            "ppo_mini_batch_size",
            whole(1, 1_000_000),
            _UNIT,
            "`data.train_batch_size` over it is the number of optimizer steps",
        ),
        _refused("use_dynamic_bsz", _ROWS_VARY, (True,)),
        _works("ppo_max_token_len_per_gpu", _TOKENS, _WORKER, _A_ROW),
        _micro_batches("actor", "ppo"),
        _works("clip_ratio", Weight, _VANILLA, "where one of the next two is null"),
        _works("{clip_ratio_low,clip_ratio_high}", Weight | None, _VANILLA),
        _works("clip_ratio_c", Annotated[float, Gt(1), Le(1e300)], _VANILLA),
        _of_loss("sapo", "{tau_pos,tau_neg}", _POSITIVE),
        _works("loss_agg_mode", one_of(_AGGREGATIONS), _LOSS),
        _works(
            "loss_scale_factor",
            _POSITIVE | None,
            _LOSS,
            "which that mode needs",
            beside=(f"{_A}.loss_agg_mode", Literal["seq-mean-token-sum-norm"]),
        ),
        _works("entropy_coeff", Finite, _LOSS),
        _works("calculate_entropy", bool, _UNIT),
        _works("use_kl_loss", bool, _LOSS),
        _works("kl_loss_coef", Weight, _LOSS, beside=_KL_LOSS),
        _works("kl_loss_type", one_of(_KL_LOSSES), _LOSS, beside=_KL_LOSS),
        _works("ppo_epochs", whole(1, 1000), _UNIT),
        _refused("shuffle", "has no effect, the trainer itself shuffles rows over mini-batches"),
        _refused("data_loader_seed", "has no effect, the trainer shuffles rows with a seed of the step"),
        _refused(
            "grad_clip",
            "has no effect, gradients are clipped to actor.optim.clip_grad",
            (DEFAULT, Like(f"{_A}.optim.clip_grad")),
            remedy="set that instead",
        ),
        _refused("use_prefix_grouper", "has no effect, verl's V1 trainer never calls it"),
        _refused("{freeze_vision_tower,calculate_sum_pi_squared}", _NOBODY),
        _follows("use_torch_compile", _OTHER_KEY, f"{_A}.fsdp_config.use_torch_compile", DEFAULT),
        _follows("use_fused_kernels", _OTHER_KEY, f"{_M}.use_fused_kernels"),
        _follows("use_remove_padding", _OTHER_KEY, f"{_M}.use_remove_padding"),
        _refused("rollout_n", _K, (DEFAULT, 1), remedy="leave it at 1"),
        _works("ulysses_sequence_parallel_size", _PARALLEL, _ACTOR),
        _works(
            "{entropy_from_logits_with_chunking,entropy_checkpointing,pad_to_length}",
            bool,
            _ENGINES,
            "through `fsdp_config`",
        ),
        _works("entropy_from_logits_chunk_size", _TOKENS, _ENGINES, "through `fsdp_config`"),
        _refused("qat.**", "has no effect, the engine reads actor.fsdp_config.qat"),
        _works(
            "checkpoint.{save_contents,load_contents}",
            list[Literal["model", "optimizer", "extra", "hf_model"]],
            "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager",
        ),
        _refused("checkpoint.async_save", "a checkpoint must be complete before the next step", (False,)),
        _refused("checkpoint.strict", _MEGATRON),
        _works(
            "profiler.**",
            None,
            _PROFILER,
            "on every worker; the tools `npu` and `precision_debugger` are for other hardware",
        ),
        _refused(
            "router_replay.mode", _EXPERTS, ("disabled", "R2", None), remedy="set it to R2 or disabled", added=True
        ),
    ),
    "actor_rollout_ref.{actor,ref,rollout}.profiler": (
        _works("tool", _TOOL | None, _PROFILER),
        _works("{enable,all_ranks,relocate_results,finish_hook_all_ranks}", bool, _PROFILER),
        _works("{ranks,finish_hook_ranks}", _RANKS, _PROFILER),
        _works("{save_path,finish_hook_cmd}", Text | None, _PROFILER),
        _works("tool_config.*.contents", list[Text], _TOOLS),
        _works("tool_config.*.{analysis,discrete}", bool, _TOOLS),
    ),
    "actor_rollout_ref.{actor,ref}.profiler.tool_config": (
        _works("torch.schedule.{skip_first,wait,warmup,active,repeat}", whole(0, 1_000_000_000), _TOOLS),
        _works(f"torch_memory.{_TORCH_MEMORY}", Count, _TOOLS),
    ),
    f"{_A}.policy_loss": (
        _works(
            "loss_mode", Text, _LOSS, "`clip_cov`, `geo_mean` and `kl_cov` are refused: they depend on the micro-batch"
        ),
        _refused("{clip_cov_ratio,clip_cov_lb,clip_cov_ub}", "has no effect, loss_mode=clip_cov is refused"),
        _refused("{kl_cov_ratio,ppo_kl_coef}", "has no effect, loss_mode=kl_cov is refused"),
        _of_loss("dro", "dro_beta", _POSITIVE | None, "which that loss needs"),
    ),
    f"{_A}.optim": (
        _works("{lr,weight_decay}", Share, _OPTIMIZER),
        _works("betas", Annotated[list[Annotated[float, Ge(0), Lt(1)]], Len(2, 2)], _OPTIMIZER),
        _works("{optimizer,optimizer_impl}", Text, _OPTIMIZER),
        _works("override_optimizer_config", dict[str, Any] | None, _OPTIMIZER),
        _works("lr_warmup_steps", whole(-1, 1_000_000_000) | None, _ENGINE),
        _works("lr_warmup_steps_ratio", Share, _ENGINE),
        _works("lr_scheduler_type", Literal["constant", "cosine"], _ENGINE),
        _works(
            "warmup_style",
            Literal["constant", "cosine"] | None,
            f"{_OPTIM}:FSDPOptimizerConfig",
            "an older name of `lr_scheduler_type`, which it overrides",
        ),
        _works("min_lr_ratio", Share | None, _ENGINE, beside=_COSINE),
        _works("num_cycles", Weight, _ENGINE, beside=_COSINE),
        _works("zero_indexed_step", bool, _ENGINE, beside=_COSINE),
        _works("clip_grad", _POSITIVE, _ENGINE),
        _refused(
            "grad_clip", "is an older name of clip_grad", (None,), remedy="set actor.optim.clip_grad", added=True
        ),
        _refused(
            "total_training_steps", "has no effect, it is set to the run's", remedy="set trainer.total_training_steps"
        ),
    ),
    f"{_A}.fsdp_config": (
        _works(
            "{param_offload,optimizer_offload,use_torch_compile,entropy_from_logits_with_chunking,"
            "use_no_sync_for_gradient_accumulation}",
            bool,
            _ENGINE,
        ),
        _works("entropy_checkpointing", bool, _HEAD),
        _works("entropy_from_logits_chunk_size", _TOKENS, _HEAD),
        _works("pad_to_length_bucket", _TOKENS, _ENGINE, beside=(f"{_A}.fsdp_config.pad_to_length", Literal[True])),
        _works("seed", _SEED, _ENGINE, beside=(f"{_A}.fsdp_config.full_determinism", Literal[True])),
        _works("offload_policy", bool, _ENGINE, beside=(f"{_A}.strategy", Literal["fsdp2"])),
        _refused("forward_only", "a policy is trained"),
        _refused("dtype", "has no effect with FSDP", remedy="set actor.fsdp_config.mixed_precision.param_dtype"),
        _works("qat.enable", bool, _QAT),
        _works("qat.{mode,activation_observer}", Text, _QAT),
        _works("qat.group_size", Count, _QAT),
        _works("qat.ignore_patterns", list[Text], _QAT),
        _works("qat.quantization_config_path", Text | None, _QAT),
        _works("qat.**", None, _ENGINE, "quantization-aware training: not tried with a team"),
    ),
    "actor_rollout_ref.{actor,ref}.fsdp_config": (
        _works("wrap_policy.min_num_params", whole(0, 10**12), _WRAP),
        _works("{reshard_after_forward,full_determinism,pad_to_length}", bool, _ENGINE),
        _works("fsdp_size", Literal[-1] | whole(1, 100_000), _ENGINE),
        _works("model_dtype", _DTYPE, _ENGINE),
        _works("ulysses_sequence_parallel_size", _PARALLEL, _ENGINE),
        _works("{forward_prefetch,use_orig_params}", bool, _ENGINE, beside=(f"{_A}.strategy", Literal["fsdp"])),
        _works("mixed_precision.{param_dtype,reduce_dtype,buffer_dtype}", _DTYPE, _ENGINE, added=True),
        _works("mixed_precision.**", None, _ENGINE, added=True),
        _refused(
            "strategy",
            "has no effect, actor.strategy is copied over it",
            (DEFAULT, Like(f"{_A}.strategy")),
            remedy="set that",
        ),
        _nothing("turbo_config.**", _OTHER_ENGINE),
    ),
    _REF: (
        _follows("strategy", "the reference uses the policy's engine", f"{_A}.strategy"),
        _works("log_prob_max_token_len_per_gpu", _TOKENS, _WORKER, _A_ROW),
        _refused("log_prob_use_dynamic_bsz", _ROWS_VARY, (True,)),
        _micro_batches("ref", "log_prob"),
        _refused("rollout_n", _K, (DEFAULT, 1), remedy="leave it at 1"),
        _refused(
            "{use_torch_compile,entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,"
            "entropy_checkpointing}",
            _ENTROPY,
        ),
        _works("pad_to_length", bool, _ENGINE, "through `fsdp_config`"),
        _works("ulysses_sequence_parallel_size", _PARALLEL, _ACTOR),
        _works("profiler.**", None, _PROFILER),
        _works(
            "fsdp_config.pad_to_length_bucket",
            _TOKENS,
            _ENGINE,
            beside=(f"{_REF}.fsdp_config.pad_to_length", Literal[True]),
        ),
        _works("fsdp_config.seed", _SEED, _ENGINE, beside=(f"{_REF}.fsdp_config.full_determinism", Literal[True])),
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
            "fsdp_config.dtype", "has no effect with FSDP", remedy="set ref.fsdp_config.mixed_precision.param_dtype"
        ),
        _refused("fsdp_config.qat.**", "has no effect, the reference is not trained"),
    ),
    _M: (
        _works("path", Text, _HF),
        _works("{hf_config_path,tokenizer_path,custom_chat_template,external_lib}", Text | None, _HF),
        _works("{use_shm,trust_remote_code}", bool, _HF),
        _works("override_config.**", dict[str, Any], _HF),
        _works(
            "{enable_gradient_checkpointing,enable_activation_offload,use_remove_padding,use_liger,use_fused_kernels}",
            bool,
            _ENGINE,
        ),
        _works("lora_rank", whole(0, 512), _ENGINE),
        _works("lora_alpha", Count, _ENGINE, beside=_WITH_ADAPTER),
        _works("{target_modules,exclude_modules}", _NAMES, _ENGINE, beside=_WITH_ADAPTER),
        _works("lora_adapter_path", Text | None, _ENGINE, beside=_WITH_ADAPTER),
        _works("target_parameters", _NAMES, _ENGINE, beside=_WITH_ADAPTER, added=True),
        _works("fused_kernel_options.impl_backend", Literal["torch", "triton"] | None, _ENGINE, beside=_FUSED),
        _works("fused_kernel_options.**", None, _ENGINE, beside=_FUSED, added=True),
        _refused("tiled_mlp.**", "has no effect, the engine does not pass it on"),
        _refused(
            "lora.merge",
            "verl rounds merged weights to bfloat16, so that servers sample with others than the actor has",
            remedy="leave it out: servers get the adapter",
        ),
        _refused("lora.**", _MEGATRON, remedy="set model.lora_rank, lora_alpha, target_modules"),
        _refused("mtp.**", "multi-token prediction has not been tried with a team"),
    ),
    _R: (
        _refused("name", "a team is served by vllm", ("vllm",)),
        _refused("mode", "has no effect, servers are asynchronous", ("async",)),
        _works("nnodes", whole(0, 100_000), f"{_MODE}:devices_of", _SEPARATE),
        _works("n_gpus_per_node", _PARALLEL, f"{_MODE}:devices_of", _SEPARATE),
        _works("temperature", Annotated[float, Gt(0), Le(100)], _LOOP, "above 0, in training"),
        _refused("top_p", _DISTRIBUTION, (1.0,)),
        _refused("top_k", _DISTRIBUTION, (-1,)),
        _refused("repetition_penalty", _DISTRIBUTION, (1.0,), added=True),
        _refused("do_sample", "candidates of a decision must differ", (True,)),
        _refused("n", _K, (1,), remedy="leave it at 1"),
        _refused("over_sample_rate", _NOBODY),
        _refused("seed", "has no effect, every sample has a seed of its own", remedy="set at_grpo.seed"),
        _works("full_determinism", bool, _SERVER, "in `mode: sync`"),
        _follows("prompt_length", "has no effect, data.max_prompt_length is the limit", "data.max_prompt_length"),
        _follows(
            "response_length", "has no effect, data.max_response_length is the limit", "data.max_response_length"
        ),
        _works("val_kwargs.temperature", Annotated[float, Ge(0), Le(100)], _LOOP),
        _works("val_kwargs.top_p", Annotated[float, Gt(0), Le(1)], _LOOP),
        _works("val_kwargs.top_k", whole(-1, 1_000_000), _LOOP),
        _works("val_kwargs.n", whole(1, 1024), _ROLLOUT),
        _refused(
            "val_kwargs.do_sample",
            "has no effect beside a val_kwargs.temperature above 0",
            (True, False),
            remedy="set val_kwargs.temperature to 0 for greedy answers",
        ),
        _works("dtype", Literal["auto", "bfloat16", "float16", "half", "float32", "float"], _SERVER),
        _works("gpu_memory_utilization", Annotated[float, Gt(0), Le(1)], _SERVER),
        _works(
            "{ignore_eos,enforce_eager,free_cache_engine,enable_chunked_prefill,enable_prefix_caching,"
            "disable_log_stats}",
            bool,
            _SERVER,
        ),
        _works("cudagraph_capture_sizes", listed(_TOKENS) | None, _SERVER),
        _works("{tensor_model_parallel_size,data_parallel_size,expert_parallel_size}", _PARALLEL, _SERVER),
        _works("max_num_batched_tokens", _TOKENS, _SERVER),
        _works("max_model_len", _TOKENS | None, _SERVER),
        _works("scheduling_policy", Literal["fcfs", "priority"], _SERVER),
        _works("load_format", Text, _SERVER),
        _works("quantization", Text | None, _SERVER),
        _works("quantization_config_file", Text | None, _SERVER, beside=(f"{_R}.quantization", Text)),
        _works("max_num_seqs", whole(1, 1_000_000), _SERVER),
        _works("enable_sleep_mode", bool, _SERVER, added=True),
        _works(
            "logprobs_mode",
            Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"],
            _SERVER,
            "`processed_logprobs`, unless temperature is 1",
        ),
        _refused("pipeline_model_parallel_size", "verl's vllm servers have none", (1,)),
        _works("layered_summon", bool, _WORKER, beside=_WITH_ADAPTER),
        _refused("multi_stage_wake_up", _NOBODY),
        _refused("skip_tokenizer_init", _NOBODY),
        _works("log_prob_max_token_len_per_gpu", _TOKENS, _WORKER, _A_ROW),
        _refused("log_prob_use_dynamic_bsz", _ROWS_VARY, (True,)),
        _micro_batches("rollout", "log_prob"),
        _refused("calculate_log_probs", "the server's log-probs show whether its weights are current", (True,)),
        _refused("enable_rollout_routing_replay", _EXPERTS, (False,)),
        _refused("moe_load_balance_metrics_interval", "has no effect, a team's rows hold no routed experts", (0,)),
        _works("engine_kwargs.vllm.**", dict[str, Any] | None, _SERVER, "any argument of vLLM's"),
        _refused(
            "engine_kwargs.vllm.{dtype,load_format,max_model_len,max_num_seqs,enable_chunked_prefill,"
            "max_num_batched_tokens,enable_prefix_caching,enable_sleep_mode,logprobs_mode,enforce_eager,"
            "gpu_memory_utilization,disable_log_stats,quantization,scheduling_policy}",
            _BYPASS,
            (None,),
            remedy="set rollout's key of the same name",
            added=True,
        ),
        _refused(
            "engine_kwargs.vllm.{tensor_parallel_size,pipeline_parallel_size,data_parallel_size}",
            _BYPASS,
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
        _works("router_config_path", Text | None, _SERVERS),
        _refused("multi_turn.**", _LOOPS),
        _works("multi_turn.format", Text, "verl_atgrpo.rollout.chat:Chat", "how the model calls tools"),
        _works("agent.num_workers", whole(1, 4096), "verl_atgrpo.serving.client:DecisionClient"),
        _refused("agent.{default_agent_loop,agent_loop_config_path}", _LOOPS),
        _refused(
            "agent.agent_loop_manager_class",
            "a team's episodes need this package's manager",
            (None, "verl_atgrpo.rollout.manager.TeamRolloutManager"),
            added=True,
        ),
        _refused("agent.custom_async_server.**", _NOBODY),
        _works("checkpoint_engine.{backend,custom_backend_module}", Text | None, _WORKER, "see `at_grpo.mode`"),
        _works("checkpoint_engine.engine_kwargs.**", dict[str, Any], _WORKER, "see `at_grpo.mode`"),
        _works("checkpoint_engine.update_weights_bucket_megabytes", whole(1, 1_000_000), _WORKER),
        _works("trace.{project_name,experiment_name,backend}", Text | None, _TRACE),
        _works("trace.token2text", bool, _TRACE),
        _works("trace.max_samples_per_step_per_worker", whole(0, 1_000_000) | None, _ROLLOUT),
        _works(
            "profiler.tool_config.*.{profile_token_start,profile_token_end}", whole(0, 1_000_000_000) | None, _TOOLS
        ),
        _works("profiler.**", None, _PROFILER, "of the servers: the tools `torch` and `npu`"),
        _works("prometheus.enable", bool, _SERVERS, beside=(f"{_R}.disable_log_stats", Literal[False])),
        _works("prometheus.port", _PORT, _PROMETHEUS, beside=_WITH_PROMETHEUS),
        _works("prometheus.file", Text, _PROMETHEUS, beside=_WITH_PROMETHEUS),
        _works("prometheus.served_model_name", Text | None, _SERVER, beside=_WITH_PROMETHEUS),
        _refused("mtp.**", "multi-token prediction has not been tried with a team"),
        _refused("qat.**", "servers are quantized as the policy is", remedy="set actor.fsdp_config.qat"),
        _works("disaggregation.enabled", bool, _SERVERS, "in `mode: sync`; not tried with a team"),
        _works("disaggregation.{prefill_replicas,decode_replicas}", _PARALLEL, _SERVERS, beside=_DISAGGREGATED),
        _works("disaggregation.decode_tensor_model_parallel_size", _PARALLEL | None, _SERVERS, beside=_DISAGGREGATED),
        _works(
            "disaggregation.transfer_backend",
            Text,
            "verl.workers.rollout.vllm_rollout.vllm_async_server",
            beside=_DISAGGREGATED,
        ),
        _nothing("disaggregation.{bootstrap_port,ib_device}", _OTHER_ENGINE),
    ),
    "data": (
        _works("train_batch_size", whole(1, 1_000_000), _TRAINER),
        _works("seed", _SEED | None, _SAMPLER),
        _works("shuffle", bool, _SAMPLER),
        _works("{max_prompt_length,max_response_length}", _TOKENS, _ROLLOUT),
        _works("apply_chat_template_kwargs.**", dict[str, Any] | None, _ROLLOUT),
        _works("val_batch_size", Count | None, _BASE),
        _works("dataloader_num_workers", whole(0, 1024), _BASE),
        _works("validation_shuffle", bool, _BASE),
        _refused("{train_files,val_files}", _TASKS, remedy="name data sets in at_grpo.environment"),
        _refused("train_max_samples", "has no effect, at_grpo.train_tasks is the number of tasks", (-1,)),
        _refused("val_max_samples", "has no effect, at_grpo.val_tasks is the number of tasks", (-1,)),
        _refused("gen_batch_size", "has no effect, tasks are submitted one by one", (None, 1)),
        _refused("custom_cls.**", _TASKS),
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
    "algorithm": (
        _refused(
            "adv_estimator",
            "does not compare a team's groups",
            ("at_grpo",),
            remedy="set it to at_grpo and choose the formula with at_grpo.estimator",
        ),
        _works(
            "norm_adv_by_std_in_grpo", bool, f"{_OURS}.estimators.plain_job", "of the presets `at_grpo` and `grpo`"
        ),
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
        _works("rollout_correction.rollout_is", Literal["token", "sequence"] | None, _CORRECT),
        _works("rollout_correction.rollout_rs", _RS | None, _CORRECT),
        _works("rollout_correction.rollout_is_threshold", _POSITIVE | _BOUNDS, _CORRECT, beside=_CORRECTED),
        _works("rollout_correction.rollout_is_batch_normalize", bool, _CORRECT, beside=_CORRECTED),
        _works(
            "rollout_correction.rollout_rs_threshold",
            _POSITIVE | _THRESHOLDS | None,
            _CORRECT,
            beside=(f"{_CORRECTION}.rollout_rs", Text),
        ),
        _works("rollout_correction.bypass_mode", bool, _UNIT),
        _refused("rollout_correction.loss_type", "is ignored by verl's V1 trainer", ("ppo_clip",)),
        _refused(
            "at_grpo_estimator", "is for plain jobs", (None,), "remove it, a team's is at_grpo.estimator", added=True
        ),
    ),
    "transfer_queue": (
        _nothing("enable", "verl sets it"),
        _works("metrics.enabled", bool, _QUEUE_METRICS),
        _works("metrics.port", whole(0, 65535), _QUEUE_METRICS),
        _works("metrics.**", None, _QUEUE_METRICS, added=True),
        _works("backend.storage_backend", Text, "transfer_queue.interface"),
        _works("backend.SimpleStorage.total_storage_size", Count | None, _SIMPLE),
        _works("backend.SimpleStorage.num_data_storage_units", whole(1, 1024), _SIMPLE),
        _works("backend.MooncakeStore.auto_init", bool, "transfer_queue.storage.bootstrap.mooncake_bootstrap"),
        _works("backend.MooncakeStore.{global_segment_size,local_buffer_size}", whole(1, 10**15), _MOONCAKE),
        _works("backend.MooncakeStore.{metadata_server,master_server_address,local_hostname}", str, _MOONCAKE),
        _works("backend.MooncakeStore.{protocol,device_name}", str, _MOONCAKE),
        _works("backend.{SimpleStorage,MooncakeStore}.**", None, "transfer_queue.interface", added=True),
    ),
    "trainer": (
        _refused("use_v1", "the legacy trainer is not supported", (True,)),
        _works("total_epochs", Count, _BASE),
        _works("total_training_steps", Count | None, _BASE),
        _works("{project_name,experiment_name}", Text, _BASE),
        _works("logger", _LOGGER | listed(_LOGGER), _BASE),
        _works("log_val_generations", whole(0, 1_000_000), _BASE),
        _works("{save_freq,test_freq}", whole(-1, 1_000_000_000), _BASE),
        _works("{val_before_train,val_only}", bool, _BASE),
        _works("{rollout_data_dir,validation_data_dir}", Text | None, _BASE),
        _works("nnodes", whole(1, 100_000), _TRAINER),
        _works("n_gpus_per_node", _PARALLEL, _TRAINER),
        _works("device", Literal["cuda", "cpu", "npu"], _UNIT),
        _works("resume_mode", Literal["disable", "auto", "resume_path"], _CHECKPOINTS),
        _works("resume_from_path", Text | None, _CHECKPOINTS, beside=("trainer.resume_mode", Literal["resume_path"])),
        _works("default_local_dir", Text, _CHECKPOINTS),
        _works("max_actor_ckpt_to_keep", Count | None, _CHECKPOINTS),
        _works(
            "checkpoint_callback_class", Text | None, "verl.trainer.ppo.checkpoint_callback:build_checkpoint_callback"
        ),
        _refused(
            "del_local_ckpt_after_load", "has no effect, verl deletes none on a local file system", (None, False)
        ),
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
        _works("v1.trainer_mode", Text, "verl.trainer.main_ppo:TaskRunnerV1"),
        _nothing("v1.sync.**", "it is empty"),
        _works("v1.{colocate_async,separate_async}.num_warmup_batches", Finite | None, f"{_OURS}.trainer.schedule"),
        _refused("v1.separate_async.parameter_sync_step", "weights are synchronised after every step", (DEFAULT, 1)),
        _refused("v1.separate_async.hybrid_rollout.**", "the trainer's devices are not used for the rollout"),
        _works("v1.sampler.max_off_policy_threshold", Finite | None, _BASE, "see `at_grpo.mode`"),
        _works("v1.sampler.max_off_policy_strategy", Literal["drop", "wait"], _BASE, "see `at_grpo.mode`"),
        _nothing("v1.sampler.sync_refill_failed_groups", "the trainer sets it"),
        _refused(
            "v1.sampler.{custom_sampler,sampler_kwargs}.**",
            "the trainer relies on verl's own sampler to replace failed episodes",
        ),
    ),
    "global_profiler": (
        _works("steps", list[Count] | None, _BASE),
        _works("tool", _TOOL | None, _BASE),
        _works("profile_continuous_steps", bool, _BASE),
        _works("{save_path,finish_hook_cmd}", Text | None, _PROFILER),
        _works("{relocate_results,finish_hook_all_ranks}", bool, _PROFILER),
        _works("finish_hook_ranks", _RANKS, _PROFILER),
        _works("global_tool_config.nsys.discrete", bool, _TOOLS),
        _works("global_tool_config.nsys.**", None, _UNIT),
        _works(f"global_tool_config.torch_memory.{_TORCH_MEMORY}", Count, _TOOLS),
        _nothing("global_tool_config.torch_memory.{context,stacks,kw_args.**}", "verl does not use these"),
        _nothing("global_tool_config.precision_debugger.**", _OTHER_ENGINE),
    ),
}
"""Prefix of keys, without the final dot and with braces as in a pattern -> rows of the keys below it."""
