"""Programming problems: a coder and a tester."""

from verl_atgrpo.environments.code.environment import Code, SingleCode

__all__ = ["Code", "SingleCode"]
