"""AT-GRPO for verl: on-policy reinforcement learning for teams of LLM agents.

Everything that the author of an environment or an estimator imports. verl's plugin loader imports this module in every
process of a job, so it imports neither verl nor torch.
"""

from verl_atgrpo.environment import (
    Environment,
    EnvironmentConfigError,
    Message,
    Outcome,
    Score,
    Split,
    make,
    register,
    stable_hash,
)
from verl_atgrpo.estimators.spec import EstimatorSpec
from verl_atgrpo.sandbox.runner import Limits, run_python
from verl_atgrpo.team import Agent, Candidate, EpisodeFailed, ScriptedTeam, Team, play
from verl_atgrpo.testing import check_environment

__all__ = [
    "Agent",
    "Candidate",
    "Environment",
    "EnvironmentConfigError",
    "EpisodeFailed",
    "EstimatorSpec",
    "Limits",
    "Message",
    "Outcome",
    "Score",
    "ScriptedTeam",
    "Split",
    "Team",
    "check_environment",
    "make",
    "play",
    "register",
    "run_python",
    "stable_hash",
]
__version__ = "0.2.0"
