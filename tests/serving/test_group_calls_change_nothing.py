"""Group calls give the same responses as one call per request, with and without failing servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from fakes.simulated_engine import run_virtually
from fakes.simulated_servers import Call, Server, Servers, sync_weights
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo import EpisodeFailed
from verl_atgrpo.train.serving.client import DecisionClient, TooLate

K = 4


pytestmark = pytest.mark.usefixtures("cancelled_calls")


class SingleClient(DecisionClient):
    """Sends every request in a call of its own."""

    async def attempt(
        self,
        server: Any,
        request_id: str,
        prompt_ids: list[int],
        token_ids: list[int],
        sampling_params: dict[str, Any],
        timeout: float,
    ) -> TokenOutput:
        call = Call(server.generate).remote(prompt_ids=prompt_ids + token_ids, sampling_params=sampling_params)
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait((answer,), timeout=timeout)
            if not answer.done():
                raise TooLate
            error = answer.exception()
            if error is not None and not isinstance(error, ray.exceptions.RayError):
                raise ray.exceptions.RayTaskError("generate", str(error), error).as_instanceof_cause()
            return answer.result()
        finally:
            answer.cancel()


async def _nothing(servers: Servers) -> None: ...


async def _new_weights(servers: Servers) -> None:
    for _ in range(2):
        await asyncio.sleep(0.0245)
        await sync_weights(servers)


async def _hangs(servers: Servers) -> None:
    for server in servers.servers.values():
        server.hangs_on = {2 if server.name == "a" else 3}


async def _death(servers: Servers) -> None:
    await asyncio.sleep(0.0245)
    servers.servers["a"].error = ray.exceptions.RayActorError()


async def _refusals(servers: Servers) -> None:
    await asyncio.sleep(0.0245)
    for server in servers.servers.values():
        server.error = ValueError("no room")


async def _played(client: type[DecisionClient], script: Callable[..., Any]) -> tuple[list[Any], Servers]:
    servers = Servers(Server("a", version=3), Server("b", version=3), timeout=0.2, client=client)
    faults = asyncio.ensure_future(script(servers))
    sampling = [
        asyncio.ensure_future(servers.sample(f"{decision}", seed=seed, max_tokens=5 + 7 * seed + 3 * decision))
        for decision in range(6)
        for seed in range(K)
    ]
    got = await asyncio.gather(*sampling, return_exceptions=True)
    await faults
    settled = await servers.settled()
    assert not any(settled.values())
    outcomes = [one.reason if isinstance(one, EpisodeFailed) else one.model_dump() for one in got]
    return [*outcomes, settled], servers


@pytest.mark.parametrize("script", [_nothing, _new_weights, _hangs, _death, _refusals])
def test_a_group_call_changes_no_response(script: Callable[..., Any]) -> None:
    (grouped, ours), _ = run_virtually(_played(DecisionClient, script))
    (single, theirs), _ = run_virtually(_played(SingleClient, script))
    assert grouped == single
    assert len({str(outcome) for outcome in grouped}) > 1
    assert sum(sum(server.calls) for server in ours.servers.values()) == sum(
        len(server.requests) for server in ours.servers.values()
    )
    if script is not _death:  # which also loses the finished responses of a call
        assert sorted(ours.counted) == sorted(theirs.counted)
