"""What an episode holds goes with it: nothing waits for the garbage collector, which a rollout worker rarely runs."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from verl_atgrpo import Outcome, Score, Team, play
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.types import Generation, TeamOptions


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Garbage stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Pair:
    """An environment whose agents act one after the other, then at once."""

    async def run(self, task: object, team: Team) -> Outcome:
        async def score(text: str) -> Score:
            return Score(team=1.0)

        await team.first.act("a", score=score)
        await asyncio.gather(team["first"].act("b"), team.second.act("c", score=lambda text: Score(local=0.5)))
        return Outcome(success=True, team_reward=1.0)


class Answers(ScriptedPolicy):
    """Remembers its generations without keeping them."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, number: f"answer {number}")
        self.given: list[weakref.ref[Generation]] = []

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        generation = await super().generate(decision_id, prompt_ids, seed)
        await asyncio.sleep(0)
        self.given.append(weakref.ref(generation))
        return generation


@pytest.fixture(params=["plain", "traced"])
def make(request: pytest.FixtureRequest) -> Callable[..., Team]:
    """Makes teams as they are, and as rollout workers do."""
    if request.param == "plain":
        return Team
    pytest.importorskip("verl")
    from verl_atgrpo.train.rollout.trace import TracedTeam

    return functools.partial(TracedTeam, attributes={"step": 1, "validate": False, "trace": False})


def test_the_answers_of_an_episode_go_with_its_record(make: Callable[..., Team], uncollected: None) -> None:
    policy = Answers()

    async def episode() -> None:
        team = make({"first": policy, "second": policy}, TeamOptions(candidates=3))
        record = await play(Pair(), None, team)
        assert sum(len(decision.candidates) for decision in record.decisions) == len(policy.given) == 9
        assert all(given() is not None for given in policy.given)

    asyncio.run(episode())
    assert [given() for given in policy.given] == [None] * 9


def test_agents_are_the_same_however_they_are_asked_for() -> None:
    team = Team(dict.fromkeys(("first", "second"), Answers()), TeamOptions())
    assert team.first == team["first"] != team.second
    assert len({team.first, team["first"], team.second}) == 2
    assert team.first.name == "first"
