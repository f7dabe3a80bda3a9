"""A worker or server that dies ends the run with its policy's name."""

from __future__ import annotations

import threading

import pytest

ray = pytest.importorskip("ray")

from verl_atgrpo.trainer.failures import PolicyFailed, check_servers, naming, watched


class Server:
    """Stands for an actor handle; `sign` is what a call to it gives."""

    def __init__(self, sign: str) -> None:
        self.collective_rpc = self
        self.sign = sign

    def remote(self, method: str) -> str:
        assert method == "check_health"
        return self.sign


@pytest.fixture(autouse=True)
def signs(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(sign: str, timeout: float) -> None:
        if sign == "dead":
            raise ray.exceptions.RayActorError()
        if sign == "busy":
            raise ray.exceptions.GetTimeoutError()

    monkeypatch.setattr(ray, "get", get)


def test_a_dead_server_is_reported_with_its_policy() -> None:
    with pytest.raises(PolicyFailed, match=r"policy 'planner': a server failed: .*Actor"):
        check_servers("planner", [Server("alive"), Server("dead")])


def test_a_busy_server_is_not_dead(caplog: pytest.LogCaptureFixture) -> None:
    check_servers("planner", [Server("busy"), Server("alive")])
    assert "no sign of life" in caplog.text


def test_only_errors_of_remote_processes_are_renamed() -> None:
    with pytest.raises(ZeroDivisionError), naming("planner", "its update"):
        raise ZeroDivisionError
    renamed = pytest.raises(PolicyFailed, match="'planner': its update failed: RayError: out of memory")
    with renamed, naming("planner", "its update"):
        raise ray.exceptions.RayError("Traceback\n  File ...\nout of memory")


def test_a_wait_ends_when_the_other_side_is_found_dead() -> None:
    never = threading.Event()

    def wait() -> None:
        never.wait(60)

    def check() -> None:
        raise PolicyFailed("policy 'planner': a server failed")

    try:
        with pytest.raises(PolicyFailed):
            watched(wait, check, every=0.01)
    finally:
        never.set()


def test_watching_passes_on_the_actions_own_error_and_ends_with_it() -> None:
    looks: list[int] = []

    def action() -> None:
        while len(looks) < 2:
            pass
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        watched(action, lambda: looks.append(1), every=0.01)
    assert len(looks) >= 2
