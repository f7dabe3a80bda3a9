"""Role-conditioned advantages: SPIRAL's moving average of each role, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.rae import Baselines
from verl_atgrpo.train.rows.row_advantages import policy_advantages


def row(episode: str, agent: str, reward: float, **tags: Any) -> dict[str, Any]:
    return {"episode": episode, "agent": agent, "reward": reward, "group": episode[0], "response_len": 1, **tags}


def test_a_step_is_compared_with_the_average_before_it() -> None:
    baselines = Baselines(resolve_spec({"preset": "rae", "decay": 0.5}))
    first = [row("a0", "x", 1.0), row("a0", "x", 1.0), row("a1", "x", -1.0), row("b0", "o", -1.0)]
    baselines.write(first)
    assert policy_advantages(first, resolve_spec("rae")).tolist() == [1.0, 1.0, -1.0, -1.0]
    baselines.update(first)
    # x: a mean of 0 over a0, whose two rows count once, and a1; o: 0 -> -.5.
    assert baselines.values == {"x": 0.0, "o": -0.5}
    second = [row("c0", "x", 1.0), row("c0", "o", -1.0)]
    baselines.write(second)
    assert policy_advantages(second, resolve_spec("rae")).tolist() == [1.0, -0.5]
    baselines.update([*second, row("c1", "x", 0.4), row("c2", "x", 1.0)])
    # .5^3 of 0 and the rest of .8; -.5 and -1.
    assert baselines.metrics() == {"agent/x/baseline": pytest.approx(0.7), "agent/o/baseline": -0.75}


def test_the_order_of_a_steps_episodes_does_not_matter() -> None:
    easy = [row(f"a{number}", "x", 1.0) for number in range(40)]
    hard = [row(f"b{number}", "x", 0.0) for number in range(40)]
    found = [Baselines(resolve_spec("rae")), Baselines(resolve_spec("rae"))]
    for baselines, rows in zip(found, (easy + hard, hard + easy), strict=True):
        baselines.update(rows)
    assert found[0].values == found[1].values == {"x": pytest.approx(0.5 * (1 - 0.95**80))}


def test_an_episode_counts_by_the_mean_of_a_roles_rows() -> None:
    baselines = Baselines(resolve_spec("rae"))
    baselines.update([row("a0", "x", 3.0), row("a0", "x", 1.0)])
    assert baselines.values["x"] == pytest.approx(0.05 * 2.0)


def test_rows_that_are_not_trained_get_no_average() -> None:
    untrained = {"agent": "x", "reward": 0.0, "trained": False}
    Baselines(resolve_spec("rae")).write([untrained])
    assert "baseline" not in untrained


def test_an_agent_may_have_a_decay_of_its_own_and_others_another_formula() -> None:
    spec = resolve_spec({"preset": "rae", "agents": {"o": {"decay": 0.0}, "judge": {"decay": 1}}})
    baselines = Baselines(spec)
    rows = [row("a0", agent, 1.0) for agent in ("x", "o", "judge")]
    baselines.write(rows)
    baselines.update(rows)
    assert baselines.values == {"x": pytest.approx(0.05), "o": 1.0, "judge": 0.0}
    rewards = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    assert team_advantages(rewards, rows, spec).tolist() == [1.0, 1.0, 1.0]


def test_a_part_of_a_mixture_may_have_a_decay_of_its_own() -> None:
    baselines = Baselines(resolve_spec({"preset": "rae", "agents": {"walk": {"decay": 0.5}}}))
    baselines.update([row("a0", "walk.navigator", 1.0), row("a0", "sudoku.planner", 1.0)])
    assert baselines.values == {"walk.navigator": 0.5, "sudoku.planner": pytest.approx(0.05)}


def test_an_agent_of_a_parts_own_estimator_has_its_decay() -> None:
    duel = resolve_spec({"preset": "rae", "decay": 0.5, "agents": {"duel.o": {"decay": 0.25}}})
    baselines = Baselines(replace(resolve_spec({"preset": "rae", "decay": 0.75}), parts={"duel": duel}))
    baselines.update([row("a0", "duel.x", 1.0), row("a0", "duel.o", 1.0), row("b0", "walk.navigator", 1.0)])
    assert dict(baselines.values) == {"duel.x": 0.5, "duel.o": 0.75, "walk.navigator": 0.25}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decay": 1.5}, r"^at_grpo\.estimator\.decay=1\.5: a number, at least 0 and at most 1$"),
        ({"decay": True}, r"^at_grpo\.estimator\.decay=True: a number"),
        ({"decay": "slow"}, r"^at_grpo\.estimator\.decay='slow': a number"),
        ({"scale": "none"}, r"^at_grpo\.estimator\.scale: 'none' has no effect with rae"),
        ({"center": "leave_one_out"}, r"^at_grpo\.estimator\.center: .* has no effect with rae"),
        ({"agents": {"x": {"ddof": 0}}}, r"^at_grpo\.estimator\.agents\.x\.ddof: 0 has no effect with rae"),
    ],
)
def test_refusals(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_spec({"preset": "rae", **given})
