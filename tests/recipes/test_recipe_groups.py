"""The recipes' Hydra groups, chosen on the command line."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("verl")

import composing
from fakes.exact_teams import Strata, Tables, branched
from fakes.jobs import check_policies
from verl.trainer import main_ppo

from verl_atgrpo.cpu.platform import SERVER_THREADS, PlatformCPU
from verl_atgrpo.recipes import compose
from verl_atgrpo.train.config.job import Job
from verl_atgrpo.train.config.policies import config_of_policy, expand_policies
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.config.view import View
from verl_atgrpo.train.rollout.episode_rows import training_rows
from verl_atgrpo.train.rows.row_advantages import policy_advantages


@pytest.mark.parametrize(
    ("recipe", "groups", "overrides"),
    [
        ("plan_path_qwen3_1p7b", "override model: qwen3_8b", ["model=qwen3_8b"]),
        (
            "plan_path_qwen3_1p7b",
            "roles: tool_user_planner, placement: colocated",
            ["+roles=tool_user_planner", "+placement=colocated"],
        ),
        ("plan_path_cpu", "mode: async", ["+mode=async"]),
    ],
)
def test_a_group_on_the_command_line_is_the_same_as_in_a_recipe(
    recipe: str, groups: str, overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [{recipe}, _self_, {groups}]\n")
    assert compose(recipe, overrides) == compose("mine", folder=tmp_path)


PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        ([], "fp32"),
        (["precision=fp16"], "fp16"),
        (["precision=bf16"], "bf16"),
        (["hardware=1_gpu"], "bf16"),
        (["hardware=8_gpus"], "bf16"),
        (["hardware=1_gpu", "precision=fp16"], "fp16"),
        (["precision=fp32", "hardware=1_gpu"], "fp32"),
    ],
)
def test_one_choice_is_the_precision_of_actor_reference_and_servers(overrides: list[str], precision: str) -> None:
    found = compose("walk_smollm2", ["+roles=navigator_pacer", *overrides]).actor_rollout_ref
    assert found.rollout.dtype == PRECISIONS[precision]
    for worker in (found.actor, found.ref):
        assert worker.fsdp_config.mixed_precision == {
            "param_dtype": precision,
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        }


GAMES = {"walk": ("navigator", "pacer"), "walk_walls": ("navigator", "checker"), "number_search": ("guesser", "judge")}


@pytest.mark.parametrize("game", GAMES)
def test_adapters_of_the_games_in_words(game: str) -> None:
    """Each agent's own on one base, or one for all: of equal size and rate."""
    shared = compose(f"{game}_smollm2", ["model=smollm2_adapter"])
    model, optim = shared.actor_rollout_ref.model, shared.actor_rollout_ref.actor.optim
    own = compose(f"{game}_smollm2_adapters")
    adapter = {
        "base": "smollm2",
        "lora": {"rank": model.lora_rank, "alpha": model.lora_alpha},
        "optim": {"lr": optim.lr},
    }
    assert own.at_grpo.policies == dict.fromkeys(GAMES[game], adapter)
    assert own.actor_rollout_ref.model.lora_rank == 0
    assert shared.at_grpo.policies is None
    for job in (own, shared):
        assert job.data.train_batch_size == job.actor_rollout_ref.actor.ppo_mini_batch_size


def test_a_policy_computes_in_what_its_blocks_say() -> None:
    own = "{actor: {fsdp_config: {mixed_precision: {param_dtype: bf16}}}, rollout: {dtype: bfloat16}}"
    config = compose("walk_smollm2", ["+roles=navigator_pacer", f"++at_grpo.policies.pacer={own}"])
    settings = read_section(config)
    check_policies(Job(View(config), settings))
    expand_policies(config, settings)
    found = {name: config_of_policy(config, name).actor_rollout_ref for name in ("navigator", "pacer")}
    assert {name: one.rollout.dtype for name, one in found.items()} == {"navigator": "float32", "pacer": "bfloat16"}
    precisions = {name: one.actor.fsdp_config.mixed_precision for name, one in found.items()}
    assert {name: one.param_dtype for name, one in precisions.items()} == {"navigator": "fp32", "pacer": "bf16"}
    assert precisions["pacer"].reduce_dtype == "fp32"


def test_a_recipe_of_ones_own_chooses_a_precision(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [walk_smollm2, _self_, override precision: fp16]\n")
    assert compose("mine", folder=tmp_path).actor_rollout_ref.rollout.dtype == "float16"
    assert compose("mine", ["precision=bf16"], tmp_path).actor_rollout_ref.rollout.dtype == "bfloat16"


@pytest.mark.parametrize("overrides", [[], ["+mode=async", "~at_grpo.agents", "+at_grpo.policies={a: {}}"]])
def test_what_tests_compose_once_is_what_hydra_composes(overrides: list[str]) -> None:
    kept = [compose("plan_path_cpu", overrides) for _ in range(2)]
    with composing.replaced(*composing.HYDRAS):
        assert kept == [compose("plan_path_cpu", overrides)] * 2


@pytest.mark.parametrize(
    ("recipe", "variables", "threads"),
    [
        ("plan_path_cpu", {}, "1"),
        ("plan_path_cpu", {SERVER_THREADS[0]: "3"}, "3"),
        ("walk_smollm2", {}, "7"),
        ("walk_smollm2", {SERVER_THREADS[0]: "3"}, "3"),
    ],
)
def test_a_tiny_models_servers_have_a_thread(
    recipe: str, variables: dict[str, str], threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**dict.fromkeys(SERVER_THREADS), "OMP_NUM_THREADS": "7", **variables}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    init = Mock(side_effect=InterruptedError)
    monkeypatch.setattr("ray.init", init)
    with pytest.raises(InterruptedError):
        main_ppo.run_ppo(compose(recipe), main_ppo.TaskRunnerV1)
    for name, value in init.call_args.kwargs["runtime_env"]["env_vars"].items():  # as Ray starts its workers
        monkeypatch.setenv(name, value)
    assert PlatformCPU().rollout_env_vars() == {"OMP_NUM_THREADS": threads}


def test_c3_compares_the_mean_outcomes_of_subtrees() -> None:
    """By hand, of 2 x 4 candidates: less the mean of the siblings, and not divided by anything."""
    settings = read_section(compose("plan_path_cpu", ["+credit=c3", "at_grpo.candidates={a:2,b:4}"]))
    assert settings.branch is not None and isinstance(settings.candidates, dict)
    tables = Tables("ab", 5, replies="01234")
    record = asyncio.run(branched(tables, Strata(tables), settings.branch, settings.candidates))
    rows = list(training_rows("u", 0, record, settings.scheme))
    found = policy_advantages([row.tags for row in rows], settings.spec).tolist()
    outcomes = defaultdict(list)
    for row in rows:
        if row.tags["agent"] == "b":
            (said,) = map(chr, row.prompt_ids)
            outcomes[said].append(tables.outcomes[said + row.generation.text[0]])
    assert sorted(map(len, outcomes.values())) == [4, 4]
    signal = {said: sum(ends) / 4 for said, ends in outcomes.items()}
    of_a = [row.generation.text[0] for row in rows if row.tags["agent"] == "a"]
    expected = [signal[said] - signal[other] for said, other in (of_a, of_a[::-1])]
    expected += [one - (sum(ends) - one) / 3 for ends in outcomes.values() for one in ends]
    assert found == pytest.approx(expected)
