"""Centre and scale over an agent's own rows or over all rows: Dr. MAS and its ablation, by hand."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from fakes.advantage_rows import estimate
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo import Candidate, Outcome, Score
from verl_atgrpo.play.types import Decision, EpisodeRecord, Generation
from verl_atgrpo.train.estimators.advantages import group_advantages, team_advantages
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.estimators.spec import EstimatorSpec
from verl_atgrpo.train.rollout.episode_rows import training_rows

CELLS = list(itertools.product(("group", "agent"), repeat=2))
"""(centre scope, scale scope): (mu, s), (mu, s_k), (mu_k, s), (mu_k, s_k)."""


def choice(center_scope: str, scale_scope: str, **options: Any) -> dict[str, Any]:
    return {"preset": "dr_mas", "center_scope": center_scope, "scale_scope": scale_scope, **options}


def advantages(spec: EstimatorSpec, rewards: list[float], agents: str, groups: str | None = None) -> list[float]:
    """Advantages of rows whose agents and groups are letters."""
    result = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([ord(group) for group in groups or "q" * len(rewards)]),
        spec,
        agents=torch.tensor([ord(agent) for agent in agents]) if "agent" in spec.scopes else None,
    )
    values: list[float] = result.tolist()
    return values


def by_uid(estimator: Any, rewards: list[float], uids: list[str], mask: list[int] | None = None) -> list[float]:
    """Advantages of one-token rows."""
    return estimate(uids, rewards, {"at_grpo_estimator": estimator}, mask)


def test_preset_is_the_agent_wise_cell() -> None:
    """Dr. MAS, arXiv 2602.08847 Eq. 5: A = (R - mu_k) / s_k."""
    assert resolve_spec("dr_mas") == resolve_spec(choice("agent", "agent"))
    assert resolve_spec("dr_mas").scopes == {"agent"}
    assert resolve_spec(choice("agent", "group", scale="none")).scopes == {"agent"}
    assert PRESETS["grpo"].scopes == {"group"}


# --- by hand

# Two tasks, rows in any order, agent b acting less often than a in task q.
# q, a: 1, 1, 0, 1; mean 3/4, squares 3/4, variance 1/4. q, b: 0, 0, 1; mean 1/3, squares 2/3, variance 1/3.
# q, all: mean 4/7, squares 4 * (3/7)^2 + 3 * (4/7)^2 = 12/7, variance 2/7.
# p, a: 0, 2; mean 1, variance 2. p, b: 5, 7; mean 6, variance 2. p, all: mean 3.5, squares 29, variance 29/3.
ROWS = [
    # task, agent, reward, R - mu, R - mu_k, s, s_k
    ("q", "a", 1, 3 / 7, 1 / 4, 0.5345225, 0.5),
    ("p", "b", 5, 1.5, -1, 3.1091264, 1.4142136),
    ("q", "b", 0, -4 / 7, -1 / 3, 0.5345225, 0.5773503),
    ("q", "a", 1, 3 / 7, 1 / 4, 0.5345225, 0.5),
    ("p", "a", 0, -3.5, -1, 3.1091264, 1.4142136),
    ("q", "a", 0, -4 / 7, -3 / 4, 0.5345225, 0.5),
    ("q", "b", 0, -4 / 7, -1 / 3, 0.5345225, 0.5773503),
    ("p", "b", 7, 3.5, 1, 3.1091264, 1.4142136),
    ("q", "a", 1, 3 / 7, 1 / 4, 0.5345225, 0.5),
    ("q", "b", 1, 3 / 7, 2 / 3, 0.5345225, 0.5773503),
    ("p", "a", 2, -1.5, 1, 3.1091264, 1.4142136),
]


@pytest.mark.parametrize("cell", CELLS)
def test_four_cells_with_unequal_rows_an_agent(cell: tuple[str, str]) -> None:
    """Dr. MAS, arXiv 2602.08847 Eq. 5 and its ablation: (R - centre) / (scale + eps), each of task or agent."""
    center, scale = (("group", "agent").index(scope) for scope in cell)
    expected = [row[3 + center] / (row[5 + scale] + 1e-6) for row in ROWS]
    tasks, agents, rewards = "".join(row[0] for row in ROWS), "".join(row[1] for row in ROWS), [row[2] for row in ROWS]
    assert advantages(resolve_spec(choice(*cell)), rewards, agents, tasks) == pytest.approx(expected, abs=1e-6)


FLAT = {
    # a 1, 1, 1 (no spread); b 0, 1 (mean .5, s .7071068); all: mean .8, variance .8 / 4, s .4472136.
    # Against the team's mean, a keeps .2: divided by its own spread of 0 it would be 200000.
    ("group", "group"): [0.2 / 0.4472136] * 3 + [-0.8 / 0.4472136, 0.2 / 0.4472136],
    ("group", "agent"): [0.2] * 3 + [-0.8 / 0.7071068, 0.2 / 0.7071068],
    ("agent", "group"): [0, 0, 0, -0.5 / 0.4472136, 0.5 / 0.4472136],
    ("agent", "agent"): [0, 0, 0, -0.5 / 0.7071068, 0.5 / 0.7071068],
}
LONE = {
    # a 0, 2, 4 (mean 2, s 2); b 6 alone; all: mean 3, squares 20, variance 20 / 3, s 2.5819889.
    # Alone with its own mean, b has nothing to be compared with; with the team's it has, but no s_k.
    ("group", "group"): [-3 / 2.5819889, -1 / 2.5819889, 1 / 2.5819889, 3 / 2.5819889],
    ("group", "agent"): [-1.5, -0.5, 0.5, 3],
    ("agent", "group"): [-2 / 2.5819889, 0, 2 / 2.5819889, 0],
    ("agent", "agent"): [-1, 0, 1, 0],
}


@pytest.mark.parametrize("cell", CELLS)
def test_an_agent_without_spread(cell: tuple[str, str]) -> None:
    """The four cells of Dr. MAS (arXiv 2602.08847 Eq. 5) where s_k of one agent is 0."""
    result = advantages(resolve_spec(choice(*cell)), [1, 1, 1, 0, 1], "aaabb")
    assert result == pytest.approx(FLAT[cell], abs=1e-5)
    if cell[0] == "agent":
        assert result[:3] == [0, 0, 0]


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("cell", CELLS)
def test_an_agent_that_acts_once(cell: tuple[str, str], ddof: int) -> None:
    """The four cells of Dr. MAS (arXiv 2602.08847 Eq. 5) where s_k of one agent is not defined."""
    rewards: list[float] = [0, 2, 4, 6]
    if ddof == 1:
        assert advantages(resolve_spec(choice(*cell)), rewards, "aaab") == pytest.approx(LONE[cell], abs=2e-6)
    lone = advantages(resolve_spec(choice(*cell, ddof=ddof)), rewards, "aaab")[3]
    # b's distance from the mean of 3 in units of s (variance 20/3, or 20/4 with ddof 0), or as it is.
    unit = {"group": (5 if ddof == 0 else 20 / 3) ** 0.5, "agent": 1}[cell[1]]
    assert lone == pytest.approx(3 / unit if cell[0] == "group" else 0, abs=1e-5)
    raw = advantages(resolve_spec(choice(*cell, ddof=ddof, singleton="raw")), rewards, "aaab")[3]
    assert raw == (6 if cell[0] == "agent" else lone)


@pytest.mark.parametrize("cell", CELLS)
def test_an_agent_absent_from_a_task(cell: tuple[str, str]) -> None:
    """In task p only a acts: its mean of 2 and s of 2.8284271 are the task's, and b's rows in q count for nothing."""
    result = advantages(resolve_spec(choice(*cell)), [0, 9, 4, 1, 5], "abaab", "pqpqq")
    assert [result[0], result[2]] == pytest.approx([-2 / 2.8284281, 2 / 2.8284281], abs=1e-6)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("value", [0.1, 0.7, -3.3, 1e8 + 0.1])
def test_equal_rewards_give_exactly_zero(cell: tuple[str, str], value: float) -> None:
    assert advantages(resolve_spec(choice(*cell)), [value] * 8, "aaabbbbc") == [0] * 8


def test_leave_one_out_of_the_agents_own_rows() -> None:
    # a 0, 4: each against the other; b 1, 2, 6 as in RLOO: 1 - 4, 2 - 3.5, 6 - 1.5.
    spec = resolve_spec({"preset": "rloo", "center_scope": "agent"})
    assert advantages(spec, [0, 1, 2, 4, 6], "abbab") == [-4, -3, -1.5, 4, 4.5]


def test_leave_one_out_leaves_out_all_of_an_episode() -> None:
    """Its rows share what follows. Rewards 1, 0, 0 of episodes with 2, 1 and 3 rows, and one of another task."""
    labels = ["q#0@a", "q#0@b", "q#1@a", "q#2@a", "q#2@a", "q#2@b", "p#0@a"]
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 5.0]
    result = estimate(labels, rewards, {"at_grpo_estimator": {"preset": "rloo", "singleton": "raw"}})
    assert result == pytest.approx([1, 1, -2 / 5, -2 / 3, -2 / 3, -2 / 3, 5])
    # An agent's rows alone: a 1, 0 and twice 0, b 1 and 0; divided by .5, the std of a's, and .7071068.
    scoped = {"preset": "rloo", "center_scope": "agent", "scale_scope": "agent", "scale": "std", "eps": 0}
    result = estimate(labels, rewards, {"at_grpo_estimator": scoped})
    assert result == pytest.approx([2, 2**0.5, -2 / 3, -1, -1, -(2**0.5), 0])


def test_leave_one_out_of_a_decision_leaves_out_the_candidate() -> None:
    rows = [{"group": "d", "episode": "u_0", "agent": "a", "candidate": number} for number in range(3)]
    rewards = torch.tensor([1, 2, 6], dtype=torch.float64)
    assert team_advantages(rewards, rows, resolve_spec("rloo")).tolist() == [-3, -1.5, 4.5]


@pytest.mark.parametrize("episodes", [2, 3])
def test_leave_one_out_is_the_exact_gradient_where_long_episodes_fail(episodes: int) -> None:
    """A first reply ends the episode with .6, or goes on: to a reward of 1, or through eight more turns to 0.

    The mean of all rows, in which failures weigh nine times as much, would push towards what is worth less.
    """
    go_on, win, safe = 0.5, 0.5, 0.6
    ends = [(1 - go_on, safe, [-go_on]), (go_on * win, 1.0, [1 - go_on, 0]), (go_on * win, 0.0, [1 - go_on] + [0] * 9)]
    update = {"rloo": 0.0, "dr_grpo": 0.0}
    for drawn in itertools.product(ends, repeat=episodes):
        rows = [
            {"group": "q", "episode": number, "agent": "a", "candidate": 0}
            for number, one in enumerate(drawn)
            for _ in one[2]
        ]
        rewards = torch.tensor([one[1] for one in drawn for _ in one[2]], dtype=torch.float64)
        score = torch.tensor([value for one in drawn for value in one[2]], dtype=torch.float64)
        chance = math.prod(one[0] for one in drawn) / episodes
        for name in update:
            update[name] += chance * float(team_advantages(rewards, rows, resolve_spec(name)) @ score)
    assert update["rloo"] == pytest.approx(go_on * (1 - go_on) * (win - safe))
    assert update["dr_grpo"] > update["rloo"] + 0.01


def test_no_centre_is_scaled_by_the_agents_own_spread() -> None:
    # s of a, 0 and 4, with ddof 0 is 2; b's 3 and 3 have none.
    spec = resolve_spec(choice("group", "agent", center="none", ddof=0, eps=0))
    assert advantages(spec, [0, 4, 3, 3], "aabb") == [0, 2, 3, 3]


# --- from episodes to advantages


def episode(reward: float, agents: str) -> EpisodeRecord:
    candidate = Candidate(Generation([7], [-0.1], "R"), Score(), 0.0)
    decisions = [Decision({"a": "tool", "b": "planner"}[agent], 0, "shared", [1], (candidate,), 0) for agent in agents]
    return EpisodeRecord(decisions, Outcome(reward > 0, reward))


@pytest.mark.parametrize("cell", CELLS)
def test_rows_of_episodes_carry_their_agent(cell: tuple[str, str]) -> None:
    # Task q of the table above as three episodes; in the first only a acts.
    episodes = [episode(1, "aa"), episode(0, "bab"), episode(1, "ab")]
    rows = [row for number, record in enumerate(episodes) for row in training_rows("q", number, record, "parallel")]
    rewards = [row.reward for row in rows]
    assert rewards == [1, 1, 0, 0, 0, 1, 1]
    uids = [f"{row.group}#{row.tags['episode']}@{row.tags['agent']}" for row in rows]
    expected = advantages(resolve_spec(choice(*cell)), rewards, "aa" + "bab" + "ab")
    assert by_uid(choice(*cell), rewards, uids) == pytest.approx(expected, abs=1e-12)
    assert expected[3] == pytest.approx(
        [-4 / 7, -3 / 4][cell[0] == "agent"] / ([0.5345225, 0.5][cell[1] == "agent"] + 1e-6), abs=1e-6
    )
    # verl's padding: a separate uid without an agent, and an empty mask.
    padded = by_uid(choice(*cell), [*rewards, 5, 5], [*uids, "pad7f", "pad7f"], [1] * 7 + [0, 0])
    assert padded == [*by_uid(choice(*cell), rewards, uids), 0, 0]
    # A masked copy of a real row is padding as well.
    assert by_uid(choice(*cell), [*rewards, 1], [*uids, uids[0]], [1] * 7 + [0])[:7] == padded[:7]


def test_naming_the_agent_changes_nothing_for_the_other_estimators() -> None:
    plain, named = ["q#0", "q#0", "q#1", "p#0"], ["q#0@tool", "q#0@planner", "q#1@tool", "p#0@tool"]
    for preset in sorted(preset for preset, spec in PRESETS.items() if spec.needs <= {"trajectory"}):
        assert by_uid(preset, [1, 1, 0, 2], plain) == by_uid(preset, [1, 1, 0, 2], named)


# --- properties


@st.composite
def teams(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = draw(st.integers(1, 20))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=size, max_size=size))

    rewards = column(st.one_of(st.sampled_from([0.0, 0.1, 1.0]), st.integers(-4000, 4000).map(lambda n: n / 1000)))
    ids = st.sampled_from([-(10**15), -1, 0, 1, 10**15])
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(column(ids)), torch.tensor(column(ids))


cells = st.sampled_from(CELLS)


@given(teams(), cells)
def test_cells_equal_a_loop_over_rows(team: Any, cell: tuple[str, str]) -> None:
    rewards, groups, agents = team
    rows = list(zip(rewards.tolist(), groups.tolist(), agents.tolist(), strict=True))
    expected = []
    for reward, group, agent in rows:
        scopes = {
            "group": [other[0] for other in rows if other[1] == group],
            "agent": [other[0] for other in rows if other[1:] == (group, agent)],
        }
        center, scale = (scopes[scope] for scope in cell)
        spread = statistics.stdev(scale) if len(set(scale)) > 1 else 0
        value = reward - statistics.fmean(center)
        expected.append(0 if len(center) == 1 else value / (spread + 1e-6) if spread else value)
    result = group_advantages(rewards, groups, resolve_spec(choice(*cell)), agents=_needed(agents, cell))
    assert result.tolist() == pytest.approx(expected, abs=1e-7)


def _needed(agents: torch.Tensor, cell: tuple[str, str]) -> torch.Tensor | None:
    return agents if "agent" in cell else None
