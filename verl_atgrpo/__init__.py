"""AT-GRPO for verl: on-policy reinforcement learning for teams of LLM agents.

Everything that the author of an environment or an estimator imports. verl's plugin loader imports this module in every
process of a job, so it imports neither verl nor torch.
"""

from verl_atgrpo.play.decision import Agent
from verl_atgrpo.play.environment import Environment, play
from verl_atgrpo.play.messages import Message
from verl_atgrpo.play.registry import make, register
from verl_atgrpo.play.scripted import ScriptedTeam
from verl_atgrpo.play.seeds import stable_hash
from verl_atgrpo.play.team import Team
from verl_atgrpo.play.testing import check_environment
from verl_atgrpo.play.types import Candidate, EnvironmentConfigError, EpisodeFailed, Outcome, Score, Split
from verl_atgrpo.sandbox.runner import Limits, run_python
from verl_atgrpo.train.estimators.spec import EstimatorSpec

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
