"""Which estimator goes with which scheme, how many policies and whose agents."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("omegaconf")

from fakes.jobs import asked

from verl_atgrpo.train.config.job_rules import of_agents
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.config.section import parse_section

M_GRPO = {"preset": "m_grpo", "main_agent": "planner", "sub_calls": 2}


def config(estimator: Any, scheme: str = "parallel", several: bool = False, name: str = "plan_path") -> AtGrpoConfig:
    section = {"environment": {"name": name}, "scheme": scheme, "estimator": estimator}
    if several:
        section |= {"policies": {"coder": None, "planner": None}}
    return parse_section(section)


def refused(estimator: Any, message: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^at_grpo\.estimator{message}") as caught:
        settings = config(estimator, **options)
        asked(of_agents, settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        ("gigpo", "='gigpo' compares whole trajectories: use scheme: parallel"),
        (M_GRPO, "='m_grpo' aligns the calls of whole episodes: use scheme: parallel"),
        (
            {"preset": "dr_grpo", "discount": 0.5},
            "='dr_grpo': discount=0.5 compares decisions .* use scheme: parallel",
        ),
        ({"name": "mine", "step_weight": 1}, "='mine': step_weight=1 compares equal prompts .* use scheme: parallel"),
        ({"name": "mine", "unit": "trajectory"}, "='mine' compares whole trajectories: use scheme: parallel"),
        (
            {"preset": "at_grpo", "agents": {"planner": {"center_scope": "agent"}}},
            r"\.agents\.planner \('at_grpo'\): the scope agent has no effect with scheme: tree",
        ),
        (
            {"preset": "at_grpo", "agents": {"planner": {"unit": "trajectory"}}},
            r"\.agents\.planner \('at_grpo'\) compares whole trajectories: use scheme: parallel",
        ),
    ],
)
def test_what_needs_episodes_is_refused_in_the_tree(estimator: Any, message: str) -> None:
    refused(estimator, message, scheme="tree")
    config(estimator)


def test_the_tree_takes_single_agents_and_specs_of_ones_own() -> None:
    config({"preset": "at_grpo", "agents": {"tool_user": {"scale": "none"}}}, "tree", several=True)
    config({"name": "mine", "center": "leave_one_out"}, "tree", several=True)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        ("gigpo", "='gigpo' compares all rows with the same prompt, .* use step_scope: agent, or one policy"),
        ({"preset": "gigpo", "step_scope": "agent"}, None),
        ("rae", None),
        (M_GRPO, None),
        (
            {**M_GRPO, "scale_scope": "group"},
            "='m_grpo' compares the rows of all agents of a task, but each of several",
        ),
        ({"name": "mine"}, "='mine' compares the rows of all agents of a task, but each of several"),
        ({"name": "mine", "center_scope": "agent", "scale_scope": "agent"}, None),
        (
            {"preset": "dr_mas", "agents": {"planner": {"center_scope": "group"}}},
            r"\.agents\.planner \('dr_mas'\) compares the rows of all agents of a task, but each of several",
        ),
        ({"preset": "dr_mas", "agents": {"planner": {"ddof": 0}}}, None),
    ],
)
def test_several_policies(estimator: Any, message: str | None) -> None:
    config(estimator)
    if message is None:
        config(estimator, several=True)
    else:
        refused(estimator, message, several=True)


def test_agents_are_the_environments() -> None:
    known = "is not an agent of 'plan_path': it has tool_user, planner$"
    refused({"preset": "grpo", "agents": {"critic": {"scale": "none"}}}, rf"\.agents\.critic {known}")
    refused({**M_GRPO, "main_agent": "critic"}, rf"\.main_agent='critic' {known}")
    alone = {**M_GRPO, "main_agent": "solo"}
    message = r"\.sub_calls=2 has no effect: 'solo' is the only agent of 'plan_path_single'; use estimator: mas_grpo$"
    refused(alone, message, name="plan_path_single")
    for estimator in (M_GRPO, {"preset": "grpo", "agents": {"planner": {"scale": "none"}}}):
        settings = config(estimator)
        asked(of_agents, settings)
