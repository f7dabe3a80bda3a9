"""Two games: their moves, without a protocol."""

from __future__ import annotations

import random
from typing import Any

Answer = tuple[dict[str, Any], Any, bool]
"""Observation, reward, done."""
UNLUCKY, UNTHINKABLE = 13, 1_000
"""Guesses that OpenEnv's server ends the session for, and that the game raises for."""


class Guessing:
    """One agent guesses a number that is in sight; what is near to it earns a part."""

    def reset(self, seed: int | None = None, most: int = 90) -> Answer:
        self.random, self.tries = random.Random(seed), 0
        self.number = self.random.randint(0, most)
        return {"text": f"Say {self.number}.", "tries": 0}, None, False

    def step(self, number: int) -> Answer:
        if number == UNTHINKABLE:
            raise KeyError("far away")
        self.tries += 1
        off = abs(number - self.number)
        reward = 1.0 if not off else 0.1 / (off + self.random.random())
        return {"text": f"Not {number}, {self.number}!", "tries": self.tries}, reward, not off


class Noisy(Guessing):
    """The same, with numbers that no seed repeats."""

    def reset(self, seed: int | None = None, most: int = 90) -> Answer:
        drawn = super().reset(None, most)
        return self.reset(None, most) if self.number == UNLUCKY else drawn


class Late(Guessing):
    """The same; only the rewards are such."""

    def step(self, number: int) -> Answer:
        seen, reward, done = super().step(number)
        return seen, reward + random.SystemRandom().random(), done


class Nim:
    """Two players take one to three of a heap in turn; who takes the last wins."""

    def reset(self, seed: int | None = None) -> Answer:
        self.heap, self.mover = random.Random(seed).randint(7, 40), 0
        return self._seen([]), None, False

    def step(self, count: str) -> Answer:
        taken = int(count)
        if not 1 <= taken <= min(3, self.heap):
            raise ValueError(f"takes {taken}")
        self.heap -= taken
        done = self.heap == 0
        gains = [1.0 if done else 0.1 / self.heap, -1.0 if done else 0.0]
        gains = gains if self.mover == 0 else gains[::-1]
        self.mover = 1 - self.mover
        return self._seen(gains), sum(gains), done

    def _seen(self, gains: list[float]) -> dict[str, Any]:
        return {"heap": self.heap, "mover": self.mover, "gains": gains}
