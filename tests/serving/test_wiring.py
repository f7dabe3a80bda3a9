"""Workers must send weights to their own policy's servers; anything else ends the run with the policy's name."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer, and the worker with it)

from verl_atgrpo.train.serving.workers import WeightTarget, check_wiring


def target(replica: int, server: str | None = None, channel: int | None = None) -> WeightTarget:
    number = replica if channel is None else channel
    return WeightTarget(replica, f"ipc:///tmp/job-replica-{number}-rank-0.sock", server)


def test_own_servers_are_accepted() -> None:
    check_wiring("planner", [target(1, "b"), target(1), target(2, "c")], {1: ["b"], 2: ["c"]})


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        ([target(0, "a"), target(2, "c")], "pushes its weights to replica 0"),
        ([target(1, "a"), target(2, "c")], "would push its weights to a"),
        ([target(1, "b", channel=0), target(2, "c")], "channel .*-replica-0-.* is not replica 1's"),
        ([target(1, "b")], r"no worker pushes weights to replicas \[2\]"),
    ],
)
def test_anything_else_is_refused(targets: list[WeightTarget], problem: str) -> None:
    with pytest.raises(RuntimeError, match=f"policy 'planner': .*{problem}"):
        check_wiring("planner", targets, {1: ["b"], 2: ["c"]})
