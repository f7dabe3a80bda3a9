"""How much of an optimizer step arrives in weights that are rounded to another dtype, on a real model.

    python benchmarks/update_arrival.py --model runs/models/smollm2

Two prompts, six sampled tokens of each, random advantages, AdamW as verl's, weights in float32. Prints for each
learning rate and dtype, with dithered weights (`at_grpo.dither`) and without, the mean over the first ten steps and
the last step, each of three figures: the part of the update that arrived, the share of weights that changed, and the
norm of the rounded change over that of the change.
"""

from __future__ import annotations

import itertools

import script
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_atgrpo.train.engine.arrival import ARRIVED, CHANGED, dither, figures, sample, sums, trained_weights

PROMPTS = [
    f"The goal is {where}. Which direction? Answer with one word:" for where in ("down and left", "up and right")
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADER = "mean of steps 1 to 10: update, weights, norms; step {}: update, weights, norms"


def norms(before: Tensor, after: Tensor, dtype: torch.dtype) -> float:
    """Returns the norm of the change in `dtype` over that of the change."""
    rounded = after.to(dtype).double() - before.to(dtype).double()
    return (rounded.norm() / (after.double() - before.double()).norm()).item()


def measure(
    path: str, rate: float, steps: int, dithered: torch.dtype | None
) -> dict[torch.dtype, list[tuple[float, float, float]]]:
    """Trains a model; returns dtype -> what arrived of every step, the share that changed, and the ratio of norms.

    With weights that are dithered for a dtype, of that one only.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01)
    found: dict[torch.dtype, list[tuple[float, float, float]]] = {dtype: [] for dtype in DTYPES}
    if dithered is not None:
        dither(trained_weights(optimizer), dithered, 0)
        found = {dithered: []}
    for _ in range(steps):
        loss = torch.zeros(())
        for ids in prompts:
            logs = torch.log_softmax(model(ids).logits[0, -1], dim=-1)
            tokens = torch.multinomial(logs.detach().exp(), 6, replacement=True)
            advantages = torch.randn(6)
            loss = loss - ((advantages - advantages.mean()) * logs[tokens]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = sample(trained_weights(optimizer))
        optimizer.step()
        after = sample(trained_weights(optimizer))
        for dtype, each in found.items():
            of_step = figures(sums(before, after, dtype))
            each.append((of_step[ARRIVED], of_step[CHANGED], norms(before, after, dtype)))
    return found


def main() -> None:
    """Prints a line for each learning rate and dtype."""
    arguments = script.parser(__doc__, model=str, rates=[1e-6, 1e-5, 5e-5, 1e-4], steps=12).parse_args()
    torch.set_num_threads(1)
    print(HEADER.format(arguments.steps))
    for rate, dithered in itertools.product(arguments.rates, (None, torch.bfloat16, torch.float16)):
        for dtype, of_steps in measure(arguments.model, rate, arguments.steps, dithered).items():
            means = torch.tensor(of_steps[:10], dtype=torch.float64).mean(dim=0).tolist()
            shown = "; ".join(", ".join(f"{value:.3g}" for value in row) for row in (means, of_steps[-1]))
            name = str(dtype).removeprefix("torch.") + ("" if dithered is None else ", dithered")
            print(f"{rate:g} {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
