"""AgentRL's normalisation by environment: by hand, and what it leaves alone."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.agentrl import by_task
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.rows.row_advantages import policy_advantages


def rows(*groups: tuple[str, str, list[tuple[float, int]]]) -> list[dict[str, Any]]:
    """Rows of groups: (group, agent, [(reward, tokens of the answer)])."""
    return [
        {"group": group, "agent": agent, "reward": reward, "response_len": tokens}
        for group, agent, answers in groups
        for reward, tokens in answers
    ]


def advantages(choice: dict[str, Any], made: list[dict[str, Any]]) -> list[float]:
    rewards = torch.tensor([row["reward"] for row in made], dtype=torch.float64)
    found: list[float] = team_advantages(rewards, made, resolve_spec(choice)).tolist()
    return found


MADE = rows(
    ("w", "walk.navigator", [(0.0, 1), (1.0, 3)]),
    ("w2", "walk.pacer", [(1.0, 2), (1.0, 5)]),  # without signal
    ("s", "search.judge", [(0.0, 10), (8.0, 10), (1.0, 20)]),
)
PLAIN = {"preset": "at_grpo", "scale": "none"}


def test_rows_of_an_environment_have_mean_0_and_deviation_1() -> None:
    # Centred: -1/2, 1/2; 0, 0; -3, 5, -2. Those of walk have deviation 1/2 over the rows with signal, those of search
    # the root of 38 / 3.
    root = math.sqrt(38 / 3)
    expected = [-1.0, 1.0, 0.0, 0.0, -3 / root, 5 / root, -2 / root]
    assert advantages({**PLAIN, "by_task": "rows"}, MADE) == pytest.approx(expected, abs=1e-5)
    assert statistics.pstdev(expected[4:]) == pytest.approx(1.0)


def test_tokens_weight_the_rows() -> None:
    # walk: mean (-1/2 + 3/2) / 4 = 1/4, deviations -3/4 and 1/4, variance (9/16 + 3/16) / 4 = 3/16.
    # search: mean (-30 + 50 - 40) / 40 = -1/2, deviations -5/2, 11/2, -3/2, variance (62.5 + 302.5 + 45) / 40 = 10.25.
    walk, search = math.sqrt(3) / 4, math.sqrt(10.25)
    expected = [-0.75 / walk, 0.25 / walk, 0.0, 0.0, -2.5 / search, 5.5 / search, -1.5 / search]
    assert advantages({**PLAIN, "by_task": "tokens"}, MADE) == pytest.approx(expected, abs=1e-5)


def test_it_follows_the_fields_of_single_agents_and_is_none_of_them() -> None:
    own = {"preset": "at_grpo", "agents": {"search": {"scale": "none"}}, "by_task": "rows"}
    scaled = advantages({"preset": "at_grpo", "by_task": "rows"}, MADE)
    # One group of an environment: its scale is gone either way.
    assert advantages(own, MADE) == pytest.approx(scaled, abs=1e-5)
    with pytest.raises(ValueError, match=r"^at_grpo\.estimator\.agents\.search: unknown key 'by_task'"):
        resolve_spec({"preset": "at_grpo", "agents": {"search": {"by_task": "rows"}}})
    with pytest.raises(ValueError, match=r"^at_grpo\.estimator\.by_task='tasks': one of none, rows, tokens"):
        resolve_spec({"preset": "at_grpo", "by_task": "tasks"})


def test_without_a_mixture_all_rows_are_of_one_environment() -> None:
    single = rows(("a", "navigator", [(0.0, 1), (2.0, 1)]), ("b", "pacer", [(0.0, 1), (4.0, 1)]))
    # Centred -1, 1, -2, 2: the deviation is the root of 2.5.
    expected = [value / math.sqrt(2.5) for value in (-1, 1, -2, 2)]
    assert advantages({**PLAIN, "by_task": "rows"}, single) == pytest.approx(expected, abs=1e-5)


def test_advantages_that_are_alike_stay() -> None:
    tasks, one = torch.tensor([4, 4, 9]), torch.ones(3).double()
    assert by_task(torch.tensor([0.5, 0.5, 0.0]).double(), tasks, tasks, one, 1e-6).tolist() == [0.5, 0.5, 0.0]
    # The mean of twelve values of .7 is not .7, by rounding.
    alike, zeros = torch.full((12,), 0.7).double(), torch.zeros(12).long()
    assert by_task(alike, zeros, zeros, torch.ones(12).double(), 1e-6).equal(alike)
    # One row with an advantage is a signal of its group: without a centre the others are not changed alike.
    lone = torch.tensor([2.0, 0.0, 0.0, 0.0]).double()
    found = by_task(lone, torch.zeros(4).long(), torch.tensor([1, 1, 2, 2]), torch.ones(4).double(), 0.0)
    assert found.tolist() == [1.0, -1.0, 0.0, 0.0]
    half, tasks = torch.tensor([-0.5, 0.5]).double(), torch.tensor([1, 1])
    assert by_task(half, tasks, tasks, one[:2], 1.0).tolist() == pytest.approx([-1 / 3, 1 / 3])
    nothing = torch.tensor([], dtype=torch.float64)
    assert by_task(nothing, nothing.long(), nothing.long(), nothing, 1e-6).tolist() == []


def test_what_a_row_is_compared_with_is_said_of_its_part() -> None:
    """A part compares all agents, the others each agent: the row in the middle of its group is that of one agent."""
    made = rows(("t", "walk.a", [(1.0, 1), (1.0, 9), (3.0, 1)]), ("t", "walk.b", [(1.5, 1), (-1.5, 1)]))
    rewards = torch.tensor([row["reward"] for row in made], dtype=torch.float64)
    grpo, dr_mas = resolve_spec("grpo"), resolve_spec("dr_mas")
    found = team_advantages(rewards, made, replace(dr_mas, by_task="tokens", parts={"walk": grpo})).tolist()
    assert sorted(range(5), key=found.__getitem__) == sorted(range(5), key=rewards.tolist().__getitem__)
    assert found[0] == found[1]


@pytest.mark.parametrize("preset", ["at_grpo", "dr_mas"])
def test_a_reward_at_the_mean_of_its_group_stays_between_the_others(preset: str) -> None:
    """A draw among a win and a loss: with a mean of tokens other than 0 all three move alike."""
    made = rows(("t", "game.x", [(-1.0, 1), (0.0, 1), (1.0, 6)]), ("u", "game.o", [(2.0, 50), (2.0, 50)]))
    loss, draw, win, *alike = advantages({"preset": preset, "by_task": "tokens"}, made)
    assert loss < draw < win and draw == pytest.approx((loss + win) / 2, abs=1e-5) and draw != 0
    assert alike == [0, 0]


def test_scale_of_an_environment_does_not_matter() -> None:
    larger = [{**row, "reward": row["reward"] * (1000 if row["agent"].startswith("walk") else 1)} for row in MADE]
    for over in ("rows", "tokens"):
        spec = resolve_spec({**PLAIN, "by_task": over})
        assert torch.allclose(policy_advantages(larger, spec), policy_advantages(MADE, spec), atol=1e-4)


def test_a_parts_estimator_sees_its_own_rows_only() -> None:
    """Candidates of one decision have different rewards, which an estimator of whole episodes would refuse."""
    made = rows(
        ("w", "walk.navigator", [(0.0, 1), (1.0, 3)]), ("t", "duel.x", [(1.0, 1)]), ("t", "duel.x", [(4.0, 1)])
    )
    for number, row in enumerate(made):
        row |= {"episode": "w" if number < 2 else f"t{number}", "baseline": 3.0}
    plain, team, roles = (resolve_spec(name) for name in ("dr_grpo", "mas_grpo", "rae"))
    rewards = torch.tensor([row["reward"] for row in made], dtype=torch.float64)
    spec = replace(plain, parts={"duel": replace(team, scale="none")})
    assert team_advantages(rewards, made, spec).tolist() == [-0.5, 0.5, -1.5, 1.5]
    # The other way round: the section's is that of whole episodes.
    spec = replace(team, scale="none", parts={"walk": plain})
    assert team_advantages(rewards, made, spec).tolist() == [-0.5, 0.5, -1.5, 1.5]
    assert team_advantages(rewards, made, replace(plain, parts={"duel": roles})).tolist() == [-0.5, 0.5, -2.0, 1.0]
    assert team_advantages(rewards[:2], made[:2], replace(plain, parts={"duel": roles})).tolist() == [-0.5, 0.5]
    # What all parts share comes last.
    spec = replace(plain, by_task="rows", parts={"duel": replace(team, scale="none")})
    assert team_advantages(rewards, made, spec).tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("narrow_first", [True, False])
def test_what_is_said_of_an_agent_comes_before_what_is_said_of_its_part(narrow_first: bool) -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    rows = [{"group": "t", "agent": "walk.navigator", "reward": reward, "response_len": 1} for reward in rewards]
    agents = {"walk.navigator": {"scale": "none"}, "walk": {"scale": "std"}}
    given = agents if narrow_first else dict(reversed(agents.items()))
    found = advantages({"preset": "at_grpo", "agents": given}, rows)
    assert found == pytest.approx([0.75, -0.25, -0.25, -0.25])
