"""Prints the table of docs/cluster.md: resources of the GPU rows of recipes/README.md, computed from their values.

python scripts/recipe_resources.py [--gigabytes 80] [--hardware 1_gpu]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from recipe_table import Job, jobs

from verl_atgrpo import recipes
from verl_atgrpo.train.config.section import read_section

TRAINING_BYTES = 16
"""Bytes per parameter in training: weight, gradient and Adam's two moments, in float32."""
RESIDENT_BYTES = 12
"""Those that stay on the device during the rollout without offloading: all but the gradient."""
BF16 = 2
FROZEN_BYTES = 4
"""Bytes per parameter of a base that adapters share: its weight, in float32."""


class Shape(NamedTuple):
    """A Qwen3 model's shape."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Whether input and output share the embedding."""

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16

    def adapter_parameters(self, rank: int) -> int:
        """Returns the number of parameters of an adapter on all linear layers but the head."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        return self.layers * rank * (attention + 3 * (self.hidden + self.intermediate))

    def activation_bytes(self, tokens: int) -> int:
        """Returns the bytes that an update of `tokens` keeps: each layer's input (the rest is recomputed), the
        activations of one layer, logits and their gradient, all in bfloat16."""
        inside = 4 * self.hidden + 2 * self.head_dim * (self.heads + self.kv_heads) + 3 * self.intermediate
        return tokens * BF16 * (self.layers * self.hidden + inside + 2 * self.vocabulary)


SHAPES = {
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151_936, tied=True),
    "Qwen/Qwen3-8B": Shape(36, 4096, 12_288, 32, 8, 128, 151_936, tied=False),
}
"""From the models' cards and `config.json`."""


@dataclass(frozen=True)
class Needs:
    """A job's resources, in bytes per device unless noted."""

    policies: int
    adapters: int
    """Their parameters, if the policies share a base; else 0."""
    model: str
    colocated: bool
    devices: int
    """Of one policy."""
    offload: bool
    states: int
    """Of one policy in training."""
    activations: int
    resident: int
    """Of all policies on a device, while the servers are awake."""
    servers: int
    """Of one policy."""
    share: int
    """Of one server."""
    weights: int
    kv_token: int
    kv_tokens: int
    """Of one server's cache."""
    longest: tuple[int, int]
    """Prompt and answer, in tokens."""
    in_flight: int
    """Candidates of one policy with the longest prompts and answers; those of a decision share their prompt."""
    wanted: int
    """Candidates of one decision of every task."""


def needs(job: Job, gigabytes: float, hardware: str = "8_gpus") -> Needs:
    """Returns a job's resources on devices with this memory."""
    config = recipes.compose(job.recipe, [*job.overrides, f"hardware={hardware}"])
    settings = read_section(config)
    policies = settings.policy_settings()
    policy = next(iter(policies.values()))
    own = {key for one in policies.values() for key in ("model", "actor", "rollout") if getattr(one, key)}
    assert not own, f"{job}: a policy sets its own {', '.join(own)}, which this table does not support"
    worker = config.actor_rollout_ref
    shape = SHAPES[worker.model.path]
    ranks = [one.lora.rank for one in policies.values() if one.base is not None and one.lora is not None]
    assert bool(ranks) == (len(settings.bases()) < len(policies)), f"{job}: not all policies share the base"
    adapters = sum(map(shape.adapter_parameters, ranks))
    trained, resting = TRAINING_BYTES * shape.parameters, RESIDENT_BYTES * shape.parameters
    if ranks:
        trained = FROZEN_BYTES * shape.parameters + TRAINING_BYTES * adapters
        resting = FROZEN_BYTES * shape.parameters + RESIDENT_BYTES * adapters
    devices = (policy.gpus or config.trainer.n_gpus_per_node) * config.trainer.nnodes
    tensor_parallel = worker.rollout.tensor_model_parallel_size
    servers = devices // tensor_parallel
    colocated = len(settings.bases()) if settings.placement == "colocated" else 1
    offload = bool(worker.actor.fsdp_config.param_offload and worker.actor.fsdp_config.optimizer_offload)
    share = int(worker.rollout.gpu_memory_utilization * gigabytes * 1e9)
    weights = BF16 * (shape.parameters + adapters) // tensor_parallel
    kv_tokens = (share - weights) * tensor_parallel // shape.kv_bytes
    prompt, answer, candidates = config.data.max_prompt_length, config.data.max_response_length, settings.candidates
    groups = kv_tokens // (prompt + candidates * answer)
    return Needs(
        policies=len(policies),
        adapters=adapters,
        model=worker.model.path,
        colocated=settings.placement == "colocated",
        devices=devices,
        offload=offload,
        states=trained // devices,
        activations=shape.activation_bytes(worker.actor.ppo_max_token_len_per_gpu),
        resident=0 if offload else colocated * resting // devices,
        servers=servers,
        share=share,
        weights=weights,
        kv_token=shape.kv_bytes,
        kv_tokens=kv_tokens,
        longest=(prompt, answer),
        in_flight=servers * min(groups * candidates, worker.rollout.max_num_seqs),
        wanted=config.data.train_batch_size * candidates,
    )


def gpu_jobs() -> list[Job]:
    """Returns the jobs with Qwen3."""
    return sorted(job for job in jobs() if "_qwen3_" in job.recipe)


def name(job: Job) -> str:
    """Returns a job's recipe and its choice of a model; the table's other columns tell its policies."""
    return " ".join([job.recipe, *(added for added in job.overrides if added.startswith("model="))])


def _gb(number: int) -> str:
    return f"{number / 1e9:.1f}"


def table(gigabytes: float = 80.0, hardware: str = "8_gpus") -> str:
    """Returns the table as Markdown, in GB; jobs with the same figures share a row.

    Policies with devices of their own are left out where there is one device.
    """
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for job in gpu_jobs():
        need = needs(job, gigabytes, hardware)
        if hardware != "1_gpu" or need.devices == 1:
            rows[_cells(need)].append(f"`{name(job)}`")
    head = "recipes", "policies", "states", "activations", "in the rollout", "cache", "longest", "in flight"
    lines = [head, ("---",) * len(head), *(("<br>".join(names), *cells) for cells, names in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(need: Needs) -> tuple[str, ...]:
    together = "one base" if need.adapters else "together" if need.colocated else "apart"
    host = RESIDENT_BYTES * SHAPES[need.model].parameters * need.policies
    prompt, answer = need.longest
    return (
        f"{need.policies}, {together}" if need.policies > 1 else "1",
        _gb(need.states),
        _gb(need.activations),
        f"0 (host: {_gb(host)})" if need.offload else _gb(need.resident),
        _gb(need.share - need.weights),
        f"{prompt:,} + {answer:,}",
        f"{need.in_flight:,}",
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=80.0, help="memory of a device")
    parser.add_argument("--hardware", choices=("1_gpu", "8_gpus"), default="8_gpus")
    options = parser.parse_args()
    print(table(options.gigabytes, options.hardware))


if __name__ == "__main__":
    main()
