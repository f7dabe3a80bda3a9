"""Advantages: arithmetic by hand, the traps of the reference code, and rows that are refused."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from fakes.advantage_rows import ROW_PRESETS, estimate, ids, tensor

from verl_atgrpo.train.estimators.advantages import group_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.dr_mas import inflation_factors
from verl_atgrpo.train.estimators.plain_job import at_grpo_advantage
from verl_atgrpo.train.estimators.presets import PRESETS

# --- by hand


# Group 7: rewards 1, 2, 6; mean 3; deviations -2, -1, 3; sum of squares 14; variance 7 (ddof 1).
# Group -4: rewards 0, 1; mean .5; deviations -.5, .5; sum of squares .5; variance .5 (ddof 1).
# Leave one out, group 7: 1 - (2+6)/2 = -3; 2 - (1+6)/2 = -1.5; 6 - (1+2)/2 = 4.5; group -4: -1, 1.
GOLDEN = {
    "at_grpo": [-2 / 2.6457523, -0.5 / 0.7071078, -1 / 2.6457523, 3 / 2.6457523, 0.5 / 0.7071078],
    "grpo": [-2 / 2.6457523, -0.5 / 0.7071078, -1 / 2.6457523, 3 / 2.6457523, 0.5 / 0.7071078],
    "dr_grpo": [-2, -0.5, -1, 3, 0.5],
    "rloo": [-3, -1, -1.5, 4.5, 1],
}


@pytest.mark.parametrize("preset", ROW_PRESETS)
def test_row_presets_on_groups_of_unequal_size(preset: str) -> None:
    result = group_advantages(tensor(1, 0, 2, 6, 1), ids(7, -4, 7, 7, -4), PRESETS[preset])
    assert result.tolist() == pytest.approx(GOLDEN[preset], abs=1e-7)


def test_population_variance_and_eps() -> None:
    # Variance of 0, 4 with ddof 0 is 4, std 2, plus eps .5.
    spec = resolve_spec({"preset": "grpo", "ddof": 0, "eps": 0.5})
    assert group_advantages(tensor(0, 4), ids(0, 0), spec).tolist() == [-0.8, 0.8]


def test_no_centre_divides_the_reward_itself() -> None:
    spec = resolve_spec({"preset": "grpo", "center": "none", "ddof": 0, "eps": 0.5})
    assert group_advantages(tensor(1, 5, 3, 3), ids(0, 0, 1, 1), spec).tolist() == [0.4, 2.0, 3.0, 3.0]


def test_trajectory_counts_once_however_many_rows_it_has() -> None:
    # Query 0: trajectory 10 (three rows) reward 1, 11 (one row) 0, 12 (two rows) 0: mean 1/3 of trajectories,
    # deviations 2/3, -1/3, -1/3, variance (4+1+1)/9/2 = 1/3, std .5773503. Query 1: one trajectory, so 0.
    rewards = tensor(1, 0, 1, 0, 5, 1, 0)
    result = group_advantages(
        rewards, ids(0, 0, 0, 0, 1, 0, 0), PRESETS["mas_grpo"], units=ids(10, 11, 10, 12, 13, 10, 12)
    )
    high, low = (2 / 3) / 0.5773513, (-1 / 3) / 0.5773513
    assert result.tolist() == pytest.approx([high, low, high, low, 0, high, low], abs=1e-6)


@pytest.mark.parametrize("preset", ROW_PRESETS)
def test_singleton_is_zero_or_raw(preset: str) -> None:
    rewards, groups = tensor(5, 1, 1), ids(0, 1, 1)
    assert group_advantages(rewards, groups, PRESETS[preset]).tolist() == [0, 0, 0]
    raw = resolve_spec({"preset": preset, "singleton": "raw"})
    assert group_advantages(rewards, groups, raw).tolist() == [5, 0, 0]


@pytest.mark.parametrize("preset", ROW_PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, 0.7, -3.3, 1e8 + 0.1])
def test_equal_rewards_give_exactly_zero(preset: str, dtype: torch.dtype, value: float) -> None:
    for size in (2, 3, 7, 8, 10):
        rewards = torch.full((size,), value, dtype=dtype)
        result = group_advantages(rewards, torch.zeros(size, dtype=torch.int64), PRESETS[preset])
        assert result.dtype == dtype
        assert result.count_nonzero() == 0


def test_spread_survives_a_large_common_offset() -> None:
    # In float32, 1e6 + (0, .5, 1) is exact but its square is not: one-pass variance would be noise.
    rewards = torch.tensor([1e6, 1e6 + 0.5, 1e6 + 1])
    result = group_advantages(rewards, ids(0, 0, 0), PRESETS["grpo"])
    assert result.tolist() == pytest.approx([-1, 0, 1], abs=1e-5)
    # What 300 is rounded by is no spread.
    assert group_advantages(tensor(1000 * (0.1 + 0.2), 300), ids(0, 0), PRESETS["grpo"]).tolist() == [0, 0]


def test_group_ids_need_not_be_dense() -> None:
    rewards = tensor(1, 0, 2, 6, 1)
    dense = group_advantages(rewards, ids(0, 1, 0, 0, 1), PRESETS["grpo"])
    for far, near in ((10**15, -(10**15)), (4, 0), (3, 1)):
        assert torch.equal(group_advantages(rewards, ids(far, near, far, far, near), PRESETS["grpo"]), dense)


def test_empty_batch() -> None:
    assert group_advantages(tensor(), ids(), PRESETS["grpo"]).shape == (0,)
    assert group_advantages(tensor(), ids(), PRESETS["mas_grpo"], units=ids()).shape == (0,)


def test_tokens_are_summed_and_the_advantage_is_spread_over_the_mask() -> None:
    rewards = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    advantages, returns = at_grpo_advantage(rewards, mask, {"at_grpo_estimator": "dr_grpo"}, np.array(["a", "a"]))
    assert advantages.tolist() == [[0.5, 0.0, 0.5], [-0.5, -0.5, 0.0]]
    assert torch.equal(advantages, returns)
    assert advantages.dtype == rewards.dtype
    assert rewards.tolist() == [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]]


def test_config_may_be_a_plain_dataclass() -> None:
    @dataclasses.dataclass
    class Config:
        at_grpo_estimator: str = "rloo"

    assert estimate(["a", "a"], [0.0, 4.0], Config()) == [-4, 4]


def test_config_may_be_a_struct_dictconfig() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({})
    omegaconf.OmegaConf.set_struct(config, True)
    assert estimate(["a", "a"], [0.0, 4.0], config) == pytest.approx([-0.7071068, 0.7071068], abs=1e-6)
    config = omegaconf.OmegaConf.create({"at_grpo_estimator": {"preset": "rloo", "singleton": "raw"}})
    assert estimate(["a", "a", "b"], [0.0, 4.0, 9.0], config) == [-4, 4, 9]


def test_inflation_factors() -> None:
    # a: 0, 2 (mean 1, variance 1); b: 7 (mean 7, variance 0). All: mean 3, variance (9 + 1 + 16) / 3 = 26/3.
    def factors(rewards: torch.Tensor, agents: list[str], *tasks: int) -> dict[str, float]:
        return inflation_factors(rewards, agents, torch.tensor(tasks or [0] * len(agents)))

    expected = {"a": (1 + 4) * 3 / 26, "b": (0 + 16) * 3 / 26}
    assert factors(tensor(0, 7, 2), ["a", "b", "a"]) == pytest.approx(expected)
    # A task whose rewards are a thousand times as large changes nothing, nor does one without spread.
    twice = [*("a", "b", "a") * 2, "b"]
    assert factors(tensor(0, 7, 2, 5000, 12000, 7000, 3), twice, 4, 4, 4, 9, 9, 9, 1) == pytest.approx(expected)
    # Two tasks in which the agents earn alike: pooled over both, a's small spread would look like none.
    apart = factors(tensor(0, 1, 0, 1, 8, 9, 8, 9), ["a", "a", "b", "b"] * 2, 0, 0, 0, 0, 1, 1, 1, 1)
    assert apart == {"a": 1.0, "b": 1.0}
    assert factors(torch.full((8,), 0.1), ["a", "b"] * 4) == {"a": 1.0, "b": 1.0}
    assert factors(tensor(3), ["a"]) == {"a": 1.0}
    assert factors(tensor(), []) == {}


# --- traps of the reference code


def test_trap_1_rows_of_different_problems_are_never_merged() -> None:
    # Two problems, two candidates each. The reference divided the number of the problem by the number of
    # candidates, so that problems 0 and 1 became one group, and the easy one looked better than the hard one.
    uids = [f"problem-{problem}/planner/1" for problem in (0, 0, 1, 1)]
    rewards = [1.0, 1.0, 0.0, 0.0]
    assert estimate(uids, rewards) == [0, 0, 0, 0]
    merged = estimate([f"{problem // 2}" for problem in (0, 0, 1, 1)], rewards)
    assert merged == pytest.approx([0.8660254, 0.8660254, -0.8660254, -0.8660254], abs=1e-5)
    # Nor are agents and turns of one problem, or names of which one is a prefix of another.
    uids = ["0/planner/1", "0/planner/1", "0/planner/11", "0/planner/11", "0/tool/1", "0/tool/1"]
    assert estimate(uids, [1.0, 1.0, 0.0, 0.0, 0.5, 0.5]) == [0] * 6


@pytest.mark.parametrize("preset", [*ROW_PRESETS, "mas_grpo"])
def test_trap_8_padding_copied_before_the_statistics(preset: str) -> None:
    config = {"at_grpo_estimator": preset}
    labels = ["q#0", "q#1", "q#2"] if preset == "mas_grpo" else ["q", "q", "q"]
    rewards = [1.0, 0.0, 0.0]
    clean = estimate(labels, rewards, config)
    # Five copies of row 0 fill the batch. A trainer that leaves their mask on changes the whole group.
    copied = [*labels, *(f"q#{number}" if "#" in labels[0] else "q" for number in range(3, 8))]
    assert estimate(copied, [*rewards, *[1.0] * 5], config)[:3] != pytest.approx(clean, abs=0.05)
    for padding in (copied, [*labels, *labels[:1] * 5]):
        padded = estimate(padding, [*rewards, *[1.0] * 5], config, [1] * 3 + [0] * 5)
        assert padded == [*clean, 0, 0, 0, 0, 0]


# --- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": torch.tensor([1.0, math.nan])}, r"^rewards: nan is not finite$"),
        (
            {"spec": PRESETS["mas_grpo"], "units": ids(5, 5)},
            r"^units: trajectory 5 has rows with different rewards \(1.0 and 2.0\)",
        ),
        (
            {"spec": PRESETS["mas_grpo"], "units": ids(5, 5), "groups": ids(3, 4), "rewards": torch.ones(2)},
            r"^units: trajectory 5 has rows with different groups \(3 and 4\)",
        ),
    ],
)
def test_invalid_rows(arguments: dict[str, Any], message: str) -> None:
    valid = {"rewards": torch.tensor([1.0, 2.0]), "groups": ids(0, 0), "spec": PRESETS["grpo"]}
    with pytest.raises(ValueError, match=message):
        group_advantages(**(valid | arguments))


def test_invalid_batches() -> None:
    rewards = torch.zeros(2, 3)
    uids = np.array(["a", "a"], dtype=object)
    with pytest.raises(ValueError, match=r"^index: missing; groups are formed by verl's 'uid' field$"):
        at_grpo_advantage(rewards, rewards)
    with pytest.raises(ValueError, match=r"response_mask \(2, 2\) and index \(2,\): expected \(N, L\), \(N, L\)"):
        at_grpo_advantage(rewards, rewards[:, :2], None, uids)
    with pytest.raises(ValueError, match=r"index \(1,\): expected \(N, L\), \(N, L\) and \(N,\)$"):
        at_grpo_advantage(rewards, rewards, None, uids[:1])
    for preset, needs in (("mas_grpo", "trajectory"), ("dr_mas", "agent"), ("gigpo", "anchor, left, trajectory")):
        message = (
            rf"^algorithm\.at_grpo_estimator='{preset}' needs {needs}, but a plain job's rows .*trainer_mode=at_grpo$"
        )
        with pytest.raises(ValueError, match=message):
            estimate(["a", "a"], [0, 1], {"at_grpo_estimator": preset})
    with pytest.raises(ValueError, match=r"^at_grpo\.estimator: unknown preset 'nope'"):
        estimate(["a", "a"], [0, 1], {"at_grpo_estimator": "nope"})
    with pytest.raises(ValueError, match=r"^rewards: expected \(1,\) finite values, got shape \(2,\)$"):
        inflation_factors(tensor(0, 1), ["a"], torch.zeros(1, dtype=torch.long))
