"""AgentRL: advantages are standardised within each environment of a mixture, so that none drowns another's.

    A' = (A - mean(A)) / (std(A) + eps)          over all tokens of an environment's rows in the update

It follows another formula, `by_task` says over what: `tokens`, as in the paper, or `rows`. Other than in the paper
rows of a group without signal (advantages 0) do not count, and have none afterwards either.

Source: arXiv 2510.04206, task advantage normalisation.
"""

from verl_atgrpo.train.estimators.arithmetic import dense, deviations, group_sum
from verl_atgrpo.train.estimators.spec import Tensor


def by_task(advantages: Tensor, tasks: Tensor, groups: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Returns advantages standardised within each environment: (N,) float64 -> (N,).

    Shapes: advantages (N,) float64; tasks and groups (N,) int64, any integers, the rows' environments and those that
    they were compared in; weights (N,) float64 above 0, how often a row counts. An environment whose advantages
    are all alike keeps them.
    """
    group, number = dense(groups)
    # Of the group, not of the row: one in the middle has advantage 0, too, and stays between the others.
    signal = group_sum((advantages != 0).double(), group, number)[group] > 0
    counted = weights * signal
    task, size, deviation = deviations(advantages, tasks, counted)
    std = (group_sum(counted * deviation.square(), task, len(size)) / size).sqrt()[task]
    return (deviation / (std + eps)).where(signal & (std > 0), advantages)
