"""The games as OpenEnv's own classes serve them: guessing at /, the others below."""

from __future__ import annotations

from typing import Any

import games
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field, field_validator


class Guess(Action):
    number: int = Field(ge=0)

    @field_validator("number")
    @classmethod
    def not_unlucky(cls, number: int) -> int:
        if number == games.UNLUCKY:
            raise ValueError("unlucky")
        return number


class Hint(Observation):
    text: str
    tries: int


class Take(Action):
    count: str


class Heap(Observation):
    heap: int
    mover: int
    gains: list[float]


class Served(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    game: type
    seen: type[Observation]

    def __init__(self) -> None:
        super().__init__()
        self.played = self.game()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return self._told(self.played.reset(seed, **kwargs))

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._told(self.played.step(*action.model_dump(exclude={"metadata"}).values()))

    def _told(self, answer: games.Answer) -> Observation:
        seen, reward, done = answer
        return self.seen(**seen, reward=reward, done=done, metadata={"note": "not for agents"})

    @property
    def state(self) -> State:
        return State()


class Guessing(Served):
    game, seen = games.Guessing, Hint


class Nim(Served):
    game, seen = games.Nim, Heap


app = create_app(Guessing, Guess, Hint, max_concurrent_envs=8)
app.mount("/nim", create_app(Nim, Take, Heap, max_concurrent_envs=8))
app.mount("/single", create_app(Guessing, Guess, Hint, max_concurrent_envs=1))
