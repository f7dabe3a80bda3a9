"""How much of an update arrives at the servers, which have the trained weights rounded to a dtype of their own.

A change smaller than half the spacing of that dtype's numbers (up to 2^-7 of a weight in bfloat16, 2^-10 in float16)
vanishes while a weight is where a checkpoint in that dtype had it: half a spacing from the next change. Once weights
lie anywhere between two numbers, few change in a step, those by a whole spacing, and on average the update arrives.

So the norm of the rounded change over that of the update misleads: SmolLM2 in bfloat16 at a learning rate of 1e-5 has
1.8 in its twelfth step, where 17% of the update arrive (benchmarks/update_arrival.py). What is measured instead
is the part of the update along which the rounded weights moved: <rounded change, change> / <change, change>.

`dither` has small updates arrive from the first step on: it moves weights away from where a checkpoint had them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_atgrpo.train.config.view import dtype_name

logger = logging.getLogger(__name__)
ARRIVED, CHANGED = "update_arrived", "weights_changed_share"
"""Metrics of an update: the part of it that arrived, and the share of weights whose value in the servers changed."""
MOST = 2**18
"""Most weights of a rank that are looked at: 1 MB as float32, and a share of .01 is known within a twentieth of it."""
_COARSE = (torch.bfloat16, torch.float16)
_AT_ONCE = 2**22
"""Weights that are placed at a time by `dither`: what that needs besides them is 0.2 GB."""


def served_dtype(rollout: DictConfig) -> torch.dtype:
    """Returns the dtype of the servers' weights, before a quantisation; vLLM's `auto` is bfloat16 for most models."""
    name = dtype_name(rollout.dtype)
    dtype: torch.dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
    return dtype


def trained_weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns this rank's shards of the weights that an FSDP engine trains.

    The module itself may have whole parameters in the dtype of the passes, as FSDP2's root after one without backward.
    """
    trained = (one for group in optimizer.param_groups for one in group["params"] if one.requires_grad)
    return [one.to_local() if isinstance(one, DTensor) else one for one in trained]


@torch.no_grad()
def sample(weights: Iterable[Tensor], most: int = MOST) -> Tensor:
    """Returns the values of at most `most` of this rank's weights, the same ones at every call: (n,) float32, CPU.

    Every p-th weight is taken, with p prime, so that no column of a matrix is taken more often than others.
    """
    parts = [one.detach().reshape(-1) for one in weights]
    total = sum(map(len, parts))
    stride = _prime_from(-(-total // most))
    taken, start = [], stride // 2
    for part in parts:
        taken.append(part[start::stride].float())
        start = (start - len(part)) % stride if len(part) > start else start - len(part)
    return torch.cat(taken).cpu()


def _prime_from(number: int) -> int:
    """Returns 1 for at most 1, else the first prime that is not below `number`."""
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return max(1, number)


def sums(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what `figures` needs of one rank's weights, (n,) float32, to be added up over ranks: (4,) float64.

    That is the number of weights, that of weights which differ in `dtype`, the squared norm of the change, and its
    product with the change in `dtype`.
    """
    change = after.double() - before.double()
    arrived = after.to(dtype).double() - before.to(dtype).double()
    count = torch.tensor(float(len(change)), dtype=torch.float64)
    return torch.stack([count, (arrived != 0).double().sum(), change @ change, arrived @ change])


def figures(total: Tensor) -> dict[str, float]:
    """Returns the metrics of an update from the `sums` of all ranks; none of an update that changed no weight."""
    count, changed, norm, product = total.tolist()
    return {ARRIVED: product / norm, CHANGED: changed / count} if norm > 0 else {}


class ArrivalWatch:
    """Warns once if next to nothing of a policy's updates arrives at its servers."""

    STEPS = 10
    LITTLE = 0.25
    """SmolLM2 had 10% in its first ten steps at 1e-5 in bfloat16, which took twice the steps of float32 to learn a
    game, and 65% in float16; at 5e-5 it had 50% in bfloat16, and learned a few steps later than in float16."""

    def __init__(self, policy: str, dtype: torch.dtype) -> None:
        """Takes the policy's name and the dtype of its servers."""
        self._policy, self._dtype = policy, str(dtype).removeprefix("torch.")
        self._last: deque[tuple[float, float]] = deque(maxlen=self.STEPS)
        self._warned = False

    def look(self, arrived: float, changed: float) -> None:
        """Takes the metrics of an update; logs the warning if the last STEPS of them were below LITTLE on average."""
        self._last.append((arrived, changed))
        part, share = (sum(column) / len(self._last) for column in zip(*self._last, strict=True))
        if self._warned or len(self._last) < self.STEPS or part >= self.LITTLE:
            return
        self._warned = True
        logger.warning(
            f"policy {self._policy!r}: of its last {self.STEPS} updates {100 * part:.2g}% arrived at its servers, and "
            f"an update changed {100 * share:.2g}% of their weights ({ARRIVED}, {CHANGED}): {self._dtype} rounds the "
            "rest away. What helps: at_grpo.dither=true, rollout.dtype and actor.fsdp_config.mixed_precision."
            "param_dtype float16 or float32, adapters (model.lora_rank), a larger actor.optim.lr, more optimizer "
            "steps a sync (data.train_batch_size over actor.ppo_mini_batch_size)"
        )


@torch.no_grad()
def dither(weights: Iterable[Tensor], dtype: torch.dtype, seed: int) -> int:
    """Moves each weight that is a number of `dtype` to a random place among those that round to it, in place.

    A checkpoint's weights are numbers of bfloat16. Each lies in the middle of what rounds to it, so updates do not
    reach what is computed in bfloat16 before they have moved a weight by half of the spacing. From a place drawn
    evenly, updates arrive in the mean over weights from the first step on, and what is computed at the start is the
    same to the bit. Weights between two numbers of `dtype`, and those that are not float32, stay where they are. Each
    shard has a seed of its own.

    Returns how many weights moved: none for float32.
    """
    if dtype not in _COARSE:
        return 0
    moved = 0
    for weight in weights:
        generator = torch.Generator(weight.device).manual_seed(seed)
        seed += 1
        for part in torch.split(weight.view(-1), _AT_ONCE) if weight.dtype == torch.float32 else ():
            moved += _place(part, dtype, generator)
    return moved


def _place(weight: Tensor, dtype: torch.dtype, generator: torch.Generator) -> int:
    rounded = weight.to(dtype)
    size = rounded.abs()
    number = size.view(torch.int16)
    above, below = ((number + step).view(dtype).float() for step in (1, -1))
    low, high = (size.float() + below) / 2, (size.float() + above) / 2
    drawn = torch.rand(len(weight), generator=generator, device=weight.device)
    placed = torch.copysign(low + drawn * (high - low), weight)
    # Bounds are shared with the next numbers; beyond the largest one and below 0 there is none.
    inside = (rounded.float() == weight) & (placed.to(dtype) == rounded) & (number > 0)
    weight.copy_(torch.where(inside, placed, weight))
    return int(inside.sum())
