"""Whether servers sample with the weights that the actor has: the first rows after every sync are compared."""

from __future__ import annotations

import logging

from omegaconf import DictConfig, OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.train.config.view import dtype_name

logger = logging.getLogger(__name__)
FLOOR = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Difference of a token's probability that is never remarkable, by the coarser dtype of the two, the finest first."""
CEILING = {"float32": 2e-2, "float16": 0.15, "bfloat16": 0.5}
"""Difference that is always remarkable, also in a run's first step."""
_FACTOR = 5.0
"""How many times as far apart as in a run's first step both may be, which is what dtypes and kernels make of a model.
In 20 steps of SmolLM2 on an H200 the largest difference was 2.2 times the first one (.077) in bfloat16 and 3.0 times
(.015) in float16."""
ENDS = 0.05
"""In float32 no rounding explains a difference above this on the CPU: the run ends."""
ENDS_WITH_TF32 = 0.3
"""The same on a GPU, where attention multiplies in TF32: SmolLM2 had .006 at most on an H200."""


class ServedWeightsError(RuntimeError):
    """The servers of a policy sample with other weights than the actor has."""


def computing_dtype(policy: DictConfig) -> str:
    """Returns the coarser one of the dtypes in which actor and servers of a policy compute, as `float32`."""
    precision = OmegaConf.select(policy, "actor.fsdp_config.mixed_precision.param_dtype")
    found = [dtype_name(precision or "bf16"), dtype_name(policy.rollout.dtype)]
    return max(found, key=lambda name: [*FLOOR].index(name) if name in FLOOR else len(FLOOR))


class ServedWeights:
    """Watches one policy's largest difference between the probabilities of sampled tokens."""

    def __init__(self, policy: str, dtype: str) -> None:
        """Takes the policy's name and the dtype of `computing_dtype`."""
        self._policy, self._dtype = policy, dtype
        self._first: float | None = None
        self._warned = False

    @property
    def bound(self) -> float:
        """The largest difference that is not remarkable."""
        known = self._dtype if self._dtype in FLOOR else "bfloat16"
        usual = CEILING[known] if self._first is None else _FACTOR * self._first
        return min(max(FLOOR[known], usual), CEILING[known])

    def look(self, difference: float, step: int) -> None:
        """Logs a warning for a difference above the bound, again only after one below it.

        `difference` is the step's `training/rollout_probs_diff_max`, over rows sampled with the last weights. Raises
        ServedWeightsError in float32 for one above ENDS, or ENDS_WITH_TF32 on a GPU.
        """
        bound, before = self.bound, "" if self._first is None else f"; {self._first:.2g} in the first step"
        if self._first is None:
            self._first = difference
        said = (
            f"policy {self._policy!r}: in step {step} a token's probability differs by {difference:.2g} between its "
            f"servers and its actor (training/rollout_probs_diff_max{before}; {self._dtype} explains {bound:.2g})"
        )
        cause = "the last weight sync did not bring the actor's weights, or rounded them"
        ends = ENDS if platform_choice.wants_cpu() else ENDS_WITH_TF32
        if self._dtype == "float32" and not difference <= ends:  # nor is NaN
            raise ServedWeightsError(f"{said}: {cause}")
        if difference <= bound:
            self._warned = False
        elif not self._warned:
            self._warned = True
            logger.warning("%s: %s", said, cause)
