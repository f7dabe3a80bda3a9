"""What a recipe says of a mixture: policies, sampling and candidates of parts; its order is not shuffled."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)

from verl_atgrpo.environments.walk.environment import Walk
from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import AtGrpoConfig, ConfigError
from verl_atgrpo.train.trainer.dataset import TeamTaskDataset, wire

MIXTURE = (
    "~at_grpo.environment",
    "+at_grpo.environment={name: mixture, parts: {walk: {weight: 2, val_tasks: 3}, search: {name: number_search}}}",
)


def settings_of(compose: Any, *overrides: str) -> AtGrpoConfig:
    settings = check_run(compose("plan_path_cpu", *MIXTURE, *overrides))
    assert isinstance(settings, AtGrpoConfig)
    return settings


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
    answers = {agent: settings.answers_of(agent, False) for agent in env.agents}
    # As in training: `ValidationAnswers` has no temperature of training, so it is read from the dump.
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
    settings = check_run(config)
    assert settings is not None
    wire(config, settings, settings.make_environment())
    assert config.data.shuffle is False
    validated = TeamTaskDataset("val", None, config.data)
    assert [validated[index]["data_source"] for index in range(len(validated))] == ["walk"] * 3 + ["search"] * 100
    plain = compose("plan_path_cpu")
    settings = check_run(plain)
    assert settings is not None
    wire(plain, settings, settings.make_environment())
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
    settings = check_run(compose("plan_path_cpu", "~at_grpo.environment", of_walk, "at_grpo.val_tasks=2"))
    assert settings is not None
    assert settings.split_size(settings.make_environment(), "val") == 2
