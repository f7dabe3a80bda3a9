"""The client on real actors of Ray and a real balancer: what only Ray can show about lost and unwanted requests."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from simulated_servers import config
from verl.workers.rollout.replica import TokenOutput

from verl_atgrpo.rollout.attempts import Gate, PatientClient
from verl_atgrpo.rollout.balancer import AvoidingBalancer
from verl_atgrpo.rollout.client import DecisionClient
from verl_atgrpo.rollout.group_answers import Answer, GroupAnswers
from verl_atgrpo.team import EpisodeFailed

pytestmark = pytest.mark.slow


class EngineDeadError(Exception):
    """vLLM's, by its name."""


@ray.remote(num_cpus=0)
class Server(GroupAnswers):
    """Answers at once, never, or not any more; and says what became of its requests."""

    def __init__(self, mood: str = "well") -> None:
        self._mood = mood
        self._counts = {"calls": 0, "asked": 0, "cancelled": 0}

    async def generate_group(self, *args: Any, **kwargs: Any) -> AsyncIterator[list[tuple[int, Answer]]]:
        self._counts["calls"] += 1
        async for answers in super().generate_group(*args, **kwargs):
            yield answers

    async def generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        self._counts["asked"] += 1
        if self._mood == "engine died":
            raise EngineDeadError("EngineCore encountered an issue")
        try:
            if self._mood == "hangs" or (self._mood == "one hangs" and sampling_params["seed"] == 1):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        tokens = [len(prompt_ids)] * sampling_params["max_tokens"]
        return TokenOutput(token_ids=tokens, log_probs=[-0.5] * len(tokens), extra_fields={"global_steps": 1})

    async def counts(self) -> dict[str, int]:
        return self._counts


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # Actors of this file's classes import this file.
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield
    ray.shutdown()


class Group:
    """Servers, balancer and client; the first server is preferred."""

    def __init__(self, *moods: str, timeout: float = 20.0) -> None:
        self.servers = {str(number): Server.remote(mood) for number, mood in enumerate(moods)}
        self.balancer = ray.remote(AvoidingBalancer).options(num_cpus=0).remote(servers=self.servers)
        self.counted: list[str] = []
        client = DecisionClient(config(), load_balancer_handle=self.balancer)
        self.client = PatientClient(client, Gate(), timeout, 2, self.counted.append)
        for number in range(1, len(moods)):
            ray.get(self.balancer.acquire_server.remote(f"other {number}", ["0", *map(str, range(1, number))]))

    async def draw(self, seed: int = 7) -> list[int]:
        output = await self.client.generate("d", prompt_ids=[1, 2], sampling_params={"max_tokens": 3, "seed": seed})
        return list(output.token_ids)

    def counts(self, server: str) -> dict[str, int]:
        return ray.get(self.servers[server].counts.remote())

    def in_flight(self) -> dict[str, int]:
        return ray.get(self.balancer.get_status.remote())["servers"]


async def all_of(group: Group, number: int = 4) -> list[list[int]]:
    return await asyncio.gather(*(group.draw(seed) for seed in range(number)))


def test_a_late_request_ends_in_its_server_and_is_answered_by_another() -> None:
    group = Group("hangs", "well", timeout=1.0)
    assert asyncio.run(group.draw()) == [2, 2, 2]
    assert group.counts("0") == {"calls": 1, "asked": 1, "cancelled": 1}
    assert group.counts("1") == {"calls": 1, "asked": 1, "cancelled": 0}
    assert group.in_flight() == {"0": 0, "1": 1}


def test_candidates_are_one_call_and_one_that_hangs_is_late_alone() -> None:
    group = Group("one hangs", "well", timeout=3.0)

    async def run() -> list[float]:
        began, times = time.monotonic(), []

        async def one(seed: int) -> None:
            assert await group.draw(seed) == [2, 2, 2]
            times.append(time.monotonic() - began)

        await asyncio.gather(*map(one, range(4)))
        return times

    *siblings, late = asyncio.run(run())
    assert max(siblings) < 3.0 <= late, "siblings do not wait for it"
    assert group.counts("0") == {"calls": 1, "asked": 4, "cancelled": 1}
    assert group.counts("1") == {"calls": 1, "asked": 1, "cancelled": 0}
    assert group.counted == ["requests_retried"]


def test_without_another_server_a_late_request_fails() -> None:
    group = Group("hangs", timeout=1.0)
    with pytest.raises(EpisodeFailed) as caught:
        asyncio.run(group.draw())
    assert (caught.value.reason, group.in_flight()) == ("timeout", {"0": 0})


def test_a_cancelled_candidate_ends_in_its_server() -> None:
    group = Group("hangs")

    async def run() -> None:
        drawing = asyncio.ensure_future(group.draw())
        while not (await group.servers["0"].counts.remote())["asked"]:
            await asyncio.sleep(0.05)
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        while not (await group.servers["0"].counts.remote())["cancelled"]:
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert group.in_flight() == {"0": 0}


def test_a_killed_server_leaves_the_balancer_and_its_decision_moves() -> None:
    group = Group("hangs", "well")

    async def run() -> list[list[int]]:
        drawing = asyncio.ensure_future(all_of(group))
        while (await group.servers["0"].counts.remote())["asked"] < 4:
            await asyncio.sleep(0.05)
        ray.kill(group.servers["0"])
        return await drawing

    assert asyncio.run(run()) == [[2, 2, 2]] * 4
    assert group.in_flight() == {"1": 1}
    assert group.counted == ["requests_retried"] * 4


def test_a_server_whose_engine_died_leaves_the_balancer() -> None:
    group = Group("engine died", "well")
    assert asyncio.run(all_of(group)) == [[2, 2, 2]] * 4
    assert group.in_flight() == {"1": 1}
    assert group.counts("0") == {"calls": 1, "asked": 4, "cancelled": 0}


def test_with_no_server_left_a_request_fails_with_the_reason() -> None:
    group = Group("engine died")
    for _ in range(2):  # the second meets an empty balancer
        with pytest.raises(EpisodeFailed) as caught:
            asyncio.run(group.draw())
        assert caught.value.reason == "engine"
