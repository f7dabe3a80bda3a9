"""Several policies on the same devices: no server wakes while a trainer keeps memory that it does not use."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from fakes.fake_trainer import Rollout, Team
from fakes.simulated_devices import Device, Unit, simulated
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

from verl_atgrpo import platform_choice, recipes
from verl_atgrpo.trainer import policy_unit, standalone
from verl_atgrpo.trainer.policy_unit import PolicyUnit, TeamSync, for_all
from verl_atgrpo.trainer.standalone import StandaloneUnit
from verl_atgrpo.trainer.trainer import AtGrpoTrainer


class SharedTeam(Team):
    """The trainer over simulated devices; whether policies take turns is its own business."""

    @property
    def concurrent(self) -> bool:
        return AtGrpoTrainer.concurrent.fget(self)  # type: ignore[attr-defined,no-any-return]

    def begin(self) -> None:
        """What verl does before the first step."""
        self.checkpoint_manager = TeamSync(self.units, self.concurrent)
        self.on_init_end()

    def step(self, save: bool = False) -> None:
        batch, metrics = self.play()
        if save:
            self._save_checkpoint()
        self.finish(batch, metrics)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    for name in ("write_old_log_probs", "write_advantages"):
        monkeypatch.setattr(policy_unit, name, lambda *_: {})  # of rows that are not there
    with simulated():
        yield


Make = Callable[..., SharedTeam]


@functools.cache
def composed() -> Any:
    return recipes.compose(
        "plan_path_cpu_roles", ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    )


@pytest.fixture
def make(rollout: Rollout) -> Make:
    """Returns a function that makes a team of two trained policies and a frozen one, started."""
    rollout.agents = ["a", "b", "c"]

    def made(
        *devices: Device, mode: str = "sync", split: bool = False, kind: type[Unit] = Unit, **changes: Any
    ) -> SharedTeam:
        units = []
        for number, name in enumerate(("p_a", "p_b", "p_c")):
            own = devices[number : number + 1] if split else devices
            units.append(kind(name, copy.deepcopy(composed()), number, name != "p_c", own))
            units[-1].place(None)
        # As the trainer's set-up does.
        for_all(units, PolicyUnit.start, concurrent=split)
        team = SharedTeam(rollout, *units, mode=mode, **changes)
        team.settings = team.settings.model_copy(update={"placement": "split" if split else "colocated"})
        return team

    return made


UPDATES = [
    *("log-probs p_a", "update p_a", "empty p_a"),
    *("log-probs p_b", "update p_b", "empty p_b"),
]
ASLEEP = ["sleep p_a", "sleep p_b", "sleep p_c"]
AWAKE = ["wake p_a", "wake p_b", "wake p_c"]


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize("number", [1, 2], ids=["one device", "a server over two"])
def test_policies_on_the_same_devices_clear_them_for_each_other(make: Make, number: int, mode: str) -> None:
    devices = [Device() for _ in range(number)]
    team = make(*devices, mode=mode)
    team.begin()
    for device in devices:
        device.log.clear()
    for _ in range(2):
        team.step()
    for device in devices:
        assert device.log == [*ASLEEP, *UPDATES, *AWAKE] * 2
        assert device.refused == []


def test_what_a_checkpoint_leaves_behind_is_gone_before_a_server_wakes(make: Make, tmp_path: Path) -> None:
    device = Device()
    team = make(device, folder=tmp_path)
    team.begin()
    assert device.log[-3:] == AWAKE
    device.log.clear()
    team.step(save=True)
    assert device.log == [*ASLEEP, *UPDATES, "save p_a", "save p_b", "empty p_a", "empty p_b", *AWAKE]

    resumed = Device()
    team = make(resumed, folder=tmp_path)
    assert team.global_steps == 2
    team.begin()
    started = [f"{what} {policy}" for policy in ("p_a", "p_b", "p_c") for what in ("init", "start", "sleep")]
    assert resumed.log == [*started, "load p_a", "load p_b", "empty p_a", "empty p_b", *AWAKE]
    assert device.refused == resumed.refused == []


def test_a_dead_server_starts_again_where_no_trainer_keeps_memory(make: Make) -> None:
    device = Device()
    team = make(device)
    team.begin()
    team.units[1].die()
    device.log.clear()
    team.step()
    assert device.log == [
        *("sleep p_a", "sleep p_c"),
        *UPDATES,
        *("wake p_a", "start p_b", "sleep p_b", "wake p_b", "wake p_c"),
    ]
    # Between two updates, when it is the policy's last server.
    team.units[0].die()
    device.log.clear()
    team.watch.check_servers()
    assert device.log == ["start p_a", "sleep p_a", "wake p_a"]
    team.step()
    assert device.refused == []


def test_on_devices_of_their_own_policies_do_not_wait_for_each_other(make: Make) -> None:
    devices = [Device(), Device(), Device()]
    team = make(*devices, split=True)
    team.begin()
    team.units[1].die()
    for device in devices:
        device.log.clear()
    team.step()
    assert [device.log for device in devices] == [
        ["sleep p_a", "log-probs p_a", "update p_a", "empty p_a", "wake p_a"],
        ["log-probs p_b", "update p_b", "empty p_b", "start p_b", "sleep p_b", "wake p_b"],
        ["sleep p_c", "wake p_c"],
    ]
    assert [device.refused for device in devices] == [[]] * 3
    # verl's own weight sync does it for the others.
    assert ["empty_cache" in unit.actor_rollout_wg.called for unit in team.units] == [False, True, False]


class Apart(Unit, StandaloneUnit):
    """A policy whose servers are elsewhere; its weights go through buffers that are not torch's."""

    def _start(self) -> None:
        self.replicas = SimpleNamespace(  # type: ignore[assignment]
            push=lambda step: self._devices[0].allocate("transfer", self.name),
            poll=lambda: None,
            serving=[],
            metrics=dict,
        )


def test_trainers_of_servers_apart_clear_their_devices_for_the_transfer(make: Make) -> None:
    device = Device()
    team = make(device, mode="separate_async", kind=Apart)
    team.begin()
    assert device.log == ["transfer p_a", "transfer p_b", "transfer p_c"]
    device.log.clear()
    team.step()
    assert device.log == [*UPDATES, "transfer p_a", "transfer p_b"]
    assert device.refused == []


def test_the_cpu_takes_no_time_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: True)
    team = make(Device())
    team.begin()
    team.step()
    called = {name for unit in team.units for name in unit.actor_rollout_wg.called}
    assert called == {"update_weights", "weight_target"}


@pytest.mark.parametrize("kind", [PolicyUnit, StandaloneUnit])
def test_every_trainer_can_be_told_to(kind: type[PolicyUnit], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []

    class Group:
        def __init__(self, **_: Any) -> None: ...

        def spawn(self, prefix_set: Any) -> Any:
            return dict.fromkeys(prefix_set)

    def together(class_dict: Any) -> None:
        made.extend(worker.cls.__ray_metadata__.modified_class for worker in class_dict.values())

    for module in (policy_unit, standalone):
        monkeypatch.setattr(module, "RayWorkerGroup", Group)
        monkeypatch.setattr(module, "create_colocated_worker_cls", together)
    unit = kind.__new__(kind)
    unit.config = composed()
    unit.use_reference_policy, unit.ref_in_actor, unit.first_replica = True, False, 0
    unit.place(None)  # type: ignore[arg-type]
    assert made
    for worker in made:
        assert getattr(worker.empty_cache, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL  # type: ignore[attr-defined]
        assert getattr(worker.empty_cache, MAGIC_ATTR)["blocking"]  # type: ignore[attr-defined]
