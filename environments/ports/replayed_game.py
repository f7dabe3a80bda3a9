"""Turn-based games of other packages: rules and episodes (`TurnGame`), and scores by replay (`ReplayedGame`).

The state of an episode is its seed and the replies committed so far. A candidate is scored in a new game that is
reset with that seed, plays those replies and then the candidate. So the game's state is never copied or shared, but it
must be a function of seed and replies; this is checked at every step.
"""

from __future__ import annotations

import functools
import logging
import math
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from annotated_types import Ge, Le

from verl_atgrpo import Environment, EnvironmentConfigError, Message, Outcome, Score, Split, Team, stable_hash
from verl_atgrpo.environments.common.options import option_error, with_options
from verl_atgrpo.environments.common.splits import draw_for
from verl_atgrpo.environments.ports.foreign import FAULTS, line, seeded
from verl_atgrpo.kinds import Finite

OnIllegal = Literal["end", "again"]
Side = Sequence[str] | Literal["turns"] | None
"""Whose return counts."""
Steps = Annotated[int, Ge(1), Le(10_000)]
"""Decisions of an episode; each is scored by playing those before it again."""
logger = logging.getLogger(__name__)

_ROUNDING = 1e-6
_SEEDS = tuple(random.Random(stable_hash("steady", number)).getrandbits(31) for number in range(12))
"""Of the openings that are compared at the start."""
_AFTER_ILLEGAL = "Your last reply was not a legal action. Give a legal one.\n"


class Refused(Exception):
    """The game cannot play a reply; its state is unchanged."""


@dataclass(frozen=True)
class Move:
    """Result of a reply in the game."""

    rewards: Mapping[str, float]
    """Agent -> its reward for this move; 0 if missing."""
    legal: bool = True
    """False if the game called the move invalid and went on by its own rules."""


class LiveGame(Protocol):
    """One game in progress."""

    def asked(self) -> tuple[str, str] | None:
        """Returns the agent whose turn it is and its prompt, or None if the game is over."""

    def play(self, reply: str) -> Move:
        """Plays a reply of the agent whose turn it is; raises Refused if that is impossible."""

    def opening(self) -> str:
        """Returns the game's whole state before the first move, as text."""

    def close(self) -> None:
        """Ends the game."""


@dataclass(frozen=True)
class Position:
    """Whose turn it is with its prompt, and the result of the last move."""

    asked: tuple[str, str] | None
    move: Move = Move({})


After = Callable[[Sequence[str], Position, str], Awaitable[Position | None]]
"""The legal replies of an episode, the position that they led to and a reply there -> the position after it, or None
if it cannot be played."""


@with_options
class TurnGame(Environment):
    """A turn-based game; subclasses play replies."""

    where = ""
    """The option that names the game, with its value, for messages."""
    origin = ""
    """What the tasks' seeds derive from; by default `where`."""
    history = False
    """Whether an agent's prompt begins with its earlier prompts and replies."""

    team: Side = None
    """Agents whose mean reward is the team's part and whose mean return is the episode's; null: all. The others have
    their own reward only. `turns`: a single one, another in every task, and the others are its opponents
    (docs/self_play.md)."""
    max_steps: Steps = 50
    """Decisions after which an episode ends without success."""
    success_return: Finite = 1.0
    """Least mean return of a success."""
    illegal_reward: Finite = -1.0
    """Team and local reward of an illegal reply; no reward may be less."""
    on_illegal: OnIllegal = "end"
    """What follows an illegal reply for which the game has no rule."""
    shared_openings: bool = False
    """Allows the same openings in training and validation, for games that have only one."""
    seed: int = 0
    """Tasks derive from it."""

    def set_agents(self, agents: Sequence[object]) -> None:
        """Sets the names of the players; raises EnvironmentConfigError if they or the option `team` are invalid."""
        for agent in agents:
            if not isinstance(agent, str) or not agent.isidentifier():
                raise EnvironmentConfigError(f"{self.where}: its agent {agent!r} is no identifier; rename it")
        self.agents = tuple(map(str, agents))  # type: ignore[misc]  # depend on the options
        self.in_turn = self.team == "turns"
        if self.in_turn and len(self.agents) < 2:
            raise option_error(f"team='turns': {self.agents[0]!r} has no opponent here; leave it out")
        team = self.agents if self.team is None or isinstance(self.team, str) else self.team
        for agent in team:
            if agent not in self.agents:
                raise option_error(f"team: {agent!r} is not an agent here, use some of {', '.join(self.agents)}")
        self._team = tuple(team) or self.agents

    def side(self, task: int) -> tuple[str, ...]:
        """Returns the agents whose return counts in a game."""
        return (self.agents[task % len(self.agents)],) if self.in_turn else self._team

    def opponents(self, task: int) -> Sequence[str]:
        """Returns those that play against a single one (`team: turns`); none otherwise."""
        return [agent for agent in self.agents if agent not in self.side(task)] if self.in_turn else ()

    @abstractmethod
    def episode(self, seed: int) -> AbstractAsyncContextManager[tuple[Position, After]]:
        """Opens a game: its first position, and what plays replies in it."""

    # ------------------------------------------------------------------ tasks

    def task(self, split: Split, index: int) -> int:
        """Returns the seed of game `index` of `split`; splits are disjoint because the opening decides the split."""
        rng = random.Random(stable_hash(self.origin or self.where, self.seed, split, index))
        if self.shared_openings:
            return rng.getrandbits(31)
        seed: int | None = draw_for(split, functools.partial(rng.getrandbits, 31), self.task_key)
        if seed is None:
            raise EnvironmentConfigError(
                f"{self.where}: found no opening for the split {split!r}; a game with few openings needs "
                "at_grpo.environment.shared_openings=true and at_grpo.allow_overlap=true"
            )
        return seed

    def check_openings(self) -> None:
        """Raises EnvironmentConfigError if one seed gives two openings, or all seeds the same one."""
        openings = [self.fingerprint(seed) for seed in _SEEDS]
        if self.fingerprint(_SEEDS[0]) != openings[0]:
            raise self._not_deterministic()
        if len(set(openings)) == 1 and not self.shared_openings:
            raise EnvironmentConfigError(
                f"{self.where}: all its seeds make the same opening, so training and validation would be the same; "
                "at_grpo.environment.shared_openings=true with at_grpo.allow_overlap=true allows that"
            )

    def _not_deterministic(self) -> EnvironmentConfigError:
        return EnvironmentConfigError(
            f"{self.where} is not deterministic: the same seed and replies gave another state; derive all its random "
            "numbers from reset(seed=...)"
        )

    # ------------------------------------------------------------------ an episode

    async def run(self, task: int, team: Team) -> Outcome:
        """Plays one episode; success means that the game ended with at least `success_return` for the team."""
        async with self.episode(task) as (position, after):
            return await self._play(task, team, position, after)

    async def _play(self, task: int, team: Team, position: Position, play: After) -> Outcome:
        replies: tuple[str, ...] = ()
        said: dict[str, list[Message]] = {agent: [] for agent in self.agents}
        returns = dict.fromkeys(self.agents, 0.0)
        steps, illegal, side = 0, 0, self.side(task)
        refused = False
        while position.asked and steps < self.max_steps and not (refused and self.on_illegal == "end"):
            agent, seen = position.asked
            known: dict[str, Position | None] = {}  # the committed reply is not played again

            async def follow(
                reply: str,
                known: dict[str, Position | None] = known,
                replies: Sequence[str] = replies,
                position: Position = position,
            ) -> Position | None:
                if reply not in known:
                    known[reply] = await play(replies, position, reply)
                return known[reply]

            shown = _AFTER_ILLEGAL + seen if refused else seen
            asked: Message = {"role": "user", "content": shown}
            reply = await team[agent].act(
                [*said[agent], asked] if self.history else shown, functools.partial(self._score, agent, side, follow)
            )
            said[agent] += [asked, {"role": "assistant", "content": reply.text}]
            after = await follow(reply.text)
            steps += 1
            refused = after is None
            illegal += after is None or not after.move.legal
            if after is None:
                returns[agent] += self.illegal_reward
                if agent not in side and self.on_illegal == "end":  # as if the side had played the move that wins
                    returns |= {name: returns[name] - self.illegal_reward for name in side}
                continue
            for name, reward in after.move.rewards.items():
                returns[name] += reward
            replies, position = (*replies, reply.text), after
        mean = _mean([returns[name] for name in side])
        lost = refused and self.on_illegal == "end"  # by whose reply the game has no rule for
        over = position.asked is None or (lost and position.asked[0] not in side)
        success = over and mean >= self.success_return - _ROUNDING
        metrics = {"steps": float(steps), "illegal": float(illegal)}
        return Outcome(success, mean, metrics | {f"return_{name}": total for name, total in returns.items()})

    def _check_reward(self, agent: str, reward: float) -> None:
        if not math.isfinite(reward) or reward < self.illegal_reward:
            raise option_error(
                f"illegal_reward={self.illegal_reward}: {agent!r} earned {reward}; rewards are finite, and none is "
                "less than that of an illegal reply: lower it"
            )

    async def _score(
        self, agent: str, side: Sequence[str], follow: Callable[[str], Awaitable[Position | None]], reply: str
    ) -> Score:
        after = await follow(reply)
        if after is None or not after.move.legal:
            return Score(team=self.illegal_reward, local=self.illegal_reward)
        rewards = after.move.rewards
        team = _mean([rewards.get(name, 0.0) for name in side]) if agent in side else 0.0
        return Score(team=team, local=rewards.get(agent, 0.0))


def _mean(values: Sequence[float]) -> float:
    """Returns the mean; of equal values it is that value to the last bit, so that shared rewards stay the game's."""
    return values[0] if len({*values}) == 1 else sum(values) / len(values)


class ReplayedGame(TurnGame):
    """A turn-based game that is scored by replay; subclasses start games."""

    @abstractmethod
    def begin(self, seed: int) -> LiveGame:
        """Returns a new game, reset with `seed`; called inside `seeded`."""

    def fingerprint(self, task: int) -> str:
        """Returns a hash of the game's whole state at its opening; the seed is not part of it."""
        with seeded(task), closing(self.begin(task)) as game:
            return f"{stable_hash(game.opening()):016x}"

    def check_deterministic(self) -> None:
        """Raises EnvironmentConfigError as `check_openings`, or if one seed gives two first prompts."""
        self.check_openings()
        if self._start(_SEEDS[0]) != self._start(_SEEDS[0]):
            raise self._not_deterministic()

    def episode(self, seed: int) -> AbstractAsyncContextManager[tuple[Position, After]]:
        """Returns the first position and `after`: every reply is played in a game of its own."""
        return nullcontext((self._start(seed), functools.partial(self.after, seed)))

    def _start(self, seed: int) -> Position:
        with seeded(seed), closing(self.begin(seed)) as game:
            return Position(game.asked())

    async def after(self, seed: int, replies: Sequence[str], position: Position, reply: str) -> Position | None:
        """Returns `follow` of the same; games that read texts play it elsewhere, under limits."""
        return self.follow(seed, replies, position, reply)

    def follow(self, seed: int, replies: Sequence[str], position: Position, reply: str) -> Position | None:
        """Returns the position after `reply`, or None if it cannot be played.

        Args:
            seed: the game's.
            replies: the replies that led to `position`.
            position: the expected position after `replies`.
            reply: the reply to play there.

        Raises EnvironmentConfigError if the replay ends at another position.
        """
        with seeded(seed), closing(self.begin(seed)) as game:
            for earlier in replies:
                if game.asked() is None:
                    raise self._not_deterministic()
                try:
                    game.play(earlier)
                except (Refused, *FAULTS) as error:
                    raise self._not_deterministic() from error
            if game.asked() != position.asked:
                raise self._not_deterministic()
            try:
                move = game.play(reply)
            except Refused:
                return None
            except FAULTS as error:
                # A defect of the game; a reply must not end the run.
                logger.warning("%s raises on a reply, which counts as illegal: %s", self.where, line(error))
                return None
            for agent, reward in move.rewards.items():
                self._check_reward(agent, reward)
            return Position(game.asked(), move)
