"""`verl-atgrpo eval --versus`: another source answers for the opponents, and only for them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import small_model as model_at

from verl_atgrpo import EnvironmentConfigError, make
from verl_atgrpo.environments.in_a_row import Game, TicTacToe
from verl_atgrpo.lab.evaluation.episodes import Lineup, play_one
from verl_atgrpo.lab.evaluation.figures import figures, games
from verl_atgrpo.lab.evaluation.results import AgentUsage, EpisodeKey, EpisodeRow, Failure
from verl_atgrpo.play.scripted import ScriptedPolicy

SELF = "at_grpo.environment.against=[self]"


def plan(*overrides: str, **options: Any) -> Any:
    pytest.importorskip("verl")
    from verl_atgrpo.lab.evaluation import plan as plans

    return plans.make(plans.Options("tic_tac_toe_cpu", overrides, **options))


def test_every_agent_has_another_player_where_it_is_an_opponent(tmp_path: Path) -> None:
    own, other = (str(model_at(tmp_path / name)) for name in ("own", "other"))
    made = plan(SELF, f"actor_rollout_ref.model.path={own}", versus=other, tasks=4)
    assert made.agents == {"x": "player", "o": "player"}
    name = f"versus player={other}"
    assert made.versus == made.header["versus"] == {"x": name, "o": name}
    assert {key: str(player.source) for key, player in made.players.items()} == {"player": own, name: other}
    # A file of few tasks can be extended.
    assert plan(SELF, f"actor_rollout_ref.model.path={own}", versus=other, tasks=2).versus == made.versus
    alone = plan(SELF, f"actor_rollout_ref.model.path={own}", tasks=4)
    assert alone.versus == {}
    assert "versus" not in alone.header


def test_agents_that_are_nobodys_opponent_keep_their_player(tmp_path: Path) -> None:
    """A mixture's walker has another model, which the other source does not replace."""
    own, walker, other = (str(model_at(tmp_path / name)) for name in ("own", "walker", "other"))
    parts = "walk: {val_tasks: 2}, duel: {name: tic_tac_toe, style: compact, against: [self], val_tasks: 1}"
    made = plan(
        "~at_grpo.environment",
        f"+at_grpo.environment={{name: mixture, parts: {{{parts}}}}}",
        "+at_grpo.agents.walk=walker",
        "+at_grpo.opponents.policy=player",
        f"+at_grpo.policies.walker={{model: {{path: {walker}}}}}",
        f"actor_rollout_ref.model.path={own}",
        versus=other,
        tasks=3,
    )
    assert made.versus == {"duel.o": f"versus player={other}"}
    assert sorted(made.players) == ["player", f"versus player={other}", "walker"]


def test_no_part_is_left_out_unasked(tmp_path: Path) -> None:
    own = str(model_at(tmp_path / "own"))
    mixture = "+at_grpo.environment={name: mixture, parts: {walk: {val_tasks: 150}, number_search: {val_tasks: 150}}}"
    changes = ("~at_grpo.environment", mixture, "~at_grpo.opponents", f"actor_rollout_ref.model.path={own}")
    with pytest.raises(ValueError, match=r"^at_grpo\.val_tasks=200: less than the 300 of the parts"):
        plan(*changes)
    assert plan(*changes, tasks=160).tasks == 160


def test_it_is_refused_where_nobody_is_an_opponent(tmp_path: Path) -> None:
    own = str(model_at(tmp_path / "own"))
    with pytest.raises(ValueError, match=r"^--versus has no effect: none of the 4 validation tasks of 'tic_tac_toe'"):
        plan(f"actor_rollout_ref.model.path={own}", versus=own, tasks=4)


@pytest.mark.parametrize(("task", "side"), [(0, "x"), (1, "o")])
def test_only_opponents_are_answered_for(task: int, side: str) -> None:
    env = make("tic_tac_toe", style="compact", against=["self"], val_games=2)
    first = ScriptedPolicy(lambda prompt, k: next(cell for cell in prompt if cell.isdigit()))
    last = ScriptedPolicy(lambda prompt, k: [cell for cell in prompt if cell.isdigit()][-1])
    both = ("x", "o")
    lineup = Lineup(
        dict.fromkeys(both, "own"), dict.fromkeys(both, first), dict.fromkeys(both, "other"), dict.fromkeys(both, last)
    )
    row = asyncio.run(play_one(env, lineup, EpisodeKey(task, 0, 0)))
    assert {agent: usage.policy for agent, usage in row.agents.items()} == {
        agent: "own" if agent == side else "other" for agent in both
    }
    # 1, 2, 3 against 9, 8, 7: x is there first.
    assert row.team_reward == (1.0 if side == "x" else -1.0)
    assert sum(first.calls.values()) == (3 if side == "x" else 2)
    alone = Lineup(dict.fromkeys(both, "own"), dict.fromkeys(both, first))
    assert {usage.policy for usage in asyncio.run(play_one(env, alone, EpisodeKey(0, 0, 0))).agents.values()} == {
        "own"
    }


def row(reward: float, failed: Failure | None = None, against: str = "other", task: int = 0) -> EpisodeRow:
    sides = {"x": AgentUsage("own", 1, 1, 1, 0), "o": AgentUsage(against, 1, 1, 500, 1)}
    return EpisodeRow(task, "", 0, 0, reward >= 0, reward, {}, 1, 1, sides, failed, 0.0)


def test_games_are_counted_by_their_reward() -> None:
    ends = [1.0] * 6 + [0.0] * 2 + [-1.0] * 2
    rows = [*(row(end, task=task) for task, end in enumerate(ends)), row(0.0, Failure("engine", "gone"))]
    # Against a program.
    rows += [row(1.0, against="own")] * 50
    text = games(rows, "runs/other", ["other"])
    assert text.startswith("against runs/other: 60.0% won, 20.0% drawn, 20.0% lost of 10 games; +1")
    assert "Elo points, 95% interval -" in text
    assert games(rows[10:], "runs/other", ["other"]) == "against runs/other: no game, all failed"


def test_games_of_one_task_may_be_alike() -> None:
    """Four tasks, each with 32 times the same game, say no more than four games."""
    once = [row(end, task=task) for task, end in enumerate((1.0, 1.0, 1.0, -1.0))]
    few, many = (games(rows, "b", ["other"]).partition(" games; ")[2] for rows in (once, once * 32))
    assert few == many and "95% interval -" in few


def test_figures_are_of_the_team_without_its_opponents() -> None:
    of_team = figures([one.without({"other"}) for one in (row(1.0), row(1.0, task=1))])
    assert (of_team.tokens_per_solved.value, of_team.truncated) == (1, 0)
    assert figures([row(1.0)]).truncated == 0.5


def test_a_match_that_was_won_throughout_bounds_nothing_above() -> None:
    text = games([row(1.0, task=task) for task in range(20)], "b", ["other"])
    low, high = re.search(r"; \+inf Elo points, 95% interval \+(\d+) to \+(inf)$", text).groups()  # type: ignore[union-attr]
    assert 100 < int(low) < 400 and high == "inf"


class Broken(TicTacToe):
    """Has no opponents to name."""

    def opponents(self, task: Game) -> tuple[str, ...]:
        """Raises an error."""
        raise KeyError("gone")


def test_an_environment_that_fails_is_named(tmp_path: Path) -> None:
    own = str(model_at(tmp_path / "own"))
    broken = f"at_grpo.environment.name='{__name__}:Broken'"
    with pytest.raises(EnvironmentConfigError, match=r"^at_grpo\.environment\.name='.*Broken': .* KeyError: 'gone'"):
        plan(SELF, broken, f"actor_rollout_ref.model.path={own}", versus=own, tasks=4)
