"""Dr. MAS: an agent's rows are compared with each other, since agents differ in how often they act and what they earn.

    A = (r - mu_k) / (s_k + eps)

r is the reward of a row of agent k, mu_k and s_k are mean and standard deviation over the rows of the same task and
agent. The ablation (mu, s), (mu_k, s), (mu, s_k), (mu_k, s_k) is the fields `center_scope` and `scale_scope`, `group`
or `agent` each. All four count rows.

Source: arXiv 2602.08847, Eq. 5.
"""

from collections.abc import Sequence

from verl_atgrpo.train.estimators.arithmetic import deviations, group_sum, pairs, standardise
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels, Tensor

PRESET = EstimatorSpec(name="dr_mas", center_scope="agent", scale_scope="agent")


def advantages(values: Tensor, labels: Labels, spec: EstimatorSpec, weights: Tensor | None = None) -> Tensor:
    """Returns the advantages of rows with the scope "agent" in the centre or the scale: (N,) float64 -> (N,).

    A row counts as often as `weights` (N,) says, by default once.
    """
    scopes = {"group": labels["groups"], "agent": pairs(labels["groups"], labels["agents"])}
    same = spec.scale == "none" or spec.scale_scope == spec.center_scope
    scale_groups = None if same else scopes[spec.scale_scope]
    return standardise(values, scopes[spec.center_scope], spec, scale_groups, weights, labels.get("units"))


def inflation_factors(rewards: Tensor, agents: Sequence[str], tasks: Tensor) -> dict[str, float]:
    """Returns the factor by which pooled normalisation inflates each agent's gradient: (s_k^2 + (mu_k - mu)^2) / s^2.

    With 1 the pooled statistics fit the agent; above 1 its updates are larger than with its own statistics. mu and s
    are those of a task's rows, and an agent's factor is the mean over its rows, as no estimator pools tasks. Uses
    population variances, so that the row-weighted mean of the factors is 1. Tasks without spread have no gradient and
    do not count; an agent of such tasks alone has 1. Raises ValueError for rewards of another shape than (N,) with N
    agents, or not finite.
    """
    if rewards.shape != (len(agents),) or not bool(rewards.isfinite().all()):
        raise ValueError(f"rewards: expected ({len(agents)},) finite values, got shape {tuple(rewards.shape)}")
    names = list(dict.fromkeys(agents))
    number = {name: position for position, name in enumerate(names)}
    codes = rewards.double().new_tensor([number[name] for name in agents]).long()
    task, size, deviation = deviations(rewards.detach().double(), tasks)
    # The mean of (r - mu)^2 over the rows of agent k is s_k^2 + (mu_k - mu)^2.
    squares = deviation.square()
    variance = (group_sum(squares, task, len(size)) / size)[task]
    spread = variance > 0
    rows = group_sum(spread.double(), codes, len(names))
    ratios = group_sum((squares / variance).where(spread, squares), codes, len(names))
    factors = (ratios / rows).where(rows > 0, rows.new_ones(()))
    return dict(zip(names, map(float, factors.tolist()), strict=True))
