"""Gives value critics random weights: a direction that says nothing of the rewards (`VERL_USE_EXTERNAL_MODULES`)."""

import torch
from torch import Tensor

from verl_atgrpo.train.estimators.value import Moments

_learned = Moments.values


def _values(self: Moments, x: Tensor) -> Tensor:
    """Returns values with the mean and the deviation of the regression's."""
    learned, mean = _learned(self, x), self.x / self.count
    spread = (self.xx.diagonal() / self.count - mean**2).clamp(min=0).sqrt()
    weights = torch.randn(len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = ((x.double() - mean) / spread.clamp(min=1e-6)) @ weights
    drawn = (drawn - drawn.mean()) / drawn.std().clamp(min=1e-12)
    return (learned.mean() + drawn * learned.std()).clamp(self.lowest, self.highest)


Moments.values = _values  # type: ignore[method-assign]
