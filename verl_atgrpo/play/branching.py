"""Branching by replay: a candidate's reward is what becomes of the episode after it.

An episode is a function of its replies. So `run` is played again with the recorded replies up to a decision, one of K
candidates is put in its place, and the episode goes on with fresh samples to its end: a continuation. The candidate's
reward is the mean team reward of its continuations, and the K candidates are the group. No environment is copied, and
none needs a score.

Unbiased: given the decisions before it, all candidates of a group come from the policy, and so does all that follows
them. The episode itself may serve as the first candidate's first continuation, unless its end decided where to branch
(`at: random`). A group's weight is the inverse of the probability, given all that was played, that it is the one which
an episode goes through: 1 / (K x continuations) for every group above it (`nested`), and the number of decisions among
which one was drawn (`at: random`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from verl_atgrpo.play.environment import Environment, play
from verl_atgrpo.play.scoring import lowest_for_errors
from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.types import (
    Candidate,
    Decision,
    EnvironmentConfigError,
    EpisodeFailed,
    EpisodeRecord,
    PlayMode,
    Replayed,
    ReplayError,
)
from verl_atgrpo.play.user_code import gather_or_cancel

MOST_ENDS = 4096
"""Most continuations of an episode with `nested`, whose number is a product over its branch points."""
NONE_COMMITTED = -1
"""`Decision.committed` where the episode went on with a reply that is not among the candidates (`at: random`)."""
MakeTeam = Callable[[PlayMode], Team]
"""The mode of an episode or of a continuation -> a team that plays so."""


class BranchOptions(Protocol):
    """Where an episode branches, and what a candidate is worth: `at_grpo.branch` (`config.schema.BranchSettings`)."""

    @property
    def at(self) -> str | Mapping[str, int]: ...

    @property
    def continuations(self) -> int: ...

    @property
    def nested(self) -> bool: ...

    @property
    def score_weight(self) -> float: ...

    @property
    def min_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...


async def play_branched(
    environment: Environment,
    task: object,
    make_team: MakeTeam,
    options: BranchOptions,
    seed: int,
    frozen: Collection[str] = (),
) -> EpisodeRecord:
    """Plays an episode and its branches; only the groups at branch points are trained.

    Returns the episode's outcome and decisions, those at which it branched with K candidates, and then the groups of
    its continuations. With `at: random` the decision at which it branched is there twice: its K candidates, and the
    episode's own reply.

    Args:
        environment: plays the task.
        task: what to play.
        make_team: makes the team of the episode or of a continuation.
        options: where to branch.
        seed: decides where to branch with `at: random`.
        frozen: policies that are not trained; their decisions are no branch points.

    Raises:
        EnvironmentConfigError: with `nested` it would have more than `MOST_ENDS` continuations.
        EpisodeFailed: a decision failed, the episode has no decision to branch at, or a decision differs when it is
            played again with the same replies.
    """
    tree = _Tree(environment, task, make_team, options, frozen)
    trunk = await tree.play("", {})
    if not trunk.points:
        raise EpisodeFailed("no_branch_point", f"no decision to branch at (at_grpo.branch.at={options.at})")
    if options.nested:
        points = trunk.points[:1]  # the continuations branch at the others
        ends = math.prod(point.k * options.continuations for point in trunk.points)
        if ends > MOST_ENDS:
            raise _too_many(f"{len(trunk.points)} decisions, which makes {ends:,} continuations")
    elif options.at == "random":
        points = [random.Random(stable_hash(seed, "branch")).choice(trunk.points)]
    else:
        points = trunk.points[:1] if options.at == "first" else trunk.points
    # Drawn with probability 1 / n, it stands for all n.
    weight = float(len(trunk.points)) if options.at == "random" else 1.0
    branches = await gather_or_cancel([tree.branch(trunk, point, weight) for point in points])
    groups = {group.name: group for branch in branches for group in branch.groups}
    decisions = []
    for one in trunk.record.decisions:
        group = groups.pop(one.name, None)
        if group is not None:
            decisions.append(group)
        if group is None or group.committed == NONE_COMMITTED:
            decisions.append(replace(one, trained=False))
    return EpisodeRecord([*decisions, *groups.values()], trunk.record.outcome)


def _too_many(what: str) -> EnvironmentConfigError:
    """Returns the error for an episode with more continuations than `MOST_ENDS`."""
    return EnvironmentConfigError(
        f"at_grpo.branch.nested=true: this episode branches at {what}, more than {MOST_ENDS:,}: name fewer decisions "
        "with branch.at: {<agent>: <n>}, lower candidates, or set nested to false"
    )


@dataclass(frozen=True)
class _Path:
    """An episode played to its end."""

    name: str
    team: Team
    record: EpisodeRecord
    points: list[Decision]
    """The decisions at which it may still branch, in the order of their start."""

    @property
    def by_name(self) -> dict[str, Decision]:
        """`<agent>.<turn>` -> decision, without those that scores made."""
        return {f"{one.agent}.{one.turn}": one for one in self.record.decisions if one.scope == self.name}


@dataclass(frozen=True)
class _Branch:
    """A branch point's group, with the groups of its continuations."""

    value: float
    """Mean of the candidates' values, without their own scores."""
    groups: list[Decision]
    """Its own first."""


@dataclass(frozen=True)
class _Tree:
    environment: Environment
    task: object
    make_team: MakeTeam
    options: BranchOptions
    frozen: Collection[str]
    ends: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the episodes that are played."""

    async def play(self, name: str, replayed: Mapping[str, Replayed]) -> _Path:
        """Plays an episode that begins with the replayed decisions."""
        # Continuations may branch at more decisions than the trunk, which ended early.
        if next(self.ends) >= MOST_ENDS and self.options.nested:
            raise _too_many("decisions of its continuations, which makes more continuations")
        # A single candidate selects nothing: its score is called only where it is part of the reward.
        team = self.make_team(
            PlayMode("parallel", scored=self.options.score_weight != 0, path=name, replayed=replayed)
        )
        try:
            path = _Path(name, team, await play(self.environment, self.task, team), [])
            if missing := set(replayed) - set(path.by_name):
                raise ReplayError(f"the decision {min(missing)!r} is not made again")
        except ReplayError as error:
            # Not a defect of the environment where a model's program prints a random number or an address.
            raise EpisodeFailed(
                "not_repeatable",
                f"{type(self.environment).__name__}, played again with the same replies: {error}; run must depend on "
                "nothing but the task and the replies",
            ) from error
        points = [one for key, one in path.by_name.items() if key not in replayed and self._may_branch(one)]
        return replace(path, points=sorted(points, key=lambda one: one.order))

    def _may_branch(self, decision: Decision) -> bool:
        at, most, tokens = self.options.at, self.options.max_tokens, len(decision.prompt_ids)
        named = isinstance(at, str) or at.get(decision.agent) == decision.turn
        trained = decision.trained and decision.policy not in self.frozen
        return trained and named and self.options.min_tokens <= tokens and (most is None or tokens <= most)

    async def branch(self, path: _Path, point: Decision, weight: float) -> _Branch:
        """Puts K candidates in the place of a decision's, and plays their continuations."""
        options, key = self.options, f"{point.agent}.{point.turn}"
        weight_below = weight / (point.k * options.continuations)
        # Where a random point lies depends on what followed the episode's own reply: that one would be biased.
        kept = [] if options.at == "random" else [point.candidates[0].generation]
        fresh = [path.team.sample_candidate(point, number) for number in range(1, 1 + point.k - len(kept))]
        replies = [*kept, *await gather_or_cancel(fresh)]
        before = {
            # As `act` returned it: what settles it later in the episode does so again.
            name: Replayed(one.prompt_ids, path.team.as_acted.get(one.name, one.candidates[one.committed]))
            for name, one in path.by_name.items()
            if one.order < point.order
        }

        async def follow(number: int, continuation: int) -> tuple[Candidate, _Branch]:
            if number < len(kept) and continuation == 0:
                after = replace(path, points=[one for one in path.points if one.order > point.order])
            else:
                reply = Replayed(point.prompt_ids, replies[number])
                after = await self.play(f"{point.name}={number}.{continuation}/", {**before, key: reply})
            return after.by_name[key].candidates[0], await self._worth(after, weight_below)

        numbers = range(point.k)
        played = await gather_or_cancel([follow(n, m) for n in numbers for m in range(options.continuations)])
        scored = lowest_for_errors([candidate for candidate, _ in played[:: options.continuations]])
        candidates, values, inner = [], [], []
        for number, candidate in enumerate(scored):
            of_reply = played[number * options.continuations : (number + 1) * options.continuations]
            value = math.fsum(branch.value for _, branch in of_reply) / options.continuations
            candidates.append(replace(candidate, reward=value + options.score_weight * candidate.reward))
            values.append(value)
            inner += [group for _, branch in of_reply for group in branch.groups]
        committed = 0 if kept else NONE_COMMITTED
        group = replace(point, candidates=tuple(candidates), committed=committed, weight=weight)
        return _Branch(math.fsum(values) / len(values), [group, *inner])

    async def _worth(self, path: _Path, weight: float) -> _Branch:
        """Returns the value of an episode: its team reward, or that of the next branch point with `nested`."""
        if self.options.nested and path.points:
            return await self.branch(path, path.points[0], weight)
        return _Branch(path.record.outcome.team_reward, [])
