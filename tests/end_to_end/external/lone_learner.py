"""An environment in which only one agent is trained, and a record of the servers' responses and of their wiring.

Loaded into a job by VERL_USE_EXTERNAL_MODULES; NOTES names the record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from types import ModuleType
from typing import Any, ClassVar

from verl_atgrpo import Environment, Outcome, Score, Split, Team
from verl_atgrpo.compat import when_imported
from verl_atgrpo.play.types import Generation


class LoneLearner(Environment):
    """`left` and `judge` are rewarded for every U; `right` acts only in validation."""

    agents: ClassVar[tuple[str, ...]] = ("left", "right", "judge")

    def task(self, split: Split, index: int) -> tuple[Split, int]:
        return split, index

    def fingerprint(self, task: tuple[Split, int]) -> str:
        return str(task)

    async def run(self, task: tuple[Split, int], team: Team) -> Outcome:
        answer = await team.left.act("draft", lambda reply: Score(local=reply.count("U")))
        await team.judge.act("plan", lambda reply: Score(local=reply.count("U")))
        for agent in ("right",) if task[0] == "val" else self.opponents(task):
            await team[agent].act("plan", lambda reply: Score(local=reply.count("U")))
        return Outcome(success="U" in answer.text)


class WithRival(LoneLearner):
    """The same with an opponent, which acts only in training."""

    agents = (*LoneLearner.agents, "rival")

    def opponents(self, task: tuple[Split, int]) -> Sequence[str]:
        return ("rival",) if task[0] == "train" else ()


def _note(what: str, **noted: Any) -> None:
    with open(os.environ["NOTES"], "a") as file:  # a line is written in one call, also with several writers
        file.write(json.dumps({"what": what, **noted}) + "\n")


def _responses(policy: ModuleType) -> None:
    generate = policy.ServedPolicy.generate

    async def noted(self: Any, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        generation: Generation = await generate(self, decision_id, prompt_ids, seed)
        _note(
            "token",
            agent=decision_id.split(".")[-2],
            weights=generation.weights_version[1],
            token=generation.token_ids[0],
            log_prob=generation.log_probs[0],
        )
        return generation

    policy.ServedPolicy.generate = noted


def _wiring(replicas: ModuleType) -> None:
    check = replicas.check_wiring

    def noted(policy: str, targets: Sequence[Any], servers: Mapping[int, Sequence[str]]) -> None:
        _note("wiring", policy=policy, targets=[astuple(target) for target in targets], servers=servers)
        check(policy, targets, servers)

    replicas.check_wiring = noted


when_imported("verl_atgrpo.train.rollout.policy", _responses)
when_imported("verl_atgrpo.train.serving.replicas", _wiring)
