"""Mathematical problems: a coder and a reasoner, an ensemble, or a debate."""

from verl_atgrpo.environments.math.ensemble import MathDebate, MathEnsemble
from verl_atgrpo.environments.math.team import Math, SingleMath

__all__ = ["Math", "MathDebate", "MathEnsemble", "SingleMath"]
