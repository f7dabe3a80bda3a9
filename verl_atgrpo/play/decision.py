"""A decision as an environment asks for it: one agent, one turn, one prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_atgrpo.play.messages import Prompt
from verl_atgrpo.play.tools import Tool, ToolSource, tools_of
from verl_atgrpo.play.types import Candidate, ReplyLimits, Score

PromptSource = Prompt | Callable[[], Prompt]
"""A prompt, or a function that makes it with quotes of the length that its policy can take (`quoting`)."""
ScoreFunction = Callable[[Any], Score | Awaitable[Score]]
"""Reply -> score: of what it says, without its thoughts, or of the `tools.Reply` to a prompt with tools."""
GroupScoreFunction = Callable[[Sequence[Any]], Sequence[Score] | Awaitable[Sequence[Score]]]


@dataclass(frozen=True)
class Ask:
    """The arguments of `Agent.act`."""

    prompt: Prompt
    score: ScoreFunction | None = None
    score_all: GroupScoreFunction | None = None
    candidates: int | None = None
    train: bool = True
    tools: tuple[Tool, ...] = ()
    limits: ReplyLimits | None = None


class Decider(Protocol):
    """What an agent needs of its `Team`."""

    def _fitted(self, agent: str, source: Callable[[], Prompt], tools: Sequence[Tool]) -> Prompt: ...

    async def _decide(self, agent: str, ask: Ask) -> Candidate: ...


@dataclass(frozen=True)
class Agent:
    """One agent of a team, as the environment uses it."""

    _team: Decider = field(repr=False)
    name: str

    async def act(
        self,
        prompt: PromptSource,
        score: ScoreFunction | None = None,
        *,
        score_all: GroupScoreFunction | None = None,
        candidates: int | None = None,
        train: bool = True,
        tools: Sequence[ToolSource] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Candidate:
        """Samples this agent's candidates for `prompt`, scores them and returns the committed one.

        Args:
            prompt: a text or chat messages; the same for every candidate. Or a function that returns them, if it
                quotes other replies (`quoting.quoted`): while the policy finds the prompt too long, it is called again
                with quotes half as long.
            score: what a reply says, without its thoughts -> Score, sync or async; it must not change the state. None
                scores 0. An async one may make decisions itself (a judge, a refinement); evaluation does not score
                such candidates.
            score_all: replies -> their scores, in place of `score`: for a judge that ranks the candidates of a group.
                It gets all of them at once, in evaluation and where each is sampled alone (`parallel`, `branch`) one,
                so a ranking is worth nothing there. What it raises ends the run: no single reply is at fault.
            candidates: K of this decision in training, in place of the recipe's; at least 2 if it is trained. With
                the scheme `parallel` a trained decision has one candidate nevertheless.
            train: False for a decision whose candidates are no rows of the update, such as a draft or a simulated
                user. It has one candidate unless `candidates` says more.
            tools: typed functions or OpenAI schemas that the reply may call. Nothing is called here (`tools.use_tools`
                does that); scores get a `tools.Reply`, and the returned candidate has `tool_calls`.
            max_tokens: most tokens of a reply, if fewer than `data.max_response_length`.
            stop: texts at which a reply ends; they are not in its text.

        Raises:
            EpisodeFailed: a candidate could not be sampled; the environment should not catch it.
            ToolError: something is no tool, or the policy's chat template knows none.
            TypeError: a score is no `Score`.
            ValueError: `candidates` or `max_tokens` is too small, a stop text is empty, or `score` and `score_all` are
                both given.
        """
        if score is not None and score_all is not None:
            raise ValueError(f"agent {self.name!r}: both score and score_all are given; use one")
        if candidates is not None and (not isinstance(candidates, int) or candidates < 1 + train):
            raise ValueError(
                f"agent {self.name!r}: candidates={candidates!r}, and train={train} needs {1 + train}, a whole number"
            )
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"agent {self.name!r}: max_tokens={max_tokens!r} is less than 1, or no whole number")
        for key, listed in (("stop", stop), ("tools", tools)):
            if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Sequence):  # read item by item
                raise ValueError(f"agent {self.name!r}: {key}={listed!r:.80} is no list: use {key}=[{listed!r:.80}]")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(
                f"agent {self.name!r}: stop={list(stop)} has an empty text, which ends every reply, or none"
            )
        limits = ReplyLimits(max_tokens, tuple(stop), bool(tools)) if max_tokens is not None or stop or tools else None
        known = tools_of(tools)
        if callable(prompt):
            prompt = self._team._fitted(self.name, prompt, known)
        ask = Ask(prompt, score, score_all, candidates, train, known, limits)
        return await self._team._decide(self.name, ask)
