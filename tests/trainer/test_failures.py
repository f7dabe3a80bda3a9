"""A worker or server that dies ends the run with its policy's name."""

from __future__ import annotations

import threading
import time

import pytest

ray = pytest.importorskip("ray")

from verl_atgrpo.serving import health
from verl_atgrpo.serving.health import PolicyFailed, dead_replicas, naming, watched


class Server:
    """Stands for an actor handle of one node's server: `engine` and `actor` are what calls to either give."""

    def __init__(self, engine: str = "alive", actor: str = "alive") -> None:
        self.collective_rpc = Method("check_health", engine)
        self.__ray_ready__ = Method(None, actor)


class Method:
    def __init__(self, argument: str | None, sign: str) -> None:
        self.argument, self.sign = argument, sign

    def remote(self, *arguments: str) -> str:
        assert arguments == (() if self.argument is None else (self.argument,))
        return self.sign


@pytest.fixture(autouse=True)
def signs(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(sign: str, timeout: float) -> None:
        if sign == "dead":
            raise ray.exceptions.RayActorError()
        if sign == "busy":
            time.sleep(min(timeout, 0.01))
            raise ray.exceptions.GetTimeoutError()

    monkeypatch.setattr(ray, "get", get)


def test_a_dead_replica_is_told_from_those_that_live() -> None:
    dead = dead_replicas("planner", {4: [Server()], 5: [Server(engine="dead")], 6: [Server()]})
    assert dead.keys() == {5}
    assert dead[5].startswith("RayActorError: ")


def test_a_busy_server_is_not_dead(caplog: pytest.LogCaptureFixture) -> None:
    assert dead_replicas("planner", {0: [Server(engine="busy")], 1: [Server()]}) == {}
    assert "policy 'planner': server 0 has not answered its health check" in caplog.text


def test_a_replica_over_nodes_is_dead_as_a_whole() -> None:
    # Only the first node's server has an engine to ask.
    alive = [Server(), Server(engine="never asked")]
    assert dead_replicas("planner", {0: alive, 1: [Server(), Server(actor="dead")]}).keys() == {1}


def test_busy_replicas_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PING_TIMEOUT", 0.01)
    waits: list[float] = []

    def get(sign: str, timeout: float) -> None:
        waits.append(timeout)
        time.sleep(timeout)
        raise ray.exceptions.GetTimeoutError()

    monkeypatch.setattr(ray, "get", get)
    dead_replicas("planner", {replica: [Server(engine="busy")] for replica in range(8)})
    assert len(waits) == 8
    assert sum(waits) < 0.02


def test_only_errors_of_remote_processes_are_renamed() -> None:
    with pytest.raises(ZeroDivisionError), naming("planner", "its update"):
        raise ZeroDivisionError
    renamed = pytest.raises(PolicyFailed, match="'planner': its update failed: RayError: out of memory")
    with renamed, naming("planner", "its update"):
        raise ray.exceptions.RayError("Traceback\n  File ...\nout of memory")


def test_a_wait_ends_when_the_other_side_is_found_dead() -> None:
    never = threading.Event()

    def wait() -> None:
        never.wait()

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

    assert watched(lambda: 7, lambda: None, every=10) == 7

    with pytest.raises(OSError, match="broken"):
        watched(action, lambda: looks.append(1), every=0.01)
    assert len(looks) >= 2
