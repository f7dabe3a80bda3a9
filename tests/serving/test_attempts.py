"""Candidates whose requests are paused, interrupted, aborted or lost."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("verl")

from fakes.simulated_engine import run_virtually, virtually
from fakes.simulated_servers import RESPONSE, Server, Servers, interrupt
from waiting import until

from verl_atgrpo import EpisodeFailed
from verl_atgrpo.train.serving.requests import Gate

pytestmark = pytest.mark.usefixtures("cancelled_calls")


# ------------------------------------------------------------------ paused and interrupted


@virtually
async def test_an_interrupted_response_continues_from_its_tokens() -> None:
    server = Server("a", version=3)
    server.cached = 1
    servers = Servers(server)
    sampling = asyncio.ensure_future(servers.sample())
    await until(lambda: server.generated > 2)
    await interrupt(servers, version=4)
    assert (len(server.requests), server.in_flight, sampling.done()) == (1, 0, False)
    server.cached = 0
    servers.gate.resume()
    output = await sampling
    assert output.token_ids == RESPONSE
    assert output.log_probs == [-token / 1000 for token in RESPONSE]
    assert output.stop_reason == "completed"
    assert output.extra_fields == {
        "min_global_steps": 3, "max_global_steps": 4, "num_cached_tokens": 1, "resumed": 1,
    }  # fmt: skip
    first, second = server.requests
    done = len(second["prompt_ids"]) - 2
    assert 0 < done < 10
    assert second["prompt_ids"] == [1, 2, *RESPONSE[:done]]
    assert (first["max_tokens"], second["max_tokens"]) == (10, 10 - done)
    assert first["seed"] == 7 != second["seed"]
    assert servers.counted == ["requests_resumed"]
    assert await servers.settled() == {"a": 0}


def test_every_part_has_a_seed_of_its_own_and_the_same_in_every_run() -> None:
    async def run() -> list[int]:
        server = Server("a")
        servers = Servers(server)
        sampling = asyncio.ensure_future(servers.sample(max_tokens=60))
        for version in (2, 3):
            generated = server.generated
            await until(lambda generated=generated: server.generated > generated + 2)
            await interrupt(servers, version)
            servers.gate.resume()
        output = await sampling
        assert output.extra_fields["resumed"] == 2
        assert output.extra_fields["max_global_steps"] == 3
        return [request["seed"] for request in server.requests]

    seeds, _ = run_virtually(run())
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert run_virtually(run())[0] == seeds


@virtually
async def test_without_a_seed_none_is_added() -> None:
    server = Server("a")
    servers = Servers(server)
    sampling = asyncio.ensure_future(
        servers.training.generate("d", prompt_ids=[1, 2], sampling_params={"max_tokens": 10})
    )
    await until(lambda: server.generated > 2)
    await interrupt(servers, version=2)
    servers.gate.resume()
    await sampling
    assert len(server.requests) == 2
    assert all("seed" not in request for request in server.requests)


@virtually
async def test_a_response_interrupted_before_its_first_token_keeps_its_seed() -> None:
    server = Server("a", version=3, pace=0.01)
    servers = Servers(server)
    sampling = asyncio.ensure_future(servers.sample())
    await until(lambda: server.in_flight)
    server.pace = 0.0
    servers.gate.pause()
    server.output_of, whole = (
        lambda tokens, reason: type(output)(token_ids=[], stop_reason="aborted"),
        server.output_of,
    )
    output = whole([], "aborted")
    server.abort_all()
    await until(lambda: not server.in_flight)
    server.output_of, server.version = whole, 4
    servers.gate.resume()
    answer = await sampling
    assert answer.token_ids == RESPONSE
    assert [request["seed"] for request in server.requests] == [7, 7]
    assert [request["max_tokens"] for request in server.requests] == [10, 10]
    # No token came from the old weights.
    assert (answer.extra_fields["min_global_steps"], answer.extra_fields["resumed"]) == (4, 0)
    assert servers.counted == []


@virtually
async def test_a_response_interrupted_at_its_last_token_is_complete() -> None:
    server = Server("a")
    servers = Servers(server)
    whole = server.output_of
    server.output_of = lambda tokens, reason: whole(tokens, "aborted")
    servers.gate.pause()
    sampling = asyncio.ensure_future(servers.sample())
    await asyncio.sleep(0.005)
    assert not server.requests
    servers.gate.resume()
    output = await sampling
    assert (output.token_ids, output.stop_reason) == (RESPONSE, "completed")
    assert (len(server.requests), servers.counted) == (1, [])


@virtually
async def test_paused_requests_do_not_time_out_and_validation_is_not_paused() -> None:
    server = Server("a")
    servers = Servers(server, timeout=0.2)
    servers.gate.pause()
    sampling = asyncio.ensure_future(servers.sample("training"))
    await asyncio.sleep(0.25)
    assert (await servers.sample("validation", validate=True)).token_ids == RESPONSE
    assert len(server.requests) == 1
    servers.gate.resume()
    assert (await sampling).token_ids == RESPONSE
    assert servers.counted == []


@virtually
async def test_a_request_that_waited_for_a_slot_is_not_sent_while_paused() -> None:
    server = Server("a")
    servers = Servers(server, slots=1)
    sampling = [asyncio.ensure_future(servers.sample(str(number))) for number in range(3)]
    await until(lambda: server.in_flight)
    servers.gate.pause()
    await until(lambda: any(task.done() for task in sampling))
    await asyncio.sleep(0.01)
    assert (len(server.requests), sum(task.done() for task in sampling)) == (1, 1)
    assert await servers.settled() == {"a": 0}
    servers.gate.resume()
    await asyncio.gather(*sampling)


@virtually
async def test_an_abort_without_a_pause_does_not_spin() -> None:
    """Or a server that rejects all requests would be called forever."""
    refusing, other = Server("a"), Server("b")
    refusing.output_of = lambda tokens, reason: type(whole)(token_ids=[], stop_reason="aborted")
    whole = other.output_of([], "completed")
    refusing.pace = 0
    servers = Servers(refusing, other)
    outputs = await asyncio.gather(*(servers.sample(str(number)) for number in range(4)))
    assert all(output.token_ids == RESPONSE for output in outputs)
    assert len(refusing.requests) == servers.counted.count("requests_retried") > 0
    with pytest.raises(EpisodeFailed, match="aborted"):
        await Servers(refusing).sample()


@virtually
async def test_an_answer_that_ends_in_an_error_of_the_engine_is_sampled_again() -> None:
    broken, other = Server("a"), Server("b")
    whole = broken.output_of
    broken.output_of = lambda tokens, reason: whole([9], "error")
    outputs = await asyncio.gather(*(Servers(broken, other).sample(str(number)) for number in range(4)))
    assert all(output.token_ids == RESPONSE for output in outputs)
    with pytest.raises(EpisodeFailed, match="ended the request with an error"):
        await Servers(broken).sample()


def test_a_gate_counts_its_pauses() -> None:
    gate = Gate()
    gate.resume()
    gate.pause()
    gate.pause()
    assert (gate.is_set(), gate.pauses) == (False, 1)
    gate.resume()
    gate.pause()
    assert gate.pauses == 2
