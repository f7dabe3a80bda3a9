"""A decision's requests in one call: they share the call, and not each other's failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from fakes.simulated_engine import run_virtually, virtually
from fakes.simulated_servers import RESPONSE, Server, Servers, StreamingCall, sync_weights
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo import EpisodeFailed
from verl_atgrpo.train.serving import client
from verl_atgrpo.train.serving.server import TOGETHER, GroupResponses

K = 4


pytestmark = pytest.mark.usefixtures("cancelled_calls")


def candidates(servers: Servers, decision: str = "d", **params: Any) -> list[asyncio.Task[TokenOutput]]:
    """Starts sampling a decision's candidates, with seeds 0, 1, ..."""
    return [asyncio.ensure_future(servers.sample(decision, seed=seed, **params)) for seed in range(K)]


# ------------------------------------------------------------------ what makes a call


@virtually
async def test_candidates_of_a_decision_are_one_call_and_decisions_are_not_mixed() -> None:
    server = Server("a")
    servers = Servers(server, slots=100)
    outputs = await asyncio.gather(*candidates(servers, "d"), *candidates(servers, "e"), servers.sample("f"))
    assert [output.token_ids for output in outputs] == [RESPONSE] * (2 * K + 1)
    assert server.calls == [K, K, 1]
    assert [request["seed"] for request in server.requests] == [*range(K), *range(K), 7]
    assert not servers.client.calls.collecting


@virtually
async def test_every_caller_gets_its_own_response() -> None:
    """The longest candidate is not the last."""
    server = Server("a")
    servers = Servers(server)
    lengths = 3, 9, 1, 6
    outputs = await asyncio.gather(*(servers.sample(max_tokens=length) for length in lengths))
    assert [len(output.token_ids) for output in outputs] == list(lengths)
    assert server.calls == [K]


@virtually
async def test_requests_with_other_prompts_or_later_ones_are_other_calls() -> None:
    server = Server("a", pace=0.1)
    servers = Servers(server)

    def ask(*prompt: int) -> asyncio.Task[TokenOutput]:
        params = {"max_tokens": 2}
        return asyncio.ensure_future(servers.training.generate("d", prompt_ids=list(prompt), sampling_params=params))

    asked = [ask(1, 2), ask(1, 3, 4), ask(1, 2)]
    await asyncio.sleep(0.01)
    asked.append(ask(1, 2))
    outputs = await asyncio.gather(*asked)
    assert [output.token_ids[0] for output in outputs] == [102, 103, 102, 102]
    assert server.calls == [2, 1, 1]


@virtually
async def test_interrupted_candidates_resume_in_one_call_each_from_its_own_tokens() -> None:
    server = Server("a")
    servers = Servers(server)
    sampling = [
        asyncio.ensure_future(servers.sample(seed=seed, max_tokens=length))
        for seed, length in enumerate((2, 10, 20, 30))
    ]
    await asyncio.sleep(0.0055)
    await sync_weights(servers)
    outputs = await asyncio.gather(*sampling)
    assert [len(output.token_ids) for output in outputs] == [2, 10, 20, 30]
    assert all(output.token_ids == [102 + n for n in range(len(output.token_ids))] for output in outputs)
    assert [output.extra_fields["resumed"] for output in outputs] == [0, 1, 1, 1]
    # The first was complete when the others were interrupted.
    assert server.calls == [4, 3]
    assert servers.counted == ["requests_resumed"] * 3


def test_a_long_response_delays_its_siblings_only_briefly() -> None:
    async def run() -> list[float]:
        server, loop = Server("a"), asyncio.get_running_loop()
        servers = Servers(server, slots=K)
        times = {}

        async def timed(length: int) -> None:
            await servers.sample("d", max_tokens=length)
            times[length] = loop.time()

        sampling = [asyncio.ensure_future(timed(length)) for length in (10, 20, 500, 1000)]
        other = candidates(servers, "e")
        await asyncio.gather(*sampling, *other)
        assert server.most_in_flight == K, "a slot is free as soon as its response is complete"
        assert server.calls[0] == K
        return [times[length] for length in (10, 20, 500, 1000)]

    first, second, third, last = run_virtually(run())[0]
    assert first == second == pytest.approx(0.010 + TOGETHER, abs=0.005)
    assert third == pytest.approx(0.500 + TOGETHER, abs=0.02)
    assert last == pytest.approx(1.000, abs=0.02), "the last one does not wait"


def test_responses_that_finish_together_are_returned_together() -> None:
    async def run() -> int:
        batches, server = 0, Server("a")
        params = [{"max_tokens": 10 + number} for number in range(K)]
        async for batch in GroupResponses.generate_group(server, [1, 2], ["x"] * K, [[]] * K, params, 9.0):
            assert len(batch) == K
            batches += 1
        return batches

    batches, seconds = run_virtually(run())
    assert batches == 1
    assert seconds < 0.02  # the last one does not wait


# ------------------------------------------------------------------ failures of one and of all


@virtually
async def test_only_the_request_that_hangs_times_out(cancelled_calls: list[Any]) -> None:
    slow, other = Server("a"), Server("b")
    slow.hangs_on = {2}
    servers = Servers(slow, other, timeout=0.2)
    servers.occupy("b", 5)
    outputs = await asyncio.gather(*candidates(servers))
    assert [output.token_ids for output in outputs] == [RESPONSE] * K
    assert (slow.calls, slow.cancelled, slow.in_flight) == ([K], 1, 0)
    assert [request["seed"] for request in other.requests] == [2]
    assert (servers.counted, cancelled_calls) == (["requests_retried"], [])
    assert 0.2 < asyncio.get_running_loop().time() < 0.25

    alone = Servers(slow, timeout=0.2)
    got = await asyncio.gather(*candidates(alone), return_exceptions=True)
    assert [getattr(one, "reason", None) for one in got] == [None, None, "timeout", None]


@virtually
async def test_a_failing_request_does_not_affect_its_siblings() -> None:
    class Refusing(Server):
        async def _generate(self, **request: Any) -> TokenOutput:
            if request["sampling_params"]["seed"] == 1:
                raise ValueError("no room")
            return await super()._generate(**request)

    server = Refusing("a")
    got = await asyncio.gather(*candidates(Servers(server)), return_exceptions=True)
    failed = got.pop(1)
    assert isinstance(failed, EpisodeFailed)
    assert failed.reason == "engine"
    assert "ValueError: no room" in str(failed)
    assert [output.token_ids for output in got] == [RESPONSE] * (K - 1)
    assert server.calls == [K]


@virtually
async def test_a_call_to_a_server_that_never_returns_is_given_up(
    monkeypatch: pytest.MonkeyPatch, cancelled_calls: list[Any]
) -> None:
    """Its own timeout does not fire either."""

    async def silent(**_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    stopped, other = Server("a"), Server("b")
    stopped.generate_group = StreamingCall(silent)
    servers = Servers(stopped, other, timeout=2.0)
    servers.occupy("b", 5)
    outputs = await asyncio.gather(*candidates(servers))
    assert [output.token_ids for output in outputs] == [RESPONSE] * K
    assert len(cancelled_calls) == 1
    assert asyncio.get_running_loop().time() == pytest.approx(2.0 + client.GRACE, abs=0.1)


@virtually
async def test_after_a_servers_death_the_whole_decision_is_retried() -> None:
    dying, other = Server("a"), Server("b")
    servers = Servers(dying, other)
    servers.occupy("b", 5)
    sampling = candidates(servers)
    await asyncio.sleep(0.005)
    dying.error = ray.exceptions.RayActorError()
    outputs = await asyncio.gather(*sampling)
    assert [output.token_ids for output in outputs] == [RESPONSE] * K
    assert (dying.calls, other.calls) == ([K], [K])
    assert servers.counted == ["requests_retried"] * K
    assert await servers.settled() == {"b": 5}


# ------------------------------------------------------------------ cancellation


@virtually
async def test_cancelling_a_candidate_does_not_cancel_its_siblings_call(cancelled_calls: list[Any]) -> None:
    server = Server("a")
    server.hangs_on = {0}
    servers = Servers(server, timeout=0.2)
    sampling = candidates(servers)
    await asyncio.sleep(0.005)
    sampling[0].cancel()
    outputs = await asyncio.gather(*sampling, return_exceptions=True)
    assert isinstance(outputs[0], asyncio.CancelledError)
    assert [output.token_ids for output in outputs[1:]] == [RESPONSE] * (K - 1)
    assert await servers.settled() == {"a": 0}
    assert (server.cancelled, server.in_flight, len(cancelled_calls)) == (1, 0, 1)


@virtually
async def test_a_call_without_callers_is_cancelled_in_the_server(cancelled_calls: list[Any]) -> None:
    server = Server("a", pace=1.0)
    servers = Servers(server, timeout=100.0)
    sampling = candidates(servers)
    await asyncio.sleep(2.5)
    for task in sampling[1:]:
        task.cancel()
    await asyncio.sleep(0.1)
    assert (server.in_flight, cancelled_calls) == (K, [])
    sampling[0].cancel()
    await asyncio.gather(*sampling, return_exceptions=True)
    assert await servers.settled() == {"a": 0}
    assert (server.cancelled, server.in_flight, len(cancelled_calls)) == (K, 0, 1)


@pytest.mark.parametrize("gone", [1, K])
@virtually
async def test_a_candidate_may_be_cancelled_before_its_call_is_sent(gone: int) -> None:
    server = Server("a")
    calls = client.GroupCalls()

    def ask(seed: int) -> asyncio.Task[TokenOutput]:
        request = client.Request(str(seed), [], {"max_tokens": 3, "seed": seed})
        return asyncio.ensure_future(calls.send(server, "d", [1, 2], request, 1.0))

    asked = [ask(seed) for seed in range(K)]
    for task in asked[:gone]:  # after the tasks have run for the first time, and before the call is sent
        asyncio.get_running_loop().call_soon(task.cancel)
    got = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in got] == [True] * gone + [False] * (K - gone)
    assert (await ask(9)).token_ids == [102, 103, 104]
    assert server.requests[-1]["seed"] == 9
    assert (server.in_flight, calls.collecting) == (0, {})


@virtually
async def test_cancelling_a_call_aborts_its_requests_in_the_server() -> None:
    ended: list[str] = []

    class Waiting(GroupResponses):
        async def generate(self, request_id: str, **_: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)  # an abort in vLLM takes a message
                ended.append(request_id)

    async def answers(*ids: str) -> list[Any]:
        stream = Waiting().generate_group([1], ids, [[] for _ in ids], [{} for _ in ids], 5.0)
        return [batch async for batch in stream]

    call = asyncio.ensure_future(answers("x", "y"))
    await asyncio.sleep(1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert (call.cancelled(), sorted(ended)) == (True, ["x", "y"])
    assert await answers("z") == [[(0, None)]]
    assert ended[2:] == ["z"]
