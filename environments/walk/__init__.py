"""Walks over a field, told in words: a team leads a walker to a goal, with and without walls."""

from verl_atgrpo.environments.walk.environment import SingleWalk, SingleWalledWalk, Walk, WalledWalk

__all__ = ["SingleWalk", "SingleWalledWalk", "Walk", "WalledWalk"]
