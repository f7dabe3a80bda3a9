"""The study's settings are jobs that start, and its table is arithmetic done right."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_atgrpo import ScriptedTeam, make, play
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.environments.sudoku import Sudoku
from verl_atgrpo.play.types import EpisodeRecord
from verl_atgrpo.recipes import compose
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.config.section import read_section

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "study"))

import curves
import planner_alone
import results
import study
from sparse import LAST_MOVES, PATH_BOARD, SOKOBAN_BOARD
from variants import CRITIC, GAMES, LEVELS, MIXTURE, OPPONENTS, VARIANTS


def job(
    compose: Any, tmp_path: Path, game: str, name: str, *more: str, trained: Sequence[Path] = ()
) -> tuple[Any, AtGrpoConfig]:
    """The configuration of a variant, with which a job can start, and its section."""
    overrides = study.overrides_of(GAMES[game], GAMES[game].variant(name), 1, tmp_path, tmp_path / "start", trained)
    config = compose(GAMES[game].recipe, *overrides, *more)
    check_run(config)
    return config, read_section(config)


@pytest.mark.slow  # half a second each
@pytest.mark.parametrize(("game", "name"), [*(("plan_path", name) for name in VARIANTS), ("sudoku", "single_at_grpo")])
def test_every_variant_is_a_job_that_can_start(compose: Any, tmp_path: Path, game: str, name: str) -> None:
    variant = VARIANTS[name]
    trained = [tmp_path / need.replace(":", "-") for need in variant.needs]
    few = "at_grpo.train_tasks=256", "at_grpo.val_tasks=8"
    config, settings = job(compose, tmp_path, game, name, *few, trained=trained)
    # Equal work a step: the same number of updates, and the same rows for one decision of every task.
    assert config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
    rows = config.data.train_batch_size * settings.candidates
    assert rows == (64 if name.endswith("_8") else 128 if settings.scheme == "parallel" else 256)
    assert settings.seed == config.data.seed == 1
    policies = (settings.policies or {}).values()
    models = {config.actor_rollout_ref.model.path, *(p.model["path"] for p in policies if p.base is None)}
    assert models == {str(tmp_path / "start"), *map(str, trained)}
    assert bool(config.trainer.get("val_only")) == bool(variant.needs)
    assert config.actor_rollout_ref.actor.optim.lr == pytest.approx(GAMES[game].learning_rate * variant.rate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "name"), [*(("plan_path", name) for name in CRITIC), ("sudoku", "c3"), ("walk", "critic")]
)
def test_critics_are_jobs_that_can_start_and_score_by_the_outcome(
    compose: Any, tmp_path: Path, game: str, name: str
) -> None:
    _, settings = job(compose, tmp_path, game, name, "at_grpo.train_tasks=256", "at_grpo.val_tasks=8")
    assert settings.scheme == ("branch" if name.startswith("c3") else "parallel")
    assert (settings.critic is not None) == name.startswith("critic")
    assert settings.episode_reward == "outcome"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "board"),
    [
        ("far_goals", ("plan_path_single", {**PATH_BOARD, "min_distance": 10})),
        ("sokoban", ("sokoban_single", {**SOKOBAN_BOARD, "min_solution": 8})),
    ],
)
@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_jobs_that_can_start_and_are_validated_alike(
    compose: Any, tmp_path: Path, game: str, board: tuple[str, dict[str, Any]], name: str
) -> None:
    _, settings = job(compose, tmp_path, game, name, "at_grpo.train_tasks=256")
    environment = settings.make_environment()
    tasks = [environment.task("val", index) for index in range(200)]
    last = [getattr(task, "task", task) for task in tasks]
    assert environment.num_tasks("val") in (None, 200)
    assert last == [make(board[0], **board[1]).task("val", index) for index in range(200)]


def test_demonstrated_moves_solve_the_board_and_others_are_as_likely_as_noise_says() -> None:
    env, lengths = LAST_MOVES.make_environment(), set()
    for seed in range(20):
        state = env.initial(env.task("train", random.Random(seed).randrange(1 << 40)))  # type: ignore[attr-defined]
        shown = LAST_MOVES.demonstrate(env, random.Random(seed), 0)
        assert env.apply(state, shown.answer).solved  # type: ignore[attr-defined]
        assert shown.prompt == env.answer_prompt(state)  # type: ignore[attr-defined]
        lengths.add(len(shown.answer))
        noisy = LAST_MOVES.demonstrate(env, random.Random(seed), 0.4)
        assert sorted({round(chance, 2) for chance in noisy.choices[0].values()})[0] == 0.1
    assert lengths == {1, 2, 3, 4}


@pytest.mark.parametrize("name", MIXTURE)
def test_a_mixture_is_a_job_that_has_the_games_in_equal_shares(compose: Any, tmp_path: Path, name: str) -> None:
    _, settings = job(compose, tmp_path, "mixture", name, "at_grpo.train_tasks=96")
    shown = settings.make_environment().data_sets("val")
    assert shown == {"walk": 100, "walk_walls": 100, "number_search": 100}
    assert settings.val_tasks == 300


@pytest.mark.parametrize("game", ["tic_tac_toe", "connect_four"])
@pytest.mark.parametrize("name", OPPONENTS)
def test_self_play_is_a_job_with_and_without_past_selves(compose: Any, tmp_path: Path, game: str, name: str) -> None:
    _, settings = job(compose, tmp_path, game, name, "at_grpo.train_tasks=96")
    opponents = settings.opponents
    assert opponents is not None and opponents.past == (name == "past_selves")


WORDS = [
    pytest.param(name, variant, marks=[pytest.mark.slow] if name != "walk" else [])
    for name in ("walk", "walk_walls", "number_search")
    for variant in GAMES[name].variants
]


@pytest.mark.parametrize(("name", "variant"), WORDS)
def test_every_variant_of_a_game_in_words_is_a_job_that_can_start(
    compose: Any, tmp_path: Path, name: str, variant: str
) -> None:
    game = GAMES[name]
    config, settings = job(compose, tmp_path, name, variant, "at_grpo.train_tasks=128", "at_grpo.val_tasks=8")
    assert len(settings.bases()) == (2 if variant == "at_grpo_roles" else 1)
    policies = settings.policies or {"shared": None}
    two = variant == "at_grpo_roles" or "adapters" in variant
    assert len(policies) == (2 if two else 1)
    ranks = [
        policy.lora.rank if policy and policy.lora else config.actor_rollout_ref.model.lora_rank
        for policy in policies.values()
    ]
    assert set(ranks) == ({16} if "adapter" in variant or variant == "critic" else {0})
    score = variant.removesuffix("_adapter").rpartition("_")[2]
    assert settings.episode_reward == {"scores": "scores", "own": "own"}.get(score, "outcome")
    assert config.actor_rollout_ref.actor.optim.lr == pytest.approx(game.learning_rate * game.variant(variant).rate)


def test_a_variant_of_another_game_is_refused() -> None:
    with pytest.raises(ValueError, match="--variants planner_alone: walk_smollm2 has at_grpo, single_at_grpo"):
        GAMES["walk"].variant("planner_alone")
    with pytest.raises(ValueError, match="--variants steps_1@1e-06: walk_smollm2 has"):
        GAMES["walk"].variant("steps_1@1e-06")


@pytest.mark.parametrize("steps", [1, 16])
def test_the_number_of_updates_and_the_learning_rate_are_what_the_names_say(
    compose: Any, tmp_path: Path, steps: int
) -> None:
    game = GAMES["plan_path"]
    name = game.at_rate(f"steps_{steps}", 7e-4 / 8)
    overrides = study.overrides_of(game, game.variant(name), 1, tmp_path, tmp_path, [])
    config = compose("plan_path_cpu", *overrides)
    assert config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size == steps
    assert config.actor_rollout_ref.actor.optim.lr == pytest.approx(7e-4 / 8)


def test_a_variant_at_its_own_rate_has_no_rate_in_its_name() -> None:
    game = GAMES["plan_path"]
    assert game.at_rate("dr_mas", 7e-4) == "dr_mas"
    assert game.at_rate("dr_mas", 1e-3) == "dr_mas@0.001"
    # Ten times the game's, as the variant says; the rate asked for is that of the optimizer.
    assert game.at_rate("at_grpo_adapters", 7e-3) == "at_grpo_adapters"
    assert game.variant(game.at_rate("at_grpo_adapters", 1e-3)).rate == pytest.approx(1e-3 / 7e-4)


def test_what_is_put_together_is_trained_before_and_kept() -> None:
    order = list(VARIANTS)
    for name, variant in VARIANTS.items():
        for need in variant.needs:
            before = need.partition(":")[0]
            assert order.index(before) < order.index(name)
            assert VARIANTS[before].keep


@pytest.mark.parametrize(("name", "options"), [("PlanPath", {"tool": "moves"}), ("Sudoku", {"tool": "grid"})])
def test_the_planner_alone_is_asked_every_turn_and_gets_the_teams_prompts(name: str, options: dict[str, str]) -> None:
    env = {"PlanPath": PlanPath, "Sudoku": Sudoku}[name](size=4, **options)
    alone = getattr(planner_alone, f"{name}Planner")(size=4, **options)
    asked: dict[str, list[str]] = {}

    def played(environment: Any) -> EpisodeRecord:
        def silent(prompt: str, call: int) -> str:
            asked.setdefault(type(environment).__name__, []).append(prompt)
            return "?"

        team = ScriptedTeam(dict.fromkeys(environment.agents, silent), candidates=1)
        return asyncio.run(play(environment, environment.task("val", 3), team))

    record = played(alone)
    assert [decision.agent for decision in record.decisions] == ["planner"] * alone.max_turns
    assert not record.outcome.success
    played(env)
    # "?" is no draft, so the team's planner sees what the planner alone sees.
    assert asked[f"{name}Planner"] == asked[name][1::2]


def test_success_and_price_are_read_between_validations() -> None:
    curve = curves.Curve(((0, 0.4), (10_000, 0.6), (20_000, 0.95), (30_000, 0.93)))
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
    # mean .5, s = .1: .5 -+ 4.303 x .1 / sqrt(3)
    assert results.interval([0.4, 0.5, 0.6]) == pytest.approx((0.25157, 0.74843), abs=1e-4)
    assert results.interval([0.1, 0.5, 0.9]) == (0, 1)
    assert results.interval([-0.9, -0.5, -0.1], low=-1.0) == pytest.approx((-1, 0.49369), abs=1e-4)
    assert results.interval([1.0]) is None


@pytest.mark.parametrize("seeds", [2, 3, 10])
@pytest.mark.parametrize(
    ("low", "value"), [(0.0, 0.0), (0.0, 0.5), (0.0, 1.0), (-1.0, -1.0), (-1.0, 0.0), (-1.0, 0.3)]
)
def test_seeds_that_agree_have_the_interval_of_their_tasks(seeds: int, low: float, value: float) -> None:
    tasks = 200 * seeds
    found = results.interval([value] * seeds, low)
    assert found is not None and low <= found[0] <= value <= found[1] <= 1
    # As many single samples: none solved gives about 3 / n, half of them 2 x 1.96 x .5 / sqrt(n).
    assert 1 / tasks < found[1] - found[0] < 2.1 / math.sqrt(tasks)


@pytest.mark.slow
def test_a_trainings_validation_has_as_many_tasks_as_intervals_assume() -> None:
    for game in GAMES.values():
        assert compose(game.recipe).at_grpo.val_tasks == results.VALIDATION_TASKS


def leave(file: Path, name: str, seed: int, *points: tuple[float, float]) -> None:
    curves.append(file, name, seed, curves.Curve(points))


def test_the_table_compares_within_seeds(tmp_path: Path) -> None:
    game, file = GAMES["plan_path"], tmp_path / "plan_path.jsonl"
    budget = game.budget
    leave(file, "at_grpo", 0, (0, 0.5), (budget, 1.0))
    leave(file, "k2", 0, (0, 0.5), (budget, 0.75))
    leave(file, "steps_4", 0, (0, 0.5), (budget, 0.75))
    lines = results.table(curves.kept(file), game)
    assert len(lines) == 4
    assert "| 50.0% | 100.0% | 100.0% |  | 48,000 |" in lines[2]
    assert "| 50.0% | 75.0% | 75.0% | -25.0 | not reached |" in lines[3]
    # Of the seeds that both have: -25 and -35, so s = 7.07 and half of the interval is 12.706 x 7.07 / sqrt(2).
    leave(file, "at_grpo", 1, (0, 0.1), (budget, 0.6))
    leave(file, "k2", 1, (0, 0.1), (budget, 0.25))
    leave(file, "k2", 2, (0, 0.1), (budget, 0.9))
    assert "| -30.0 (-93.5 to +33.5) |" in results.table(curves.kept(file), game)[3]


def test_the_learning_rate_is_chosen_by_a_seed_of_its_own(tmp_path: Path) -> None:
    game, file = GAMES["sudoku"], tmp_path / "sudoku.jsonl"
    budget = game.budget
    # Mean success over the budget: .7 and .9 in its halves, and .75 and .5 of one that collapses at the end.
    leave(file, "steps_4@0.000125", 3, (0, 0.5), (budget / 2, 0.9), (budget, 0.9))
    leave(file, "steps_4", 3, (0, 0.5), (budget / 2, 1.0), (budget, 0.0))
    leave(file, "steps_4@0.000125", 0, (0, 0.5), (budget, 0.75))
    leave(file, "steps_4", 0, (0, 0.5), (budget, 1.0))
    leave(file, "steps_8", 0, (0, 0.5), (budget, 1.0))
    assert study.chosen(curves.kept(file), game, "steps_4") == "steps_4@0.000125"
    with pytest.raises(ValueError, match="--chosen: steps_8 did not run with seed 3"):
        study.chosen(curves.kept(file), game, "steps_8")
    lines = results.sweeps(curves.kept(file), game)
    assert len(lines) == 3
    assert lines[2] == (
        "| AT-GRPO, 4 optimizer steps | 0.000125: 80.0%, 0.00025: 62.5% | 0.000125 | 75.0% | 75.0% | not reached |"
    )


def test_variants_are_compared_each_at_its_best_rate(tmp_path: Path) -> None:
    game, file = GAMES["walk"], tmp_path / "walk.jsonl"
    budget = game.budget
    leave(file, "at_grpo", 0, (0, 0.0), (budget, 0.4))
    leave(file, "at_grpo@0.0001", 0, (0, 0.0), (budget, 0.8))
    leave(file, "at_grpo@0.0001", 1, (0, 0.0), (budget, 0.6))
    leave(file, "dr_mas", 1, (0, 0.0), (budget, 0.5))  # nothing was tried with seed 0, so nothing is chosen
    compared = results.at_best(curves.kept(file), game)
    assert results.table(compared, game)[2].count("70.0%") == 1
    assert [curve.at(budget) for curve in compared["at_grpo"].values()] == [0.8, 0.6]
    assert [curve.at(budget) for curve in compared["dr_mas"].values()] == [0.5]
    assert not results.sweeps({"dr_mas": compared["dr_mas"]}, game)


def test_what_has_a_curve_is_trained_again_only_for_its_models(tmp_path: Path) -> None:
    file, names = tmp_path / "plan_path.jsonl", list(VARIANTS)
    assert study.missing(names, curves.kept(file), 0) == names
    for name in names:
        if name not in ("k2", "alone_in_team"):
            leave(file, name, 0, (0, 0.5))
    needed = ["tool_user_alone", "planner_alone", "alone_in_team"]
    assert study.missing(names, curves.kept(file), 0) == ["k2", *needed]
    # Also those that were not asked for.
    assert study.missing(["alone_in_team"], curves.kept(file), 0) == needed
    leave(file, "alone_in_team", 0, (0, 0.5))
    assert study.missing(names, curves.kept(file), 0) == ["k2"]
    assert study.missing(names, curves.kept(file), 1) == names


def test_the_short_table_has_a_column_for_every_game(tmp_path: Path) -> None:
    budgets = {name: GAMES[name].budget for name in ("plan_path", "sudoku")}
    for game, budget in budgets.items():
        leave(tmp_path / game, "at_grpo", 0, (0, 0.25), (budget, 0.75))
    leave(tmp_path / "sudoku", "single_grpo", 0, (0, 0.5), (budgets["sudoku"], 0.625))
    lines = results.in_short({game: curves.kept(tmp_path / game) for game in budgets})
    assert lines[2:4] == ["| team, not trained | 25.0% | 25.0% |", "| single agent, not trained |  | 50.0% |"]
    assert "| AT-GRPO, one policy, K = 8 | 75.0% | 75.0% |" in lines
    assert "| single agent, GRPO |  | 62.5% |" in lines


def test_curves_are_kept_and_replaced_by_newer_ones(tmp_path: Path) -> None:
    file = tmp_path / "curves" / "plan_path.jsonl"
    assert curves.kept(file) == {}
    leave(file, "k2", 1, (0, 0.5), (10, 0.75))
    leave(file, "k2", 0, (0, 0.5))
    leave(file, "at_grpo", 1, (0, 0.25))
    leave(file, "k2", 1, (0, 0.5), (10, 0.875))
    found = curves.kept(file)
    assert list(found) == ["at_grpo", "k2"]
    assert list(found["k2"]) == [0, 1]
    assert found["k2"][1].points == ((0, 0.5), (10, 0.875))
