"""Measures the prefix cache hit rate of the candidates' prompts, and the time that it saves.

Decisions with prompts of 512 to 1,000 random tokens and K equal requests are sent through our client to a real server.
The share is the sum of vLLM's cached tokens over the sum of prompt tokens. At best a prompt is computed once for K
requests, so the target is 0.9 x (K - 1) / K. Orders: decisions one after the other, all concurrently as in a rollout,
and all concurrently with one candidate of each sent ahead of its siblings. A cache only has full blocks, so their size
matters: the first servers have the recipe's, the second `--block-size`, vLLM's default for CPUs, the last no cache.
Seconds are the median of `--rounds` with different prompts.

python benchmarks/bench_prefill.py --model runs/models/plan_path_tiny [--decisions 12] [--rounds 3]
    [--block-size 128] [--limit 0.9] [override ...]

The limit is for K > 1 with the recipe's blocks, in every order.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import real_stack
from processes import exit_on_sigterm

SHORTEST, LONGEST, ANSWER = 512, 1000, 8
CANDIDATES = (1, 4, 8)
ORDERS = ("in turn", "at once", "lead")


@dataclass(frozen=True)
class Sampled:
    """Cached tokens and seconds of some decisions."""

    candidates: int
    order: str
    cached: int
    prompt: int
    seconds: float

    @property
    def share(self) -> float:
        """The share of prompt tokens that were cached."""
        return self.cached / self.prompt

    @property
    def of_possible(self) -> float:
        """The share over (K - 1) / K, the best possible one; 1 for K = 1."""
        return self.share * self.candidates / (self.candidates - 1) if self.candidates > 1 else 1.0


def prompts(decisions: int, tokens: int, seed: str) -> list[list[int]]:
    """Returns prompts without a common prefix, of ids from 2 to `tokens` - 1."""
    rng = random.Random(seed)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(decisions)]
    return [[rng.randrange(2, tokens) for _ in range(length)] for length in lengths]


async def sample(client: Any, asked: Sequence[list[int]], candidates: int, order: str) -> Sampled:
    """Samples candidates for every prompt."""
    cached = 0

    async def one(number: int, index: int) -> None:
        nonlocal cached
        params = {"max_tokens": ANSWER, "ignore_eos": True, "temperature": 1.0, "logprobs": True, "detokenize": False}
        output = await client.generate(
            f"{order}.{candidates}.{number}",
            prompt_ids=asked[number],
            sampling_params={**params, "seed": 1000 * number + index},
        )
        cached += output.extra_fields["num_cached_tokens"] or 0

    async def decide(number: int) -> None:
        ahead = 1 if order == "lead" else 0
        for index in range(ahead):
            await one(number, index)
        await asyncio.gather(*(one(number, index) for index in range(ahead, candidates)))

    began = time.perf_counter()
    if order == "in turn":
        for number in range(len(asked)):
            await decide(number)
    else:
        await asyncio.gather(*map(decide, range(len(asked))))
    seconds = time.perf_counter() - began
    return Sampled(candidates, order, cached, candidates * sum(map(len, asked)), seconds)


def together(rounds: Sequence[Sampled]) -> Sampled:
    """Returns the sum of several rounds, with the median of their seconds."""
    cached, prompt = (sum(getattr(made, name) for made in rounds) for name in ("cached", "prompt"))
    return replace(rounds[0], cached=cached, prompt=prompt, seconds=median(made.seconds for made in rounds))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts servers and samples in every order with every K; runs in a process of its own."""
    fixed = [
        f"data.max_prompt_length={LONGEST}",
        f"data.max_response_length={ANSWER}",
        f"actor_rollout_ref.rollout.max_model_len={LONGEST + ANSWER}",
    ]
    config = real_stack.compose(options.recipe, options.model, [*fixed, *options.overrides])

    async def sample_all(client: Any, tokens: int) -> list[Sampled]:
        await sample(client, prompts(4, tokens, "warm-up"), 2, "at once")
        made = []
        for candidates, order in itertools.product(CANDIDATES, ORDERS):
            rounds = [
                await sample(
                    client, prompts(options.decisions, tokens, f"{order} {candidates} {number}"), candidates, order
                )
                for number in range(options.rounds)
            ]
            made.append(together(rounds))
        return made

    with real_stack.started(config) as trainer:
        sampled = sample_all(real_stack.client_of(trainer), len(trainer.units[0].tokenizer))
        return [asdict(made) for made in asyncio.run(sampled)]


def table(servers: dict[str, list[Sampled]]) -> str:
    """Returns a table of all servers, with the time saved by the cache."""
    without = {(made.candidates, made.order): made.seconds for made in servers["no cache"]}
    lines = [f"{'servers':12}  {'K':>2}  {'order':8}  {'share':>6}  {'/ (K-1)/K':>9}  {'seconds':>7}  no cache / this"]
    for name, draws in servers.items():
        for made in draws:
            saved = without[made.candidates, made.order] / made.seconds
            lines.append(
                f"{name:12}  {made.candidates:>2}  {made.order:8}  {made.share:>6.3f}  {made.of_possible:>9.3f}  "
                f"{made.seconds:>7.2f}  {saved:>15.2f}"
            )
    return "\n".join(lines)


def main() -> int:
    """Prints the shares; status 1 if one is below the limit."""
    parser = real_stack.parser(__doc__, decisions=12, rounds=3, block_size=128, limit=0.9)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    exit_on_sigterm()
    if options.part:
        print(f"\n{json.dumps(measure(options))}", flush=True)
        return 0
    caching = "actor_rollout_ref.rollout.enable_prefix_caching"
    blocks = "++actor_rollout_ref.rollout.engine_kwargs.vllm.block_size"
    recipes_own = "recipe's blocks"
    servers = {}
    for name, overrides in (
        (recipes_own, []),
        (f"block {options.block_size}", [f"{blocks}={options.block_size}"]),
        ("no cache", [f"{caching}=false"]),
    ):
        common = ["--part", f"--model={options.model}", f"--recipe={options.recipe}"]
        found = real_stack.run_part(
            __file__,
            *common,
            f"--decisions={options.decisions}",
            f"--rounds={options.rounds}",
            *overrides,
            *options.overrides,
        )
        servers[name] = [Sampled(**made) for made in found]
        print(f"{name}: done, {real_stack.load_average()}", flush=True)
    print(table(servers))
    worst = min(made.of_possible for made in servers[recipes_own] if made.candidates > 1)
    print(f"{recipes_own}, lowest share / ((K-1)/K): {worst:.3f} (at least {options.limit})")
    return int(worst < options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
