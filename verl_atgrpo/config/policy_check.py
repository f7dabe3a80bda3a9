"""Checks every policy's `actor_rollout_ref`: keys of it against each other and against the job."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.config.key_check import POLICY, View, check_keys, check_types
from verl_atgrpo.config.mode_check import SEPARATE, check_mode
from verl_atgrpo.config.policies import unresolved_job
from verl_atgrpo.config.schema import SECTION, AtGrpoConfig, ConfigError

_CLIP_RATIO = 0.2
"""verl's default of `clip_ratio`, which has no effect if the two others are set."""
_PER_MICRO_BATCH = ("clip_cov", "geo_mean", "kl_cov")
"""Policy losses of verl that average or choose tokens within each micro-batch, which any rows may share."""
IN_PARTS = ("entropy_from_logits_with_chunking", "entropy_checkpointing")
"""Keys of an engine with which verl computes entropies in parts; prefix trees compute them at once."""
_NOT_SERVED = ("lm_head", "embed_tokens")
"""Modules that a policy of a shared base cannot adapt."""
_MAX_MEMORY = 0.95
"""Largest share of a GPU's memory that servers awake at the same time may claim together."""
_SERVER = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")


def check_policies(view: View, settings: AtGrpoConfig) -> None:
    """Raises ConfigError if a policy cannot be trained and served with its `actor_rollout_ref`.

    Args:
        view: the job's configuration, not resolved yet; the types of its keys have been checked.
        settings: its section `at_grpo`.
    """
    check_bases(settings)
    separate = settings.mode == SEPARATE
    sections: dict[str, DictConfig] = {}
    memory: dict[str, float] = {}
    if settings.policies:  # first, as what every policy inherits is to be named by its own key
        check_types(view, POLICY)
        check_keys(view, POLICY)
    for name, policy in settings.policy_settings().items():
        key, own = POLICY, view
        if settings.policies:
            key, own = f"{SECTION}.policies.{name}", View(unresolved_job(view.config, name, policy))
            check_types(own, key)
        check_keys(own, key)
        job = own.config
        if not separate:
            _check_servers_devices(key, job)
        devices = None if separate else job.trainer.n_gpus_per_node * job.trainer.nnodes
        check_policy(key, job.actor_rollout_ref, job.data, devices)
        if settings.prefix_tree is True:
            _check_trees(key, job.actor_rollout_ref)
        sections[key] = job.actor_rollout_ref
        if policy.base is not None:
            _check_base(key, job.actor_rollout_ref)
        if name not in settings.bases():
            continue
        memory[name] = float(job.actor_rollout_ref.rollout.gpu_memory_utilization)
    check_mode(view.config, settings.mode, sections)
    if settings.policies and settings.placement == "colocated" and not separate:
        check_memory(f"{SECTION}.placement=colocated", memory, "lower them, or use placement: split")


def check_bases(settings: AtGrpoConfig) -> None:
    """Raises ConfigError if policies of one base cannot share it, or do not need to."""
    policies = settings.policy_settings()
    for host, names in settings.bases().items():
        base, first = policies[host].base, policies[names[0]]
        if base is None:
            continue
        where = f"{SECTION}.policies.{host}.base={base!r}"
        if len(names) == 1:
            raise ConfigError(f"{where} has no effect: no other policy has it; give it to another one, or remove it")
        if not policies[host].trainable:
            raise ConfigError(
                f"{where}: none of its policies is trained, so they are equal; use one policy for their agents"
            )
        for name in names:
            key, policy = f"{SECTION}.policies.{name}", policies[name]
            if policy.trainable and policy.lora is None:
                raise ConfigError(
                    f"{key}.base={base!r}: policies of one base differ by their adapters; set lora: {{rank: 16}}, or "
                    "trainable: false"
                )
            for block in ("model", "actor", "rollout", "gpus"):
                if getattr(policy, block) != getattr(first, block):
                    raise ConfigError(
                        f"{key}.{block}={getattr(policy, block)}: other than that of {names[0]}, with which it shares "
                        f"the base {base!r}; make them equal, or give it a model of its own"
                    )


def _check_base(key: str, policy: DictConfig) -> None:
    """Raises ConfigError if a policy of a shared base has settings that adapters beside others do not have."""
    needed = {
        "actor.strategy": "fsdp2",
        "model.lora_adapter_path": None,
        "model.target_parameters": None,
        "rollout.disaggregation.enabled": False,
    }
    for name, value in needed.items():
        if (given := OmegaConf.select(policy, name)) != value:
            raise ConfigError(f"{key}.{name}={given}: adapters that share a base need {value}; set that")
    modules = policy.model.target_modules
    for module in [modules] if isinstance(modules, str) else modules or ():
        if module in _NOT_SERVED:
            raise ConfigError(
                f"{key}.model.target_modules={modules}: servers have no adapter on {module}; leave it out"
            )
    for name in ("save_contents", "load_contents"):
        given = OmegaConf.select(policy, f"actor.checkpoint.{name}")
        if not {"model", "optimizer", "extra"} <= set(given):
            raise ConfigError(
                f"{key}.actor.checkpoint.{name}={list(given)} has no effect on adapters that share a base, whose "
                "weights, optimizer and schedule are saved together; set it to [model, optimizer, extra]"
            )


def _check_servers_devices(key: str, job: DictConfig) -> None:
    servers, trainer = job.actor_rollout_ref.rollout.n_gpus_per_node, job.trainer.n_gpus_per_node
    if servers != trainer:
        raise ConfigError(
            f"{key}.rollout.n_gpus_per_node={servers}: the servers are on the policy's {trainer} devices of a node, "
            f"set it to {trainer}, or use {SECTION}.mode={SEPARATE}"
        )


def check_memory(where: str, shares: Mapping[str, float], remedy: str) -> None:
    """Raises ConfigError if servers that share every GPU claim more memory than it has; accepts anything on the CPU.

    Args:
        where: beginning of the message.
        shares: policy -> its servers' `gpu_memory_utilization`.
        remedy: end of the message.
    """
    if not platform_choice.wants_cpu() and sum(shares.values()) > _MAX_MEMORY:
        raise ConfigError(
            f"{where}: the servers of all policies share every GPU, but their rollout.gpu_memory_utilization add up "
            f"to {sum(shares.values()):.2f} ({dict(shares)}), more than {_MAX_MEMORY}; {remedy}"
        )


def check_policy(key: str, policy: DictConfig, data: DictConfig, devices: int | None) -> None:
    """Raises ConfigError if a policy's settings contradict each other or the job's `data`.

    Args:
        key: of the policy's section, for messages.
        policy: the section, with the keys of `actor_rollout_ref`.
        data: the job's `data`.
        devices: on which the policy is trained and served; None if its servers are standalone.
    """
    _check_steps(key, policy, data)
    _check_clipping(key, policy.actor)
    _check_loss(key, policy)
    _check_optimizer(key, policy.actor.optim)
    _check_lengths(key, policy, data)
    _check_batches(key, policy.rollout)
    _check_tool_format(f"{key}.rollout.multi_turn.format", policy.rollout.multi_turn.format)
    if devices is not None:
        _check_server_size(key, policy.rollout, devices)


def _check_tool_format(key: str, name: str) -> None:
    if name == "hermes":  # verl's default; the list of the others takes seconds to import
        return
    from verl_atgrpo.rollout.chat import tool_formats

    if name not in tool_formats():
        raise ConfigError(
            f"{key}={name!r}: verl has no such parser of tool calls; use one of {', '.join(tool_formats())}"
        )


def _check_steps(key: str, policy: DictConfig, data: DictConfig) -> None:
    rows, tasks = policy.actor.ppo_mini_batch_size, data.train_batch_size
    if tasks % rows:
        raise ConfigError(
            f"{key}.actor.ppo_mini_batch_size={rows} does not divide data.train_batch_size={tasks}: their ratio is "
            "the number of optimizer steps"
        )


def _check_clipping(key: str, actor: DictConfig) -> None:
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    # verl replaces a null by clip_ratio.
    if None not in (low, high) and actor.clip_ratio not in (_CLIP_RATIO, low, high):
        raise ConfigError(
            f"{key}.actor.clip_ratio={actor.clip_ratio} has no effect beside clip_ratio_low={low} and "
            f"clip_ratio_high={high}: set those to {actor.clip_ratio}"
        )


def _check_loss(key: str, policy: DictConfig) -> None:
    actor, loss = policy.actor, policy.actor.policy_loss.loss_mode
    mode, factor = actor.loss_agg_mode, actor.loss_scale_factor
    if mode == "seq-mean-token-sum-norm" and factor is None:
        raise ConfigError(
            f"{key}.actor.loss_agg_mode={mode}: without actor.loss_scale_factor verl divides by the longest answer of "
            "each micro-batch, so an answer's weight depends on those it is packed with; set loss_scale_factor to a "
            "constant, such as data.max_response_length"
        )
    if loss in _PER_MICRO_BATCH:
        raise ConfigError(
            f"{key}.actor.policy_loss.loss_mode={loss} averages or chooses tokens within each micro-batch, so what "
            "an answer teaches depends on those it is packed with; set it to gspo, or vanilla"
        )
    if loss == "sapo" and mode != "seq-mean-token-mean":
        raise ConfigError(
            f"{key}.actor.loss_agg_mode={mode} has no effect with policy_loss.loss_mode=sapo: set it to "
            "seq-mean-token-mean"
        )
    if loss == "dro" and actor.policy_loss.dro_beta is None:
        raise ConfigError(f"{key}.actor.policy_loss.dro_beta=null: loss_mode=dro needs it, a number above 0")
    if policy.model.external_lib is None:  # else workers may register further losses
        known = importlib.import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
        if loss not in known:
            raise ConfigError(
                f"{key}.actor.policy_loss.loss_mode={loss} is no policy loss of verl's: use one of "
                f"{', '.join(sorted(set(known) - {*_PER_MICRO_BATCH}))}"
            )


def _check_optimizer(key: str, optim: DictConfig) -> None:
    module = optim.optimizer_impl
    if module == "torch.optim":
        if not hasattr(importlib.import_module(module), optim.optimizer):
            raise ConfigError(
                f"{key}.actor.optim.optimizer={optim.optimizer}: {module} has none of this name, as AdamW"
            )
    elif importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ConfigError(f"{key}.actor.optim.optimizer_impl={module}: it is not installed, set it to torch.optim")


def _check_batches(key: str, rollout: DictConfig) -> None:
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise ConfigError(
            f"{key}.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: vLLM needs at least one token "
            f"for each of {key}.rollout.max_num_seqs={rollout.max_num_seqs}; raise it, or lower that"
        )


def _check_lengths(key: str, policy: DictConfig, data: DictConfig) -> None:
    """Raises ConfigError if the longest prompt and answer do not fit into the engine or into a micro-batch."""
    check_room(key, policy.rollout, data)
    row, needed = _rows(data)
    ranks = max(policy.actor.ulysses_sequence_parallel_size, policy.actor.fsdp_config.ulysses_sequence_parallel_size)
    if ranks > 1 and not policy.model.use_remove_padding:
        raise ConfigError(
            f"{key}.actor.ulysses_sequence_parallel_size={ranks} divides rows among devices, which needs "
            f"{key}.model.use_remove_padding=true; set that, or this to 1"
        )
    for name in (
        "actor.ppo_max_token_len_per_gpu",
        "rollout.log_prob_max_token_len_per_gpu",
        "ref.log_prob_max_token_len_per_gpu",
    ):
        if (budget := OmegaConf.select(policy, name)) * ranks < row:
            raise ConfigError(
                f"{key}.{name}={budget}: {needed}, and a micro-batch holds whole rows; set it to at least "
                f"{-(-row // ranks)}"
            )


def _check_trees(key: str, policy: DictConfig) -> None:
    """Raises ConfigError if a setting excludes prefix trees."""
    parallel = "ulysses_sequence_parallel_size"
    needed = {"model.use_fused_kernels": False, f"actor.{parallel}": 1, f"actor.fsdp_config.{parallel}": 1}
    needed |= {f"actor.fsdp_config.{key}": False for key in IN_PARTS}
    for name, value in needed.items():
        if OmegaConf.select(policy, name) != value:
            raise ConfigError(
                f"{SECTION}.prefix_tree=true: {key}.{name} excludes prefix trees; set it to its default, or "
                "prefix_tree to auto"
            )


def _check_server_size(key: str, rollout: DictConfig, devices: int) -> None:
    size = math.prod(rollout[name] for name in _SERVER)
    if devices % size:
        raise ConfigError(
            f"{key}.rollout.{_SERVER[0]}={rollout[_SERVER[0]]}: the policy has {devices} devices, which servers of "
            f"{size} ({' * '.join(_SERVER)}) do not divide among them; choose one that does"
        )
    together = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if rollout.expert_parallel_size not in (1, together):
        raise ConfigError(
            f"{key}.rollout.expert_parallel_size={rollout.expert_parallel_size}: set it to 1, or to {together} "
            f"({' * '.join(_SERVER[:2])})"
        )


def _rows(data: DictConfig) -> tuple[int, str]:
    """Returns the longest row's tokens, and words for a message."""
    row = data.max_prompt_length + data.max_response_length
    return row, (
        f"data.max_prompt_length={data.max_prompt_length} and data.max_response_length={data.max_response_length} "
        f"make rows of up to {row} tokens"
    )


def check_room(key: str, rollout: DictConfig, data: DictConfig) -> None:
    """Raises ConfigError if the longest prompt and answer do not fit into the engine."""
    row, needed = _rows(data)
    longest = rollout.max_model_len
    if longest is not None and longest < row:
        raise ConfigError(
            f"{key}.rollout.max_model_len={longest}: {needed}; set it to at least that, or shorten them: the server "
            "would cut answers off early, or refuse long prompts"
        )


def check_context(key: str, rollout: DictConfig, data: DictConfig, longest: int) -> None:
    """Raises ConfigError if rows, or `max_model_len`, are longer than the model's context.

    Args:
        key: of the policy's section.
        rollout: its `rollout`.
        data: the job's `data`.
        longest: the model's number of positions.
    """
    row, needed = _rows(data)
    if longest < row:
        raise ConfigError(f"{key}.model.path: the model has {longest} positions, {needed}; shorten them")
    if rollout.max_model_len is not None and rollout.max_model_len > longest:
        raise ConfigError(
            f"{key}.rollout.max_model_len={rollout.max_model_len}: the model has {longest} positions; set it to at "
            f"most that"
        )
