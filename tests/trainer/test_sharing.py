"""Policies that are adapters on one base: they take turns at the workers, and one of them has the servers."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import PPOTrainer
from waiting import HANG

from verl_atgrpo.train.config.schema import EXPANDED, CriticSettings
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.rows.step_rows import StepRows
from verl_atgrpo.train.serving.health import PolicyFailed
from verl_atgrpo.train.trainer.critic_unit import CriticUnit
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, SharingUnit, Update
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer
from verl_atgrpo.train.trainer.value_critic import ValueCritic


class Workers:
    """A fake of the base's workers."""

    def __init__(self) -> None:
        self.adapter: str | None = None
        self.calls: list[tuple[Any, ...]] = []

    def with_adapter(self, what: str, name: str, *given: Path) -> None:
        if what == "use":
            self.adapter = name
        else:
            self.calls.append((what, name, *given))

    def empty_cache(self) -> None:
        self.calls.append(("empty",))

    def weights_sent(self) -> list[int]:
        return [3_000_000, 1_000_000]


@pytest.fixture
def team() -> tuple[PolicyUnit, SharingUnit, SharingUnit]:
    """A policy with workers, one beside it, and one that is not trained."""
    host = PolicyUnit.__new__(PolicyUnit)
    host._turns, host.replicas = threading.RLock(), SimpleNamespace(metrics=dict)  # type: ignore[assignment]
    host.actor_rollout_wg = Workers()
    units = [host, SharingUnit.__new__(SharingUnit), SharingUnit.__new__(SharingUnit)]
    for unit, name in zip(units, ("host", "guest", "judge"), strict=True):
        unit.name, unit.folder, unit.trainable = name, f"policies/{name}", name != "judge"
        if isinstance(unit, SharingUnit):
            unit._host = host
    return tuple(units)  # type: ignore[return-value]


def test_one_policys_adapter_is_in_use_until_its_turn_ends(team: tuple[PolicyUnit, SharingUnit, SharingUnit]) -> None:
    host, guest, _ = team
    workers: Any = host.actor_rollout_wg
    holding, release, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        with host._turn():
            holding.set()
            assert release.wait(HANG)
            seen.append(workers.adapter)

    def second() -> None:
        assert holding.wait(HANG)
        release.set()
        with guest._turn():
            seen.append(workers.adapter)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert seen == ["host", "guest"]
    alone = PolicyUnit.__new__(PolicyUnit)
    with alone._turn():  # a policy with workers of its own asks them for no adapter
        assert workers.adapter == "guest"


def test_adapters_are_saved_and_loaded_in_their_own_folders(
    team: tuple[PolicyUnit, SharingUnit, SharingUnit], tmp_path: Path
) -> None:
    workers: Any = team[0].actor_rollout_wg
    folders = [tmp_path / "policies" / name for name in ("host", "guest")]
    for unit in team:
        unit.save(str(tmp_path), 7)
        unit.load(str(tmp_path))
    named = zip(("host", "guest"), folders, strict=True)
    assert workers.calls == [(what, *given) for given in named for what in ("save_adapter", "load_adapter")]


def test_servers_and_caches_are_those_of_the_base(team: tuple[PolicyUnit, SharingUnit, SharingUnit]) -> None:
    host, guest, judge = team
    assert guest.actor_rollout_wg is guest.ref_policy_wg is host.actor_rollout_wg
    assert guest.replicas is host.replicas
    assert host.metrics() == {"team/weights_megabytes": 4.0} and guest.metrics() == {}
    guest.empty_cache()
    assert host.actor_rollout_wg.calls == [("empty",)]
    trainer: Any = SimpleNamespace(units=[judge, host, guest])  # a policy that is not trained may come first
    assert AtGrpoTrainer.hosts.fget(trainer) == [host]  # type: ignore[attr-defined]


def test_workers_that_died_during_the_rollout_are_told_with_the_policy(
    team: tuple[PolicyUnit, SharingUnit, SharingUnit],
) -> None:
    host, *_ = team

    def dead() -> list[int]:
        raise ray.exceptions.RayActorError

    host.actor_rollout_wg.weights_sent = dead
    with pytest.raises(PolicyFailed, match="policy 'host': asking its workers failed"):
        host.metrics()


def test_a_critics_schedule_has_as_many_updates_as_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainer, "_init_dataloader", lambda self: None)
    trainer: Any = AtGrpoTrainer.__new__(AtGrpoTrainer)
    trainer.settings = SimpleNamespace(critic=CriticSettings(kind="likelihood", policy="critic", epochs=3))
    optim = {"optim": {"total_training_steps": 20}}
    own = {"ppo_mini_batch_size": 8, "optim": {"total_training_steps": -1}}
    policies = {name: {"actor": own} for name in ("player", "critic")}
    data = {"train_batch_size": 16}
    trainer.config = OmegaConf.create({"data": data, "actor_rollout_ref": {"actor": optim}, EXPANDED: policies})
    trainer._init_dataloader()
    found = {name: one.actor.optim.total_training_steps for name, one in trainer.config[EXPANDED].items()}
    assert found == {"player": 20, "critic": 120}, "three passes of two optimizer steps each"


@pytest.mark.parametrize("kind", [CriticUnit, ValueCritic])
@pytest.mark.parametrize(("step", "reward"), [(1, 1.0), (2, 1.0), (3, 5.0)])
def test_a_critic_learns_in_its_warm_up_and_does_not_score(
    kind: type, step: int, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score is recorded all the same; from step 3 on it is half of the reward."""
    asked: list[int] = []

    def train(self: object, batch: Batch, global_steps: int) -> Update:
        asked.append(global_steps)
        batch.tag(score=[9.0])
        return Update(Batch(), {"accuracy": 0.5}, {})

    monkeypatch.setattr(kind, "train", train)
    critic = kind.__new__(kind)
    critic.steps = step
    trainer: Any = AtGrpoTrainer.__new__(AtGrpoTrainer)
    settings = CriticSettings(warmup=2, weight=0.5)
    trainer.settings = SimpleNamespace(critic=settings, bases=lambda: {"player": ["player", "critic"]})
    trainer._critic, trainer.global_steps, trainer._sampled = critic, step, {}
    critic.name = "critic"
    monkeypatch.setattr(AtGrpoTrainer, "concurrent", True)  # nothing is freed in between
    rows = StepRows(["u_0_0"], [{"reward": 1.0}])
    rows.of_critic = Batch(["u_0_1"], [{"critic": "u_0_0"}])
    metrics = trainer._ask_critic(rows, {}) or trainer._sampled
    assert metrics == ({"critic": {"accuracy": 0.5}} if kind is CriticUnit else {"critic/accuracy": 0.5})
    assert rows.tags == [{"reward": reward, "critic_score": 9.0, "without_critic": 1.0}] and asked == [step]
