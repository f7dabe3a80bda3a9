"""AgentRL: advantages are standardised within each environment of a mixture, so that none drowns another's.

    A' = (A - mean(A)) / (std(A) + eps)          over all tokens of an environment's rows in the update

It follows another formula, `by_task` says over what: `tokens`, as in the paper, or `rows`. A row without signal
(advantage 0) has none afterwards either, and does not count.

Source: arXiv 2510.04206, task advantage normalisation.
"""

from verl_atgrpo.train.estimators.arithmetic import dense, group_sum
from verl_atgrpo.train.estimators.spec import Tensor


def by_task(advantages: Tensor, tasks: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Returns advantages standardised within each environment: (N,) float64 -> (N,).

    Shapes: advantages (N,) float64; tasks (N,) int64, any integers, the rows' environments; weights (N,) float64 above
    0, how often a row counts. An environment whose advantages are all alike keeps them.
    """
    task, total = dense(tasks)
    signal = advantages != 0
    counted = weights * signal
    size = group_sum(counted, task, total)
    deviation = advantages - (group_sum(counted * advantages, task, total) / size)[task]
    std = (group_sum(counted * deviation.square(), task, total) / size).sqrt()[task]
    return (deviation / (std + eps)).where(signal & (std > 0), advantages)
