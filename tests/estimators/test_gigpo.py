"""GiGPO (arXiv 2505.10978): the episode term and the step term, by hand."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from fakes.advantage_rows import estimate, ids, tensor
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo.train.estimators.advantages import group_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.presets import PRESETS


def gigpo(**options: Any) -> dict[str, Any]:
    return {"at_grpo_estimator": {"preset": "gigpo", "step_gamma": 0.5, **options}}


# Task q: episode 0 (outcome 1) sees A, then B; episode 1 (outcome 0) A, A, C; episode 2 (outcome 1) A.
# Task p: one episode (outcome 5), which sees A as well, but in another task.
UIDS = [
    "q#0@x~1~A",
    "q#0@x~0~B",
    "q#1@x~2~A",
    "p#7@x~0~A",
    "q#1@x~1~A",
    "q#1@x~0~C",
    "q#2@x~0~A",
]
REWARDS = [1, 1, 0, 5, 0, 0, 1]
# Episode term, A^E = (R - mean) / F_norm over episodes: 1, 0, 1, mean 2/3, deviations 1/3, -2/3, 1/3, squares
# 1/9 + 4/9 + 1/9 = 2/3, variance 1/3, std .5773503. Alone in its task, p's episode gets 0.
EPISODE = [1 / 3, 1 / 3, -2 / 3, 0, -2 / 3, -2 / 3, 1 / 3]
# Step term, A^S = (R_t - mean) / F_norm over the rows that saw the same, R_t = gamma^(T-1-t) * R, gamma .5: in A .5^1,
# 0, 0, .5^0: mean 3/8, deviations 1/8, -3/8, -3/8, 5/8, squares (1 + 9 + 9 + 25) / 64 = 11/16, variance 11/48,
# std .4787136. B, C and p's A are alone: 0.
STEP = [1 / 8, 0, -3 / 8, 0, -3 / 8, 0, 5 / 8]


def test_both_terms_by_hand() -> None:
    """A = A^E + w * A^S with F_norm = std."""
    for weight in (1, 0.25):
        expected = [a / 0.5773513 + weight * b / 0.4787146 for a, b in zip(EPISODE, STEP, strict=True)]
        assert estimate(UIDS, REWARDS, gigpo(step_weight=weight)) == pytest.approx(expected, abs=1e-6)


def test_both_terms_without_a_scale() -> None:
    """A = A^E + w * A^S with F_norm = 1."""
    expected = [a + b for a, b in zip(EPISODE, STEP, strict=True)]
    assert estimate(UIDS, REWARDS, gigpo(scale="none")) == pytest.approx(expected, abs=1e-12)


def test_the_preset_is_the_published_one() -> None:
    spec = PRESETS["gigpo"]
    assert (spec.unit, spec.scale, spec.step_weight, spec.step_gamma) == ("trajectory", "std", 1, 0.95)
    # .95 and 1 at the same prompt: mean .975, spread .0353553.
    result = estimate(["q#0@x~1~A", "q#1@x~0~A"], [1, 1], {"at_grpo_estimator": "gigpo"})
    assert result == pytest.approx([-0.025 / 0.0353563, 0.025 / 0.0353563], abs=1e-6)


def test_leave_one_out_holds_in_both_terms() -> None:
    # Episodes 1, 0, 1: 1 - 1/2, 0 - 1, 1 - 1/2. In A .5, 0, 0, 1, both zeros of one
    # episode: .5 - 1/3, 0 - 1.5/2, the same, 1 - .5/3.
    episode, step = [0.5, 0.5, -1, 0, -1, -1, 0.5], [1 / 6, 0, -0.75, 0, -0.75, 0, 5 / 6]
    result = estimate(UIDS, REWARDS, gigpo(scale="none", center="leave_one_out"))
    assert result == pytest.approx([a + b for a, b in zip(episode, step, strict=True)], abs=1e-12)


def test_population_variance_and_eps_hold_in_both_terms() -> None:
    # Variances 2/9 and 11/64 over all episodes and rows, stds .4714045 and .4145781, plus eps .5.
    expected = [a / 0.9714045 + b / 0.9145781 for a, b in zip(EPISODE, STEP, strict=True)]
    assert estimate(UIDS, REWARDS, gigpo(ddof=0, eps=0.5)) == pytest.approx(expected, abs=1e-6)


def test_a_lone_prompt_gets_nothing_even_where_lone_episodes_get_their_reward() -> None:
    result = estimate(UIDS, REWARDS, gigpo(scale="none", singleton="raw"))
    assert result[3] == 5
    assert result[1] == pytest.approx(1 / 3)


@pytest.mark.parametrize("value", [0.1, 0.7, -3.3, 1e8 + 0.1])
def test_equal_outcomes_without_a_discount_give_exactly_zero(value: float) -> None:
    assert estimate(UIDS, [value] * 7, gigpo(step_gamma=1)) == [0] * 7


def test_agents_with_the_same_prompt_are_compared_unless_the_scope_is_agent() -> None:
    # Agent y is absent from episode 1. Prompt A: x .5, 0; y 1. Together mean .5; apart x mean .25 and y alone.
    uids, rewards = ["q#0@x~1~A", "q#0@y~0~A", "q#1@x~0~A"], [1.0, 1.0, 0.0]
    together = estimate(uids, rewards, gigpo(scale="none"))
    assert together == pytest.approx([0.5 + 0, 0.5 + 0.5, -0.5 - 0.5])
    apart = estimate(uids, rewards, gigpo(scale="none", step_scope="agent"))
    assert apart == pytest.approx([0.5 + 0.25, 0.5 + 0, -0.5 - 0.25])


def test_padding_enters_neither_term() -> None:
    clean = estimate(UIDS, REWARDS, gigpo())
    for uid in ("pad7f", UIDS[0]):  # verl's padding, and a masked copy of a real row
        padded = estimate([*UIDS, uid], [*REWARDS, 9], gigpo(), mask=[1] * 7 + [0])
        assert padded == [*clean, 0]


def test_no_second_term_is_mas_grpo() -> None:
    options = {"step_weight": 0, "step_gamma": 1}
    assert estimate(UIDS, REWARDS, gigpo(**options)) == estimate(UIDS, REWARDS, {"at_grpo_estimator": "mas_grpo"})


@st.composite
def episodes(draw: st.DrawFn) -> list[tuple[int, int, int, float, int, int]]:
    """Rows (task, episode, agent, outcome, decisions left, prompt)."""
    rows = []
    for episode in range(draw(st.integers(1, 6))):
        task, outcome = draw(st.integers(0, 1)), draw(st.sampled_from([0.0, 0.1, 1.0, -2.5]))
        steps = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=4))
        rows += [(task, episode, agent, outcome, len(steps) - 1 - t, seen) for t, (agent, seen) in enumerate(steps)]
    return draw(st.permutations(rows))


@given(episodes(), st.sampled_from(["group", "agent"]), st.sampled_from(["std", "none"]))
def test_equals_a_loop_over_rows(rows: list[Any], scope: Any, scale: Any) -> None:
    def normed(value: float, others: list[float]) -> float:
        spread = statistics.stdev(others) if scale == "std" and len(set(others)) > 1 else 0
        centred = value - statistics.fmean(others) if len(others) > 1 else 0
        return centred / (spread + 1e-6) if spread else centred

    expected = []
    for task, _, agent, outcome, left, seen in rows:
        outcomes = {row[1]: row[3] for row in rows if row[0] == task}
        returns = [
            row[3] * 0.5 ** row[4]
            for row in rows
            if (row[0], row[5]) == (task, seen) and (scope == "group" or row[2] == agent)
        ]
        expected.append(normed(outcome, list(outcomes.values())) + 2 * normed(outcome * 0.5**left, returns))
    options = {"step_gamma": 0.5, "step_weight": 2, "step_scope": scope, "scale": scale}
    columns = list(zip(*rows, strict=True))
    result = group_advantages(
        tensor(*columns[3]),
        ids(*columns[0]),
        resolve_spec({"preset": "gigpo", **options}),
        units=ids(*columns[1]),
        agents=ids(*columns[2]) if scope == "agent" else None,
        left=ids(*columns[4]),
        anchors=ids(*columns[5]),
    )
    torch.testing.assert_close(result, tensor(*expected), rtol=1e-7, atol=1e-7)
