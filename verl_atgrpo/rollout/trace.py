"""verl's rollout trace (`actor_rollout_ref.rollout.trace`), one trace a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from verl.utils.rollout_trace import rollout_trace_attr, rollout_trace_op

from verl_atgrpo.environment import Message
from verl_atgrpo.team import Candidate, Decision, Prompt, ScoreFunction, Team, as_messages


class TraceBudget:
    """Says which tasks a worker traces: the first of every step and validation, as many as are allowed."""

    def __init__(self, most: int | None) -> None:
        """Takes `trace.max_samples_per_step_per_worker`; None traces every task."""
        self._most = most
        self._taken: Counter[tuple[int, bool]] = Counter()

    def take(self, step: int, validate: bool) -> bool:
        """Returns whether the next task of a step is traced."""
        if self._most is None:
            return True
        self._taken = Counter({key: count for key, count in self._taken.items() if key[0] == step})
        self._taken[step, validate] += 1
        return self._taken[step, validate] <= self._most


@dataclass(frozen=True)
class Episode:
    """What every trace of an episode says about it; verl's names for task and episode are in brackets."""

    step: int
    task: int
    """(`sample_index`)"""
    number: int
    """Among the episodes of the task in this step (`rollout_n`)."""
    validate: bool
    traced: bool


class TracedTeam(Team):
    """A team whose decisions are traced where verl has a backend to trace to."""

    def __init__(self, *args: Any, episode: Episode, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._episode = episode

    async def _sample_and_commit(self, agent: str, prompt: Prompt, score: ScoreFunction | None) -> Candidate:
        episode, turn = self._episode, self._turns[agent]

        async def sample() -> Decision:
            await super(TracedTeam, self)._sample_and_commit(agent, prompt, score)
            return next(made for made in self.decisions if (made.agent, made.turn) == (agent, turn))

        decision = TracedDecision(sample)
        with rollout_trace_attr(
            sample_index=episode.task,
            step=episode.step,
            rollout_n=episode.number,
            name=f"{agent}.turn_{turn}",
            validate=episode.validate,
            trace=episode.traced,
        ):
            await decision.decide(
                agent=agent, turn=turn, policy=self._policy_of[agent], messages=[dict(m) for m in as_messages(prompt)]
            )
        return decision.committed


class TracedDecision:
    """One decision as an operation that verl's trace knows: what goes in, what comes out."""

    def __init__(self, sample: Callable[[], Awaitable[Decision]]) -> None:
        self._sample = sample

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def decide(self, *, agent: str, turn: int, policy: str, messages: list[Message]) -> dict[str, Any]:
        """Samples and commits; returns what the trace shows of it."""
        decision = await self._sample()
        self.committed = decision.candidates[decision.committed]
        return {
            "answer": self.committed.text,
            "committed": decision.committed,
            "candidates": [
                {
                    "text": candidate.text,
                    "tokens": len(candidate.generation.token_ids),
                    "team": candidate.score.team,
                    "local": candidate.score.local,
                    "reward": candidate.reward,
                    "truncated": candidate.generation.truncated,
                }
                for candidate in decision.candidates
            ],
        }
