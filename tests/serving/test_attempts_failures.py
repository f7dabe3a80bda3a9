"""Requests that are too slow, or lost with their server: what becomes of their candidates, and of the others'."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from fakes.simulated_engine import virtually
from fakes.simulated_servers import RESPONSE, Server, Servers, interrupt
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from waiting import until

from verl_atgrpo import EpisodeFailed
from verl_atgrpo.train.serving.client import slots_per_server

pytestmark = pytest.mark.usefixtures("cancelled_calls")


# ------------------------------------------------------------------ slow and dead servers


@virtually
async def test_a_request_that_times_out_is_aborted_in_its_server_and_retried_on_another(
    cancelled_calls: list[Any],
) -> None:
    slow, fast = Server("a"), Server("b")
    slow.hangs = True
    servers = Servers(slow, fast, timeout=0.2)
    servers.occupy("b", 5)  # busy, but the other hangs
    output = await servers.sample()
    assert output.token_ids == RESPONSE
    assert (slow.cancelled, cancelled_calls, slow.in_flight) == (1, [], 0)  # by the server
    # The same seed: the first attempt returned nothing.
    assert [server.requests[0]["seed"] for server in (slow, fast)] == [7, 7]
    assert servers.counted == ["requests_retried"]
    assert await servers.settled() == {"a": 0, "b": 5}


@virtually
async def test_a_request_that_waits_for_a_weight_sync_does_not_time_out() -> None:
    server = Server("a")
    server.hangs = True  # verl's gate in the server is closed
    servers = Servers(server, timeout=0.2)
    sampling = asyncio.ensure_future(servers.sample())
    await until(lambda: server.in_flight)
    servers.gate.pause()
    await asyncio.sleep(0.25)
    assert (server.cancelled, sampling.done()) == (1, False)
    server.hangs = False
    servers.gate.resume()
    assert (await sampling).token_ids == RESPONSE
    assert servers.counted == []


@pytest.mark.parametrize(
    "error",
    [
        ray.exceptions.RayActorError(),
        ray.exceptions.OutOfMemoryError("the node is low on memory"),
        ray.exceptions.ActorUnavailableError("gone", None),
    ],
)
@virtually
async def test_a_dead_server_leaves_the_balancer_and_a_decision_moves_as_one(error: Exception) -> None:
    dead, alive = Server("a"), Server("b")
    dead.error = error
    servers = Servers(dead, alive)
    servers.occupy("b", 1)
    outputs = await asyncio.gather(*(servers.sample("d", seed=seed) for seed in range(4)))
    assert all(output.token_ids == RESPONSE for output in outputs)
    assert (len(dead.requests), len(alive.requests)) == (4, 4)
    left = {"a": 0, "b": 1} if isinstance(error, ray.exceptions.ActorUnavailableError) else {"b": 1}
    assert await servers.settled() == left
    assert servers.counted == ["requests_retried"] * 4


@virtually
async def test_an_engine_that_died_behind_its_server_is_dead() -> None:
    class EngineDeadError(Exception):
        """Has the name of vLLM's error."""

    dead, alive = Server("a"), Server("b")
    dead.error = EngineDeadError("the engine has died")
    servers = Servers(dead, alive)
    for number in range(4):
        assert (await servers.sample(str(number))).token_ids == RESPONSE
    assert len(dead.requests) <= 1
    assert await servers.settled() == ({"b": 0} if dead.requests else {"a": 0, "b": 0})


@pytest.mark.parametrize("refusal", [ValueError("no room"), asyncio.TimeoutError("no room")])
@virtually
async def test_an_error_of_a_live_engine_is_not_retried(refusal: Exception) -> None:
    """Not even a timeout of the engine's own, which Ray raises as a TimeoutError."""
    servers = Servers(Server("a"), Server("b"))
    for server in servers.servers.values():
        server.error = refusal
    with pytest.raises(EpisodeFailed, match="no room") as caught:
        await servers.sample()
    assert caught.value.reason == "engine"
    assert sum(len(server.requests) for server in servers.servers.values()) == 1
    assert await servers.settled() == {"a": 0, "b": 0}


@pytest.mark.parametrize(("servers", "retries", "asked"), [(1, 2, 1), (2, 2, 2), (4, 2, 3), (4, 0, 1)])
@pytest.mark.parametrize("reason", ["timeout", "engine"])
@virtually
async def test_retries_end_with_the_reason(servers: int, retries: int, asked: int, reason: str) -> None:
    all_of_them = [Server(str(number)) for number in range(servers)]
    for server in all_of_them:
        server.hangs = reason == "timeout"
        server.error = None if server.hangs else ray.exceptions.RayActorError()
    group = Servers(*all_of_them, timeout=0.02, retries=retries)
    with pytest.raises(EpisodeFailed) as caught:
        await group.sample()
    assert caught.value.reason == reason
    assert sum(len(server.requests) for server in all_of_them) == asked
    assert len(group.counted) == asked - 1
    assert not any((await group.settled()).values())


@pytest.mark.parametrize("reason", ["timeout", "engine"])
@virtually
async def test_a_router_that_ignores_avoid_is_called_at_most_once_more(reason: str) -> None:
    """Such as a user's router, or verl's own with routing by request id."""
    failing = Server("a")
    failing.hangs = reason == "timeout"
    failing.error = None if failing.hangs else ray.exceptions.ActorUnavailableError("busy", None)
    asked: list[str] = []
    released: list[str | None] = []

    class Router(GlobalRequestLoadBalancer):  # type: ignore[misc]
        def acquire_server(self, request_id: str) -> tuple[str, Any]:
            asked.append(request_id)
            assert len(asked) < 5, "it never stops"
            self._inflight_requests["a"] += 1
            return "a", failing

        def require_release_fields(self) -> list[str]:
            return ["request_id"]

        def release_server(self, server_id: str, request_id: str | None = None) -> None:
            super().release_server(server_id)
            released.append(request_id)

    servers = Servers(failing, Server("b"), timeout=0.02, retries=9, balancer=Router)
    with pytest.raises(EpisodeFailed) as caught:
        await servers.sample()
    assert (caught.value.reason, len(failing.requests), asked) == (reason, 1, ["d", "d"])
    assert await servers.settled() == {"a": 0, "b": 0}
    assert released == asked


@virtually
async def test_a_lost_part_is_sampled_again_and_earlier_parts_are_kept() -> None:
    dying, other = Server("a", version=1), Server("b", version=1)
    servers = Servers(dying, other)
    servers.occupy("b", 9)
    sampling = asyncio.ensure_future(servers.sample())
    await until(lambda: dying.generated > 2)
    await interrupt(servers, version=2)
    dying.error = ray.exceptions.RayActorError()
    servers.gate.resume()
    output = await sampling
    assert output.token_ids == RESPONSE
    assert output.extra_fields["max_global_steps"] == 2
    (_, lost), (again,) = dying.requests, other.requests
    assert lost == again


# ------------------------------------------------------------------ slots of a server


@virtually
async def test_cancelled_candidates_leave_nothing_behind() -> None:
    server = Server("a", pace=0.005)
    servers = Servers(server, slots=2)
    sampling = [asyncio.ensure_future(servers.sample("d")) for _ in range(4)]
    await until(lambda: server.in_flight == 2)
    for task in (sampling[0], sampling[3]):  # one is in flight, one waits for a slot
        task.cancel()
    outputs = await asyncio.gather(*sampling, return_exceptions=True)
    assert [isinstance(output, asyncio.CancelledError) for output in outputs] == [True, False, False, True]
    assert server.calls == [2, 1]
    assert await servers.settled() == {"a": 0}
    late = asyncio.ensure_future(servers.sample("e"))
    await asyncio.sleep(0)  # it has called the balancer and has no reply yet
    late.cancel()
    assert await servers.settled() == {"a": 0}


@virtually
async def test_a_server_has_no_more_requests_than_slots_and_all_are_served() -> None:
    first, second = Server("a"), Server("b")
    servers = Servers(first, second, slots=3)
    outputs = await asyncio.gather(*(servers.sample(str(number // 4)) for number in range(40)))
    assert all(output.token_ids == RESPONSE for output in outputs)
    assert (first.most_in_flight, second.most_in_flight) == (3, 3)
    assert len(first.requests) + len(second.requests) == 40


@virtually
async def test_every_server_has_the_configured_slots() -> None:
    first, second = Server("a"), Server("b")
    servers = Servers(first, second, slots=3)
    sampling = [asyncio.ensure_future(servers.sample(str(number))) for number in range(20)]
    first.hangs = second.hangs = True
    await asyncio.sleep(1)
    assert (first.in_flight, second.in_flight) == (3, 3)
    for task in sampling:
        task.cancel()
    await asyncio.wait(sampling)
    assert await servers.settled() == {"a": 0, "b": 0}


@virtually
async def test_without_a_server_the_episode_fails_and_nothing_else_does() -> None:
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    servers = Servers()
    for outcome in await asyncio.gather(*(servers.sample("d") for _ in range(3)), return_exceptions=True):
        assert isinstance(outcome, EpisodeFailed) and outcome.reason == "engine"
        assert "the load balancer gave no server" in str(outcome)
    assert await servers.settled() == {}
    assert not problems


def test_slots_by_hand() -> None:
    slots = [slots_per_server(*given) for given in ((32, 1), (256, 8), (1024, 8), (4096, 3), (8, 2000))]
    assert slots == [900, 112, 128, 1365, 1]
    assert all(isinstance(number, int) for number in slots)


@pytest.mark.parametrize(("max_num_seqs", "workers"), [(32, 1), (256, 8), (1024, 8), (4096, 3), (8, 2000)])
def test_slots_leave_the_servers_actor_room_for_control_calls(max_num_seqs: int, workers: int) -> None:
    slots = slots_per_server(max_num_seqs, workers)
    calls_at_a_time = max(1000, max_num_seqs + 16)  # verl's RolloutReplica.max_concurrency
    assert slots >= 1
    if workers <= 900:
        assert slots * workers <= calls_at_a_time - 16
        assert (slots + 1) * workers > min(900, max_num_seqs)


@virtually
async def test_candidates_of_a_decision_share_one_server_and_one_call_to_the_balancer() -> None:
    servers = Servers(Server("a"), Server("b"))
    asked: list[str] = []
    acquire = servers.balancer.acquire_server
    servers.balancer.acquire_server = lambda request_id, **_: (asked.append(request_id), acquire(request_id))[1]
    sampling = [asyncio.ensure_future(servers.sample(decision)) for decision in "aaaabb"]
    cancelled = asyncio.ensure_future(servers.sample("a"))
    await asyncio.sleep(0)
    cancelled.cancel()
    await until(lambda: servers.in_flight() == {"a": 1, "b": 1})
    await asyncio.gather(*sampling)
    assert sorted(asked) == ["a", "b"]
    assert sorted(len(server.requests) for server in servers.servers.values()) == [2, 4]
    assert await servers.settled() == {"a": 0, "b": 0}
    # The next decision with the same id calls it again.
    await servers.sample("a")
    assert sorted(asked) == ["a", "a", "b"]


@virtually
async def test_the_balancer_sends_a_handle_once_per_actor() -> None:
    first = Server("a")
    servers = Servers(first, Server("b"))
    servers.occupy("b", 9)
    acquire = servers.balancer.acquire_server
    sent: list[str | None] = []

    def watched(request_id: str, **fields: Any) -> tuple[str, Any]:
        server_id, server = acquire(request_id, **fields)
        sent.append(server and server.name)
        return server_id, server

    servers.balancer.acquire_server = watched
    for decision in "defg":
        assert (await servers.sample(decision)).token_ids == RESPONSE
    # Another server at the same address: a restarted one that got the port of the dead one.
    second = Server("another a")
    servers.balancer.remove_servers(["a"])
    servers.balancer.add_servers({"a": second})
    for decision in "hi":
        assert (await servers.sample(decision)).token_ids == RESPONSE
    assert sent == ["a", None, None, None, "another a", None]
    assert (len(first.requests), len(second.requests)) == (4, 2)
