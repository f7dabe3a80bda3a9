"""The scores of a decision's candidates (`Scorer`, which the team calls), the scope in which a score runs, and which
candidate is committed.

A score may make decisions itself. asyncio's context variables tell to which candidate they belong. With `scheme:
branch` the reward of a candidate is that of its continuations (`branching`), with `parallel` its episode's
(`train.rollout.episode_rows`).
"""

from __future__ import annotations

import contextvars
import inspect
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verl_atgrpo.play.decision import GroupScoreFunction, ScoreFunction
from verl_atgrpo.play.messages import Reply
from verl_atgrpo.play.types import Candidate, Decision, EpisodeFailed, Score, Selection, TeamOptions
from verl_atgrpo.play.user_code import contained

OnScoreError = Callable[[str, int, str, Exception], None]
"""Agent, turn, reply and what scoring the reply raised."""


@dataclass(eq=False)
class Scope:
    """Where decisions are made: in `run`, or in a score."""

    name: str
    """As in `Decision.scope`."""
    weight: float = 1.0
    """Of the decisions that are made in it (`Decision.weight`)."""
    needed: bool = True
    """Whether anybody needs the result; nobody does of a score in evaluation."""
    ended: bool = False
    """Whether it was ended for that."""


SCOPE: contextvars.ContextVar[tuple[object, Scope]] = contextvars.ContextVar("scope", default=(None, Scope("")))
"""Team and scope of the running task."""


class NotNeeded(Exception):
    """A score made a decision in evaluation, where nobody needs its result."""


class _NoScore(TypeError):
    """An environment returned something else than a score: a defect, whatever the reply was."""


def end_in_evaluation() -> None:
    """Ends the running score if it is one of evaluation, where nobody needs its result.

    For what a score asks elsewhere; decisions of the team do it themselves.
    """
    _, scope = SCOPE.get()
    if not scope.needed:
        scope.ended = True
        raise NotNeeded


@dataclass(frozen=True)
class Scorer:
    """Calls the scores of an episode's decisions and mixes rewards."""

    options: TeamOptions
    on_error: OnScoreError | None
    """As in `Team`."""

    async def one(
        self, candidate: Candidate, decision: Decision, score: ScoreFunction | None, scope: Scope
    ) -> Candidate:
        """Returns a candidate with its score."""
        try:
            with contained(f"{_place(decision)}: the score"):
                scored = Score() if score is None else score(_what_is_scored(candidate))
                if inspect.isawaitable(scored):
                    scored = await scored
            return self._mixed(candidate, scored, decision)
        except (EpisodeFailed, _NoScore):
            raise
        except Exception as error:  # noqa: BLE001  (a reply that the author did not think of, or a defect)
            return self._without_score(candidate, decision, error, scope)

    async def group(
        self, candidates: Sequence[Candidate], decision: Decision, score_all: GroupScoreFunction, scope: Scope
    ) -> list[Candidate]:
        """Scores the candidates of a decision together; what `score_all` raises is raised: no reply is at fault."""
        where = _place(decision)
        try:
            with contained(f"{where}: score_all"):
                scores = score_all([_what_is_scored(candidate) for candidate in candidates])
                if inspect.isawaitable(scores):
                    scores = await scores
        except Exception:
            if not scope.ended:
                raise
            scores = [Score()] * len(candidates)
        if not isinstance(scores, Sequence):
            raise _NoScore(f"{where}: score_all gave {scores!r:.80}, not a list of scores")
        if len(scores) != len(candidates):
            raise ValueError(f"{where}: score_all gave {len(scores)} scores for {len(candidates)} replies")

        def scored(candidate: Candidate, score: Score) -> Candidate:
            try:
                return self._mixed(candidate, score, decision)
            except ValueError as error:
                return self._without_score(candidate, decision, error, scope)

        return list(map(scored, candidates, scores))

    def _without_score(self, candidate: Candidate, decision: Decision, error: Exception, scope: Scope) -> Candidate:
        """Returns a candidate whose score raised an error, which is raised again where nobody counts such errors."""
        if scope.ended:
            return replace(candidate, score=Score(), reward=0.0)
        if self.on_error is None:
            raise error
        self.on_error(decision.agent, decision.turn, candidate.generation.text, error)
        return replace(candidate, score=Score(), reward=0.0, error=error)

    def _mixed(self, candidate: Candidate, score: Score, decision: Decision) -> Candidate:
        if not isinstance(score, Score):
            raise _NoScore(f"{_place(decision)}: the score of {candidate.text!r:.80} is {score!r:.80}, not a Score")
        reward = score.mixed(self.options.alpha, self.options.local_weight)
        if not math.isfinite(reward):
            raise ValueError(f"{_place(decision)}: the environment gave a score of {score}, not finite")
        return replace(candidate, score=score, reward=reward, error=None)


def _place(decision: Decision) -> str:
    return f"agent {decision.agent!r}, turn {decision.turn}"


def _what_is_scored(candidate: Candidate) -> str | Reply:
    return candidate.text if candidate.reply is None else candidate.reply


def lowest_for_errors(sampled: list[Candidate]) -> list[Candidate]:
    """Returns candidates in which those without a score have the lowest reward of the others, and at most 0.

    Raises the first error if none of several candidates could be scored: not a single reply is at fault.
    """
    errors = [candidate.error for candidate in sampled if candidate.error is not None]
    if len(errors) == len(sampled) > 1:
        raise errors[0]
    lowest = min([0.0, *(candidate.reward for candidate in sampled if candidate.error is None)])
    return [candidate if candidate.error is None else replace(candidate, reward=lowest) for candidate in sampled]


def select(rewards: Sequence[float], selection: Selection, rng: random.Random) -> int:
    """Returns the index of the candidate to commit, given the candidates' mixed rewards."""
    if selection == "first":
        return 0
    if selection == "random":
        return rng.randrange(len(rewards))
    return max(range(len(rewards)), key=lambda index: rewards[index])
