"""Branches on servers that fail: whatever happens to a request, the groups and their rewards are the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
from fakes.scripted_policy import Numbered
from fakes.simulated_engine import virtually
from fakes.simulated_servers import Letters, Server, Servers, sync_weights
from verl.workers.rollout.replica import TokenOutput
from waiting import until

from verl_atgrpo import Outcome, Team, stable_hash
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.types import EpisodeRecord, PlayMode, TeamOptions
from verl_atgrpo.train.chat import Chat
from verl_atgrpo.train.config.schema import BranchSettings
from verl_atgrpo.train.rollout.policy import ServedPolicy

pytestmark = pytest.mark.usefixtures("cancelled_calls")


class Digits(Server):
    """Samples the first digit by the seed; the others follow from it, as a resumed request has another seed."""

    async def _generate(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        output = await super()._generate(prompt_ids=prompt_ids, sampling_params=sampling_params)
        told = list(prompt_ids)
        for _token in output.token_ids:
            told.append(ord("0") + stable_hash(sampling_params["seed"] if told[-1] == ord(":") else told) % 10)
        return output.model_copy(update={"token_ids": told[len(prompt_ids) :]})


class Sums(Numbered):
    """Four agents, of which all but the first are told what was said before; two act at the same time."""

    agents = ("first", "left", "right", "last")

    async def run(self, task: int, team: Team) -> Outcome:
        said = (await team.first.act("first:")).text
        both = await asyncio.gather(team.left.act(f"left {said}:"), team.right.act(f"right {said}:"))
        said += "".join(reply.text for reply in both)
        said += (await team.last.act(f"last {said}:")).text
        return Outcome(False, sum(map(int, said)) / 100)


def branched(servers: Servers) -> asyncio.Task[EpisodeRecord]:
    policy = ServedPolicy(
        client=servers.training,
        chat=Chat(Letters()),
        sampling_params={},
        max_prompt_length=64,
        max_response_length=6,
        request_timeout=None,
    )

    def make(mode: PlayMode) -> Team:
        return Team(dict.fromkeys(Sums.agents, policy), TeamOptions(candidates=4), mode)

    return asyncio.ensure_future(play_branched(Sums(), 0, make, BranchSettings(at="every"), seed=0))


def groups(record: EpisodeRecord) -> dict[str, list[tuple[str, float]]]:
    assert all(one.trained for one in record.decisions)
    return {one.name: [(each.text, each.reward) for each in one.candidates] for one in record.decisions}


@virtually
async def test_interrupted_hung_and_lost_requests_leave_the_same_groups() -> None:
    undisturbed = groups(await branched(Servers(Digits("a"), Digits("b"))))
    assert len({reward for group in undisturbed.values() for _, reward in group}) > 8

    dying, slow, sound = Digits("a"), Digits("b"), Digits("c")
    servers = Servers(dying, slow, sound, timeout=1.0, retries=50)
    playing = branched(servers)
    await until(lambda: sum(server.generated for server in servers.servers.values()) > 10)
    await sync_weights(servers)
    slow.hangs = True
    await until(lambda: dying.in_flight and slow.in_flight)
    dying.error = ray.exceptions.RayActorError()
    assert groups(await playing) == undisturbed
    assert {"requests_retried", "requests_resumed"} <= set(servers.counted)
    assert (await servers.settled()).keys() == {"b", "c"}
