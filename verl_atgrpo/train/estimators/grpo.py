"""GRPO: an answer is compared with the other answers of its group, in units of their spread.

    A_i = (r_i - mean(r)) / (std(r) + eps)

r are the rewards of the group's rows. A group is a task in the parallel scheme, a decision in the tree. The standard
deviation is over n - 1, as in verl.

Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision).
"""

from verl_atgrpo.train.estimators.arithmetic import standardise
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels, Tensor

PRESET = EstimatorSpec(name="grpo")


def advantages(values: Tensor, labels: Labels, spec: EstimatorSpec) -> Tensor:
    """Returns the advantages of rows that are compared with their whole group: (N,) float64 -> (N,)."""
    return standardise(values, labels["groups"], spec, units=labels.get("units"))
