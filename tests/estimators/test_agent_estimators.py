"""Specs of single agents: whose advantages change, and over which rows."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.advantage_rows import estimate

TREE = ["t.0.tool.0#0@tool"] * 3 + ["t.0.planner.0#0@planner"] * 2
UIDS = ["q#0@tool~1~A", "q#0@planner~0~B", "q#1@tool~2~A", "q#1@tool~1~A", "q#1@planner~0~B"]
"""Two episodes of two agents, as the parallel scheme writes them for an estimator that needs everything."""
REWARDS = [1.0, 1.0, 0.0, 0.0, 0.0]


def test_one_agent_without_a_scale_in_the_tree() -> None:
    # tool 1, 2, 6: mean 3, as in Dr. GRPO. planner 0, 1: mean .5, std .7071068, as in AT-GRPO.
    choice = {"preset": "at_grpo", "agents": {"tool": {"scale": "none"}}}
    result = estimate(TREE, [1, 2, 6, 0, 1], {"at_grpo_estimator": choice})
    assert result == pytest.approx([-2, -1, 3, -0.5 / 0.7071078, 0.5 / 0.7071078], abs=1e-6)


def test_leave_one_out_and_raw_singletons_for_one_agent() -> None:
    own = {"center": "leave_one_out", "scale": "none", "singleton": "raw"}
    choice = {"preset": "dr_grpo", "agents": {"tool": own}}
    uids = [label.replace("#0", f"#{number}") for number, label in enumerate(TREE)]
    uids += ["t.0.tool.1#0@tool", "t.0.planner.1#0@planner"]
    result = estimate(uids, [1, 2, 6, 0, 1, 7, 7], {"at_grpo_estimator": choice})
    assert result == pytest.approx([-3, -1.5, 4.5, -0.5, 0.5, 7, 0])


def test_an_agents_own_fields_do_not_cut_the_others_out_of_its_statistics() -> None:
    # The task's mean is 1/5 for everybody: four fifths and minus a fifth without a scale; std .4472136 with one.
    choice = {"preset": "grpo", "agents": {"tool": {"scale": "none"}}}
    result = estimate(UIDS, REWARDS, {"at_grpo_estimator": {**choice}})
    assert result == pytest.approx([0.6, 0.6 / 0.5477236, -0.4, -0.4, -0.4 / 0.5477236], abs=1e-6)


@pytest.mark.parametrize(
    ("preset", "own"),
    [
        ("dr_mas", {"center_scope": "group"}),
        ("dr_mas", {"scale": "none"}),
        ("mas_grpo", {"unit": "row"}),
        ("grpo", {"unit": "trajectory", "ddof": 0}),
        ("gigpo", {"step_gamma": 0.5, "eps": 0.1}),
        ("gigpo", {"step_weight": 0, "step_gamma": 1}),
        ("mas_grpo", {"step_weight": 2, "step_scope": "agent"}),
        ({"preset": "m_grpo", "main_agent": "planner", "sub_calls": 2}, {"ddof": 1}),
        ({"preset": "m_grpo", "main_agent": "planner", "sub_calls": 2}, {"sub_calls": 3}),
    ],
)
def test_each_agents_rows_get_what_its_spec_gives_the_whole_batch(preset: Any, own: dict[str, Any]) -> None:
    base = preset if isinstance(preset, dict) else {"preset": preset}
    mixed = estimate(UIDS, REWARDS, {"at_grpo_estimator": {**base, "agents": {"tool": own}}})
    plain = estimate(UIDS, REWARDS, {"at_grpo_estimator": base})
    changed = estimate(UIDS, REWARDS, {"at_grpo_estimator": {**base, **own}})
    assert mixed == [new if "tool" in uid else old for uid, old, new in zip(UIDS, plain, changed, strict=True)]
    assert mixed != plain


def test_several_agents_and_one_that_has_no_rows() -> None:
    own = {"tool": {"scale": "none"}, "planner": {"ddof": 0, "eps": 0}, "judge": {"singleton": "raw"}}
    result = estimate(TREE, [1, 2, 6, 0, 1], {"at_grpo_estimator": {"preset": "at_grpo", "agents": own}})
    assert result == pytest.approx([-2, -1, 3, -1, 1])


def test_padding_has_no_agent() -> None:
    config = {"at_grpo_estimator": {"preset": "at_grpo", "agents": {"tool": {"scale": "none"}}}}
    clean = estimate(TREE, [1, 2, 6, 0, 1], config)
    assert estimate([*TREE, "pad7f"], [1, 2, 6, 0, 1, 5], config, mask=[1] * 5 + [0]) == [*clean, 0]


def test_a_row_without_an_agent_is_refused() -> None:
    config = {"at_grpo_estimator": {"preset": "at_grpo", "agents": {"tool": {"scale": "none"}}}}
    with pytest.raises(ValueError, match=r"^a row has no tag 'agent'; estimator 'at_grpo' needs its agent"):
        estimate(["a#0", "a#1"], [0, 1], config)
