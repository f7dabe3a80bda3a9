"""Role-conditioned advantages (RAE): a reward is compared with what its role has earned so far, not with a group.

    A = r - b[role]          then          b[role] <- decay b[role] + (1 - decay) r

A role is an agent, in a mixture an agent of an environment, and b begins at 0. All rows of a step are compared with b
as it was before the step. Its n episodes then change b at once, so that their order does not matter:

    b <- decay^n b + (1 - decay^n) r,   r the mean over the episodes of the mean reward of the role's rows

In a game of two sides this takes away what one side earns by moving first.

Source: SPIRAL, arXiv 2506.24119. That b is taken before its update and begins at 0 is prime-rl's; .95 is our default.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from verl_atgrpo.kinds import Share
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels, Need, Scope, Tensor


@dataclass(frozen=True, kw_only=True)
class RaeSpec(EstimatorSpec):
    """Rewards minus a moving average for each role."""

    decay: Share = 0.95
    """Weight of the average so far; 1 keeps it at 0."""

    @property
    def scopes(self) -> frozenset[Scope]:
        """None: it compares with no rows of the update."""
        return frozenset()

    @property
    def needs(self) -> frozenset[Need]:
        """The role's average, which the trainer keeps."""
        return super().needs | {"baseline"}

    def formula(self, values: Tensor, labels: Labels) -> Tensor:
        """Returns the rows' advantages: (N,) float64 -> (N,)."""
        return values - labels["baselines"]


PRESET = RaeSpec(name="rae")


class Baselines:
    """The moving average of each role."""

    def __init__(self, spec: EstimatorSpec) -> None:
        """Begins at 0; `spec` has the decay, and for single agents their own."""
        self._spec = spec
        self.values: dict[str, float] = defaultdict(float)

    def write(self, rows: Iterable[MutableMapping[str, Any]]) -> None:
        """Writes the average of its role into the tags of every row of a trained agent."""
        for tags in rows:
            if "group" in tags:
                tags["baseline"] = self.values[tags["agent"]]

    def update(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds the rewards of a step's rows."""
        rewards: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for tags in rows:
            rewards[tags["agent"]][tags["episode"]].append(tags["reward"])
        for agent, episodes in rewards.items():
            decay = getattr(self._spec.of_agent(agent), "decay", PRESET.decay)
            mean = fmean(fmean(given) for given in episodes.values())
            self.values[agent] = mean + decay ** len(episodes) * (self.values[agent] - mean)

    def metrics(self) -> dict[str, float]:
        """Returns every role's average."""
        return {f"agent/{agent}/baseline": value for agent, value in self.values.items()}

    def state(self) -> dict[str, float]:
        """Returns what a checkpoint keeps."""
        return dict(self.values)

    def restore(self, state: Mapping[str, float]) -> None:
        """Continues with the averages of a checkpoint."""
        self.values.update(state)
