"""An environment in which only one agent is trained, and a record of the servers' responses.

Loaded into a job by VERL_USE_EXTERNAL_MODULES; SERVED_FILE names the record.
"""

from __future__ import annotations

import json
import os
from types import ModuleType
from typing import Any

from verl_atgrpo.compat import when_imported
from verl_atgrpo.environment import Environment, Outcome, Score, Split
from verl_atgrpo.team import Generation, Team


class LoneLearner(Environment):
    """`left` and `judge` are rewarded for every U; `right` acts only in validation."""

    agents = ("left", "right", "judge")

    def task(self, split: Split, index: int) -> tuple[Split, int]:
        return split, index

    def fingerprint(self, task: tuple[Split, int]) -> str:
        return str(task)

    async def run(self, task: tuple[Split, int], team: Team) -> Outcome:
        answer = await team.left.act("draft", lambda reply: Score(local=reply.count("U")))
        await team.judge.act("plan", lambda reply: Score(local=reply.count("U")))
        if task[0] == "val":
            await team.right.act("plan", lambda reply: Score(local=reply.count("U")))
        return Outcome(success="U" in answer.text)


def _record(policy: ModuleType) -> None:
    generate = policy.ServedPolicy.generate

    async def recording(self: Any, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        generation: Generation = await generate(self, decision_id, prompt_ids, seed)
        served = {
            "agent": decision_id.split(".")[-2],
            "weights": generation.weights_version[1],
            "token": generation.token_ids[0],
            "log_prob": generation.log_probs[0],
        }
        with open(os.environ["SERVED_FILE"], "a") as file:
            file.write(json.dumps(served) + "\n")
        return generation

    policy.ServedPolicy.generate = recording


when_imported("verl_atgrpo.rollout.policy", _record)
