"""The simulated engine behaves as documented, and our schedule reaches the bound on it."""

from __future__ import annotations

import asyncio
import math
import statistics
from typing import Any

import pytest

pytest.importorskip("ray")

from fakes.simulated_engine import SimulatedEngine, log_normal, lower_bound, rollout, run_virtually

Served = list[tuple[str, float]]


def test_sleeping_takes_virtual_time_only() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await asyncio.sleep(nap)
            woken.append((name, asyncio.get_running_loop().time()))

    async def main() -> str:
        await asyncio.gather(sleeper("a", 3, 1e6), sleeper("b", 2, 2, 2))
        return "done"

    assert run_virtually(main()) == ("done", pytest.approx(1e6 + 3))
    assert woken == [("b", 2), ("a", 3), ("b", 4), ("b", 6), ("a", pytest.approx(1e6 + 3))]


def test_timeouts_use_virtual_time() -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 4)

    assert run_virtually(main()) == (None, pytest.approx(4))


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        run_virtually(main())


def ends(engine: SimulatedEngine, *requests: tuple[str, int]) -> list[float]:
    """Returns when requests of (decision, tokens), sent concurrently, are finished."""

    async def one(decision: str, tokens: int) -> float:
        params: dict[str, Any] = {"seed": tokens, "max_tokens": 50}
        answer = await engine.generate(decision, prompt_ids=[1], sampling_params=params)
        assert len(answer.token_ids) == len(answer.log_probs) == min(tokens, 50)
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        return await asyncio.gather(*(one(*request) for request in requests))

    return [pytest.approx(end) for end in run_virtually(main())[0]]


def engine(replicas: int, slots: int) -> SimulatedEngine:
    return SimulatedEngine(tokens_of=lambda seed: seed, seconds_per_token=0.5, replicas=replicas, slots=slots)


def test_requests_wait_for_a_slot_in_the_order_of_arrival() -> None:
    # Two slots, half a second per token: 6 and 10 tokens start; 4 at 3 s and 2 at 5 s, when slots are free.
    assert ends(engine(1, 2), ("a", 6), ("a", 10), ("b", 4), ("b", 2)) == [3, 5, 5, 6]


def test_candidates_of_a_decision_share_a_replica() -> None:
    # One slot each: a on the first replica, b on the second, c on the first again.
    assert ends(engine(2, 1), ("a", 6), ("a", 10), ("b", 4), ("c", 2)) == [3, 8, 2, 9]


def test_a_decision_goes_to_the_replica_with_the_fewest_decisions() -> None:
    loaded = engine(2, 4)

    async def main() -> float:
        def sample(decision: str, tokens: int) -> Any:
            return loaded.generate(decision, prompt_ids=[], sampling_params={"seed": tokens, "max_tokens": 99})

        long = asyncio.gather(*(sample("a", 20) for _ in range(4)))  # fills the first replica until 10 s
        await sample("b", 2)
        await sample("c", 2)  # the second again, as b is finished
        await long
        return asyncio.get_running_loop().time()

    assert run_virtually(main())[0] == pytest.approx(10)
    assert loaded.decisions == [0, 0]
    assert not loaded.leases


def test_responses_are_cut_at_the_limit() -> None:
    assert ends(engine(1, 1), ("a", 80)) == [25]


def test_lengths_are_log_normal_and_follow_from_the_seed() -> None:
    tokens_of = log_normal(2000, 0.8)
    lengths = [tokens_of(seed) for seed in range(4000)]
    logs = [math.log(length) for length in lengths]
    assert statistics.mean(logs) == pytest.approx(math.log(2000), abs=0.05)
    assert statistics.stdev(logs) == pytest.approx(0.8, abs=0.03)
    assert lengths == [tokens_of(seed) for seed in range(4000)]
    assert log_normal(1, 0.001)(7) == 1


def test_bound_by_hand() -> None:
    served = [("t0.0.a.0", 2.0), ("t0.0.a.0", 3.0), ("t0.0.b.0", 4.0), ("t1.0.a.0", 6.0), ("t1.0.a.0", 1.0)]
    assert lower_bound(served, slots=2) == (8.0, 7.0)
    assert lower_bound(served, slots=2).seconds == 8
    assert lower_bound(served, slots=16).seconds == 7


def played(slots: int, episodes: int, **schedule: bool) -> tuple[float, Served]:
    """Virtual seconds and requests of 2 agents x 2 turns with 3 candidates."""
    simulated = SimulatedEngine(replicas=2, slots=slots)
    records, seconds = run_virtually(rollout(simulated, episodes=episodes, turns=2, candidates=3, **schedule))
    assert [len(decision.candidates) for record in records for decision in record.decisions] == [3] * episodes * 4
    return seconds, simulated.served


def by_decision(served: Served) -> dict[tuple[str, str], list[float]]:
    """(episode, decision) -> its candidates' seconds."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, seconds in served:
        episode, agent, turn = name.rsplit(".", 2)
        found.setdefault((episode, f"{agent}.{turn}"), []).append(seconds)
    return found


def test_schedules_take_the_time_of_their_responses() -> None:
    """With a slot for every request, each schedule's time is a formula of its response lengths."""
    runs = {
        (barriers, sequential): played(64, 8, barriers=barriers, sequential=sequential)
        for barriers in (False, True)
        for sequential in (False, True)
    }
    lengths = {key: by_decision(served) for key, (_, served) in runs.items()}
    assert all(seconds_of == lengths[False, False] for seconds_of in lengths.values())
    episodes = {episode for episode, _ in lengths[False, False]}
    decisions = {decision for _, decision in lengths[False, False]}
    assert (len(episodes), len(decisions)) == (8, 4)
    for (barriers, sequential), (seconds, _) in runs.items():
        took = {
            key: (sum if sequential else max)(seconds_of) for key, seconds_of in lengths[barriers, sequential].items()
        }
        if barriers:
            expected = sum(max(took[episode, decision] for episode in episodes) for decision in decisions)
        else:
            expected = max(sum(took[episode, decision] for decision in decisions) for episode in episodes)
        assert seconds == pytest.approx(expected), (barriers, sequential)


@pytest.mark.parametrize(("slots", "episodes", "barriers"), [(64, 24, 1.3), (2, 48, 1.05)])
def test_our_schedule_reaches_the_bound_and_barriers_do_not(slots: int, episodes: int, barriers: float) -> None:
    """Where episodes' chains are the bound, and where the engine is."""
    seconds, served = played(slots, episodes)
    bound = lower_bound(served, 2 * slots)
    assert (bound.work > bound.chain) == (slots == 2)
    assert bound.seconds <= seconds * (1 + 1e-9)
    assert seconds <= 1.10 * bound.seconds
    assert played(slots, episodes, barriers=True)[0] > barriers * seconds
