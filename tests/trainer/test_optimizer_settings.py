"""What a resumed optimizer has of its checkpoint, and what of the job."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from verl_atgrpo.train.engine.adapters import _sharded
from verl_atgrpo.train.engine.optimizer_settings import keeping_settings

STEPS = 20


def made(schedule: str, rate: float, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW([torch.ones(3, requires_grad=True)], lr=rate, **options)
    if schedule == "constant":
        return optimizer, get_constant_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=0)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=STEPS)


def step(optimizer: Any, schedule: Any) -> float:
    (weights,) = optimizer.param_groups[0]["params"]
    weights.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    rate: float = schedule.get_last_lr()[0]
    assert rate == optimizer.param_groups[0]["lr"]
    return rate


def test_what_decides_the_state_is_the_checkpoints() -> None:
    """A step of amsgrad needs the largest second moment, which the checkpoint has not."""
    saved = made("constant", 1e-3)
    step(*saved)
    resumed = made("constant", 1e-3, amsgrad=True, eps=1e-6)
    with keeping_settings(*resumed):
        for one, other in zip(resumed, saved, strict=True):
            one.load_state_dict(other.state_dict())
    step(*resumed)
    assert resumed[0].param_groups[0]["eps"] == 1e-6


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_rates_and_decay_are_the_jobs_and_the_moments_the_checkpoints(schedule: str) -> None:
    saved = made(schedule, 1e-3, weight_decay=0.01, betas=(0.9, 0.99))
    before = [step(*saved) for _ in range(5)]
    resumed = made(schedule, 1e-4, weight_decay=0.5, betas=(0.8, 0.95))
    with keeping_settings(*resumed):
        for one, other in zip(resumed, saved, strict=True):
            one.load_state_dict(other.state_dict())
    (group,), (moments,) = resumed[0].param_groups, resumed[0].state.values()
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.95))
    assert moments["step"] == 5 and moments["exp_avg"].all()
    assert resumed[1].get_last_lr()[0] == pytest.approx(before[-1] / 10)
    assert step(*resumed) == pytest.approx(step(*saved) / 10)  # at the same place of the schedule


def test_a_state_that_is_a_number_or_has_a_type_of_its_own_is_kept() -> None:
    """As those of bitsandbytes: a resume of adapters failed, or would have made floats of quantised moments."""
    parameter = torch.zeros(2, 3)
    saved = {"step": 7, "state1": torch.arange(6, dtype=torch.uint8).reshape(2, 3), "absmax1": torch.ones(1)}
    found = _sharded(saved, parameter)
    assert found["step"] == 7 and found["state1"].dtype == torch.uint8
    assert all(torch.equal(found[name], saved[name]) for name in ("state1", "absmax1"))
