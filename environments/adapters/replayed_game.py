"""Games of other packages that several agents play in turn, step by step, until the game says that it is over.

An episode is its seed and the replies committed so far. A candidate is scored by a game of its own, started with that
seed: it plays those replies and then the candidate. So nothing is copied and nothing is shared, whatever the game
keeps inside; but the game must follow from the seed and the replies alone, which is checked at every step.
"""

from __future__ import annotations

import functools
import math
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, Protocol

from verl_atgrpo.environment import Environment, EnvironmentConfigError, Outcome, Score, Split, stable_hash
from verl_atgrpo.environments.adapters.foreign import own_dice
from verl_atgrpo.environments.common.options import check_choice, check_number, check_whole_numbers
from verl_atgrpo.environments.common.splits import draw_for
from verl_atgrpo.team import Team

OnIllegal = Literal["end", "again"]
_ROUNDING = 1e-6
_TOLD = "Your last reply was not a legal action. Give a legal one.\n"


class Refused(Exception):
    """A reply that the game cannot play; the game stands as before."""


@dataclass(frozen=True)
class Move:
    """What a reply came to in the game."""

    rewards: Mapping[str, float]
    """Agent -> what it earned by this move; who is not in it earned nothing."""
    legal: bool = True
    """False if the game took the reply for an invalid move, and went on as its own rules say."""


class LiveGame(Protocol):
    """One running game."""

    def asked(self) -> tuple[str, str] | None:
        """Returns whose turn it is and what that agent sees, or None if the game is over."""
        ...

    def play(self, reply: str) -> Move:
        """Plays the reply of the agent whose turn it is; raises Refused if it cannot be played."""
        ...

    def opening(self) -> str:
        """Returns a text of all that the game holds, before the first move."""
        ...

    def close(self) -> None:
        """Ends the game."""
        ...


@dataclass(frozen=True)
class Position:
    """Where a game stands, and what the last move brought."""

    asked: tuple[str, str] | None
    move: Move = Move({})


class ReplayedGame(Environment):
    """An episode of such a game; subclasses start it."""

    where: str
    """The option that names the game and its value, for messages."""

    def set_rules(
        self,
        agents: Sequence[object],
        team: Sequence[str] | None,
        max_steps: int,
        success_return: float,
        illegal_reward: float,
        on_illegal: OnIllegal,
        shared_openings: bool,
        seed: int,
    ) -> None:
        """Sets what all such games take.

        Args:
            agents: who plays.
            team: the agents whose mean reward is the team's part and whose mean return is the episode's; None: all.
                The others are opponents: they earn their own reward alone.
            max_steps: decisions after which an episode is cut off; it has not succeeded then.
            success_return: the mean return at which an episode that the game itself ended is solved.
            illegal_reward: what a reply that is no legal move earns in both parts; no reward may be less.
            on_illegal: such a reply, if the game has no rule for it, ends the episode, or the agent is asked again.
            shared_openings: deal the same openings in training and validation, for games that have but one.
            seed: tasks derive from it.

        Raises EnvironmentConfigError for a value that does not make sense.
        """
        for agent in agents:
            if not isinstance(agent, str) or not agent.isidentifier():
                raise EnvironmentConfigError(f"{self.where}: its agent {agent!r} is no identifier; rename it")
        self.agents = tuple(map(str, agents))  # type: ignore[misc]  # here they depend on the options
        for agent in team or ():
            if agent not in self.agents:
                raise EnvironmentConfigError(
                    f"at_grpo.environment.team: {agent!r} is not an agent here, use some of {', '.join(self.agents)}"
                )
        check_whole_numbers(max_steps=(max_steps, 1))
        check_number(success_return=success_return, illegal_reward=illegal_reward)
        check_choice("on_illegal", on_illegal, ("end", "again"))
        self.side = tuple(team or self.agents)
        self.max_steps = max_steps
        self.success_return = success_return
        self.illegal_reward = illegal_reward
        self.on_illegal = on_illegal
        self.shared_openings = shared_openings
        self.seed = seed

    @abstractmethod
    def begin(self, seed: int) -> LiveGame:
        """Returns a fresh game, started with `seed`; called with global dice of its own (`own_dice`)."""

    # ------------------------------------------------------------------ tasks

    def task(self, split: Split, index: int) -> int:
        """Returns the seed of game `index` of `split`; splits are disjoint because openings decide theirs."""
        rng = random.Random(stable_hash(self.where, self.seed, split, index))
        if self.shared_openings:
            return rng.getrandbits(31)
        seed: int | None = draw_for(split, functools.partial(rng.getrandbits, 31), self.task_key)
        if seed is None:
            raise EnvironmentConfigError(
                f"{self.where}: its seeds make no opening for the split {split!r}; a game with few openings needs "
                "at_grpo.environment.shared_openings=true and at_grpo.allow_overlap=true"
            )
        return seed

    def fingerprint(self, task: int) -> str:
        """Returns a hash of all that the game holds at its opening, whatever its seed."""
        with own_dice(task), closing(self.begin(task)) as game:
            return f"{stable_hash(game.opening()):016x}"

    def check_steady(self) -> None:
        """Raises EnvironmentConfigError if one seed makes two openings, or all seeds the same one."""
        seeds = [random.Random(stable_hash("steady", number)).getrandbits(31) for number in range(12)]
        openings = [self.fingerprint(seed) for seed in seeds]
        if self.fingerprint(seeds[0]) != openings[0] or self._start(seeds[0]) != self._start(seeds[0]):
            raise self._unsteady()
        if len(set(openings)) == 1 and not self.shared_openings:
            raise EnvironmentConfigError(
                f"{self.where}: all its seeds make the same opening, so training and validation would be the same; "
                "at_grpo.environment.shared_openings=true and at_grpo.allow_overlap=true accept that"
            )

    def _unsteady(self) -> EnvironmentConfigError:
        return EnvironmentConfigError(
            f"{self.where} is not repeatable: the same seed and replies led elsewhere; let every draw in it derive "
            "from reset(seed=...)"
        )

    # ------------------------------------------------------------------ an episode

    async def run(self, task: int, team: Team) -> Outcome:
        """Plays one episode; success means that the game ended with at least `success_return` for the team."""
        replies: tuple[str, ...] = ()
        position = self._start(task)
        returns = dict.fromkeys(self.agents, 0.0)
        steps = illegal = 0
        refused = False
        while position.asked and steps < self.max_steps and not (refused and self.on_illegal == "end"):
            agent, seen = position.asked
            # Equal replies are played once, and the committed one is not played again.
            follow = functools.cache(functools.partial(self.follow, task, replies, position))
            reply = await team[agent].act(
                _TOLD + seen if refused else seen, functools.partial(self._score, agent, follow)
            )
            after = follow(reply.text)
            steps += 1
            refused = after is None
            illegal += after is None or not after.move.legal
            if after is None:
                returns[agent] += self.illegal_reward
                continue
            for name, reward in after.move.rewards.items():
                returns[name] += reward
            replies, position = (*replies, reply.text), after
        mean = sum(returns[name] for name in self.side) / len(self.side)
        success = position.asked is None and mean >= self.success_return - _ROUNDING
        metrics = {"steps": float(steps), "illegal": float(illegal)}
        return Outcome(success, mean, metrics | {f"return_{name}": total for name, total in returns.items()})

    def _start(self, seed: int) -> Position:
        with own_dice(seed), closing(self.begin(seed)) as game:
            return Position(game.asked())

    def follow(self, seed: int, replies: Sequence[str], position: Position, reply: str) -> Position | None:
        """Returns the position after `reply`, or None if it cannot be played.

        Args:
            seed: the game's.
            replies: those that led to `position`.
            position: where the game should stand then.
            reply: what is tried there.

        Raises EnvironmentConfigError if the game does not stand there.
        """
        with own_dice(seed), closing(self.begin(seed)) as game:
            for earlier in replies:
                if game.asked() is None:
                    raise self._unsteady()
                try:
                    game.play(earlier)
                except Refused as error:
                    raise self._unsteady() from error
            if game.asked() != position.asked:
                raise self._unsteady()
            try:
                move = game.play(reply)
            except Refused:
                return None
            for agent, reward in move.rewards.items():
                self._check_reward(agent, reward)
            return Position(game.asked(), move)

    def _check_reward(self, agent: str, reward: float) -> None:
        if not math.isfinite(reward) or reward < self.illegal_reward:
            raise EnvironmentConfigError(
                f"at_grpo.environment.illegal_reward={self.illegal_reward}: {agent!r} earned {reward}; rewards are "
                "finite, and none is less than that of an illegal reply: lower it"
            )

    def _score(self, agent: str, follow: functools._lru_cache_wrapper[Position | None], reply: str) -> Score:
        after = follow(reply)
        if after is None or not after.move.legal:
            return Score(team=self.illegal_reward, local=self.illegal_reward)
        rewards = after.move.rewards
        team = sum(rewards.get(name, 0.0) for name in self.side) / len(self.side) if agent in self.side else 0.0
        return Score(team=team, local=rewards.get(agent, 0.0))
