"""The trainer draws who answers for the other side, freezes past selves when they are due, and resumes the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.fake_trainer import FakeRollout, FakeTrainer, FakeUnit

from verl_atgrpo.play.opponents import Opponent, OpponentPool


class Unit(FakeUnit):
    """A policy that notes when which slot took its past self."""

    def __init__(self) -> None:
        super().__init__("p_a", 2)
        self.frozen: list[tuple[int, int]] = []

    def freeze_self(self, slot: int) -> None:
        self.frozen.append((slot, len(self.updates)))


def trainer_of(
    rollout: FakeRollout, weights: Mapping[str, float] = MappingProxyType({"current": 1, "past": 3}), **options: Any
) -> tuple[FakeTrainer, Unit]:
    unit = Unit()

    class Trainer(FakeTrainer):
        _self_played = unit  # type: ignore[assignment]

    pool = OpponentPool("p_a", weights, size=2, every=2, choose="prioritized", seed=3)
    return Trainer(rollout, unit, opponents=pool, tasks=48, **options), unit


def test_a_past_self_is_frozen_before_the_first_step_and_after_every_second(rollout: FakeRollout) -> None:
    trainer, unit = trainer_of(rollout)
    steps = trainer.run(5)
    # Slot, and the updates before it: the third one takes the place of one that is beaten as often as the other.
    assert [updates for _, updates in unit.frozen] == [0, 2, 4]
    assert [slot for slot, _ in unit.frozen][:2] == [1, 2]
    assert [step["opponents/past_selves"] for step in steps] == [1, 1, 2, 2, 2]
    drawn = [Opponent.parse(text) for text in rollout.opponents.values()]
    assert len(drawn) == 20
    assert {one.step for one in drawn[:8] if one.slot} == {0}
    assert {one.step for one in drawn[8:16] if one.slot} <= {0, 2}
    # Every episode of the fake is won.
    assert steps[-1]["opponents/past/win"] == 1.0
    assert steps[-1]["opponents/elo"] > 0


def test_episodes_without_an_opponent_are_no_games(rollout: FakeRollout, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trainer_of(rollout)
    games: list[Any] = []
    monkeypatch.setattr(OpponentPool, "add", lambda self, found, step: games.extend(found))
    rollout.sides = False
    trainer.run(1)
    assert games == []
    rollout.sides = True
    trainer.run(1)
    assert len(games) == 4


def test_a_resumed_run_draws_what_the_interrupted_one_would_have(rollout: FakeRollout, tmp_path: Path) -> None:
    trainer, _ = trainer_of(rollout, folder=tmp_path)
    trainer.run(3)
    trainer.run_and_save()
    before = len(rollout.opponents)
    trainer.run(2)
    whole = list(rollout.opponents.values())[before:]
    rollout.crash()
    rollout.opponents.clear()
    resumed, unit = trainer_of(rollout, folder=tmp_path)
    assert unit.frozen == [], "the past selves are in the checkpoint"
    resumed.run(2)
    assert Counter(rollout.opponents.values()) == Counter(whole)


def test_a_checkpoint_without_a_pool_gets_its_first_past_self(rollout: FakeRollout, tmp_path: Path) -> None:
    plain = FakeTrainer(rollout, Unit(), tasks=48, folder=tmp_path)
    plain.run_and_save()
    plain, again = FakeTrainer(rollout, Unit(), tasks=48, folder=tmp_path), plain
    plain.play()
    plain.save()
    _, unit = trainer_of(rollout, folder=tmp_path)
    assert [slot for slot, _ in unit.frozen] == [1]
    assert again.global_steps < 3


def test_a_run_that_resumes_between_two_past_selves_without_a_pool_has_an_opponent(
    rollout: FakeRollout, tmp_path: Path
) -> None:
    # With opponents, but without past selves.
    plain = FakeTrainer(rollout, Unit(), tasks=48, folder=tmp_path, opponents=OpponentPool(None, {"current": 1}))
    plain.run_and_save()
    resumed, unit = trainer_of(rollout, folder=tmp_path, weights={"past": 1})
    assert [slot for slot, _ in unit.frozen] == [1]
    rollout.opponents.clear()
    resumed.play()
    assert set(rollout.opponents.values()) == {"p_a/1/1"}
