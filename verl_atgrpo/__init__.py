"""AT-GRPO for verl: on-policy reinforcement learning for teams of LLM agents."""

from verl_atgrpo.environment import Environment, Outcome, Score, make, register
from verl_atgrpo.team import Agent, ScriptedTeam, Team

__all__ = ["Agent", "Environment", "Outcome", "Score", "ScriptedTeam", "Team", "make", "register"]
__version__ = "0.1.0"
