"""What a recipe says of a mixture: policies, sampling and candidates of parts; its order is not shuffled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)

from verl_atgrpo.environments.in_a_row import TicTacToe
from verl_atgrpo.environments.walk import Walk
from verl_atgrpo.play import registry
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.trainer.dataset import TeamTaskDataset, wire

MIXTURE = (
    "~at_grpo.environment",
    "+at_grpo.environment={name: mixture, parts: {walk: {weight: 2, val_tasks: 3}, search: {name: number_search}}}",
)


def settings_of(compose: Any, *overrides: str) -> AtGrpoConfig:
    job = check_run(compose("plan_path_cpu", *MIXTURE, *overrides))
    assert job is not None
    return job.settings


def test_a_parts_name_stands_for_its_agents(compose: Any) -> None:
    settings = settings_of(
        compose,
        "~at_grpo.agents",
        "+at_grpo.agents={walk: one, walk.pacer: two, all: three}",
        "at_grpo.val_agents={search: one}",
        "at_grpo.policies={one: {}, two: {}, three: {}}",
        "+at_grpo.sampling={all: {stop: [a], temperature: 0.5}, walk: {temperature: 0.7}, walk.pacer: {stop: [b]}}",
        "at_grpo.candidates={all: 2, search: 3, search.judge: 5}",
        "at_grpo.estimator={preset: at_grpo, agents: {walk: {scale: none}}}",
    )
    env = settings.make_environment()
    training = {"walk.navigator": "one", "walk.pacer": "two", "search.guesser": "three", "search.judge": "three"}
    assert settings.policies_of(env) == training
    validation = {**training, "search.guesser": "one", "search.judge": "one"}
    assert settings.validation_policies_of(env) == validation
    answers = {agent: settings.sampling_of(agent, False) for agent in env.agents}
    # As in training: `SamplingSettings` has no temperature of training, so it is read from the dump.
    assert {agent: (one.stop, one.temperature) for agent, one in answers.items()} == {
        "walk.navigator": (["a"], 0.7),
        "walk.pacer": (["b"], 0.7),
        "search.guesser": (["a"], 0.5),
        "search.judge": (["a"], 0.5),
    }
    options = settings.team_options()
    assert (options.candidates, options.agent_candidates) == (2, {"search": 3, "search.judge": 5})
    assert settings.spec.agents["walk"].scale == "none"


def test_tasks_are_played_in_the_mixtures_order_and_validated_by_part(compose: Any) -> None:
    config = compose("plan_path_cpu", *MIXTURE)
    job = check_run(config)
    assert job is not None
    wire(config, job.settings, job.env)
    assert config.data.shuffle is False
    validated = TeamTaskDataset("val", None, config.data)
    assert [validated[index]["data_source"] for index in range(len(validated))] == ["walk"] * 3 + ["search"] * 100
    plain = compose("plan_path_cpu")
    job = check_run(plain)
    assert job is not None
    wire(plain, job.settings, job.env)
    assert plain.data.shuffle is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+at_grpo.agents.walks=shared",
            r"^at_grpo\.agents\.walks is not an agent of 'mixture': it has walk\.navigator,",
        ),
        ("+at_grpo.agents.walk=nobody", r"^at_grpo\.agents\.walk\.navigator='nobody' is not a policy of this job"),
        ("+at_grpo.sampling={navigator: {stop: [a]}}", r"^at_grpo\.sampling\.navigator is not an agent of 'mixture'"),
        ("at_grpo.candidates={walk: 3}", r"^at_grpo\.candidates has no number for 'search\.guesser'"),
        (
            "at_grpo.estimator={preset: at_grpo, agents: {pacer: {scale: none}}}",
            r"^at_grpo\.estimator\.agents\.pacer is not an agent of 'mixture'",
        ),
        ("at_grpo.val_tasks=102", r"^at_grpo\.val_tasks=102: less than the 103 of the parts, of which the last would"),
    ],
)
def test_what_names_no_part_is_refused(compose: Any, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(compose, override)


def test_a_curriculum_may_validate_fewer_tasks_than_there_are(compose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every environment may; only a mixture would lose whole parts."""
    monkeypatch.setattr(Walk, "num_tasks", lambda self, split: 9 if split == "val" else None)
    of_walk = "+at_grpo.environment={name: curriculum, of: {name: walk}, levels: [{size: 4}, {size: 6}]}"
    job = check_run(compose("plan_path_cpu", "~at_grpo.environment", of_walk, "at_grpo.val_tasks=2"))
    assert job is not None
    assert job.settings.split_size(job.env, "val") == 2


PARTS = "at_grpo.parts={search: {scheme: parallel, estimator: rae, candidates: 5}}"


def test_a_part_has_its_own_scheme_and_the_sections_other_settings(compose: Any) -> None:
    settings = settings_of(
        compose, PARTS, "at_grpo.selection=first", "at_grpo.local_weight=0.5", "at_grpo.candidates={all: 2}"
    )
    search, walk = settings.of_part("search"), settings.of_part("walk")
    assert walk is settings and (walk.training_episodes, walk.selection, walk.local_weight) == (1, "first", 0.5)
    # What only a tree has is not inherited, and by the outcome there are no scores to weigh.
    assert (search.training_episodes, search.selection, search.local_weight) == (5, "greedy", 1.0)
    assert search.seed == settings.seed and search.spec.name == "rae"
    assert settings.spec.name == "at_grpo" and settings.spec.parts["search"].name == "rae"
    assert settings.spec.needs == {"agent", "baseline"}
    calls = "{preset: m_grpo, main_agent: search.guesser, sub_calls: 2}"
    assert settings_of(compose, PARTS.replace("rae", calls)).spec.parts["search"].main_agent == "search.guesser"
    own = "at_grpo.parts={search: {scheme: parallel, estimator: dr_mas, episode_reward: own}}"
    search = settings_of(compose, own, "at_grpo.local_weight=0.5", "at_grpo.candidates={all: 2, search: 3}").of_part(
        "search"
    )
    assert (search.training_episodes, search.local_weight) == (3, 0.5)


def test_a_tree_among_branches_has_no_branch_points(compose: Any) -> None:
    branches = ("at_grpo.scheme=branch", "+at_grpo.branch={at: {search.judge: 1}}", "at_grpo.candidates=2")
    settings = settings_of(compose, *branches, "at_grpo.parts={walk: {scheme: tree}}")
    assert settings.of_part("walk").branch is None and settings.of_part("search").branch is not None


def test_every_part_that_branches_has_a_branch_point(compose: Any) -> None:
    branches = ("at_grpo.scheme=branch", "+at_grpo.branch={at: {search.judge: 1}}", "at_grpo.candidates=2")
    with pytest.raises(ConfigError, match=r"^at_grpo\.branch\.at names no agent of walk, whose episodes would fail"):
        settings_of(compose, *branches)
    settings_of(compose, MIXTURE[1].replace("weight: 2", "weight: 0"), *branches)


def test_data_that_are_not_played_are_named(
    compose: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = "{name: tic_tac_toe, style: compact, val_games: 20, val_tasks: 30}"
    both = f"+at_grpo.environment={{name: mixture, parts: {{walk: {{val_tasks: 3}}, game: {game}}}}}"
    of_game = "at_grpo.parts={game: {scheme: parallel, estimator: rae}}"
    check_run(compose("plan_path_cpu", MIXTURE[0], both, of_game))
    assert "no task of" not in caplog.text
    check_run(compose("plan_path_cpu", MIXTURE[0], both.replace("val_tasks: 30", "val_tasks: 20"), of_game))
    assert "environment.parts.game.val_tasks=20: no task of 'search' is played, which begin at 20" in caplog.text
    for size, cut in ((4096, False), (5000, True)):
        monkeypatch.setattr(registry.load("plan_path"), "num_tasks", lambda self, split, size=size: size)
        check_run(compose("plan_path_cpu"))
        assert ("train_tasks=4096: only the first of the 5000 training tasks of 'plan_path'" in caplog.text) == cut


LEVELS = "+at_grpo.environment={name: curriculum, of: {name: plan_path}, levels: [{size: 4}, {size: 6}]}"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((MIXTURE[0], LEVELS), "environment"),
        (("at_grpo.task_order=half_solved",), "task_order"),
        ((), None),
        ((MIXTURE[0], LEVELS, "at_grpo.selection=first"), None),
        ((MIXTURE[0], LEVELS, "at_grpo.scheme=parallel", "at_grpo.estimator=mas_grpo"), None),
    ],
)
def test_success_that_is_the_best_candidates_is_named(
    compose: Any, caplog: pytest.LogCaptureFixture, overrides: tuple[str, ...], key: str | None
) -> None:
    check_run(compose("plan_path_cpu", *overrides))
    check_best_of_k(caplog, key)


class ScoredGame(TicTacToe):
    """Moves have scores, so decisions may be compared."""

    schemes: ClassVar[Mapping[str, tuple[str, ...]]] = {"x": ("tree", "parallel"), "o": ("tree", "parallel")}


@pytest.mark.parametrize("selection", ["greedy", "first"])
def test_ratings_of_best_candidates_are_named(compose: Any, caplog: pytest.LogCaptureFixture, selection: str) -> None:
    name = f"at_grpo.environment.name='{__name__}:ScoredGame'"
    check_run(
        compose(
            "tic_tac_toe_cpu", name, "at_grpo.scheme=tree", "at_grpo.branch=null", f"at_grpo.selection={selection}"
        )
    )
    check_best_of_k(caplog, "opponents" if selection == "greedy" else None)


def check_best_of_k(caplog: pytest.LogCaptureFixture, key: str | None) -> None:
    warned = [message for message in caplog.messages if "go on from the best candidate" in message]
    assert len(warned) == (key is not None) and all(message.startswith(f"at_grpo.{key}: ") for message in warned)


BRANCHES = "at_grpo.parts={walk: {scheme: branch, branch: {at: {walk.pacer: 0}}}}"


@pytest.mark.parametrize(
    ("candidates", "parts", "message"),
    [
        ("all: 2, search: 3", PARTS, r"search has no effect: at_grpo\.parts\.search\.candidates is set"),
        ("all: 2, search.judge: 3", PARTS, r"search\.judge has no effect: at_grpo\.parts\.search\.candidates is set"),
        (
            "all: 2, search.judge: 3",
            PARTS.replace(", candidates: 5", ""),
            r"search\.judge has no effect: whole episodes are compared; set at_grpo\.candidates\.search$",
        ),
        ("all: 2, walk.navigator: 3", BRANCHES, r"walk\.navigator has no effect: episodes do not branch at its"),
        ("all: 2, walk: 3, walk.pacer: 4", BRANCHES, r"walk has no effect: each of its agents has a number"),
        (
            "all: 2, walk: 3, walk.navigator: 2, walk.pacer: 4",
            "at_grpo.selection=first",
            r"walk has no effect: each of its agents has a number of its own; remove it$",
        ),
    ],
)
def test_candidates_that_no_decision_has_are_refused(compose: Any, candidates: str, parts: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^at_grpo\.candidates\.{message}"):
        settings_of(compose, f"at_grpo.candidates={{{candidates}}}", parts)


@pytest.mark.parametrize(
    ("candidates", "parts"),
    [
        ("all: 2, search: 3", PARTS.replace(", candidates: 5", "")),
        ("all: 2, walk: 3", BRANCHES),
        ("walk: 3, search: 2, walk.navigator: 4", "at_grpo.selection=first"),
    ],
)
def test_candidates_that_some_decision_has_are_accepted(compose: Any, candidates: str, parts: str) -> None:
    settings_of(compose, f"at_grpo.candidates={{{candidates}}}", parts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{play: {scheme: tree}}", r"^at_grpo\.parts\.play is not a part of 'mixture': it has walk, search$"),
        ("{walk: {}}", r"^at_grpo\.parts\.walk has no effect: it changes nothing; remove it$"),
        ("{walk: {schemes: tree}}", r"^at_grpo\.parts\.walk\.schemes is not a known key: use one of scheme, branch,"),
        ("{walk: {candidates: 1}}", r"^at_grpo\.parts\.walk\.candidates=1: "),
        ("{walk: {scheme: parallel, selection: first}}", r"^at_grpo\.parts\.walk\.selection='first' has no effect"),
        ("{walk: {scheme: branch}}", r"^at_grpo\.parts\.walk\.scheme='branch' needs to know where to branch"),
        (
            "{walk: {scheme: branch, branch: {at: {search.judge: 0}}}}",
            r"^at_grpo\.parts\.walk\.branch\.at: search\.judge is not an agent of it: it has walk\.navigator,",
        ),
        (
            "{walk: {scheme: branch, branch: {at: first, min_tokens: 100000}}}",
            r"^at_grpo\.parts\.walk\.branch\.min_tokens=100000: no prompt has as many tokens",
        ),
        ("{walk: {estimator: mas_grpo}}", r"^at_grpo\.parts\.walk\.estimator='mas_grpo' compares whole trajectories"),
        (
            "{walk: {estimator: {preset: at_grpo, by_task: rows}}}",
            r"^at_grpo\.parts\.walk\.estimator\.by_task='rows' has no effect; set estimator\.by_task$",
        ),
        (
            "{walk: {estimator: {preset: at_grpo, agents: {search.judge: {scale: none}}}}}",
            r"^at_grpo\.parts\.walk\.estimator\.agents: search\.judge is not an agent of it",
        ),
        (
            "{walk: {estimator: {preset: at_grpo, agents: {walk.pacer: {center_scope: agent}}}}}",
            r"^at_grpo\.parts\.walk\.estimator\.agents\.walk\.pacer \('at_grpo'\): the scope agent has no effect",
        ),
        (
            "{walk: {scheme: parallel, estimator: unknown}}",
            r"^at_grpo\.parts\.walk\.estimator: unknown preset 'unknown'",
        ),
    ],
)
def test_what_a_part_cannot_have_is_refused(compose: Any, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(compose, f"at_grpo.parts={given}")


def test_an_agents_estimator_beside_its_parts_is_refused(compose: Any) -> None:
    agents = "at_grpo.estimator={preset: at_grpo, agents: {search.judge: {scale: none}}}"
    with pytest.raises(ConfigError, match=r"^at_grpo\.estimator\.agents\.search\.judge has no effect beside parts"):
        settings_of(compose, PARTS, agents)


def test_only_a_mixture_has_parts(compose: Any) -> None:
    with pytest.raises(ConfigError, match=r"^at_grpo\.parts\.walk is not a part of 'plan_path': only a mixture has"):
        check_run(compose("plan_path_cpu", "at_grpo.parts={walk: {scheme: tree}}"))
