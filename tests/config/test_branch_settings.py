"""The section `at_grpo.branch`, and a K for each agent."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.jobs import asked

from verl_atgrpo.train.config.job_rules import of_agents, of_branch_points
from verl_atgrpo.train.config.schema import AtGrpoConfig, BranchSettings, ConfigError
from verl_atgrpo.train.config.section import parse_section


def settings(scheme: str = "branch", **section: Any) -> AtGrpoConfig:
    return parse_section({"environment": {"name": "walk"}, "scheme": scheme, **section})


def test_a_section_says_where_to_branch() -> None:
    branch = {"at": {"pacer": 1}, "continuations": 2, "nested": True, "min_tokens": 3, "max_tokens": 9}
    assert settings(branch=branch).branch.model_dump() == {**branch, "score_weight": 0.0}
    assert settings(branch={}).branch == BranchSettings(
        at="every", continuations=1, nested=False, score_weight=0, min_tokens=0, max_tokens=None
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"scheme": "branch"}, "scheme='branch' needs to know where to branch: set branch.at to every, first, random"),
        ({"scheme": "tree", "branch": {}}, "branch.at='every' has no effect with scheme: tree; remove branch"),
        ({"scheme": "parallel", "branch": {"at": "first"}}, "branch.at='first' has no effect with scheme: parallel"),
        ({"branch": {"at": "last"}}, "branch.at='last': "),
        ({"branch": {"at": {}}}, "branch.at={} names no decision"),
        (
            {"branch": {"at": {"pacer": -1}}},
            r"branch.at={'pacer': -1}: one of first, .* or a section \(each: a whole number, at least 0",
        ),
        ({"branch": {"at": {"pacer": True}}}, "branch.at={'pacer': True}: one of first, random, every or a section"),
        ({"branch": {"continuations": 0}}, "branch.continuations=0: a whole number, at least 1"),
        ({"branch": {"score_weight": -1}}, "branch.score_weight=-1: a number, at least 0"),
        ({"branch": {"at": "first", "nested": True}}, "branch.nested=True has no effect with at: first"),
        ({"branch": {"at": "random", "nested": True}}, "branch.nested=True has no effect with at: random"),
        ({"branch": {"min_tokens": 9, "max_tokens": 3}}, "branch.max_tokens=3 is less than min_tokens=9"),
        ({"branch": {"points": 1}}, "branch.points is not a known key: use one of at, continuations, nested"),
        ({"branch": {}, "candidates": 1}, "candidates=1: a whole number, at least 2"),
        ({"branch": {}, "candidates": {"all": 1}}, r"candidates={'all': 1}: a whole number, .* or a section \(each: "),
        (
            {"branch": {}, "candidates": {}},
            r"candidates={}: with scheme: branch set one number, or for tree and branch",
        ),
        (
            {"scheme": "parallel", "candidates": {"all": 4}},
            r"candidates={'all': 4}: with scheme: parallel set one number",
        ),
        ({"branch": {}, "alpha": 0.5}, "alpha=0.5 has no effect with scheme: branch; .* branch.score_weight"),
        ({"branch": {}, "local_weight": 0.5}, "local_weight=0.5 has no effect with scheme: branch"),
        ({"branch": {}, "selection": "first"}, "selection='first' has no effect with scheme: branch; remove it"),
        ({"branch": {}, "episode_reward": "scores"}, "episode_reward='scores' has no effect with scheme: branch"),
        ({"branch": {}, "estimator": "mas_grpo"}, "estimator='mas_grpo' compares whole trajectories"),
        (
            {"branch": {}, "estimator": "dr_mas"},
            "estimator=.dr_mas.: the scope agent has no effect with scheme: branch",
        ),
    ],
)
def test_what_cannot_work_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^at_grpo.{message}"):
        settings(**section)


def test_weights_have_an_effect_beside_a_weight_of_scores() -> None:
    settings(branch={"score_weight": 0.5}, alpha=0.5, local_weight=0)


def test_agents_must_be_the_environments() -> None:
    made = settings(branch={"at": {"navigator": 0}})
    asked(of_agents, made)
    made = settings(branch={"at": {"navigator": 0, "pilot": 1}})
    with pytest.raises(
        ConfigError, match=r"at_grpo\.branch\.at\.pilot is not an agent of 'walk': it has navigator, p"
    ):
        asked(of_agents, made)


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        ({"min_tokens": 49}, r"min_tokens=49: no prompt has as many tokens with data\.max_prompt_length=48; lower it"),
        ({"at": {"navigator": 0, "pacer": 0}}, r"at\.pacer: the policy 'other' is not trained, so its decisions are"),
    ],
)
def test_points_that_no_episode_can_reach_are_refused(branch: dict[str, Any], message: str) -> None:
    policies = {"one": None, "other": {"trainable": False}}
    made = settings(branch=branch, policies=policies, agents={"navigator": "one", "pacer": "other"})
    with pytest.raises(ConfigError, match=rf"^at_grpo\.branch\.{message}"):
        asked(of_branch_points, made, data={"max_prompt_length": 48})
    fine = settings(branch={"min_tokens": 48, "at": {"navigator": 0}})
    asked(of_branch_points, fine, data={"max_prompt_length": 48})


def test_an_agent_may_have_a_k_of_its_own() -> None:
    made = settings("tree", candidates={"all": 4, "pacer": 8})
    assert (made.team_options().candidates, made.team_options().agent_candidates) == (4, {"pacer": 8})
    asked(of_agents, made)
    both = settings("tree", candidates={"navigator": 3, "pacer": 8})
    assert (both.fewest_candidates, both.team_options().agent_candidates) == (3, {"navigator": 3, "pacer": 8})
    asked(of_agents, both)
    assert settings("tree", candidates=6).team_options().agent_candidates == {}
    for candidates, why in (
        ({"all": 4, "pilot": 8}, r"candidates\.pilot is not an agent of 'walk': it has navigator, pacer"),
        ({"pacer": 8}, r"candidates has no number for 'navigator': add navigator: 4, or all: 4"),
    ):
        wrong = settings("tree", candidates=candidates)
        with pytest.raises(ConfigError, match=rf"^at_grpo\.{why}"):
            asked(of_agents, wrong)
