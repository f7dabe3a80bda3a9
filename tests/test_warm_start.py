"""The starting model of plan_path_cpu: what it is taught, and that it starts honest and low."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch

from verl_atgrpo.environment import Split
from verl_atgrpo.environments.grid import PlanPathTask, State, walk
from verl_atgrpo.environments.plan_path import PlanPath
from verl_atgrpo.models import warm_start
from verl_atgrpo.models.warm_start import END, WarmStart, demonstrate, demonstration, make

# P.G
# .#.
CORNER = PlanPathTask(3, frozenset({(1, 1), (2, 0), (2, 1), (2, 2)}), (0, 0), (0, 2))


def test_a_demonstration_without_mistakes_takes_a_shortest_path() -> None:
    moves, choices = demonstrate(CORNER, (1, 0), 0.0, 8, random.Random(0))
    assert moves == "URR"
    assert choices == [
        {"U": 1.0, "D": 0.0, "L": 0.0, "R": 0.0},
        {"U": 0.0, "D": 0.0, "L": 0.0, "R": 1.0},
        {"U": 0.0, "D": 0.0, "L": 0.0, "R": 1.0},
        {END: 1.0},
    ]


def test_equally_good_moves_are_equally_likely() -> None:
    open_field = PlanPathTask(3, frozenset(), (0, 0), (1, 1))
    _, choices = demonstrate(open_field, (0, 0), 0.0, 8, random.Random(0))
    assert choices[0] == {"U": 0.0, "D": 0.5, "L": 0.0, "R": 0.5}


def test_the_chance_of_a_mistake_by_hand() -> None:
    _, choices = demonstrate(CORNER, (1, 0), 0.6, 8, random.Random(0))
    assert choices[0] == pytest.approx({"U": 0.15 + 0.4, "D": 0.15, "L": 0.15, "R": 0.15})
    for choice in choices:
        assert sum(choice.values()) == pytest.approx(1.0)


def test_after_a_mistake_the_demonstrator_goes_on_from_where_it_stands() -> None:
    field = PlanPathTask(4, frozenset(), (0, 0), (3, 3))
    for seed in range(50):
        moves, choices = demonstrate(field, (0, 0), 0.7, 20, random.Random(seed))
        position = (0, 0)
        for move, choice in zip(moves, choices, strict=False):
            best = max(choice.values())
            assert {name for name, chance in choice.items() if chance == best} == {
                name for name, open_ in (("D", position[0] < 3), ("R", position[1] < 3)) if open_
            }
            position = walk(State(field, position, 99), move).end.position


def test_a_good_draft_is_followed() -> None:
    field = PlanPathTask(3, frozenset(), (0, 0), (2, 2))
    for seed in range(20):
        assert demonstrate(field, (0, 0), 0.0, 8, random.Random(seed), draft="DRDR")[0] == "DRDR"


def test_answers_keep_within_the_limit() -> None:
    field = PlanPathTask(5, frozenset(), (0, 0), (4, 4))
    moves, choices = demonstrate(field, (0, 0), 0.0, 3, random.Random(0))
    assert len(moves) == 3
    assert choices[-1] == {END: 1.0}


def test_no_validation_grid_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[Split] = set()
    original = PlanPath.task

    def task(env: PlanPath, split: Split, index: int) -> PlanPathTask:
        seen.add(split)
        return original(env, split, index)

    monkeypatch.setattr(PlanPath, "task", task)
    for seed in range(20):
        demonstration(WarmStart().environment(), random.Random(seed), 0.0)
    assert seen == {"train"}


BRIEF = WarmStart(clean_steps=3, noisy_steps=2, batch_size=4, hidden=16, layers=1)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_equal_settings_give_equal_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, settings in (("a", BRIEF), ("b", BRIEF), ("c", dataclasses.replace(BRIEF, seed=1))):
        make(tmp_path / name, settings)
    first, again, other = (weights_of(tmp_path / name) for name in "abc")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_model_that_is_there_is_kept_and_other_settings_make_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = make(tmp_path, BRIEF)
    monkeypatch.setattr(warm_start, "train", lambda *_: pytest.fail("made again"))
    assert make(tmp_path, BRIEF) == known
    with pytest.raises(pytest.fail.Exception, match="made again"):
        make(tmp_path, dataclasses.replace(BRIEF, noise=0.5))


def test_the_environment_taught_is_the_recipes(compose) -> None:  # type: ignore[no-untyped-def]
    section = dict(compose("plan_path_cpu").at_grpo.environment)
    assert section.pop("name") == "plan_path"
    taught = WarmStart().environment()
    expected = PlanPath(**section)
    assert vars(taught) == vars(expected)


@pytest.mark.slow
def test_the_starting_model_knows_the_form_but_mostly_goes_astray(tmp_path: Path) -> None:
    known = make(tmp_path, WarmStart())
    assert 0.25 <= known["success"] <= 0.45
