"""verl's rollout trace (`actor_rollout_ref.rollout.trace`): one trace per decision."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl.utils.rollout_trace import rollout_trace_attr, rollout_trace_op

from verl_atgrpo.play.decision import Ask
from verl_atgrpo.play.messages import Message, as_messages
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.types import Decision


class TraceBudget:
    """Limits the tasks that a worker traces per step and per validation."""

    def __init__(self, limit: int | None) -> None:
        """`limit` is `trace.max_samples_per_step_per_worker`; None traces every task."""
        self._limit = limit
        self._taken: Counter[tuple[int, bool]] = Counter()

    def take(self, step: int, validate: bool) -> bool:
        """Counts a task of a step, and returns whether it is traced."""
        if self._limit is None:
            return True
        self._taken = Counter({key: count for key, count in self._taken.items() if key[0] == step})
        self._taken[step, validate] += 1
        return self._taken[step, validate] <= self._limit


class TracedTeam(Team):
    """A team that sends its decisions to verl's trace backend."""

    def __init__(self, *args: Any, attributes: Mapping[str, Any], **kwargs: Any) -> None:
        """`attributes` are those of every trace of the episode, as `rollout_trace_attr` takes them."""
        super().__init__(*args, **kwargs)
        self._attributes = attributes

    async def _sample_and_commit(self, decision: Decision, ask: Ask) -> Decision:
        traced = TracedDecision(functools.partial(super()._sample_and_commit, decision, ask))
        with rollout_trace_attr(name=f"{decision.scope}{decision.agent}.turn_{decision.turn}", **self._attributes):
            await traced.decide(
                agent=decision.agent,
                turn=decision.turn,
                policy=decision.policy,
                messages=[dict(message) for message in as_messages(ask.prompt)],
            )
        return traced.decision


class TracedDecision:
    """One decision as an operation of verl's trace, with its inputs and outputs."""

    def __init__(self, sample: Callable[[], Awaitable[Decision]]) -> None:
        self._sample = sample

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def decide(self, *, agent: str, turn: int, policy: str, messages: list[Message]) -> dict[str, Any]:
        """Makes the decision and returns what the trace shows of it."""
        self.decision = decision = await self._sample()
        return {
            "answer": decision.candidates[decision.committed].generation.text,
            "committed": decision.committed,
            "candidates": [
                {
                    "text": candidate.generation.text,
                    "tokens": len(candidate.generation.token_ids),
                    "team": candidate.score.team,
                    "local": candidate.score.local,
                    "reward": candidate.reward,
                    "truncated": candidate.generation.truncated,
                }
                for candidate in decision.candidates
            ],
        }
