"""The study's settings are jobs that start, and its table is arithmetic done right."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_atgrpo.config import AtGrpoConfig
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.sudoku import Sudoku
from verl_atgrpo.run_check import check_run
from verl_atgrpo.team import EpisodeRecord, ScriptedTeam, play

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "study"))

import results
import solo
import study
from variants import GAMES, VARIANTS


@pytest.mark.parametrize(("game", "name"), [*(("plan_path", name) for name in VARIANTS), ("sudoku", "at_grpo")])
def test_every_variant_is_a_job_that_can_start(compose: Any, tmp_path: Path, game: str, name: str) -> None:
    variant = VARIANTS[name]
    trained = [tmp_path / need.replace(":", "-") for need in variant.needs]
    overrides = study.overrides_of(GAMES[game], variant, 1, tmp_path, tmp_path / "start", trained)
    config = compose(GAMES[game].recipe, *overrides, "at_grpo.train_tasks=256", "at_grpo.val_tasks=8")
    check_run(config)
    settings = AtGrpoConfig.from_config(config)
    # Equal work a step: the same number of updates, and the same rows for one decision of every task.
    assert config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
    rows = config.data.train_batch_size * settings.candidates
    assert rows == (128 if settings.scheme == "parallel" else 256)
    assert settings.seed == config.data.seed == 1
    models = {config.actor_rollout_ref.model.path, *(p["model"]["path"] for p in (settings.policies or {}).values())}
    assert models == {str(tmp_path / "start"), *map(str, trained)}
    assert bool(config.trainer.get("val_only")) == bool(variant.needs)


def test_what_is_put_together_is_trained_before_and_kept() -> None:
    order = list(VARIANTS)
    for name, variant in VARIANTS.items():
        for need in variant.needs:
            before = need.partition(":")[0]
            assert order.index(before) < order.index(name)
            assert VARIANTS[before].keep
        # A start is borrowed only from the same agents with the same model: nothing else may differ.
        alone = "at_grpo.environment.name={single}" in variant.overrides
        assert variant.start in (None, "single_grpo" if alone else "at_grpo")


@pytest.mark.parametrize("env", [PlanPath(size=4, tool="moves"), Sudoku(size=4, clues=8, tool="grid")])
@pytest.mark.parametrize("role", ["Planner", "ToolUser"])
def test_a_role_alone_is_asked_every_turn_and_gets_the_teams_prompts(env: Any, role: str) -> None:
    name = {"PlanPath": "size=4, tool='moves'", "Sudoku": "size=4, clues=8, tool='grid'"}[type(env).__name__]
    options = dict(size=4, tool="moves") if "moves" in name else dict(size=4, clues=8, tool="grid")
    alone = getattr(solo, f"{type(env).__name__}{role}")(**options)
    agent = alone.agents[0]
    asked: list[str] = []

    def silent(prompt: str, call: int) -> str:
        asked.append(prompt)
        return "?"

    def played(environment: Any, agents: tuple[str, ...]) -> EpisodeRecord:
        team = ScriptedTeam(dict.fromkeys(agents, silent), candidates=1)
        return asyncio.run(play(environment, environment.task("val", 3), team))

    record = played(alone, (agent,))
    assert [decision.agent for decision in record.decisions] == [agent] * alone.max_turns
    assert not record.outcome.success
    of_alone, asked[:] = list(asked), []
    played(env, env.agents)
    # "?" is no draft, so the team's planner sees what the planner alone sees.
    assert set(of_alone) <= set(asked)


def test_success_and_price_are_read_between_validations() -> None:
    curve = results.Curve(((0, 0.4), (10_000, 0.6), (20_000, 0.95), (30_000, 0.93)))
    assert curve.at(5_000) == pytest.approx(0.5)
    assert curve.at(25_000) == pytest.approx(0.94)
    assert curve.at(99_000) == 0.93  # it ended before
    # .9 lies .3 above .6, of the .35 gained over 10,000 tokens.
    assert curve.reaches(0.9, within=20_000) == pytest.approx(10_000 + 10_000 * 0.30 / 0.35)
    assert curve.reaches(0.9, within=18_500) is None
    assert curve.reaches(0.4, within=20_000) == 0.0
    assert curve.reaches(0.96, within=30_000) is None
    assert results.price([None, None]) == "not reached"
    assert results.price([10_000.0, None, 30_000.0]) == "20,000 (2 of 3 seeds)"


def test_intervals_are_students() -> None:
    # mean 2, s = 1: 2 -+ 4.303 / sqrt(3)
    assert results.interval([1.0, 2.0, 3.0]) == pytest.approx((-0.4843, 4.4843), abs=1e-3)
    assert results.interval([1.0]) is None


def leave(folder: Path, name: str, seed: int, curve: dict[int, tuple[float, float]], done: bool = True) -> None:
    """What a training leaves: step -> tokens and success."""
    folder = folder / f"{name}_{seed}"
    folder.mkdir(parents=True)
    lines = [
        {"step": step, "data": {"rollout/tokens": tokens, "val-core/x/acc/mean@1": success}}
        for step, (tokens, success) in curve.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        (folder / "done").write_text('{"seconds": 60.0}')


def test_the_table_borrows_starts_and_leaves_out_what_is_not_done(tmp_path: Path) -> None:
    game = GAMES["plan_path"]
    budget = game.budget
    leave(tmp_path, "at_grpo", 0, {0: (0, 0.5), 3: (budget, 1.0)})
    leave(tmp_path, "k2", 0, {3: (budget, 0.75)})
    leave(tmp_path, "k4", 0, {3: (budget, 0.75)}, done=False)
    lines = results.table(results.done(tmp_path), game)
    assert len(lines) == 4
    assert "| 50.0% | 100.0% | 100.0% |  | 48,000 |" in lines[2]
    assert "| 50.0% | 75.0% | 75.0% | -25.0 | not reached |" in lines[3]
    # Of the seeds that both have: -25 and -35, so s = 7.07 and half of the interval is 12.706 x 7.07 / sqrt(2).
    leave(tmp_path, "at_grpo", 1, {0: (0, 0.1), 3: (budget, 0.6)})
    leave(tmp_path, "k2", 1, {3: (budget, 0.25)})
    leave(tmp_path, "k2", 2, {3: (budget, 0.9)})
    leave(tmp_path, "at_grpo", 2, {0: (0, 0.1), 3: (budget, 0.6)}, done=False)
    assert "| -30.0 (-93.5 to +33.5) |" in results.table(results.done(tmp_path), game)[3]


def test_the_short_table_has_a_column_for_every_game(tmp_path: Path) -> None:
    budgets = {name: game.budget for name, game in GAMES.items()}
    for game, budget in budgets.items():
        leave(tmp_path / game, "at_grpo", 0, {0: (0, 0.25), 3: (budget, 0.75)})
    leave(tmp_path / "sudoku", "single_grpo", 0, {0: (0, 0.5), 3: (budgets["sudoku"], 0.625)})
    lines = results.in_short({game: results.done(tmp_path / game) for game in GAMES})
    assert lines[2:4] == ["| team, not trained | 25.0% | 25.0% |", "| single agent, not trained |  | 50.0% |"]
    assert "| AT-GRPO, one policy, K = 8 | 75.0% | 75.0% |" in lines
    assert "| single agent, GRPO |  | 62.5% |" in lines


def test_curves_are_kept_and_replaced_by_newer_ones(tmp_path: Path) -> None:
    file = tmp_path / "curves" / "plan_path.jsonl"
    first = {"k2": {0: results.Curve(((0, 0.5), (10, 0.75)))}, "at_grpo": {1: results.Curve(((0, 0.25),))}}
    assert results.keep(file, first) == first
    newer = {"k2": {0: results.Curve(((0, 0.5), (10, 0.875)))}, "k4": {2: results.Curve(((0, 0.5),))}}
    assert results.keep(file, newer) == {**first, **newer}
    assert results.keep(file, {}) == results.kept(file) == {**first, **newer}
    assert [json.loads(line)["variant"] for line in file.read_text().splitlines()] == ["at_grpo", "k2", "k4"]
    none = tmp_path / "none.jsonl"
    assert results.keep(none, {}) == {}
    assert not none.exists()
