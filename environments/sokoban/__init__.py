"""Sokoban: push all boxes onto targets."""

from verl_atgrpo.environments.sokoban.environment import SingleSokoban, Sokoban

__all__ = ["SingleSokoban", "Sokoban"]
