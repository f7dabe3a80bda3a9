"""Policies with devices of their own run concurrently; policies on shared devices take turns."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer, and the unit with it)
from waiting import HANG

from verl_atgrpo.train.config.run_check import check_run
from verl_atgrpo.train.config.schema import ConfigError
from verl_atgrpo.train.trainer.policies import for_all


class Unit:
    def __init__(self, name: str) -> None:
        self.name = name


def test_policies_with_devices_of_their_own_run_concurrently() -> None:
    barrier = threading.Barrier(2, timeout=HANG)

    def work(_: object) -> None:
        barrier.wait()

    for_all([Unit("coder"), Unit("planner")], work, concurrent=True)  # type: ignore[list-item]


def test_results_are_in_the_order_of_the_policies_whoever_is_done_first() -> None:
    done = threading.Event()

    def work(unit: Any) -> str:
        if unit.name == "coder":
            assert done.wait(HANG)
        done.set()
        return str(unit.name)

    units: Any = [Unit("coder"), Unit("planner")]
    assert for_all(units, work, concurrent=True) == ["coder", "planner"]


def test_on_shared_devices_policies_take_turns() -> None:
    busy = threading.Lock()
    order = []

    def work(unit: Any) -> None:
        assert busy.acquire(blocking=False)
        order.append(unit.name)
        busy.release()

    for_all([Unit("coder"), Unit("planner")], work, concurrent=False)  # type: ignore[list-item]
    assert order == ["coder", "planner"]


@pytest.mark.parametrize("concurrent", [True, False])
def test_an_error_of_one_policy_is_raised(concurrent: bool) -> None:
    def work(unit: Any) -> None:
        if unit.name == "planner":
            raise RuntimeError("policy 'planner' failed")

    with pytest.raises(RuntimeError, match="planner"):
        for_all([Unit("coder"), Unit("planner")], work, concurrent)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("at_grpo.placement=apart",), "at_grpo.placement='apart'"),
        (("at_grpo.placement=split",), r"policies\.tool_user\.gpus is missing"),
        (("+at_grpo.policies.planner.gpus=1",), r"policies\.planner\.gpus=1 has no effect"),
        (
            (
                "at_grpo.placement=split",
                "+at_grpo.policies.planner.gpus=1",
                "+at_grpo.policies.tool_user.gpus=1",
                "trainer.n_gpus_per_node=3",
            ),
            "gpus add up to 2, trainer.n_gpus_per_node is 3",
        ),
    ],
)
def test_devices_must_add_up(compose: Any, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(compose("plan_path_cpu_roles", "at_grpo.train_tasks=64", "at_grpo.val_tasks=8", *overrides))
