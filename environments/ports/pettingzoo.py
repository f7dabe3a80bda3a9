"""PettingZoo's agent-environment-cycle games (https://pettingzoo.farama.org/api/aec/)."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from verl_atgrpo import EnvironmentConfigError, stable_hash
from verl_atgrpo.environments.common.options import check_installed, option_error, with_options
from verl_atgrpo.environments.common.replies import last_line
from verl_atgrpo.environments.common.workflow import Style
from verl_atgrpo.environments.ports.foreign import FAULTS, canonical, line, load, seeded, unseeded
from verl_atgrpo.environments.ports.replayed_game import Move, Refused, ReplayedGame

_MARK = "Action:"
_LABEL = re.compile(_MARK, re.IGNORECASE)
_MARKUP = " *_`<>[]()\"'$"
_LISTED = 100
"""Most actions that a prompt lists one by one if none is masked."""
_TRIED = 8
"""Steps of the game that the check at the start plays twice."""


@with_options
class PettingZooGame(ReplayedGame):
    """An AEC environment with text observations and with actions from Discrete or Text spaces."""

    env: str = ""
    """`module:function`, which returns the environment, or a module of PettingZoo."""
    options: Mapping[str, Any] | None = None
    """Keyword arguments of that function."""
    actions: Sequence[str | int] | None = None
    """Names of the actions of a Discrete space, in order; by default numbers."""
    observe: str | None = None
    """`module:function`: (agent, observation) -> the text that the agent sees."""
    task_key: str | None = None  # type: ignore[assignment]  # the method of this name is set below
    """`module:function`: the environment after its reset -> a text that no action changes, by which tasks are split;
    by default the whole opening."""
    style: Style = "full"
    """`full` prompts explain the form of an answer, whose last line is read; with `compact` the reply is the
    action."""

    def __post_init__(self) -> None:
        check_installed("pettingzoo", "PettingZoo", "pettingzoo")
        self.where = f"at_grpo.environment.env={self.env!r}"
        self._make = load("env", self.env, "env")
        self.seen = load("observe", self.observe) if self.observe is not None else None
        self._key = load("task_key", self.task_key) if self.task_key is not None else None
        del self.task_key  # so that the name is the method's again, or a subclass's own
        self._options = dict(self.options or {})
        self.names = None if self.actions is None else tuple(map(str, self.actions))
        self.full = self.style == "full"
        self.set_agents(self._check_env())
        self.check_deterministic()
        self._check_steps()

    def begin(self, seed: int) -> _Running:
        """Returns the environment after reset(seed=seed)."""
        env = self._make(**self._options)
        env.reset(seed=seed)
        return _Running(env, self, seed)

    def _task_key(self, task: int) -> str:
        """Returns what the option `task_key` returns for a game after its reset, or the fingerprint."""
        if self._key is None:
            return self.fingerprint(task)
        with seeded(task), closing(self.begin(task)) as game:
            return str(self._key(game.env))

    def _check_env(self) -> Sequence[object]:
        """Returns the agents of the environment; raises EnvironmentConfigError if it has no text interface."""
        from gymnasium.spaces import Discrete, Text
        from pettingzoo import AECEnv

        names = self.names or ()
        if len({name.casefold() for name in names if name and name == name.strip()}) < len(names):
            raise option_error(f"actions={[*names]}: name each differently in lower case too, without spaces around")
        try:
            with seeded(0):
                env = self._make(**self._options)
        except FAULTS as error:
            raise EnvironmentConfigError(
                f"{self.where}, options={self._options}: cannot be made, {line(error)}"
            ) from error
        if not isinstance(env, AECEnv):
            raise EnvironmentConfigError(
                f"{self.where}: returns a {type(env).__name__}, not an AECEnv; wrap a parallel environment in "
                "pettingzoo.utils.parallel_to_aec"
            )
        try:
            for agent in env.possible_agents:
                space = env.action_space(agent)
                if not isinstance(space, Discrete | Text):
                    raise EnvironmentConfigError(
                        f"{self.where}: the action space of {agent!r} is {space}; use Discrete or Text"
                    )
                if self.names is not None and (not isinstance(space, Discrete) or space.n != len(self.names)):
                    raise option_error(
                        f"actions names {len(self.names)} actions, the action space of {agent!r} is {space}; name "
                        "each action of a Discrete space, or leave actions out"
                    )
            return list(env.possible_agents)
        finally:
            env.close()

    def _check_steps(self) -> None:
        """Plays a game of random actions, each step twice; raises EnvironmentConfigError if the results differ."""
        rng = random.Random(stable_hash("steps", self.seed))
        seed = rng.getrandbits(31)
        replies: list[str] = []
        position = self._start(seed)
        while position.asked and len(replies) < min(_TRIED, self.max_steps):
            with seeded(seed):
                game = self.begin(seed)
                for earlier in replies:
                    game.asked()
                    game.play(earlier)
                game.asked()
                reply = game.any_reply(rng)
                game.close()
            if reply is None:
                return
            after, again = (self.follow(seed, replies, position, reply) for _ in range(2))
            if after is None or after != again:
                raise self._not_deterministic()
            replies.append(reply)
            position = after


PettingZooGame.task_key = PettingZooGame._task_key  # type: ignore[method-assign,assignment]


class _Running:
    """One game in progress."""

    def __init__(self, env: Any, form: PettingZooGame, seed: int) -> None:
        self._env, self._form, self._seed = env, form, seed
        self.env = env.unwrapped
        self._legal: dict[str, int] | None = None
        """Name -> action, of a Discrete space; None for a Text space."""

    def asked(self) -> tuple[str, str] | None:
        env = self._env
        while env.agents:
            observation, _, terminated, truncated, info = env.last()
            if not terminated and not truncated:
                agent: str = env.agent_selection
                return agent, self._question(agent, observation, info)
            env.step(None)  # the interface requires this for an agent that is done
        return None

    def _question(self, agent: str, observation: Any, info: Mapping[str, Any]) -> str:
        mask = info.get("action_mask")
        if isinstance(observation, Mapping) and "observation" in observation:
            mask = observation.get("action_mask", mask)
            observation = observation["observation"]
        text = observation if self._form.seen is None else self._form.seen(agent, observation)
        if not isinstance(text, str):
            raise EnvironmentConfigError(
                f"{self._form.where}: {agent!r} observes a {type(text).__name__}, not a text; "
                "at_grpo.environment.observe='module:function' can convert (agent, observation) to text"
            )
        space = self._env.action_space(agent)
        self._legal, listed = None, []
        if hasattr(space, "n"):
            names = self._form.names or [str(space.start + number) for number in range(space.n)]
            numbers = [number for number in range(space.n) if mask is None or mask[number]]
            listed = [names[number] for number in numbers]
            # casefold: models write Left for left
            self._legal = {names[number].casefold(): int(space.start) + number for number in numbers}
        if not self._form.full:
            return text if mask is None else f"{text}\n{' '.join(listed)}"
        if self._legal is not None and mask is None and len(listed) > _LISTED:
            listed = [f"{listed[0]} to {listed[-1]}"]
        actions = "" if self._legal is None else f"Legal actions: {', '.join(listed)}\n"
        return f"{text}\n\n{actions}End with one line of the form '{_MARK} <your action>'."

    def _action(self, reply: str) -> int | str:
        text = reply.strip()
        if self._form.full:
            line = last_line(text)
            label = _LABEL.search(line)
            if label is None or (mark := line[: label.start()]).strip(_MARKUP):
                raise Refused
            text = line[label.end() :].strip().strip(mark).strip()
        if self._legal is not None:
            if self._form.full and text.casefold() not in self._legal:
                text = text.strip(f"{_MARKUP}.")
            if text.casefold() not in self._legal:
                raise Refused
            return self._legal[text.casefold()]
        if not self._env.action_space(self._env.agent_selection).contains(text):
            raise Refused
        return text

    def any_reply(self, rng: random.Random) -> str | None:
        """Returns a legal reply, or None where actions are texts."""
        return f"{_MARK if self._form.full else ''} {rng.choice(list(self._legal))}" if self._legal else None

    def play(self, reply: str) -> Move:
        self._env.step(self._action(reply))
        return Move({agent: float(reward) for agent, reward in self._env.rewards.items()})

    def opening(self) -> str:
        env = self._env
        return canonical([unseeded(env.unwrapped, self._seed), [env.observe(agent) for agent in env.agents]])

    def close(self) -> None:
        self._env.close()
