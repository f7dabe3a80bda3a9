"""Dead servers are detected, and errors of remote processes name the policy."""

from __future__ import annotations

import threading
import time

import pytest

ray = pytest.importorskip("ray")

from verl_atgrpo.train.serving import health
from verl_atgrpo.train.serving.health import PolicyFailed, dead_replicas, naming, watched


class Server:
    """A fake actor handle of one node's server: `engine` and `actor` are `alive`, `busy` or `dead`."""

    def __init__(self, engine: str = "alive", actor: str = "alive") -> None:
        self.collective_rpc = Method("check_health", engine)
        self.__ray_ready__ = Method(None, actor)


class Method:
    def __init__(self, argument: str | None, state: str) -> None:
        self.argument, self.state = argument, state

    def remote(self, *arguments: str) -> str:
        assert arguments == (() if self.argument is None else (self.argument,))
        return self.state


@pytest.fixture(autouse=True)
def ray_get(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(state: str, timeout: float) -> None:
        if state == "dead":
            raise ray.exceptions.RayActorError()
        if state == "busy":
            time.sleep(min(timeout, 0.01))
            raise ray.exceptions.GetTimeoutError()

    monkeypatch.setattr(ray, "get", get)


def test_only_the_dead_replica_is_returned() -> None:
    dead = dead_replicas("planner", {4: [Server()], 5: [Server(engine="dead")], 6: [Server()]})
    assert dead.keys() == {5}
    assert dead[5].startswith("RayActorError: ")


def test_a_busy_server_is_not_dead(caplog: pytest.LogCaptureFixture) -> None:
    assert dead_replicas("planner", {0: [Server(engine="busy")], 1: [Server()]}) == {}
    assert "policy 'planner': server 0 has not answered its health check" in caplog.text


def test_a_replica_over_nodes_is_dead_as_a_whole() -> None:
    # Only the first node's server has an engine to check.
    alive = [Server(), Server(engine="not called")]
    assert dead_replicas("planner", {0: alive, 1: [Server(), Server(actor="dead")]}).keys() == {1}


def test_busy_replicas_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PING_TIMEOUT", 0.01)
    waits: list[float] = []

    def get(state: str, timeout: float) -> None:
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


def test_a_process_that_was_killed_for_memory_is_told_by_the_machines_use() -> None:
    use = "2 worker(s) were killed due to the node running low on memory. Memory was 21.47GB used / 23.54GB limit"
    error = ray.exceptions.OutOfMemoryError(f"{use}\nOOM kill reason: threshold\nRefer to the documentation on memory")
    with pytest.raises(PolicyFailed) as failure, naming("planner", "its update"):
        raise error
    assert str(failure.value) == f"policy 'planner': its update failed: OutOfMemoryError: {use}"


def test_a_wait_ends_when_the_check_fails() -> None:
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


def test_an_actions_own_result_or_error_ends_the_wait() -> None:
    checks: list[int] = []

    def action() -> None:
        while len(checks) < 2:
            pass
        raise OSError("broken")

    assert watched(lambda: 7, lambda: None, every=10) == 7

    with pytest.raises(OSError, match="broken"):
        watched(action, lambda: checks.append(1), every=0.01)
    assert len(checks) >= 2
