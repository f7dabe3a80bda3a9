"""An environment with some episodes that begin during an update, and a record of the times of requests.

Loaded into a job by VERL_USE_EXTERNAL_MODULES; NOTES names the file with the times of requests and updates.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_atgrpo import Environment, Outcome, Score, Split, Team
from verl_atgrpo.compat import when_imported

UPDATING = Path(os.environ["NOTES"] + ".updating")
PATIENCE = 600.0
"""Most seconds that an update waits for a request; without one the test fails in its assertions."""


class LateWriter(Environment):
    """Is rewarded for every U, in five turns; every third of the first twelve episodes first waits for an update."""

    agents = ("writer",)

    def __init__(self) -> None:
        self._played = 0

    def task(self, split: Split, index: int) -> tuple[Split, int]:
        return split, index

    def fingerprint(self, task: tuple[Split, int]) -> str:
        return str(task)

    async def run(self, task: tuple[Split, int], team: Team) -> Outcome:
        if task[0] == "train":
            self._played += 1
            if self._played % 3 == 0 and self._played <= 12:
                await _an_update()
        answers = [await team.writer.act("draft", lambda reply: Score(local=reply.count("U"))) for _ in range(5)]
        return Outcome(success="U" in answers[-1].text)


async def _an_update() -> None:
    while not UPDATING.exists():
        await asyncio.sleep(0.01)


def _note(what: str, began: float, **more: Any) -> None:
    line = json.dumps({"what": what, "began": began, "ended": time.time(), **more}) + "\n"
    with open(os.environ["NOTES"], "a") as notes:  # a line is written in one call, also with several writers
        notes.write(line)


def _answered_since(began: float) -> bool:
    notes = Path(os.environ["NOTES"])
    lines = notes.read_text().rpartition("\n")[0].splitlines() if notes.exists() else []
    return any(note["what"] == "request" and note["began"] > began for note in map(json.loads, lines))


def _requests(servers: ModuleType) -> None:
    generate = servers.vLLMHttpServer.generate

    @functools.wraps(generate)
    async def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        output = await generate(self, *args, **kwargs)
        _note("request", began, tokens=len(output.token_ids), version=self.global_steps)
        return output

    servers.vLLMHttpServer.generate = noted


def _updates(units: ModuleType) -> None:
    update, updates = units.PolicyUnit._update_actor, list[float]()

    def noted(self: Any, *args: Any) -> Any:
        began = time.time()
        UPDATING.touch()
        metrics = update(self, *args)
        # On a busy machine a tiny model's update may end before a request is sent.
        until = time.monotonic() + PATIENCE
        while len(updates) < 3 and not _answered_since(began) and time.monotonic() < until:
            time.sleep(0.01)
        updates.append(began)
        UPDATING.unlink()
        _note("update", began)
        return metrics

    units.PolicyUnit._update_actor = noted


when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server", _requests)
when_imported("verl_atgrpo.train.trainer.policy_unit", _updates)
