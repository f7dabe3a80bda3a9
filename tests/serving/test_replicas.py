"""A dead replica is removed, left out of the weight sync, and restarted before the next one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer, and the worker with it)
from fakes.simulated_replicas import Method, World, get

from verl_atgrpo.train.serving.health import PolicyFailed
from verl_atgrpo.train.serving.replicas import Replicas


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(server: Any) -> None:
        server.actor_lives = False

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", kill)


def replicas_of(world: World, restarts: int = 3) -> Replicas:
    return Replicas("planner", world, world, world.sync, restarts)  # type: ignore[arg-type]


def ranks(replicas: Replicas) -> list[int]:
    return [replica.replica_rank for replica in replicas.serving]


def test_nothing_happens_while_all_live() -> None:
    world = World()
    replicas = replicas_of(world)
    replicas.poll()
    replicas.push(3)
    assert world.log == [("weights", 3, 4, 5)]
    assert not replicas.revive()
    assert replicas.metrics() == {"team/replicas_alive": 2.0, "team/replicas_restarted": 0.0}


@pytest.mark.parametrize("of", ["actor", "engine"])
def test_a_dead_replica_is_removed_everywhere_and_logged_once(of: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    replicas = replicas_of(world)
    setattr(world[5].servers[0], f"{of}_lives", False)
    world.balancer.remove_servers([world[5].server_address])  # a client may have removed it first
    for _ in range(3):
        replicas.poll()
    assert ranks(replicas) == [4]
    assert world.admitted == {"address-4-0"}
    assert world.managed == {4}
    assert replicas.metrics()["team/replicas_alive"] == 1.0
    assert caplog.text.count("policy 'planner': server 5 is dead") == 1
    assert "; 1 of 2 are left" in caplog.text


def test_a_replica_over_two_nodes_is_dead_as_a_whole() -> None:
    world = World(nodes=2)
    replicas = replicas_of(world)
    world[4].servers[1].actor_lives = False
    replicas.poll()
    assert ranks(replicas) == [5]
    first = world[4].servers[0]
    replicas.push(1)
    assert not first.actor_lives, "its other server is killed, too: its name is needed"
    assert [server.identity for server in world[4].servers] == ["4.0.1", "4.1.1"]


def test_without_restarts_the_weights_go_to_the_others() -> None:
    world = World()
    replicas = replicas_of(world, restarts=0)
    world[4].servers[0].engine_lives = False
    replicas.push(7)
    assert world.log == [("weights", 7, 5)]
    world[5].servers[0].engine_lives = False
    with pytest.raises(
        PolicyFailed,
        match=r"^policy 'planner': no server is left \(server 4: .*EngineDeadError.*; server 5: .*Engine.*\), "
        r"and at_grpo\.restart_servers=0 allows no further restart$",
    ):
        replicas.push(8)


def test_a_restart_kills_what_is_left_and_admits_requests_only_after_the_weight_sync() -> None:
    world = World()
    replicas = replicas_of(world)
    old = world[5].servers[0]
    old.engine_lives = False
    admitted: list[set[str]] = []
    world.while_sending = lambda: admitted.append(set(world.admitted)) or {}  # type: ignore[func-returns-value]
    replicas.push(2)
    assert not old.actor_lives
    assert world.log == [
        ("empty",),  # the training workers' caches
        ("end", 5, [(1, 0.5)]),  # kills the engine's processes, on a worker of its node
        ("launch", 5),
        ("sleep", 5),
        ("forget", 5),
        ("weights", 2, 4, 5),
    ]
    assert admitted == [{"address-4-0"}], "requests need the policy's weights"
    assert world.admitted == {"address-4-0", "address-5-1"}
    assert world.managed == {4, 5}
    assert replicas.metrics() == {"team/replicas_alive": 2.0, "team/replicas_restarted": 1.0}


def test_a_worker_with_the_old_server_stops_the_run() -> None:
    world = World()
    replicas = replicas_of(world)
    world[5].servers[0].engine_lives = False
    world.forget_servers = lambda replicas: None  # type: ignore[method-assign]
    with pytest.raises(
        RuntimeError, match=r"replica 5 is served by \['5\.0\.1'\], but a worker would push .* to 5\.0\.0"
    ):
        replicas.push(2)


def test_restarts_are_bounded_over_all_replicas(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    replicas = replicas_of(world, restarts=2)
    for step, rank in enumerate([4, 5, 4]):
        world[rank].servers[0].engine_lives = False
        replicas.push(step)
    assert ranks(replicas) == [5]
    assert world.log[-1] == ("weights", 2, 5)
    assert "server 5 is started again; at_grpo.restart_servers=2 allows 0 more" in caplog.text
    world[5].servers[0].engine_lives = False
    with pytest.raises(PolicyFailed, match=r"at_grpo\.restart_servers=2 allows no further restart"):
        replicas.push(3)


def test_failed_restarts_count() -> None:
    world = World(ranks=(0,))
    replicas = replicas_of(world, restarts=2)
    world[0].servers[0].actor_lives = False
    world.broken_starts = 5
    with pytest.raises(
        PolicyFailed, match=r"server 0: its restart failed: RayError: CUDA out of memory\), and at_grpo"
    ):
        replicas.push(1)
    assert world.starts == 2
    assert world[0].servers == [], "a partly started replica is killed"
    assert world.admitted == set()


def test_a_failed_restart_leaves_the_others_serving() -> None:
    world = World()
    replicas = replicas_of(world, restarts=2)
    world[4].servers[0].engine_lives = False
    world.broken_starts = 1
    replicas.push(1)
    assert world.log[-1] == ("weights", 1, 5)
    replicas.push(2)
    assert world.log[-1] == ("weights", 2, 4, 5)


def test_the_last_replica_is_restarted_immediately_with_its_weights() -> None:
    world = World(ranks=(0,))
    replicas = replicas_of(world)
    replicas.push(6)
    world[0].servers[0].engine_lives = False
    with pytest.raises(PolicyFailed, match=r"no server is left \(server 0: .*\)$"):
        replicas.check()
    assert replicas.revive()
    assert world.log[-1] == ("weights", 6, 0)
    assert world.admitted == {"address-0-1"}
    assert not replicas.revive()


def test_a_death_during_the_sync_leaves_the_others_with_the_weights() -> None:
    world = World()
    replicas = replicas_of(world)

    def die() -> dict[int, str]:
        world[4].servers[0].engine_lives = False
        return {4: "replica 4 did not take the weights: EngineDeadError"}

    world.while_sending = die
    replicas.push(1)
    assert ranks(replicas) == [5]
    assert world.admitted == {"address-5-0"}
    assert world.log == [("weights", 1, 4, 5)]


def test_if_the_last_replica_dies_during_the_sync_it_is_repeated() -> None:
    world = World(ranks=(0,))
    replicas = replicas_of(world)
    deaths = iter([True, False])

    def die() -> dict[int, str]:
        if next(deaths):
            world[0].servers[0].engine_lives = False
        return {}

    world.while_sending = die
    replicas.push(1)
    assert [done for done in world.log if done[0] in ("weights", "launch")] == [
        ("weights", 1, 0),
        ("launch", 0),
        ("weights", 1, 0),
    ]


def test_a_live_server_that_does_not_load_the_weights_ends_the_run() -> None:
    world = World()
    replicas = replicas_of(world)
    world.while_sending = lambda: {5: "replica 5 did not take the weights within 120.0 s; its log says why"}
    with pytest.raises(PolicyFailed, match=r"^policy 'planner': replica 5 did not take the weights within 120\.0 s"):
        replicas.push(1)


def test_a_live_server_that_a_client_removed_is_added_again() -> None:
    world = World()
    replicas = replicas_of(world)
    world.balancer.remove_servers(["address-4-0"])
    replicas.push(1)
    assert world.admitted == {"address-4-0", "address-5-0"}


@pytest.mark.parametrize(
    "death", [ray.exceptions.RayActorError(), ray.exceptions.OutOfMemoryError("the node is low on memory")]
)
def test_a_restart_waits_until_ray_has_registered_the_death(death: Exception) -> None:
    states = iter([None, ray.exceptions.ActorUnavailableError("connection lost", None), death])

    def ready() -> None:
        assert not world.starts, "its name is not free yet"
        if (state := next(states)) is not None:
            raise state

    world = World(ranks=(0,))
    replicas = replicas_of(world)
    world[0].servers[0].engine_lives = False
    world[0].servers[0].__ray_ready__ = Method(ready)
    replicas.push(1)
    assert next(states, "none") == "none"
    assert ranks(replicas) == [0]
