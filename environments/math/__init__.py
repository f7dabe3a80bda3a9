"""Mathematical problems: a coder and a reasoner, an ensemble, a debate, or answers that others improve or judge."""

from verl_atgrpo.environments.math.refinement import MathDrafts, MathJudged, MathRefined
from verl_atgrpo.environments.math.team import Math, MathDebate, MathEnsemble, SingleMath

__all__ = ["Math", "MathDebate", "MathDrafts", "MathEnsemble", "MathJudged", "MathRefined", "SingleMath"]
