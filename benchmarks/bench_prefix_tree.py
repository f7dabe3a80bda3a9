"""Log-probs and updates over prefix trees against verl's plain path: time, peak memory, and the same numbers.

The rows are decisions of Plan-Path with two solved examples in the prompt, K random responses each; or, with
`--apart`, as long rows that share nothing. verl's FSDP2 engine and ours take them in turn, each in a process of its
own, the first batch untimed; with `--apart` in the order plain, trees, trees, plain, as the second of two processes
can be several percent slower with the same code. Wanted: at least `--limit` x (row tokens / tree tokens) times faster,
with no more memory; with `--apart`, at most 3% slower. With `--build`, only the trees of so many rows of 1,000 tokens
are made, 872 of them shared by a decision's candidates; wanted: in 10 s for 100,000 rows, on one core.

On a GPU (override `hardware=1_gpu`) memory is the device's.

python benchmarks/bench_prefix_tree.py --model runs/models/smollm2 [--decisions 16] [--candidates 8]
    [--response 8] [--rounds 3] [--apart] [--limit 0.7] [override ...]
python benchmarks/bench_prefix_tree.py --build 100000 [--candidates 8]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import script

ENGINES = ("plain", "trees")
RECIPE = "walk_smollm2"
ENVIRONMENT = "{name: plan_path, size: 3, wall_density: 0.1, max_turns: 2, max_moves: 1, tool: moves, few_shot: 2}"


def prompts(config: Any, tokenizer: Any, decisions: int) -> list[list[int]]:
    """Returns the first prompts of so many training episodes."""
    from verl_atgrpo import ScriptedTeam, play
    from verl_atgrpo.play import registry

    env = registry.make(**config.at_grpo.environment)

    async def first(index: int) -> list[int]:
        team = ScriptedTeam({agent: lambda prompt, k: "?" for agent in env.agents})
        record = await play(env, env.task("train", index), team)
        text = "".join(map(chr, record.decisions[0].prompt_ids))  # as a scripted policy encodes it
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return [asyncio.run(first(index)) for index in range(decisions)]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times one engine in this process."""
    import torch
    from one_gpu.numbers import start

    device = start()  # before verl is imported
    from fakes.fsdp_rows import batch, make
    from verl.utils.device import get_device_id
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    from verl_atgrpo import recipes
    from verl_atgrpo.train.engine.prefix_tree.engine import TreeEngine

    overrides = [f"actor_rollout_ref.model.path={options.model.resolve()}", f"++at_grpo.environment={ENVIRONMENT}"]
    config = recipes.compose(RECIPE, [*overrides, *options.overrides])
    engine, section = make(TreeEngine if options.part == "trees" else FSDPEngineWithLMHead, config.actor_rollout_ref)
    settings = section.model_config
    rng, vocabulary = random.Random(0), settings.hf_config.vocab_size
    rows = [
        (
            [rng.randrange(vocabulary) for _ in prompt] if options.apart else prompt,
            [rng.randrange(vocabulary) for _ in range(options.response)],
        )
        for prompt in prompts(config, settings.tokenizer, options.decisions)
        for _ in range(options.candidates)
    ]

    sizes = {
        "global_batch_size": len(rows),
        "use_remove_padding": engine.use_remove_padding,
        "max_token_len_per_gpu": section.ppo_max_token_len_per_gpu,
    }

    def data() -> Any:
        return batch(rows, 0, 1, log_prob=-10.0, **sizes).to(get_device_id())

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    loss = functools.partial(ppo_loss, config=section)
    inferred, updated, losses = [], [], []
    for _ in range(options.rounds + 1):
        asked, began = data(), now()
        with engine.eval_mode():
            engine.infer_batch(asked)
        inferred.append(now() - began)
        asked, began = data(), now()
        with engine.train_mode():
            output = engine.train_batch(asked, loss)
        updated.append(now() - began)
        losses.append((sum(output["loss"]), float(output["metrics"]["grad_norm"])))
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    if device == "cuda":
        gigabytes = torch.cuda.max_memory_allocated() / 1024**3
    tokens = [output["metrics"].get(f"{kind}_tokens", [None])[0] for kind in ("row", "model")]
    torch.distributed.destroy_process_group()
    return {
        "log_probs": inferred[1:],
        "update": updated[1:],
        "gigabytes": gigabytes,
        "losses": losses[:2],
        "tokens": tokens,
    }


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one engine's processes as one: medians of all their times, the most memory, the first one's numbers."""
    times = {name: median(time for run in runs for time in run[name]) for name in ("log_probs", "update")}
    return {**runs[0], **times, "gigabytes": max(run["gigabytes"] for run in runs)}


def build(count: int, candidates: int) -> None:
    """Makes trees of 4,096 tokens of so many rows and prints the seconds of each part."""
    import numpy as np

    from verl_atgrpo.train.engine.prefix_tree.tree import TokenRows, cut, pack, sort

    rng, length, response = np.random.default_rng(0), 1000, 128
    tokens = rng.integers(0, 50_000, (count, length))
    tokens[:, :-response] = np.repeat(tokens[::candidates, :-response], candidates, axis=0)[:count]
    tokens = tokens[rng.permutation(count)]
    times = [time.process_time()]
    rows = TokenRows(tokens.ravel(), np.arange(count + 1) * length, np.full(count, length - response))
    order = sort(rows)
    times.append(time.process_time())
    parts = cut(rows, order, budget=4096)
    times.append(time.process_time())
    sizes = [len(pack(rows, order, part).tokens) for part in parts]
    times.append(time.process_time())
    for name, began, ended in zip(("sort", "cut", "pack"), times, times[1:], strict=False):
        print(f"{name:12} {ended - began:10.2f} s")
    seconds, wanted = times[-1] - times[0], count * 1e-4
    print(f"{count * length:,} row tokens, {sum(sizes):,} tree tokens: {seconds:.2f} s, wanted {wanted:.1f} s")
    if seconds > wanted:
        raise SystemExit(1)


def main() -> None:
    """Measures the engines in processes of their own and prints ratios."""
    defaults = {"decisions": 16, "candidates": 8, "response": 8, "rounds": 3, "apart": False, "limit": 0.7}
    parser = script.parser(__doc__, **defaults)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--build", type=int, metavar="ROWS")
    parser.add_argument("--part", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if (options.model is None) is (options.build is None):
        parser.error("--model or --build is needed")
    if options.build:
        build(options.build, options.candidates)
        return
    if options.part:
        print(json.dumps(measure(options)))
        return
    made: dict[str, list[dict[str, Any]]] = {part: [] for part in ENGINES}
    for part in (*ENGINES, *reversed(ENGINES)) if options.apart else ENGINES:
        command = [sys.executable, __file__, *sys.argv[1:], f"--part={part}"]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
        made[part].append(json.loads(output.splitlines()[-1]))
    plain, trees = (merged(made[part]) for part in ENGINES)
    print(f"{'':12} {'plain':>10} {'trees':>10} {'ratio':>7}")
    for name in ("log_probs", "update", "gigabytes"):
        print(f"{name:12} {plain[name]:10.2f} {trees[name]:10.2f} {plain[name] / trees[name]:7.2f}")
    for number, (theirs, ours) in enumerate(zip(plain["losses"], trees["losses"], strict=True), 1):
        print(f"step {number}: loss {theirs[0]:.6f} {ours[0]:.6f}, gradient norm {theirs[1]:.6f} {ours[1]:.6f}")
    both = [sum(each[name] for name in ("log_probs", "update")) for each in (plain, trees)]
    if options.apart:
        wanted, reached = 0.97, both[0] / both[1]
    else:
        row_tokens, tree_tokens = trees["tokens"]
        shared = row_tokens / tree_tokens
        wanted, reached = options.limit * shared, both[0] / both[1]
        print(f"{row_tokens} row tokens, {tree_tokens} tree tokens: {shared:.1f} times fewer")
    print(f"{reached:.2f} times faster, wanted {wanted:.2f}")
    # Rows that share nothing are run by the same code, so their peaks differ by chance.
    more = not options.apart and trees["gigabytes"] > plain["gigabytes"]
    if reached < wanted or more:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
