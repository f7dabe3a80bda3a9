"""M-GRPO: a main agent that calls others. Its episodes are compared, and of every other agent D calls in each episode.

    main agent      A = (R_i - mean(R)) / (std(R) + eps)          over the episodes i of a task
    other agents    A = c * (r - mean(r)) / (std(r) + eps)        over D calls of each episode

Episodes differ in their number n of calls, so the paper aligns them to D = `sub_calls`: with n < D calls are
duplicated in turn, with n > D the last ones are dropped. Here no row is copied: a row counts c times in the statistics
(D // n, and once more for the D % n earliest), and its advantage is multiplied by c. So a sum over rows, such as a
policy's gradient before its division by rows or tokens, equals the sum over copies. An agent without a call in an
episode has no copies there. Standard deviations are over n, as in the paper.

Source: arXiv 2511.13288, trajectory alignment and group-relative advantages of main and sub-agents.
"""

from verl_atgrpo.train.estimators import dr_mas
from verl_atgrpo.train.estimators.arithmetic import dense, group_min, pairs
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels, Tensor

PRESET = EstimatorSpec(name="m_grpo", unit="call", ddof=0, center_scope="agent", scale_scope="agent")


def advantages(values: Tensor, labels: Labels, spec: EstimatorSpec) -> Tensor:
    """Returns the advantages of rows whose calls are aligned (unit "call"): (N,) float64 -> (N,).

    Raises ValueError if the main agent's rows of an episode have different rewards, or the spec has no `sub_calls`.
    """
    if spec.sub_calls is None:
        raise ValueError(f"spec: {spec.name!r} has no sub_calls")
    mains = labels["mains"]
    call, total = dense(pairs(labels["units"], labels["agents"]))
    differs = mains & (values != group_min(values, call, total)[call])
    if bool(differs.any()):
        unit = labels["units"][differs][0].item()
        raise ValueError(
            f"units: the main agent's rows of trajectory {unit} have different rewards; it has one outcome"
        )
    position, number = _order(call, total, labels)
    copies = spec.sub_calls // number + (position < spec.sub_calls % number)
    # The first row of the main agent stands for the episode in the statistics; all its rows get the advantage.
    weights = copies.where(~mains, (position == 0).long())
    copies = copies.masked_fill(mains, 1)
    return copies.to(values.dtype) * dr_mas.advantages(values, labels, spec, weights.to(values.dtype))


def _order(call: Tensor, total: int, labels: Labels) -> tuple[Tensor, Tensor]:
    """Returns each row's position among the rows of its episode and agent, earliest first, and their number: (N,)."""
    count = call.bincount(minlength=total)
    # Sorted by episode and agent, then by decision; by turn where an agent makes several at once.
    order = labels["turns"].argsort()
    order = order[labels["left"][order].argsort(descending=True, stable=True)]
    order = order[call[order].argsort(stable=True)]
    return order.argsort() - (count.cumsum(0) - count)[call], count[call]
