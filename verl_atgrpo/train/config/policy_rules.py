"""Rules of policies, each by itself, beside others and in the job's mode of training (`at_grpo.mode`)."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt
from omegaconf import OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.kinds import Count, fits
from verl_atgrpo.train.chat import tool_formats
from verl_atgrpo.train.config.job import SEPARATE, Job, Policy, longest_row
from verl_atgrpo.train.config.schema import MODES
from verl_atgrpo.train.config.view import leaves, same, shown_as, verls_defaults

_CLIP_RATIO = 0.2
"""verl's default of `clip_ratio`, which has no effect if the two others are set."""
_PER_MICRO_BATCH = ("clip_cov", "geo_mean", "kl_cov")
"""Policy losses of verl that average or choose tokens within each micro-batch, which any rows may share."""
_UNCLIPPED = {
    ("clip_ratio_low", "clip_ratio_high"): ("sapo", "gpg", "dro"),
    ("clip_ratio_c",): ("gspo", "sapo", "gpg", "dro", "cispo"),
}
"""Bounds of ratios -> policy losses of verl that do not read them."""
_NOT_SERVED = ("lm_head", "embed_tokens")
"""Modules that a policy of a shared base cannot adapt."""
_MAX_MEMORY = 0.95
"""Largest share of a GPU's memory that servers awake at the same time may claim together."""
SERVER = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
"""Keys of `rollout` whose product is the devices of one server."""
_CORRECTION = "algorithm.rollout_correction"
_SAMPLER = "trainer.v1.sampler"
_ENGINE = "rollout.checkpoint_engine"
_OF_STANDALONE_SERVERS = {
    "hybrid_engine": True,
    "rollout.nnodes": 0,
    f"{_ENGINE}.backend": "naive",
    f"{_ENGINE}.custom_backend_module": None,
}
"""Keys of a policy that only standalone servers read -> what they are elsewhere."""
_CPU_ENGINE = {"backend": "gloo", "custom_backend_module": "verl_atgrpo.cpu.checkpoint_engine"}
_OTHERS = {
    "naive": "syncs weights to servers on the trainer's own devices",
    "delta_sharded": "sends weight deltas, which has not been tried with several policies or frozen ones",
    "gloo": "is for machines without a GPU",
}
"""Backends that cannot sync weights to standalone servers on GPUs; verl's others are accepted."""
_CUPY = "cupy-cuda12x or cupy-cuda13x, as torch's CUDA is"
REQUIRED_MODULES = {
    "nccl": {"cupy": _CUPY},
    "nixl": {"cupy": _CUPY, "nixl": "nixl"},
    "kimi_ckpt_engine": {"checkpoint_engine": "checkpoint-engine"},
    "mooncake": {"mooncake": "mooncake-transfer-engine"},
}
"""Backend -> module that verl's checkpoint engine imports and verl does not install -> its distribution. verl skips an
engine that it cannot import, and fails only when the models have been loaded."""
ROUNDING = ("kimi_ckpt_engine", "mooncake")
"""Backends of verl that send weights in its engine's `rollout_dtype`: bfloat16, and YAML has no name for another."""


def of_devices(job: Job) -> Iterator[str]:
    """Devices of policies that do not add up to those of a node."""
    settings, available = job.settings, job.trainer.n_gpus_per_node
    for policy in job.policies.values():
        if settings.placement == "colocated" and policy.settings.gpus is not None:
            yield f"{policy.key}.gpus={policy.settings.gpus} has no effect with placement: colocated; remove it"
        if settings.placement == "split" and policy.settings.gpus is None:
            where = f"{policy.key}.gpus is missing" if settings.policies else "at_grpo.policies is missing"
            yield f"{where}: placement: split needs it, with the gpus of each policy"
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


def of_gpu_memory(job: Job) -> Iterator[str]:
    """More GPU memory for the servers of all policies than there is, as they share every GPU in most modes."""
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
        yield f"{policy.key_of('actor.optim.optimizer')}={optim.optimizer}: {module} has none of this name, as AdamW"
    if module != "torch.optim" and importlib.util.find_spec(module.partition(".")[0]) is None:
        where = policy.key_of("actor.optim.optimizer_impl")
        yield f"{where}={module}: it is not installed, set it to torch.optim"
    whole = policy.settings.lora is None and not policy.model.lora_rank
    if policy.settings.trainable and whole and (dtype := actor.fsdp_config.model_dtype) not in ("fp32", "float32", 32):
        yield (
            f"{key}.fsdp_config.model_dtype={dtype}: the optimizer would round its own weights to it, and lose small "
            "updates before any metric can see them; set it to fp32, and what the model computes in by precision=bf16"
        )


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
    for names, losses in _UNCLIPPED.items():
        for name in names if loss in losses else ():
            default = verls_defaults()[f"actor_rollout_ref.actor.{name}"]
            if actor[name] not in (None, default):
                without = f"has no effect with policy_loss.loss_mode={loss}"
                yield f"{key}.{name}={actor[name]} {without}: set it to {default}"
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
            whole = "a micro-batch holds whole rows"
            yield f"{policy.key_of(name)}={budget}: {needed}, and {whole}; set it to at least {least}"
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
    if size % trainer.n_gpus_per_node and trainer.n_gpus_per_node % size:
        yield (
            f"{key}.{SERVER[0]}={rollout[SERVER[0]]}: a server of {size} devices ({' * '.join(SERVER)}) is on whole "
            f"nodes of {trainer.n_gpus_per_node}, or on a part that divides one; choose one that does"
        )
    together, given = rollout.tensor_model_parallel_size * rollout.data_parallel_size, rollout.expert_parallel_size
    if given not in (1, together):
        yield f"{key}.expert_parallel_size={given}: set it to 1, or to {together} ({' * '.join(SERVER[:2])})"


def of_trees(policy: Policy) -> Iterator[str]:
    """Settings that exclude prefix trees, where they are demanded."""
    parallel = "ulysses_sequence_parallel_size"
    needed = {"model.use_fused_kernels": False, f"actor.{parallel}": 1, f"actor.fsdp_config.{parallel}": 1}
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
        "actor.fsdp_config.reshard_after_forward": True,  # else they would be loaded into temporary weights
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


def of_checkpoints(policy: Policy) -> Iterator[str]:
    """Checkpoints from which a run would go on with other weights, or that hold nothing."""
    trainer, contents = policy.job.trainer, policy.actor.checkpoint
    if not policy.settings.trainable:
        return
    if policy.settings.base is not None:
        for name in ("save_contents", "load_contents"):
            if not {"model", "optimizer", "extra"} <= {*(given := contents[name])}:
                yield (
                    f"{policy.key}.actor.checkpoint.{name}={list(given)} has no effect on adapters that share a base, "
                    "whose weights, optimizer and schedule are saved together; set it to [model, optimizer, extra]"
                )
        return
    same_command = trainer.resume_mode == "auto" and trainer.save_freq > 0 and not trainer.val_only
    needed = ["model", *(["optimizer", "extra"] if same_command else [])]
    saves = trainer.save_freq > 0 and (trainer.resume_mode != "disable" or policy.model.lora_rank > 0)
    for name, asked in (("save_contents", saves), ("load_contents", trainer.resume_mode != "disable")):
        given = list(contents[name])
        if asked and (missing := [part for part in needed if part not in given]):
            yield (
                f"{policy.key}.actor.checkpoint.{name}={given} leaves out {', '.join(missing)}, which a run that goes "
                f"on, or the export of an adapter, needs; add {'them' if len(missing) > 1 else 'it'}"
            )


def of_temperatures(policy: Policy) -> Iterator[str]:
    """Temperatures of agents at which log-probs would be others than those that were sampled from."""
    settings = policy.job.settings
    if not settings.sampling:
        return
    agents = [agent for agent, name in policy.job.agents.items() if name == policy.name and policy.settings.trainable]
    given = [settings.sampling_of(agent, validate=False).temperature for agent in agents]
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


# ---------------------------------------------------------------------- modes of training


def of_modes(job: Job) -> Iterator[str]:
    """Keys of a job that its mode does not support, or that have no effect in it."""
    mode, correction = job.settings.mode, job.config.algorithm.rollout_correction
    for name in ("rollout_is", "rollout_rs"):
        if correction.bypass_mode and correction[name] is not None:
            yield (
                f"{_CORRECTION}.{name}={correction[name]} is ignored by verl's V1 trainer with bypass_mode=true: set "
                "it to null, or bypass_mode to false"
            )
    if correction.rollout_rs is not None and correction.rollout_rs_threshold is None:
        yield f"{_CORRECTION}.rollout_rs_threshold=null: rollout_rs={correction.rollout_rs} needs it, such as 2.0"
    ignored = [other for other in MODES if other != mode] + (["sampler.max_off"] if mode == "sync" else [])
    section: Any = OmegaConf.to_container(job.trainer.v1, resolve=True)
    for name, value in leaves(section):
        default = verls_defaults().get(f"trainer.v1.{name}", ...)
        if name.startswith(tuple(ignored)) and value != default:
            yield f"trainer.v1.{name}={value} has no effect with at_grpo.mode={mode}: remove it, or use another mode"
    if mode == SEPARATE:
        yield from _of_separate_servers(job)
    if mode == "sync":
        return
    yield from _of_staleness(job)
    if not correction.bypass_mode and correction.rollout_is not in ("token", "sequence"):
        yield (
            f"{_CORRECTION}.rollout_is={shown_as(correction.rollout_is)}: with at_grpo.mode={mode} candidates come "
            "from older weights, and their log-probs would not be used; set it to token or sequence"
        )


def _of_separate_servers(job: Job) -> Iterator[str]:
    settings, key = job.settings, f"trainer.v1.{SEPARATE}.parameter_sync_step"
    if settings.placement != "colocated":
        yield (
            f"at_grpo.placement={settings.placement} has not been tried with at_grpo.mode={SEPARATE}: set it to "
            "colocated; the servers of every policy have devices of their own anyway"
        )
    if (steps := OmegaConf.select(job.config, key)) != 1:
        yield f"{key}={shown_as(steps)}: weights are synchronised after every step, set it to 1"
    if settings.restart_servers:
        yield f"at_grpo.restart_servers={settings.restart_servers}: standalone servers are not restarted, set it to 0"


def _of_staleness(job: Job) -> Iterator[str]:
    mode, sampler = job.settings.mode, job.trainer.v1.sampler
    key, warmup = f"trainer.v1.{mode}.num_warmup_batches", job.trainer.v1[mode].num_warmup_batches
    if sampler.max_off_policy_strategy != "wait":
        yield (
            f"{_SAMPLER}.max_off_policy_strategy={sampler.max_off_policy_strategy} discards the longest episodes, so "
            "the policy would be trained on short ones; set it to wait"
        )
    if not fits(Annotated[float, Gt(0)], warmup):
        why = "no task is in flight in addition to a step's own and nothing is gained over at_grpo.mode=sync"
        yield f"{key}={warmup}: above 0, or {why}"
    least, threshold = 1 + math.ceil(warmup), sampler.max_off_policy_threshold
    if not fits(Annotated[int, Ge(least)], threshold):
        yield (
            f"{_SAMPLER}.max_off_policy_threshold={shown_as(threshold)}: with at_grpo.mode={mode} a number of "
            f"steps, at least {least} (1 + {key}), which bounds the age of an episode"
        )


def of_a_policys_mode(policy: Policy) -> Iterator[str]:
    """Keys of a policy that the job's mode does not support, or that have no effect in it."""
    mode, loss = policy.job.settings.mode, policy.actor.policy_loss.loss_mode
    yield from _of_standalone_servers(policy) if mode == SEPARATE else _of_shared_devices(policy)
    correction = policy.job.config.algorithm.rollout_correction
    if not correction.bypass_mode and correction.rollout_is is not None and loss == "bypass_mode":
        ignored = f"{_CORRECTION}.rollout_is={correction.rollout_is}"
        yield f"{policy.key}.actor.policy_loss.loss_mode=bypass_mode ignores {ignored}: set it to vanilla"
    if mode == "sync":
        return
    for name, why in (
        ("full_determinism", f"interruptions depend on time, so at_grpo.mode={mode} cannot be reproduced"),
        ("disaggregation.enabled", "requests of a prefill server cannot be interrupted"),
    ):
        if OmegaConf.select(policy.rollout, name):
            yield f"{policy.key}.rollout.{name}=true: {why}; set it to false, or use at_grpo.mode=sync"
    # The loss must use the log-probs of the weights that sampled the candidates.
    if correction.bypass_mode and loss != "vanilla":
        yield (
            f"{policy.key}.actor.policy_loss.loss_mode={loss} with {_CORRECTION}.bypass_mode=true: only vanilla's "
            "ratio is known to correct for older weights; set that, or bypass_mode to false and rollout_is to token"
        )


def _of_shared_devices(policy: Policy) -> Iterator[str]:
    for name, neutral in _OF_STANDALONE_SERVERS.items():
        if not same(value := OmegaConf.select(policy.section, name), neutral):
            yield (
                f"{policy.key_of(name)}={shown_as(value)} has no effect with at_grpo.mode={policy.job.settings.mode}, "
                f"whose servers are on the trainer's devices: set it to {shown_as(neutral)}, or use "
                f"at_grpo.mode={SEPARATE}"
            )


# ---------------------------------------------------------------------- standalone servers


def devices_of(policy: Any) -> int:
    """Returns the number of devices of a policy's standalone servers, from its `actor_rollout_ref`."""
    return int(policy.rollout.nnodes * policy.rollout.n_gpus_per_node)


def _of_backends(policy: Policy) -> Iterator[str]:
    key, engine, dtype = f"{policy.key}.{_ENGINE}", policy.rollout.checkpoint_engine, policy.rollout.dtype
    backend = engine.backend
    if platform_choice.wants_cpu():
        for name, needed in _CPU_ENGINE.items():
            if engine.get(name) != needed:
                yield (
                    f"{key}.{name}={shown_as(engine.get(name))}: without a GPU only this package's engine syncs "
                    f"weights to standalone servers, set it to {needed}"
                )
        return
    if backend in _OTHERS:
        yield f"{key}.backend={backend} {_OTHERS[backend]}: set it to nccl"
    if engine.get("custom_backend_module") is not None:  # which may have an engine of the same name
        return
    # Imports nothing, which would take seconds. On Ascend HCCL has NCCL's name.
    hccl = backend == "nccl" and importlib.util.find_spec("torch_npu") is not None
    for module, package in REQUIRED_MODULES.get(backend, {}).items() if not hccl else ():
        if importlib.util.find_spec(module) is None:
            yield (
                f"{key}.backend={backend}: verl's engine imports {module}, which is not installed: pip install "
                f"{package}, or set another backend"
            )
    if backend in ROUNDING and dtype != "bfloat16":
        yield (
            f"{key}.backend={backend} rounds all weights to bfloat16, and the servers compute in {dtype} "
            "(rollout.dtype): they would not have the actor's; set it to nccl or nixl, or precision=bf16"
        )


def _of_standalone_servers(policy: Policy) -> Iterator[str]:
    key, section, rollout = policy.key, policy.section, policy.rollout
    mode = f"with at_grpo.mode={SEPARATE}"
    if section.hybrid_engine:
        where = policy.key_of("hybrid_engine")
        yield f"{where}=true: {mode} there are no servers on the trainer's devices, set it to false"
    for name in ("nnodes", "n_gpus_per_node"):
        if not fits(Count, rollout[name]):
            number = "the number of the servers' own devices, a whole number above 0"
            yield f"{key}.rollout.{name}={shown_as(rollout[name])}: {mode} {number}"
    if rank := section.model.lora_rank:
        yield (
            f"{key}.model.lora_rank={rank}: verl does not send adapters to standalone servers; train the whole model, "
            "or use at_grpo.mode=colocate_async"
        )
    yield from _of_backends(policy)
    if (devices := devices_of(section)) % (size := math.prod(rollout.get(name, 1) for name in SERVER)):
        yield (
            f"{key}.rollout.n_gpus_per_node={rollout.n_gpus_per_node}: {devices} devices (times nnodes) are not a "
            f"multiple of the {size} that one server takes ({' * '.join(SERVER)}); make it one"
        )


def of_rays_devices(job: Job) -> Iterator[str]:
    """Rays that would start with fewer devices than are needed, for which the servers would wait for ever."""
    available, trainer = OmegaConf.select(job.config, "ray_kwargs.ray_init.num_gpus"), job.trainer
    policies = job.policies.values() if job.settings.mode == SEPARATE else ()
    servers = {policy.key: devices_of(policy.section) for policy in policies}
    devices = trainer.nnodes * trainer.n_gpus_per_node
    if available is not None and available < devices + sum(servers.values()):
        yield (
            f"ray_kwargs.ray_init.num_gpus={available}: the trainer has {devices} devices "
            f"(trainer.nnodes={trainer.nnodes} * trainer.n_gpus_per_node={trainer.n_gpus_per_node}) and "
            f"the servers {servers or 'none'} of their own, set it to {devices + sum(servers.values())}"
        )
