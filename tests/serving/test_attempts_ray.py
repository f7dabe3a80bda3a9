"""The client on real actors of Ray and a real balancer: what only Ray can show about lost and unwanted requests."""

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

from verl_atgrpo.serving import client
from verl_atgrpo.serving.client import AvoidingBalancer, DecisionClient
from verl_atgrpo.serving.requests import Gate, PatientClient
from verl_atgrpo.serving.server import Answer, GroupAnswers
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
    # Actors of this file's classes import this file, and that the fakes.
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
    """An actor may take its time to start: a call is not given up for that."""
    monkeypatch.setattr(client, "_RETURN", HANG)


class Group:
    """Servers, balancer and client; the first server is preferred.

    A request's time begins in its server, so those that are answered at once are never late, however busy the machine.
    """

    def __init__(self, *moods: str, timeout: float = HANG) -> None:
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

    async def counted_to(self, what: str, number: int) -> None:
        """Returns when the first server has so many of its requests so far."""
        while (await self.servers["0"].counts.remote())[what] < number:
            await asyncio.sleep(0.05)

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


def test_siblings_of_a_candidate_that_hangs_do_not_wait_for_it() -> None:
    group = Group("one hangs", "well")

    async def run() -> None:
        drawing = [asyncio.ensure_future(group.draw(seed)) for seed in range(4)]
        hanging = drawing.pop(1)
        assert await asyncio.gather(*drawing) == [[2, 2, 2]] * 3
        assert not hanging.done()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)

    asyncio.run(run())
    assert group.counts("1")["calls"] == 0


def test_candidates_are_one_call_and_one_that_hangs_is_late_alone() -> None:
    group = Group("one hangs", "well", timeout=1.0)
    assert asyncio.run(all_of(group)) == [[2, 2, 2]] * 4
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
        await group.counted_to("asked", 1)
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        await group.counted_to("cancelled", 1)

    asyncio.run(asyncio.wait_for(run(), HANG))
    assert group.in_flight() == {"0": 0}


def test_a_killed_server_leaves_the_balancer_and_its_decision_moves() -> None:
    group = Group("hangs", "well")

    async def run() -> list[list[int]]:
        drawing = asyncio.ensure_future(all_of(group))
        await group.counted_to("asked", 4)
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
