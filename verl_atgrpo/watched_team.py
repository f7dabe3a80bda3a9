"""A scripted team that watches an environment for breaches of the contract that `testing` checks."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_atgrpo.environment import Environment, Score, Split
from verl_atgrpo.team import Candidate, Generation, Prompt, ScoreFunction, ScriptedPolicy, ScriptedTeam, as_messages

Script = Callable[[str, int], str]
"""(prompt text, index of the call for this prompt) -> reply, and nothing else: it is asked out of turn as well."""
ROUNDING = 1e-9
"""By how much a sum of scores may be off."""


class EnvironmentContractError(AssertionError):
    """An environment breaks the contract; the message is one line: the check, the task and what happened."""


class ScriptError(ValueError):
    """A script that was given to the check raises, is missing, or replies with no text: the environment is not at
    fault."""


@dataclass(frozen=True)
class Trial:
    """A task to be played, and what the caller allows."""

    env: Environment
    split: Split
    index: int
    bounds: tuple[float, float]
    """Of the team part and of the local part."""
    alpha: float
    floor: float
    """The most that a hostile reply may earn at a decision, mixed."""
    max_decisions: int

    def fault(self, check: str, team: str, what: str) -> EnvironmentContractError:
        """Returns the error that names the check, the task, the team that played, and what happened."""
        return EnvironmentContractError(f"{check}: task ({self.split}, {self.index}), {team} team: {what}")

    def scripts(self, team: str, make: Callable[[Any], Mapping[str, Script]]) -> dict[str, Script]:
        """Returns a team's scripts for the task; what they raise is raised as a ScriptError that names them.

        Args:
            team: the name of the team in messages.
            make: task -> the script of every agent.
        """
        where = f"script: task ({self.split}, {self.index}), {team} team"
        task = self.env.task(self.split, self.index)
        try:
            made = dict(make(task))
        except Exception as error:
            raise ScriptError(f"{where}: the function that makes its scripts raises {in_a_line(error)}") from error
        if missing := [agent for agent in self.env.agents if agent not in made]:
            raise ScriptError(f"{where}: no script for {', '.join(map(repr, missing))}")

        def asked(agent: str, prompt: str, k: int) -> str:
            try:
                reply = made[agent](prompt, k)
            except Exception as error:
                raise ScriptError(f"{where}: the script of {agent!r} raises {in_a_line(error)}") from error
            if not isinstance(reply, str):
                raise ScriptError(f"{where}: the script of {agent!r} replies {reply!r:.80}, no text")
            return reply

        return {agent: functools.partial(asked, agent) for agent in self.env.agents}


class WatchedTeam(ScriptedTeam):
    """A scripted team that looks at prompts and scores, and has the replies of `probes` scored as well."""

    def __init__(
        self, trial: Trial, name: str, scripts: Mapping[str, Script], probes: Mapping[str, Mapping[str, Script]]
    ) -> None:
        super().__init__(scripts, alpha=trial.alpha)
        self.policies.update({agent: _EndingPolicy(script) for agent, script in scripts.items()})
        self.trial, self.name, self.probes = trial, name, probes
        self.asked = 0
        self._order = asyncio.Lock()
        self.fault: EnvironmentContractError | ScriptError | None = None
        """The first one, kept here because an environment may catch what a decision raises."""

    async def _decide(self, agent: str, prompt: Prompt, score: ScoreFunction | None) -> Candidate:
        try:
            if self.fault is not None:
                raise self.fault
            self.asked += 1
            if self.asked > self.trial.max_decisions:
                raise self.trial.fault("end", self.name, f"none after {self.trial.max_decisions} decisions")
            if not is_prompt(prompt):
                raise self.trial.fault("prompt", self.name, f"{agent!r} is asked {prompt!r:.80}, no text, no chat")
            scored = functools.partial(self._scored, agent, score)
            # In the order asked, as without probes: decisions of one agent at the same time are numbered by it.
            async with self._order:
                await self._probe(agent, prompt, scored)
                return await super()._decide(agent, prompt, scored)
        except (EnvironmentContractError, ScriptError) as fault:
            self.fault = self.fault or fault
            raise

    async def _probe(self, agent: str, prompt: Prompt, score: Callable[[str], Awaitable[Score]]) -> None:
        policy = self.policies[agent]
        text = "\n".join(message["content"] for message in as_messages(prompt))
        replies = {name: scripts[agent](text, policy.calls[text]) for name, scripts in self.probes.items()}
        earned = {name: await score(reply) for name, reply in replies.items()}
        for name, reply in reversed(replies.items()):
            if (again := await score(reply)) != earned[name]:
                what = f"{agent!r} earns {earned[name]} for {reply!r:.40}, and {again} when it is scored again"
                raise self.trial.fault("side effect", self.name, what)
        if self.name == "gold" and self.probes:
            worth = {name: earned[name].mixed(self.trial.alpha) for name in earned}
            best = max(worth, key=lambda name: worth[name])
            if worth[best] > worth["gold"] + ROUNDING:
                what = f"{agent!r} earns {worth['gold']:g}; the {best} team's {replies[best]!r:.40}, {worth[best]:g}"
                raise self.trial.fault("gold", self.name, what)

    async def _scored(self, agent: str, score: ScoreFunction | None, reply: str) -> Score:
        low, high = self.trial.bounds
        scored = Score() if score is None else score(reply)
        if inspect.isawaitable(scored):
            scored = await scored
        parts = (scored.team, scored.local) if isinstance(scored, Score) else (math.nan,)
        if not all(is_finite(part) and low - ROUNDING <= part <= high + ROUNDING for part in parts):
            what = f"{agent!r} gets {scored!r:.80} for {reply!r:.40}, no Score inside [{low:g}, {high:g}]"
            raise self.trial.fault("score", self.name, what)
        return scored


class _EndingPolicy(ScriptedPolicy):
    """Gives every answer one token, as a model ends even an empty one: it is an answer then, and no failure."""

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        generation = await super().generate(decision_id, prompt_ids, seed)
        return replace(generation, token_ids=[0], log_probs=[0.0])


def in_a_line(error: BaseException) -> str:
    """Returns an error's class and message as the part of a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def is_finite(value: object) -> bool:
    """Returns whether `value` is a number other than infinity and nan."""
    return isinstance(value, int | float) and math.isfinite(value)


def is_prompt(prompt: object) -> bool:
    """Returns whether `prompt` is a text or chat messages."""

    def told(message: object, key: str) -> bool:
        return isinstance(message, Mapping) and isinstance(message.get(key), str)

    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return isinstance(prompt, str)
    return len(prompt) > 0 and all(told(message, "role") and told(message, "content") for message in prompt)
