"""Properties of every preset for any rows."""

from typing import Any

import pytest
import torch
from fakes.advantage_rows import ids, tensor
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo.train.estimators.advantages import group_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.presets import PRESETS


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    size = draw(st.integers(1, 24))
    reward = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(-4000, 4000).map(lambda n: n / 1000))
    rewards = draw(st.lists(reward, min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    return tensor(*rewards), ids(*groups)


SPECS = {**PRESETS, "m_grpo": resolve_spec({"preset": "m_grpo", "main_agent": "planner", "sub_calls": 2})}
# Compared with no group: tests/estimators/test_rae.py.
every_preset = st.sampled_from(sorted({*PRESETS} - {"rae"}))


def advantages_of(preset: str, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Advantages of episodes of one row, by one agent and from one prompt a task.

    Several are in the tests of single presets.
    """
    one, no = torch.zeros_like(groups), torch.zeros_like(groups, dtype=torch.bool)
    inputs: dict[str, Any] = {}
    if preset in ("mas_grpo", "gigpo", "m_grpo"):
        inputs["units"] = torch.arange(len(rewards))
    if preset in ("dr_mas", "m_grpo"):
        inputs["agents"] = one
    if preset in ("gigpo", "m_grpo"):
        inputs["left"] = one
    if preset == "gigpo":
        inputs["anchors"] = one
    if preset == "m_grpo":
        inputs["mains"], inputs["turns"] = no, one
    return group_advantages(rewards, groups, SPECS[preset], **inputs)


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@given(problems(), every_preset, st.randoms())
def test_rows_may_come_in_any_order(problem: Any, preset: str, random: Any) -> None:
    rewards, groups = problem
    order = torch.tensor(random.sample(range(len(rewards)), len(rewards)))
    assert_same(advantages_of(preset, rewards[order], groups[order]), advantages_of(preset, rewards, groups)[order])


@given(problems(), every_preset)
def test_groups_do_not_see_each_other(problem: Any, preset: str) -> None:
    rewards, groups = problem
    changed = groups == groups[0]
    other = torch.where(changed, rewards.square() - torch.arange(len(rewards)), rewards)
    before, after = advantages_of(preset, rewards, groups), advantages_of(preset, other, groups)
    assert torch.equal(before[~changed], after[~changed])


@given(problems(), every_preset, st.integers(-1000, 1000))
def test_shifting_all_rewards_changes_nothing(problem: Any, preset: str, shift: int) -> None:
    rewards, groups = problem
    shifted = advantages_of(preset, rewards + shift, groups)
    torch.testing.assert_close(shifted, advantages_of(preset, rewards, groups), rtol=1e-6, atol=1e-6)


@given(problems(), every_preset, st.sampled_from([0.5, 3.0, 100.0]))
def test_scaling_all_rewards(problem: Any, preset: str, scale: float) -> None:
    rewards, groups = problem
    scaled, plain = advantages_of(preset, rewards * scale, groups), advantages_of(preset, rewards, groups)
    if SPECS[preset].scale == "none":
        assert_same(scaled, plain * scale)
    else:
        # eps does not scale: with a spread of .0005 at least, its share is below .3 percent.
        torch.testing.assert_close(scaled, plain, rtol=4e-3, atol=1e-9)


@given(problems(), every_preset)
def test_a_group_has_mean_zero(problem: Any, preset: str) -> None:
    rewards, groups = problem
    result = advantages_of(preset, rewards, groups)
    for group in groups.unique():
        assert result[groups == group].sum().item() == pytest.approx(0, abs=1e-9)
