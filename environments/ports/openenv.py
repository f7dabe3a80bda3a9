"""Environments that OpenEnv's servers serve (https://github.com/huggingface/OpenEnv), for one or several agents.

This process speaks the protocol itself: only the server's needs the package. An episode has one session. Where K
candidates are scored, the session is reset with the episode's seed for each, plays the replies before and then the
candidate; where there is one, as in evaluation and with `scheme: parallel`, it simply goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from annotated_types import Ge, Gt, Le

from verl_atgrpo import EnvironmentConfigError, EpisodeFailed, stable_hash
from verl_atgrpo.environments.common.options import option_error, with_options
from verl_atgrpo.environments.ports.foreign import FAULTS, canonical, line, load
from verl_atgrpo.environments.ports.openenv_server import Refusal, Result, Session, server_of
from verl_atgrpo.environments.ports.replayed_game import After, Move, Position, Refused, TurnGame, logger
from verl_atgrpo.kinds import Text
from verl_atgrpo.play.types import float_of

_OURS = ("metadata", "done", "reward")
"""Fields of all observations and actions, which are no content."""
_JSON = ("integer", "number", "boolean", "array", "object")


@with_options
class OpenEnvGame(TurnGame):
    """An environment of an OpenEnv server; agents act on it one after the other."""

    origin = "openenv"

    app: Text | None = None
    """ "module:app" of a server that this process starts and ends, without a container."""
    url: Text | None = None
    """In place of `app`, http(s)://... of a server that runs already."""
    python: Text | None = None
    """The interpreter that has the app's packages; null: this one."""
    folder: Text | None = None
    """Where the app is imported and runs; null: here."""
    variables: Mapping[str, Any] | None = None
    """Further environment variables of the app."""
    reset: Mapping[str, Any] | None = None
    """Further arguments of every reset."""
    agents: Sequence[str] = ("player",)  # type: ignore[assignment,misc]  # here an option
    """Their names."""
    turn: Text | None = None
    """The observation's field with the name or number of the agent that acts next; null: in turns."""
    observe: Text | None = None
    """The field of the observation that is the prompt, or "module:function": (agent, observation) -> text. Null: its
    only text, or the whole as JSON."""
    action: Text | None = None
    """The field of the action that is the reply, "json" for a reply that is the action, or "module:function": (agent,
    reply) -> action. Null: the only required field."""
    rewards: Text = "shared"
    """Who gets the reward of a step: "shared" for all agents, "acting" for the one that acted, or the observation's
    field with all rewards, by name or in the order of `agents`."""
    history: bool = False  # type: ignore[misc]
    """Whether a prompt is the agent's chat so far."""
    replays: bool = True
    """Whether seed and actions determine observations and rewards; false: `scheme: parallel` only."""
    sessions: Annotated[int, Ge(1), Le(10_000)] = 64
    """Episodes of a process at once on the server."""
    timeout: Annotated[float, Gt(0), Le(3600)] = 60.0
    """Seconds for an answer of the server."""

    def __post_init__(self) -> None:
        app, url = self.app, self.url
        self.where = f"at_grpo.environment.app={app!r}" if url is None else f"at_grpo.environment.url={url!r}"
        if (app is None) == (url is None) or not (url or "http://").startswith(("http://", "https://")):
            raise EnvironmentConfigError(f"{self.where}: set either app='module:app' or url='http://host:port'")
        if not self.replays and self.on_illegal == "again":
            raise option_error(
                "replays=false: what an illegal action has changed could not be undone; set on_illegal: end"
            )
        for option in ("python", "folder", "variables"):
            if url is not None and (value := getattr(self, option)) is not None:
                raise option_error(f"{option}={value!r}: has no effect on a url")
        if "seed" in (self.reset or {}):
            raise option_error(f"reset={self.reset!r}: every task has its own seed; remove it")
        for name, value in (self.variables or {}).items():
            if value is None:
                raise option_error(f"variables.{name}=null: give a text, or leave it out")
        if not self.agents:
            raise option_error("agents=[]: name at least one, such as player")
        told = tuple((name, str(value)) for name, value in (self.variables or {}).items())
        self._server = server_of(os.getpid(), self.where, url, app, self.python, self.folder, told)
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self.set_agents(self.agents)
        if not self.replays:
            # Branches play the replies before them again, too.
            self.schemes = dict.fromkeys(self.agents, ("parallel",))  # type: ignore[misc]
        try:
            self._read_schema()
            self._check_sessions()
            if self.replays:
                self.check_openings()
        except EpisodeFailed as failed:
            raise EnvironmentConfigError(str(failed)) from failed

    def _read_schema(self) -> None:
        observe, action = self.observe, self.action
        schema = self._server.ask("/schema", seconds=self.timeout)
        try:
            seen, taken = _properties(schema["observation"]), _properties(schema["action"])
        except FAULTS as error:
            raise self._server.failed(f"has no schema as OpenEnv's: {line(error)}") from error
        texts = [name for name, kind in seen.items() if kind == "string"]
        self._convert = load("observe", observe) if observe is not None and ":" in observe else None
        self._field = observe or (texts[0] if len(texts) == 1 else None)
        self._act = load("action", action) if action is not None and ":" in action else None
        required = [name for name in schema["action"].get("required", taken) if name in taken]
        if action is None and len(required) != 1:
            raise option_error(
                f"action=null: {self.where} needs {', '.join(required) or 'no field'} of it; set one of "
                f"{', '.join(taken)}, or 'json', or 'module:function'"
            )
        self._into = action or required[0]
        self._seen = seen
        if self._act is None and self._into not in (*taken, "json"):
            raise option_error(f"action={action!r}: {self.where} has no such field, but {', '.join(taken)}")
        self._is_json = taken.get(self._into) in _JSON

    def _check_sessions(self) -> None:
        """Resets one session, and if there may be more a second at once, in which nothing may differ."""

        async def opened() -> list[Result]:
            async with AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(Session(self._server, self.timeout, self.sessions))
                    for _ in range(min(2, self.sessions))
                ]
                return [await session.reset(self._arguments(0)) for session in sessions]

        with ThreadPoolExecutor(1) as thread:  # here a loop may run already
            first, *others = thread.submit(asyncio.run, opened()).result()
        if self.replays and any(canonical(other) != canonical(first) for other in others):
            raise self._not_deterministic()
        self.position(first, 0)
        if self.rewards not in ("shared", "acting", *self._seen):  # a field may be in no schema, but be observed
            self._of(first, "rewards", self.rewards)

    def _arguments(self, seed: int) -> dict[str, Any]:
        return {**(self.reset or {}), "seed": seed}

    def _not_deterministic(self) -> EnvironmentConfigError:
        return EnvironmentConfigError(
            f"{self.where} is not deterministic: the same seed and replies gave another state; derive all its random "
            "numbers from reset(seed=...), or set at_grpo.environment.replays=false and at_grpo.scheme=parallel"
        )

    def fingerprint(self, task: int) -> str:
        """Returns a hash of the first observation; the seed if that does not decide it (`replays`)."""
        if not self.replays:
            return str(task)
        answer = self._server.ask("/reset", self._arguments(task), seconds=self.timeout)
        return f"{stable_hash(canonical(Result.of(answer).observation)):016x}"

    @asynccontextmanager
    async def episode(self, seed: int) -> AsyncIterator[tuple[Position, After]]:  # type: ignore[override]
        """Opens a session when one is free, resets it and closes it at the end."""
        free = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.sessions))
        async with free, Session(self._server, self.timeout, self.sessions) as session:
            playing = _Playing(self, session, self._arguments(seed))
            yield await playing.reset(), playing.after

    # ------------------------------------------------------------------ between texts and the server

    def position(self, result: Result, steps: int) -> Position:
        """Returns whose turn it is after so many steps, with its prompt; no rewards.

        Raises EnvironmentConfigError if the observation has not the fields that the options name.
        """
        if result.done:
            return Position(None)
        turn: Any = steps % len(self.agents) if self.turn is None else self._of(result, "turn", self.turn)
        if isinstance(turn, int) and not isinstance(turn, bool) and 0 <= turn < len(self.agents):
            turn = self.agents[turn]
        if turn not in self.agents:
            raise option_error(
                f"turn={self.turn!r}: the observation says {turn!r}; it has to be one of {', '.join(self.agents)} or "
                "its number from 0"
            )
        if self._convert is not None:
            seen = self._convert(turn, result.observation)
        else:
            seen = self._of(result, "observe", self._field) if self._field else result.observation
        return Position((turn, seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)))

    def action_of(self, agent: str, reply: str) -> Mapping[str, Any]:
        """Returns the action that a reply stands for; raises Refused if it is none."""
        try:
            if self._act is not None:
                action = self._act(agent, reply)
            elif self._into == "json":
                action = json.loads(reply)
            else:
                action = {self._into: json.loads(reply) if self._is_json else reply.strip()}
        except FAULTS as error:  # a function of the user's meets replies that it did not think of
            raise Refused from error
        if not isinstance(action, Mapping):
            raise Refused
        return action

    def move(self, agent: str, result: Result) -> Move:
        """Returns the rewards of a step; raises EnvironmentConfigError for what is none, or less than allowed."""
        if self.rewards in ("shared", "acting"):
            given: Any = dict.fromkeys(self.agents if self.rewards == "shared" else (agent,), result.reward)
        else:
            given = self._of(result, "rewards", self.rewards)
        try:
            given = given if isinstance(given, Mapping) else dict(zip(self.agents, given, strict=True))
            rewards = {name: 0.0 if value is None else float_of(value, "reward") for name, value in given.items()}
        except (TypeError, ValueError) as error:
            raise EnvironmentConfigError(f"{self.where}: the rewards {given!r:.80} are none: {line(error)}") from error
        for name, reward in rewards.items():
            if name not in self.agents:
                raise option_error(f"rewards={self.rewards!r}: has one of {name!r}, which is not in agents")
            self._check_reward(name, reward)
        return Move(rewards)

    def _of(self, result: Result, option: str, name: str) -> Any:
        if name not in result.observation:
            raise option_error(
                f"{option}={name!r}: {self.where} observes no such field, but {', '.join(result.observation)}"
            )
        return result.observation[name]


def _properties(schema: Mapping[str, Any]) -> dict[str, str | None]:
    """Returns the fields of a JSON schema and their types; None for one that may have several."""

    def kind(field: Mapping[str, Any]) -> str | None:
        kinds = [one.get("type") for one in field.get("anyOf", [field]) if one.get("type") != "null"]
        return kinds[0] if len(kinds) == 1 else None

    return {name: kind(field) for name, field in schema.get("properties", {}).items() if name not in _OURS}


class _Playing:
    """An episode on its session."""

    def __init__(self, game: OpenEnvGame, session: Session, arguments: Mapping[str, Any]) -> None:
        self._game, self._session, self._arguments = game, session, arguments
        self._lock = asyncio.Lock()  # candidates are scored one after the other
        self._known: dict[tuple[str, ...], Result | None] = {}
        """Replies since the reset -> what the server answered to the last; None if that is no legal action."""
        self._at: tuple[str, ...] | None = None
        """The replies that the session has played; None if that is not known."""

    async def reset(self) -> Position:
        """Begins the episode."""
        self._known[()] = await self._play(())
        return self._position(())

    async def after(self, replies: Sequence[str], position: Position, reply: str) -> Position | None:
        """Returns the position after a reply, as `After`; raises EnvironmentConfigError if a replay differs."""
        earlier, path = tuple(replies), (*replies, reply)
        async with self._lock:
            if path not in self._known:
                if self._at != earlier:
                    await self._replay(earlier)
                self._known[path] = await self._play(path)
            result = self._known[path]
        if result is None:
            return None
        assert position.asked is not None
        return Position(self._position(path).asked, self._game.move(position.asked[0], result))

    async def _replay(self, path: tuple[str, ...]) -> None:
        if not self._game.replays:
            raise option_error(
                "replays=false: several replies to one prompt need replays; set at_grpo.scheme=parallel"
            )
        for length in range(len(path) + 1):
            again = await self._play(path[:length])
            if canonical(again) != canonical(self._known[path[:length]]):
                raise self._game._not_deterministic()

    async def _play(self, path: tuple[str, ...]) -> Result | None:
        """Plays the last reply of a path on a session that is before it, or resets; None if it is no legal action."""
        action: Mapping[str, Any] | None = None
        if path:
            asked = self._position(path[:-1]).asked
            assert asked is not None  # nobody replies after the end
            try:
                action = self._game.action_of(asked[0], path[-1])
            except Refused:
                return None
        self._at = None
        try:
            result = await (self._session.reset(self._arguments) if action is None else self._session.step(action))
        except Refusal as refusal:
            if refusal.untouched:
                self._at = path[:-1]
            else:
                logger.warning("%s raises on a reply, which counts as illegal: %s", self._game.where, refusal)
            return None
        self._at = path
        return result

    def _position(self, path: tuple[str, ...]) -> Position:
        result = self._known[path]
        assert result is not None
        return self._game.position(result, len(path))
