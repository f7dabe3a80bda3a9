"""Several policies on the same devices: no server wakes while a training worker keeps unused memory cached."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.fake_trainer import FakeRollout, FakeTrainer
from fakes.simulated_devices import Device, Unit, simulated
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

from verl_atgrpo import platform_choice, recipes
from verl_atgrpo.train.trainer import policy_unit
from verl_atgrpo.train.trainer.policies import TeamSync, for_all
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, StandaloneUnit
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer


class DeviceTrainer(FakeTrainer):
    """The trainer on simulated devices, with its own rule for when policies take turns."""

    @property
    def concurrent(self) -> bool:
        return AtGrpoTrainer.concurrent.fget(self)  # type: ignore[attr-defined,no-any-return]

    def begin(self) -> None:
        """Does what verl does before the first step."""
        self.checkpoint_manager = TeamSync(self.units, self.concurrent)
        self.on_init_end()

    def step(self, save: bool = False) -> None:
        batch, metrics = self.play()
        if save:
            self.save()
        self.finish(batch, metrics)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    monkeypatch.setattr(policy_unit.update_inputs, "write_old_log_probs", lambda *_: {})
    monkeypatch.setattr(policy_unit.update_inputs, "write_advantages", tag_rows)
    with simulated():
        yield


Make = Callable[..., DeviceTrainer]


def tag_rows(batch: Any, *_: Any) -> dict[str, float]:
    """Replaces `write_advantages`, for rows without fields."""
    for tags in batch.tags:
        tags.update(advantage=0.0, trained_tokens=1)
    return {}


@functools.cache
def composed() -> Any:
    return recipes.compose(
        "plan_path_cpu_roles", ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    )


@pytest.fixture
def make(rollout: FakeRollout) -> Make:
    """Returns a function that creates a trainer with two trained policies and a frozen one, started."""
    rollout.agents = ["a", "b", "c"]

    def made(
        *devices: Device, mode: str = "sync", split: bool = False, kind: type[Unit] = Unit, **changes: Any
    ) -> DeviceTrainer:
        units = []
        for number, name in enumerate(("p_a", "p_b", "p_c")):
            own = devices[number : number + 1] if split else devices
            units.append(kind(name, copy.deepcopy(composed()), number, name != "p_c", own))
            units[-1].place(None)
        # As the trainer's setup does.
        for_all(units, PolicyUnit.start, concurrent=split)
        trainer = DeviceTrainer(rollout, *units, mode=mode, **changes)
        trainer.settings = trainer.settings.model_copy(update={"placement": "split" if split else "colocated"})
        return trainer

    return made


TRAINED = [
    *("log-probs p_a", "update p_a", "empty p_a"),
    *("log-probs p_b", "update p_b"),
]
UPDATES = [*TRAINED, "empty p_b"]
ASLEEP = ["sleep p_a", "sleep p_b", "sleep p_c"]
AWAKE = ["wake p_a", "wake p_b", "wake p_c"]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize("number", [1, 2], ids=["one device", "a server over two"])
def test_policies_on_the_same_devices_empty_their_caches_for_each_other(make: Make, number: int, mode: str) -> None:
    devices = [Device() for _ in range(number)]
    trainer = make(*devices, mode=mode)
    trainer.begin()
    for device in devices:
        device.log.clear()
    for _ in range(2):
        trainer.step()
    for device in devices:
        assert device.log == [*ASLEEP, *UPDATES, *AWAKE] * 2
        assert device.refused == []


@pytest.mark.parametrize(("policies", "calls"), [(1, [1]), (2, [2, 1]), (3, [2, 1, 1])])
def test_caches_are_emptied_for_another_policy_and_once_before_the_servers_wake(
    make: Make, policies: int, calls: list[int]
) -> None:
    trainer = make(Device())
    trainer.rollout.agents = ["a", "b", "c"][:policies]
    del trainer.units[policies:]
    trainer.begin()
    for _ in range(2):
        for unit in trainer.units:
            unit.actor_rollout_wg.called.clear()
        trainer.step()
        assert [unit.actor_rollout_wg.called.count("empty_cache") for unit in trainer.units] == calls


def test_memory_cached_by_a_checkpoint_is_freed_before_a_server_wakes(make: Make, tmp_path: Path) -> None:
    device = Device()
    trainer = make(device, folder=tmp_path)
    trainer.begin()
    assert device.log[-3:] == AWAKE
    device.log.clear()
    trainer.step(save=True)
    assert device.log == [*ASLEEP, *TRAINED, "save p_a", "save p_b", "empty p_a", "empty p_b", *AWAKE]

    resumed = Device()
    trainer = make(resumed, folder=tmp_path)
    assert trainer.global_steps == 2
    trainer.begin()
    started = [f"{what} {policy}" for policy in ("p_a", "p_b", "p_c") for what in ("init", "start", "sleep")]
    assert resumed.log == [*started, "load p_a", "load p_b", "empty p_a", "empty p_b", *AWAKE]
    assert device.refused == resumed.refused == []


def test_a_dead_server_restarts_when_no_memory_is_cached(make: Make) -> None:
    device = Device()
    trainer = make(device)
    trainer.begin()
    trainer.units[1].die()
    device.log.clear()
    trainer.step()
    assert device.log == [
        *("sleep p_a", "sleep p_c"),
        *UPDATES,
        *("wake p_a", "start p_b", "sleep p_b", "wake p_b", "wake p_c"),
    ]
    # During the rollout, if it is the policy's last server.
    trainer.units[0].die()
    device.log.clear()
    trainer.watch.check_servers()
    assert device.log == ["start p_a", "sleep p_a", "wake p_a"]
    trainer.step()
    assert device.refused == []


def test_policies_with_devices_of_their_own_do_not_wait_for_each_other(make: Make) -> None:
    devices = [Device(), Device(), Device()]
    trainer = make(*devices, split=True)
    trainer.begin()
    trainer.units[1].die()
    for device in devices:
        device.log.clear()
    trainer.step()
    assert [device.log for device in devices] == [
        ["sleep p_a", "log-probs p_a", "update p_a", "empty p_a", "wake p_a"],
        ["log-probs p_b", "update p_b", "empty p_b", "start p_b", "sleep p_b", "wake p_b"],
        ["sleep p_c", "wake p_c"],
    ]
    assert [device.refused for device in devices] == [[]] * 3
    # verl's weight sync empties the caches of the others.
    assert ["empty_cache" in unit.actor_rollout_wg.called for unit in trainer.units] == [False, True, False]


class Separate(Unit, StandaloneUnit):
    """A policy with servers on other devices; its weights are sent through buffers that torch does not allocate."""

    def _start_servers(self) -> None:
        self.replicas = SimpleNamespace(  # type: ignore[assignment]
            push=lambda step: self._devices[0].allocate("transfer", self.name),
            poll=lambda: None,
            serving=[],
            metrics=dict,
        )


def test_training_workers_empty_their_caches_before_a_sync_to_separate_servers(make: Make) -> None:
    device = Device()
    trainer = make(device, mode="separate_async", kind=Separate)
    device.log.clear()
    trainer.begin()
    assert device.log == ["transfer p_a", "transfer p_b", "transfer p_c"]
    device.log.clear()
    trainer.step()
    assert device.log == [*UPDATES, "transfer p_a", "transfer p_b"]
    assert device.refused == []


def test_on_the_cpu_no_cache_is_emptied(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    trainer = make(Device())
    trainer.begin()
    trainer.step()
    called = {name for unit in trainer.units for name in unit.actor_rollout_wg.called}
    assert called == {"update_weights", "weight_target"}


@pytest.mark.parametrize("kind", [PolicyUnit, StandaloneUnit])
def test_every_training_worker_can_empty_its_cache(kind: type[PolicyUnit], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []

    class Group:
        def __init__(self, **_: Any) -> None: ...

        def spawn(self, prefix_set: Any) -> Any:
            return dict.fromkeys(prefix_set)

    def together(class_dict: Any) -> None:
        made.extend(worker.cls.__ray_metadata__.modified_class for worker in class_dict.values())

    monkeypatch.setattr(policy_unit, "RayWorkerGroup", Group)
    monkeypatch.setattr(policy_unit, "create_colocated_worker_cls", together)
    unit = kind.__new__(kind)
    unit.config = composed()
    unit.use_reference_policy, unit.ref_in_actor, unit.first_replica, unit._prefix_tree = True, False, 0, "auto"
    unit._dither = None
    unit.place(None)  # type: ignore[arg-type]
    assert made
    for worker in made:
        assert getattr(worker.empty_cache, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL  # type: ignore[attr-defined]
        assert getattr(worker.empty_cache, MAGIC_ATTR)["blocking"]  # type: ignore[attr-defined]
