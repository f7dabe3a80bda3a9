"""MAS-GRPO: whole episodes of a task are compared, and every row of an episode gets its episode's advantage.

    A_i = (R_i - mean(R)) / (std(R) + eps)

R_i is the reward of episode i, and each episode counts once: counted by rows, a long episode would weigh more than a
short one. It is the baseline of a team without a reward for each answer.

Source: `grpo` over the episodes of a team, to which arXiv 2510.11062 (AT-GRPO) compares itself.
"""

from verl_atgrpo.train.estimators.arithmetic import dense, group_min, standardise
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels, Tensor

PRESET = EstimatorSpec(name="mas_grpo", unit="trajectory")


def advantages(values: Tensor, labels: Labels, spec: EstimatorSpec) -> Tensor:
    """Returns the advantages of rows whose episodes are compared (unit "trajectory"): (N,) float64 -> (N,).

    Raises ValueError if an episode has rows with different rewards, or in different groups.
    """
    episode, total = dense(labels["units"])
    rewards = _of_episodes("rewards", values, episode, total, labels)
    groups = _of_episodes("groups", labels["groups"], episode, total, labels)
    return standardise(rewards, groups, spec)[episode]


def _of_episodes(what: str, column: Tensor, episode: Tensor, total: int, labels: Labels) -> Tensor:
    """Returns the value of each episode (E,) from those of its rows, which must be equal."""
    # All rows are equal exactly if each equals the minimum.
    chosen = group_min(column, episode, total)
    differs = column != chosen[episode]
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise ValueError(
            f"units: trajectory {labels['units'][row].item()} has rows with different {what} "
            f"({chosen[episode][row].item()} and {column[row].item()}); a trajectory has one outcome and one group"
        )
    return chosen
