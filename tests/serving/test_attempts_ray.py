"""The client with real Ray actors and a real balancer: timeouts, cancellation and death."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from fakes.simulated_servers import config
from verl.workers.rollout.replica import TokenOutput
from waiting import HANG

from verl_atgrpo.train.serving import client
from verl_atgrpo.train.serving.balancer import AvoidingBalancer
from verl_atgrpo.train.serving.client import DecisionClient
from verl_atgrpo.train.serving.requests import Gate, PatientClient
from verl_atgrpo.train.serving.server import GroupResponses, Result

pytestmark = pytest.mark.slow


class EngineDeadError(Exception):
    """Has the name of vLLM's error."""


@ray.remote(num_cpus=0)
class Server(GroupResponses):
    """Responds immediately, never, or with an error, depending on `mode`; counts its requests."""

    def __init__(self, mode: str = "normal") -> None:
        self._mode = mode
        self._counts = {"calls": 0, "requests": 0, "cancelled": 0}

    async def generate_group(self, *args: Any, **kwargs: Any) -> AsyncIterator[list[tuple[int, Result]]]:
        self._counts["calls"] += 1
        async for answers in super().generate_group(*args, **kwargs):
            yield answers

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        counts = self._counts  # a request that an earlier test cancelled late counts there
        counts["requests"] += 1
        if self._mode == "engine died":
            raise EngineDeadError("EngineCore encountered an issue")
        try:
            if self._mode == "hangs" or (self._mode == "one hangs" and sampling_params["seed"] == 1):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            counts["cancelled"] += 1
            raise
        tokens = [len(prompt_ids)] * sampling_params["max_tokens"]
        return TokenOutput(token_ids=tokens, log_probs=[-0.5] * len(tokens), extra_fields={"global_steps": 1})

    async def counts(self) -> dict[str, int]:
        return self._counts


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Actors import this file, which imports the fakes.
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are not given up because an actor starts slowly."""
    monkeypatch.setattr(client, "GRACE", HANG)


ACTORS: dict[str, Any] = {}
"""Those of earlier tests."""


def again(kind: Any, name: str, *arguments: Any) -> Any:
    """Returns the actor of this name as if it were new, because to start one takes seconds; replaces a dead one."""
    try:
        ray.get(ACTORS[name].__ray_call__.remote(lambda self: self.__init__(*arguments)))
    except (KeyError, ray.exceptions.RayActorError):
        ACTORS[name] = kind.remote(*arguments)
    return ACTORS[name]


class Group:
    """Servers, balancer and client; the balancer prefers the first server.

    A request's timeout starts in the server, so immediate responses never time out on a busy machine.
    """

    def __init__(self, *modes: str, timeout: float = HANG) -> None:
        self.servers = {str(number): again(Server, f"server {number}", mode) for number, mode in enumerate(modes)}
        self.balancer = again(ray.remote(num_cpus=0)(AvoidingBalancer), "balancer", self.servers)
        self.counted: list[str] = []
        client = DecisionClient(config(), load_balancer_handle=self.balancer)
        self.client = PatientClient(client, Gate(), timeout, 2, self.counted.append)
        for number in range(1, len(modes)):
            ray.get(self.balancer.acquire_server.remote(f"other {number}", ["0", *map(str, range(1, number))]))

    async def sample(self, seed: int = 7) -> list[int]:
        output = await self.client.generate("d", prompt_ids=[1, 2], sampling_params={"max_tokens": 3, "seed": seed})
        return list(output.token_ids)

    def counts(self, server: str) -> dict[str, int]:
        return ray.get(self.servers[server].counts.remote())

    async def counted_to(self, what: str, number: int) -> None:
        """Returns when the first server has counted `number` requests."""
        while (await self.servers["0"].counts.remote())[what] < number:
            await asyncio.sleep(0.05)

    def in_flight(self) -> dict[str, int]:
        return ray.get(self.balancer.get_status.remote())["servers"]


async def all_of(group: Group, number: int = 4) -> list[list[int]]:
    return await asyncio.gather(*(group.sample(seed) for seed in range(number)))


def test_siblings_of_a_candidate_that_hangs_do_not_wait_for_it() -> None:
    group = Group("one hangs", "normal")

    async def run() -> None:
        sampling = [asyncio.ensure_future(group.sample(seed)) for seed in range(4)]
        hanging = sampling.pop(1)
        assert await asyncio.gather(*sampling) == [[2, 2, 2]] * 3
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)

    asyncio.run(run())
    assert group.counts("1")["calls"] == 0


def test_candidates_are_one_call_and_only_one_that_hangs_times_out() -> None:
    group = Group("one hangs", "normal", timeout=1.0)
    assert asyncio.run(all_of(group)) == [[2, 2, 2]] * 4
    assert group.counts("0") == {"calls": 1, "requests": 4, "cancelled": 1}
    assert group.counts("1") == {"calls": 1, "requests": 1, "cancelled": 0}
    assert group.in_flight() == {"0": 0, "1": 1}
    assert group.counted == ["requests_retried"]


def test_a_cancelled_candidate_is_aborted_in_its_server() -> None:
    group = Group("hangs")

    async def run() -> None:
        sampling = asyncio.ensure_future(group.sample())
        await group.counted_to("requests", 1)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        await group.counted_to("cancelled", 1)

    asyncio.run(asyncio.wait_for(run(), HANG))
    assert group.in_flight() == {"0": 0}


def test_a_killed_server_is_removed_and_its_decision_is_retried() -> None:
    group = Group("hangs", "normal")

    async def run() -> list[list[int]]:
        sampling = asyncio.ensure_future(all_of(group))
        await group.counted_to("requests", 4)
        ray.kill(group.servers["0"])
        return await sampling

    assert asyncio.run(run()) == [[2, 2, 2]] * 4
    assert group.in_flight() == {"1": 1}
    assert group.counted == ["requests_retried"] * 4


def test_a_server_with_a_dead_engine_is_removed() -> None:
    group = Group("engine died", "normal")
    assert asyncio.run(all_of(group)) == [[2, 2, 2]] * 4
    assert group.in_flight() == {"1": 1}
    assert group.counts("0") == {"calls": 1, "requests": 4, "cancelled": 0}
