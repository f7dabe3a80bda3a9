"""A resumed optimizer: its moments are the checkpoint's, its settings are the job's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@contextmanager
def keeping_settings(optimizer: Optimizer, schedule: LambdaLR) -> Iterator[None]:
    """Within, both load their states; afterwards learning rates, weight decay and so on are again those of before.

    torch saves a group's settings with its moments, so a lower `actor.optim.lr` would have no effect on a resumed run.
    The schedule goes on at the checkpoint's step.
    """
    # Flags go with the state: without amsgrad there is no largest second moment.
    settings = [
        {key: value for key, value in group.items() if key != "params" and not isinstance(value, bool | None)}
        for group in optimizer.param_groups
    ]
    rates = list(schedule.base_lrs)
    yield
    schedule.base_lrs = rates
    for group, given, rate, factor in zip(optimizer.param_groups, settings, rates, schedule.lr_lambdas, strict=True):
        group.update(given, lr=rate * factor(schedule.last_epoch))
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
