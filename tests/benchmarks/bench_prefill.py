"""How much of the candidates' prompts the engine takes from its prefix cache, and what that saves.

Decisions with prompts of 512 to 1,000 random tokens and K equal requests each go through the product's client to a
real server; the share is the sum of vLLM's cached tokens over the sum of prompt tokens. K requests compute their
prompt once at best, so the share is wanted to be 0.9 x (K - 1) / K. Orders: the decisions one after the other, all
at once as in a rollout, and all at once with one candidate of each sent ahead of its siblings. A cache holds full
blocks only, so their size matters: the first servers have `--block-size`, the second vLLM's own, the last no cache.
Seconds are the median of `--rounds` with other prompts each.

python tests/benchmarks/bench_prefill.py --model runs/models/plan_path_tiny [--decisions 12] [--rounds 3]
    [--block-size 32] [--limit 0.9] [override ...]

The limit holds for K > 1 with `--block-size`, whatever the order.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import real_stack
from processes import exit_on_sigterm

SHORTEST, LONGEST, ANSWER = 512, 1000, 8
CANDIDATES = (1, 4, 8)
ORDERS = ("in turn", "at once", "lead")


@dataclass(frozen=True)
class Draw:
    """What some decisions took."""

    candidates: int
    order: str
    cached: int
    prompt: int
    seconds: float

    @property
    def share(self) -> float:
        """Of the prompts' tokens, those that were not computed."""
        return self.cached / self.prompt

    @property
    def of_possible(self) -> float:
        """The share over (K - 1) / K, what K equal prompts could share at best; 1 where there is nothing to share."""
        return self.share * self.candidates / (self.candidates - 1) if self.candidates > 1 else 1.0


def prompts(decisions: int, tokens: int, seed: str) -> list[list[int]]:
    """Returns prompts that share no beginning, of ids between 2 and `tokens`."""
    rng = random.Random(seed)
    lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(decisions)]
    return [[rng.randrange(2, tokens) for _ in range(length)] for length in lengths]


async def draw(client: Any, asked: Sequence[list[int]], candidates: int, order: str) -> Draw:
    """Draws candidates for every prompt and returns what was cached."""
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
    return Draw(candidates, order, cached, candidates * sum(map(len, asked)), seconds)


def together(rounds: Sequence[Draw]) -> Draw:
    """Returns all of a kind as one, with the median of their seconds."""
    cached, prompt = (sum(getattr(made, name) for made in rounds) for name in ("cached", "prompt"))
    return replace(rounds[0], cached=cached, prompt=prompt, seconds=median(made.seconds for made in rounds))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts servers and draws in every order with every K; run in a process of its own."""
    fixed = [
        f"data.max_prompt_length={LONGEST}",
        f"data.max_response_length={ANSWER}",
        f"actor_rollout_ref.rollout.max_model_len={LONGEST + ANSWER}",
    ]
    config = real_stack.compose(options.recipe, options.model, [*fixed, *options.overrides])

    async def all_draws(client: Any, tokens: int) -> list[Draw]:
        await draw(client, prompts(4, tokens, "warm-up"), 2, "at once")
        made = []
        for candidates, order in itertools.product(CANDIDATES, ORDERS):
            rounds = [
                await draw(
                    client, prompts(options.decisions, tokens, f"{order} {candidates} {number}"), candidates, order
                )
                for number in range(options.rounds)
            ]
            made.append(together(rounds))
        return made

    with real_stack.started(config) as trainer:
        draws = all_draws(real_stack.client_of(trainer), len(trainer.units[0].tokenizer))
        return [asdict(made) for made in asyncio.run(draws)]


def table(servers: dict[str, list[Draw]]) -> str:
    """Returns the draws of all servers, the time saved beside each."""
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
    """Prints the shares; status 1 if one is under the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--recipe", default="plan_path_cpu")
    parser.add_argument("--decisions", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--limit", type=float, default=0.9)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="as verl's command takes them")
    options = parser.parse_args()
    exit_on_sigterm()
    if options.part:
        print(f"\n{json.dumps(measure(options))}", flush=True)
        return 0
    caching = "actor_rollout_ref.rollout.enable_prefix_caching"
    own_blocks = f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={options.block_size}"
    blocks_of = f"block {options.block_size}"
    servers = {}
    for name, overrides in (
        (blocks_of, [own_blocks]),
        ("own block", []),
        ("no cache", [own_blocks, f"{caching}=false"]),
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
        servers[name] = [Draw(**made) for made in found]
        print(f"{name}: done, {real_stack.load_average()}", flush=True)
    print(table(servers))
    worst = min(made.of_possible for made in servers[blocks_of] if made.candidates > 1)
    print(f"{blocks_of}, lowest share / ((K-1)/K): {worst:.3f} (at least {options.limit})")
    return int(worst < options.limit)


if __name__ == "__main__":
    raise SystemExit(main())
