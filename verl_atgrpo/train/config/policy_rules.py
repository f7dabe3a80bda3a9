"""Rules of policies: how they share devices and models, and each one's keys against each other and the job's."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.train.chat import tool_formats
from verl_atgrpo.train.config.job import SEPARATE, Job, Policy, longest_row

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
SERVER = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
"""Keys of `rollout` whose product is the devices of one server."""


def of_devices(job: Job) -> Iterator[str]:
    """Devices of policies that do not add up to those of a node."""
    settings, available = job.settings, job.trainer.n_gpus_per_node
    for policy in job.policies.values():
        if settings.placement == "colocated" and policy.settings.gpus is not None:
            yield f"{policy.key}.gpus={policy.settings.gpus} has no effect with placement: colocated; remove it"
        if settings.placement == "split" and policy.settings.gpus is None:
            yield f"{policy.key}.gpus is missing: placement: split needs it"
    total = sum(job.policies[host].settings.gpus or 0 for host in settings.bases())
    if settings.placement == "split" and total != available:
        yield f"at_grpo.policies: gpus add up to {total}, trainer.n_gpus_per_node is {available}; make them equal"


def of_bases(job: Job) -> Iterator[str]:
    """Policies of one base that cannot share it, or do not need to."""
    for host, names in job.settings.bases().items():
        base, policies = job.policies[host].settings.base, [job.policies[name] for name in names]
        if base is None:
            continue
        where = f"{job.policies[host].key}.base={base!r}"
        if len(names) == 1 and job.settings.self_played not in names:
            yield f"{where} has no effect: no other policy has it; give it to another one, or remove it"
        if not job.policies[host].settings.trainable:
            yield f"{where}: none of its policies is trained, so they are equal; use one policy for their agents"
        for policy in policies:
            if policy.settings.trainable and policy.settings.lora is None:
                own = "set lora: {rank: 16}, or trainable: false"
                yield f"{policy.key}.base={base!r}: policies of one base differ by their adapters; {own}"
            for block in ("model", "actor", "rollout", "gpus"):
                if (value := getattr(policy.settings, block)) != getattr(policies[0].settings, block):
                    yield (
                        f"{policy.key}.{block}={value}: other than that of {names[0]}, with which it shares the base "
                        f"{base!r}; make them equal, or give it a model of its own"
                    )


def of_memory(where: str, shares: Mapping[str, float], remedy: str) -> Iterator[str]:
    """Servers that share every GPU and claim more memory than it has; on the CPU anything is accepted.

    `shares` are policy -> its servers' `gpu_memory_utilization`; a message is between `where` and `remedy`.
    """
    if not platform_choice.wants_cpu() and sum(shares.values()) > _MAX_MEMORY:
        yield (
            f"{where}: the servers of all policies share every GPU, but their rollout.gpu_memory_utilization add up "
            f"to {sum(shares.values()):.2f} ({dict(shares)}), more than {_MAX_MEMORY}; {remedy}"
        )


def of_shared_memory(job: Job) -> Iterator[str]:
    """The same of a job, whose policies' servers share every GPU in most modes."""
    settings = job.settings
    if settings.policies and settings.placement == "colocated" and settings.mode != SEPARATE:
        shares = {name: float(job.policies[name].rollout.gpu_memory_utilization) for name in settings.bases()}
        yield from of_memory("at_grpo.placement=colocated", shares, "lower them, or use placement: split")


# ---------------------------------------------------------------------- a policy by itself


def of_training(policy: Policy) -> Iterator[str]:
    """Mini-batches, clipping and the optimizer."""
    key, actor, optim = f"{policy.key}.actor", policy.actor, policy.actor.optim
    rows, tasks = actor.ppo_mini_batch_size, policy.job.data.train_batch_size
    if tasks % rows:
        batch = f"data.train_batch_size={tasks}"
        yield f"{key}.ppo_mini_batch_size={rows} does not divide {batch}: their ratio is the number of optimizer steps"
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    # verl replaces a null by clip_ratio.
    if None not in (low, high) and (ratio := actor.clip_ratio) not in (_CLIP_RATIO, low, high):
        others = f"clip_ratio_low={low} and clip_ratio_high={high}"
        yield f"{key}.clip_ratio={ratio} has no effect beside {others}: set those to {ratio}"
    module = optim.optimizer_impl
    if module == "torch.optim" and not hasattr(importlib.import_module(module), optim.optimizer):
        yield f"{key}.optim.optimizer={optim.optimizer}: {module} has none of this name, as AdamW"
    if module != "torch.optim" and importlib.util.find_spec(module.partition(".")[0]) is None:
        yield f"{key}.optim.optimizer_impl={module}: it is not installed, set it to torch.optim"


def of_losses(policy: Policy) -> Iterator[str]:
    """verl's losses and how they are averaged."""
    key, actor = f"{policy.key}.actor", policy.actor
    loss, mode = actor.policy_loss.loss_mode, actor.loss_agg_mode
    if mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        yield (
            f"{key}.loss_agg_mode={mode}: without actor.loss_scale_factor verl divides by the longest answer of "
            "each micro-batch, so an answer's weight depends on those it is packed with; set loss_scale_factor to a "
            "constant, such as data.max_response_length"
        )
    if loss in _PER_MICRO_BATCH:
        yield (
            f"{key}.policy_loss.loss_mode={loss} averages or chooses tokens within each micro-batch, so what "
            "an answer teaches depends on those it is packed with; set it to gspo, or vanilla"
        )
    if loss == "sapo" and mode != (needed := "seq-mean-token-mean"):
        yield f"{key}.loss_agg_mode={mode} has no effect with policy_loss.loss_mode=sapo: set it to {needed}"
    if loss == "dro" and actor.policy_loss.dro_beta is None:
        yield f"{key}.policy_loss.dro_beta=null: loss_mode=dro needs it, a number above 0"
    if policy.model.external_lib is None:  # else workers may register further losses
        known = importlib.import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
        if loss not in known:
            choices = ", ".join(sorted(set(known) - {*_PER_MICRO_BATCH}))
            yield f"{key}.policy_loss.loss_mode={loss} is no policy loss of verl's: use one of {choices}"


def of_room(policy: Policy) -> Iterator[str]:
    """Engines without room for the longest prompt and answer."""
    (row, needed), longest = longest_row(policy.job.data), policy.rollout.max_model_len
    if longest is not None and longest < row:
        yield (
            f"{policy.key}.rollout.max_model_len={longest}: {needed}; set it to at least that, or shorten them: the "
            "server would cut answers off early, or refuse long prompts"
        )


def of_batches(policy: Policy) -> Iterator[str]:
    """Micro-batches, and steps of the engine, without room for the longest row or for every sequence."""
    key, actor, rollout = policy.key, policy.actor, policy.rollout
    ranks = max(actor.ulysses_sequence_parallel_size, actor.fsdp_config.ulysses_sequence_parallel_size)
    if ranks > 1 and not policy.model.use_remove_padding:
        yield (
            f"{key}.actor.ulysses_sequence_parallel_size={ranks} divides rows among devices, which needs "
            f"{key}.model.use_remove_padding=true; set that, or this to 1"
        )
    row, needed = longest_row(policy.job.data)
    for section, kind in (("actor", "ppo"), ("rollout", "log_prob"), ("ref", "log_prob")):
        name, least = f"{section}.{kind}_max_token_len_per_gpu", -(-row // ranks)
        if (budget := OmegaConf.select(policy.section, name)) < least:
            yield f"{key}.{name}={budget}: {needed}, and a micro-batch holds whole rows; set it to at least {least}"
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield (
            f"{key}.rollout.max_num_batched_tokens={rollout.max_num_batched_tokens}: vLLM needs at least one token "
            f"for each of {key}.rollout.max_num_seqs={rollout.max_num_seqs}; raise it, or lower that"
        )


def of_tool_calls(policy: Policy) -> Iterator[str]:
    """Parsers of tool calls that verl does not have."""
    name, key = policy.rollout.multi_turn.format, f"{policy.key}.rollout.multi_turn.format"
    if name != "hermes" and name not in (known := tool_formats()):  # the list takes seconds to import
        yield f"{key}={name!r}: verl has no such parser of tool calls; use one of {', '.join(known)}"


def of_servers(policy: Policy) -> Iterator[str]:
    """Servers on the policy's devices that do not divide them."""
    if policy.job.settings.mode == SEPARATE:
        return
    key, rollout, trainer = f"{policy.key}.rollout", policy.rollout, policy.view.config.trainer
    if rollout.n_gpus_per_node != trainer.n_gpus_per_node:
        yield (
            f"{key}.n_gpus_per_node={rollout.n_gpus_per_node}: the servers are on the policy's "
            f"{trainer.n_gpus_per_node} devices of a node, set it to {trainer.n_gpus_per_node}, or use "
            f"at_grpo.mode={SEPARATE}"
        )
    size, devices = math.prod(rollout[name] for name in SERVER), trainer.n_gpus_per_node * trainer.nnodes
    if devices % size:
        yield (
            f"{key}.{SERVER[0]}={rollout[SERVER[0]]}: the policy has {devices} devices, which servers of "
            f"{size} ({' * '.join(SERVER)}) do not divide among them; choose one that does"
        )
    together, given = rollout.tensor_model_parallel_size * rollout.data_parallel_size, rollout.expert_parallel_size
    if given not in (1, together):
        yield f"{key}.expert_parallel_size={given}: set it to 1, or to {together} ({' * '.join(SERVER[:2])})"


def of_trees(policy: Policy) -> Iterator[str]:
    """Settings that exclude prefix trees, where they are demanded."""
    parallel = "ulysses_sequence_parallel_size"
    needed = {"model.use_fused_kernels": False, f"actor.{parallel}": 1, f"actor.fsdp_config.{parallel}": 1}
    needed |= {f"actor.fsdp_config.{key}": False for key in IN_PARTS}
    for name, value in needed.items() if policy.job.settings.prefix_tree is True else ():
        if OmegaConf.select(policy.section, name) != value:
            default = "set it to its default, or prefix_tree to auto"
            yield f"at_grpo.prefix_tree=true: {policy.key}.{name} excludes prefix trees; {default}"


def of_adapters(policy: Policy) -> Iterator[str]:
    """Settings that adapters beside others on one base do not have."""
    if policy.settings.base is None:
        return
    needed = {
        "actor.strategy": "fsdp2",
        "model.lora_adapter_path": None,
        "model.target_parameters": None,
        "rollout.disaggregation.enabled": False,
    }
    for name, value in needed.items():
        if (given := OmegaConf.select(policy.section, name)) != value:
            yield f"{policy.key}.{name}={given}: adapters that share a base need {value}; set that"
    modules = policy.model.target_modules
    for module in [modules] if isinstance(modules, str) else modules or ():
        if module in _NOT_SERVED:
            yield f"{policy.key}.model.target_modules={modules}: servers have no adapter on {module}; leave it out"
    for name in ("save_contents", "load_contents"):
        given = policy.actor.checkpoint[name]
        if not {"model", "optimizer", "extra"} <= set(given):
            yield (
                f"{policy.key}.actor.checkpoint.{name}={list(given)} has no effect on adapters that share a base, "
                "whose weights, optimizer and schedule are saved together; set it to [model, optimizer, extra]"
            )


def of_temperatures(policy: Policy) -> Iterator[str]:
    """Temperatures of agents at which log-probs would be others than those that were sampled from."""
    settings = policy.job.settings
    if not settings.sampling:
        return
    agents = [agent for agent, name in policy.job.agents.items() if name == policy.name and policy.settings.trainable]
    given = [settings.answers_of(agent, validate=False).temperature for agent in agents]
    temperatures = sorted({policy.rollout.temperature if one is None else one for one in given})
    shown = ", ".join(map(str, temperatures))
    if {*temperatures} - {1} and policy.rollout.logprobs_mode != "processed_logprobs":
        yield (
            f"{policy.key}.rollout.logprobs_mode={policy.rollout.logprobs_mode}: with at_grpo.sampling its agents "
            f"answer at {shown}, and the server's log-probs would not be those that were sampled from, set it to "
            "processed_logprobs"
        )
    if len(temperatures) > 1 and policy.model.use_fused_kernels:
        yield (
            f"{policy.key}.model.use_fused_kernels=true: verl's fused kernels compute one temperature, and with "
            f"at_grpo.sampling its agents have {shown}; set it to false"
        )


def of_context(key: str, rollout: Any, data: Any, longest: int) -> Iterator[str]:
    """Rows, or a `max_model_len`, longer than the `longest` positions of a model; `key` is of the policy's section."""
    row, needed = longest_row(data)
    if longest < row:
        yield f"{key}.model.path: the model has {longest} positions, {needed}; shorten them"
    if (given := rollout.max_model_len) is not None and given > longest:
        yield f"{key}.rollout.max_model_len={given}: the model has {longest} positions; set it to at most that"
