"""A model over prefix trees against the same rows one by one: the same numbers, time, peak memory. Without verl.

What runs is `prefix_tree.forward` and a transformers model with random weights: on a GPU with FlexAttention, else with
SDPA. Rows are decisions with `--candidates` random responses each; plain rows are as long as each other, so
that they fill micro-batches without padding, with SDPA's causal kernel, and the head runs on responses alone in both.
First in float32, where log-probs and gradients must agree; then in bfloat16, timed; then trees of many sizes.

python benchmarks/bench_tree_attention.py [--layers 28] [--hidden 1024] [--prompt 1024] [--response 128]
    [--decisions 32] [--candidates 8] [--budget 8192] [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import script
import torch
from torch import Tensor

from verl_atgrpo.train.engine.prefix_tree.forward import FLEX, Packed, log_probs, model_inputs
from verl_atgrpo.train.engine.prefix_tree.tree import TokenRows, cut, pack, sort

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 32_000


def model(options: argparse.Namespace, dtype: torch.dtype, attention: str) -> Any:
    """Returns a Qwen3 with random weights, the same for equal options."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = options.hidden // 64
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=128,
        tie_word_embeddings=True,
    )
    net = Qwen3ForCausalLM(config).to(device=DEVICE, dtype=dtype)
    net.set_attn_implementation(attention)
    return net


def rows(options: argparse.Namespace) -> np.ndarray[Any, Any]:
    """Returns token ids [rows, prompt + response]; candidates of a decision have the same prompt."""
    rng = np.random.default_rng(0)
    count = options.decisions * options.candidates
    tokens = rng.integers(0, VOCABULARY, (count, options.prompt + options.response))
    tokens[:, : options.prompt] = np.repeat(
        tokens[:: options.candidates, : options.prompt], options.candidates, axis=0
    )
    return tokens


def plain(net: Any, tokens: Any, options: argparse.Namespace, each: Callable[[list[int], Tensor], None]) -> int:
    """Calls `each` with row numbers and their log-probs [rows, response], by micro-batch; returns tokens read."""
    size = max(1, options.budget // (options.prompt + options.response))
    for start in range(0, len(tokens), size):
        ids = torch.from_numpy(tokens[start : start + size]).to(net.device)
        kept = net(input_ids=ids[:, :-1], logits_to_keep=options.response, use_cache=False).logits
        logs = kept.float().log_softmax(-1).gather(-1, ids[:, -options.response :, None]).squeeze(-1)
        each(list(range(start, start + len(ids))), logs)
    return int(tokens.size - len(tokens))


def trees(net: Any, tokens: Any, options: argparse.Namespace, each: Callable[[list[int], Tensor], None]) -> int:
    """As `plain`, over trees."""
    count, length = tokens.shape
    made = TokenRows(tokens.ravel(), np.arange(count + 1) * length, np.full(count, options.prompt))
    order, read = sort(made), 0
    for part in cut(made, order, options.budget):
        tree = pack(made, order, part)
        packed = Packed.of(tree, net.device)
        logits = net(**model_inputs(packed, net.config), use_cache=False).logits.squeeze(0)
        each(tree.rows.tolist(), log_probs(logits, packed)["log_probs"].view(len(tree.rows), -1))
        read += len(tree)
    return read


def update(run: Callable[..., int], net: Any, tokens: Any, options: argparse.Namespace) -> tuple[Tensor, Tensor, int]:
    """One forward and backward pass of a weighted sum: log-probs [rows, response], the gradient, and tokens read."""
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1)).to(net.device) / len(tokens)
    found = torch.zeros(len(tokens), options.response, device=net.device)
    net.zero_grad(set_to_none=True)

    def learn(numbers: list[int], logs: Tensor) -> None:
        (logs.sum(-1) * weights[numbers]).sum().backward()  # type: ignore[no-untyped-call]
        found[numbers] = logs.detach().float()

    read = run(net, tokens, options, learn)
    return found, torch.cat([parameter.grad.flatten().float() for parameter in net.parameters()]), read


def new_sizes(net: Any, tokens: Any, options: argparse.Namespace) -> None:
    """Prints how long trees of sizes never seen before take: attention is compiled for some."""
    times = []
    for number in range(12):
        rest = argparse.Namespace(**{**vars(options), "prompt": options.prompt - 7 * number})
        _wait()
        began = time.perf_counter()
        update(trees, net, tokens[: 2 * options.candidates, 7 * number :], rest)
        _wait()
        times.append(time.perf_counter() - began)
    print(f"trees of new sizes, seconds: {' '.join(f'{each:.2f}' for each in times)}")


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Prints how far both agree, and the ratios."""
    sizes = {"layers": 28, "hidden": 1024, "prompt": 1024, "response": 128, "decisions": 32, "candidates": 8}
    options = script.parser(__doc__, **sizes, budget=8192, rounds=5).parse_args()
    attention = FLEX if DEVICE == "cuda" else "sdpa"
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {attention}; {options}")
    tokens = rows(options)
    few = tokens[: 4 * options.candidates]
    torch.set_float32_matmul_precision("highest")
    results = [
        update(run, model(options, torch.float32, implementation), few, options)
        for run, implementation in ((plain, "sdpa"), (trees, attention))
    ]
    (theirs, gradient, _), (ours, own, _) = results
    apart = float((theirs - ours).abs().max())
    gradients = float((gradient - own).norm() / gradient.norm())
    print(
        f"float32, {len(few)} rows: log-probs differ by at most {apart:.1e}, gradients by {gradients:.1e} of the norm"
    )
    del results, gradient, own
    seconds, memory, read = [], [], []
    for run, implementation in ((plain, "sdpa"), (trees, attention)):
        net = model(options, torch.bfloat16, implementation)
        times = []
        for number in range(options.rounds + 1):
            if number == 1 and DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _wait()
            began = time.perf_counter()
            _, _, count = update(run, net, tokens, options)
            _wait()
            times.append(time.perf_counter() - began)
        seconds.append(median(times[1:]))
        memory.append(torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else float("nan"))
        read.append(count)
        del net
    print(f"bfloat16, {len(tokens)} rows: {read[0]} and {read[1]} tokens, {read[0] / read[1]:.2f} times fewer")
    print(
        f"forward and backward {seconds[0]:.3f} s and {seconds[1]:.3f} s: {seconds[0] / seconds[1]:.2f} times faster"
    )
    print(f"peak memory {memory[0]:.1f} and {memory[1]:.1f} GiB")
    new_sizes(model(options, torch.bfloat16, attention), tokens, options)
    if apart > 1e-3 or gradients > 1e-3:
        raise SystemExit("trees and rows differ by more than rounding")


if __name__ == "__main__":
    main()
