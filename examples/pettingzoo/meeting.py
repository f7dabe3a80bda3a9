"""A cooperative PettingZoo environment with text observations: two walkers on a street have to meet."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Text
from pettingzoo import AECEnv

CHARACTERS = string.ascii_letters + string.digits + " .,"


class Meeting(AECEnv[str, str, int]):
    """Two walkers move in turn, one house up or down; their shared rewards sum to 1 when they meet."""

    metadata = {"name": "meeting_v0", "is_parallelizable": False, "render_modes": []}  # noqa: RUF012
    render_mode = None

    def __init__(self, houses: int = 40, most_moves: int = 12) -> None:
        self.houses, self.most_moves = houses, most_moves
        self.possible_agents = ["north", "south"]
        self.action_spaces = dict.fromkeys(self.possible_agents, Discrete(2))
        self.observation_spaces = dict.fromkeys(self.possible_agents, Text(80, charset=CHARACTERS))

    def action_space(self, agent: str) -> Discrete:
        return self.action_spaces[agent]

    def observation_space(self, agent: str) -> Text:
        return self.observation_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        rng = np.random.default_rng(seed)  # all random numbers derive from the seed
        self.agents = list(self.possible_agents)
        self.street = int(rng.integers(1, 100))
        first = int(rng.integers(1, self.houses - 5))
        places = [first, first + int(rng.integers(2, 6))]
        rng.shuffle(places)
        self.places = dict(zip(self.agents, map(int, places), strict=True))
        self.way = self.closest = self.distance()
        self.moves = 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def distance(self) -> int:
        return abs(self.places["north"] - self.places["south"])

    def observe(self, agent: str) -> str:
        other = "south" if agent == "north" else "north"
        where = f"You are at house {self.places[agent]}, your friend is at {self.places[other]}."
        return f"Street {self.street}. {where} Go up or down."

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.places[agent] += 1 if action == 0 else -1
        self.moves += 1
        # Progress is rewarded once, relative to the smallest distance so far: going back and forth earns nothing.
        if self.distance() < self.closest:
            self.rewards = dict.fromkeys(self.agents, (self.closest - self.distance()) / self.way)
            self.closest = self.distance()
        self.terminations = dict.fromkeys(self.agents, self.distance() == 0)
        self.truncations = dict.fromkeys(self.agents, self.distance() > 0 and self.moves >= self.most_moves)
        self.agent_selection = "south" if agent == "north" else "north"
        self._accumulate_rewards()

    def close(self) -> None:
        """Nothing to close."""


def street(game: Meeting) -> str:
    """Returns what no move changes; it decides the split."""
    return str(game.street)


def env(**options: Any) -> Meeting:
    """Returns the environment; the recipe names this function."""
    return Meeting(**options)
