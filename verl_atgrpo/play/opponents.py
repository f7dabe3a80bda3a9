"""Who answers for the other side: the policy in training as it is, one of its past selves, or another policy.

Past selves are frozen every few steps, the first one before the first step. Of those in the pool one is drawn
uniformly, or by prioritised fictitious self-play (AlphaStar, Nature 575, 2019): with a probability in proportion to
(1 - w)^2, w the share of games that the policy wins against it.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from verl_atgrpo.play.ratings import Rating, elo, results, score_of
from verl_atgrpo.play.seeds import stable_hash

_WINDOW = 32
"""Games against a past self, the last ones, that say how often it is beaten: the policy changes."""
_GRAIN = 5
"""Steps whose policies may be rated as one player."""
_MORE = 1.05
"""So many times the games as at the last rating make a new one, which takes seconds after a thousand past selves."""


class Opponent(NamedTuple):
    """Who answers for the other side in an episode."""

    policy: str = ""
    """Its policy; empty for those that the recipe gives its agents."""
    slot: int = 0
    """A past self's place in the pool, from 1; 0 for a policy as it is."""
    step: int = 0
    """The step after which the past self was frozen."""

    def __str__(self) -> str:
        return f"{self.policy}/{self.slot}/{self.step}"

    @classmethod
    def parse(cls, text: str) -> Opponent:
        """Returns the opponent of `str(opponent)`."""
        policy, slot, step = text.split("/")
        return cls(policy, int(slot), int(step))


class OpponentPool:
    """The opponents of a policy in training, and the results of its games."""

    def __init__(
        self,
        policy: str | None,
        weights: Mapping[str, float],
        size: int = 1,
        every: int = 1,
        choose: Literal["prioritized", "uniform"] = "prioritized",
        seed: int = 0,
    ) -> None:
        """Begins with an empty pool; `size`, `every` and `choose` are those of `at_grpo.opponents`.

        Args:
            policy: the policy of which past selves play; None if none do.
            weights: `current`, `past` and further policies by name -> weight.
            seed: from which draws derive.
        """
        self._policy, self._every, self._choose, self._seed = policy, every, choose, seed
        self._weights = {name: weight for name, weight in weights.items() if weight > 0}
        self._frozen: list[int | None] = [None] * size
        """The step of the past self in every slot."""
        self._recent: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        """The policy's scores against a past self, by its step."""
        self._games: dict[tuple[int, int], tuple[float, float]] = {}
        """(The policy near this step, the step of a past self) -> score and games, of which a task has one."""
        self._rated: int | None = None
        """The policy as it is, of these."""
        self._rating: tuple[float, Rating] | None = None
        """A number of games, and that policy's rating by them."""
        self._last: list[tuple[str, float]] = []
        """Kind of opponent and reward of the games of the last step."""

    @property
    def slots(self) -> dict[int, int]:
        """Slot -> the step of its past self, of the slots that have one."""
        return {slot: step for slot, step in enumerate(self._frozen, 1) if step is not None}

    def is_due(self, step: int) -> bool:
        """Returns whether the policy is to be frozen after a step; 0 is before the first."""
        return self._policy is not None and step % self._every == 0

    def freeze(self, step: int) -> int:
        """Returns the slot for the policy as it is after a step: a free one, or that of the most beaten past self."""
        taken, places = self.slots, range(1, len(self._frozen) + 1)
        slot = next((place for place in places if place not in taken), 0)
        if not slot:  # among equals the oldest
            slot = min(taken, key=lambda place: (-self._beaten(taken[place]), taken[place]))
            self._recent.pop(taken[slot], None)
        self._frozen[slot - 1] = step
        return slot

    def _beaten(self, step: int) -> float:
        """Returns the share of games won against a past self; one won and one lost are counted in advance."""
        scores = self._recent.get(step, ())
        return (1 + math.fsum(scores)) / (2 + len(scores))

    def draw(self, *place: object) -> Opponent:
        """Returns the opponent of a task that is submitted at this place of the run: step, task and number."""
        rng = random.Random(stable_hash(self._seed, "opponent", *place))
        weights = {name: weight for name, weight in self._weights.items() if name != "past" or self.slots}
        (chosen,) = rng.choices(list(weights), list(weights.values()))
        if chosen != "past" or self._policy is None:
            return Opponent("" if chosen == "current" else chosen)
        slots = self.slots
        chances = [(1 - self._beaten(step)) ** 2 if self._choose == "prioritized" else 1.0 for step in slots.values()]
        (slot,) = rng.choices(list(slots), chances)
        return Opponent(self._policy, slot, slots[slot])

    def add(self, tasks: Iterable[tuple[Opponent, Sequence[float]]], step: int) -> None:
        """Adds the games of a step.

        Of each task the opponent, and the rewards of the policy in training in its games, above 0 for those it won.
        For the rating a task counts as one game, as its games are alike.
        """
        self._last = []
        # A step is played with the weights after the one before; a past self of the nearest step is as strong.
        grain = min(self._every, _GRAIN)
        label = (step - 1 + grain // 2) // grain * grain
        for opponent, rewards in tasks:
            kind = "past" if opponent.slot else opponent.policy or "current"
            self._last += [(kind, reward) for reward in rewards]
            if self.slots.get(opponent.slot) != opponent.step:  # no past self, or another one has taken its place
                continue
            scores = [score_of(reward) for reward in rewards]
            self._recent[opponent.step].extend(scores)
            if opponent.step == label:  # the policy itself
                continue
            score, number = self._games.get((label, opponent.step), (0.0, 0.0))
            self._games[label, opponent.step] = score + math.fsum(scores) / len(scores), number + 1
            self._rated = label
        rated = math.fsum(number for _, number in self._games.values())
        if self._rated is not None and (self._rating is None or rated >= _MORE * self._rating[0]):
            self._rating = rated, elo(self._games)[self._rated]

    def metrics(self) -> dict[str, float]:
        """Returns results of the last step by kind of opponent, the number of past selves, and the policy's rating.

        The rating is in Elo points above the oldest past self, and of all games so far, or nearly (`_MORE`): later
        players are compared by earlier ones.
        """
        found = {"opponents/past_selves": float(len(self.slots))} if "past" in self._weights else {}
        for kind in dict.fromkeys(kind for kind, _ in self._last):
            shares = results(reward for one, reward in self._last if one == kind)
            found |= {f"opponents/{kind}/{name}": share for name, share in shares.items()}
        if self._rating is not None:
            _, rating = self._rating
            found |= {"opponents/elo": rating.points, "opponents/elo_margin": rating.margin}
        return found

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint needs, without the weights of past selves."""
        return {
            "policy": self._policy,
            "frozen": list(self._frozen),
            "recent": {step: list(scores) for step, scores in self._recent.items()},
            "games": dict(self._games),
            "rated": self._rated,
            "rating": self._rating,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's state; raises ValueError if it is of another policy's pool, or another size."""
        if state["policy"] is None or self._policy is None:  # one of the two runs has no past selves
            return
        if state["policy"] != self._policy:
            raise ValueError(
                f"at_grpo.opponents: the checkpoint has past selves of {state['policy']}, this job needs those of "
                f"{self._policy}; set opponents.policy as it had it, or trainer.resume_mode=disable"
            )
        if len(state["frozen"]) != len(self._frozen):
            raise ValueError(
                f"at_grpo.opponents.size={len(self._frozen)}: the checkpoint has a pool of {len(state['frozen'])}; "
                "set it to that, or trainer.resume_mode=disable"
            )
        self._frozen = list(state["frozen"])
        for step, scores in state["recent"].items():
            self._recent[step].extend(scores)
        self._games, self._rated = dict(state["games"]), state["rated"]
        self._rating = state["rating"]
