"""Teams whose policies are tables: the exact gradient is known, and so is the expected update of a team that plays,
without sampling.

`Strata` answers the K candidates of a decision in exact proportion to the policy, so one played tree has every path as
often as expected. `expected` plays a team once for every sequence of samples, and weights each with its probability.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from fakes.scripted_policy import Numbered
from numpy.typing import NDArray

from verl_atgrpo import EpisodeFailed, Message, Outcome, Score, Team, play
from verl_atgrpo.play.branching import play_branched
from verl_atgrpo.play.types import TREE, EpisodeRecord, Generation, PlayMode, TeamOptions
from verl_atgrpo.train.config.schema import BranchSettings
from verl_atgrpo.train.estimators.spec import EstimatorSpec
from verl_atgrpo.train.rollout.episode_rows import training_rows
from verl_atgrpo.train.rows.row_advantages import loss_weights, policy_advantages, weights_of

Gradient = dict[Any, NDArray[np.float64]]
"""Parameters -> derivatives by the logits of the replies."""


class Tables(Numbered):
    """Agents speak in an order until one says what ends it; each is told all replies before.

    Args:
        order: the agents that speak, each once or several times.
        k: probabilities are multiples of 1 / k.
        replies: of which each agent says one.
        shared: whether all agents have the same logits, by the last reply alone.
        ends: replies after which the episode is over.
        seed: of probabilities, outcomes and lengths.
    """

    agents = ("a", "b", "c")

    def __init__(
        self, order: str, k: int, replies: str = "01", shared: bool = False, ends: str = "", seed: int = 0
    ) -> None:
        self.order, self.replies, self.shared = order, replies, shared
        numbers = np.random.default_rng(seed)
        every = ["".join(said) for n in range(len(order) + 1) for said in itertools.product(replies, repeat=n)]
        played = [said for said in every if not set(said[:-1]) & set(ends)]
        over = [said for said in played if len(said) == len(order) or said[-1:] in tuple(ends)]
        self.outcomes = {said: float(numbers.normal()) for said in over}
        self.histories = [said for said in played if said not in self.outcomes]
        self.tokens = {agent: int(numbers.integers(1, 9)) for agent in order}
        counts: dict[Any, list[int]] = {}
        for said in self.histories:
            if self.parameters(said) not in counts:
                draws = numbers.integers(len(replies), size=k - len(replies) if k >= len(replies) else k)
                least = [int(k >= len(replies))] * len(replies)
                counts[self.parameters(said)] = (np.bincount(draws, minlength=len(replies)) + least).tolist()
        self.counts = {said: counts[self.parameters(said)] for said in self.histories}
        self.policy = {said: np.array(self.counts[said]) / k for said in self.histories}

    def speaker(self, said: str) -> str:
        return self.order[len(said)]

    def parameters(self, said: str) -> Any:
        return said[-1:] if self.shared else (self.speaker(said), said)

    def value(self, said: str) -> float:
        if said in self.outcomes:
            return self.outcomes[said]
        return sum(
            share * self.value(said + reply) for share, reply in zip(self.policy[said], self.replies, strict=True)
        )

    def reached(self, said: str, share: Callable[[str], Any] | None = None) -> float:
        """The probability of what was said before; `share` are probabilities in the place of the policy's."""
        of = share or self.policy.__getitem__
        steps = [of(said[:n])[self.replies.index(said[n])] for n in range(len(said))]
        return float(np.prod(steps))

    def score(self, said: str, k: int) -> NDArray[np.float64]:
        """The derivative of a reply's log-prob."""
        return np.eye(len(self.replies))[k] - self.policy[said]

    def gradient(self, visits: Callable[[str], float] | None = None, agents: str = "abc") -> Gradient:
        """The exact gradient of the expected outcome; `visits` are weights of histories in the place of how often they
        are reached."""
        total: Gradient = defaultdict(lambda: np.zeros(len(self.replies)))
        for said in self.histories:
            if self.speaker(said) in agents:
                for k, reply in enumerate(self.replies):
                    worth = (visits or self.reached)(said) * self.policy[said][k] * self.value(said + reply)
                    total[self.parameters(said)] += worth * self.score(said, k)
        return dict(total)

    def mean_tokens(self, agents: str = "abc") -> float:
        """Expected number of an episode's tokens that these agents say."""
        return sum(self.reached(s) * self.tokens[self.speaker(s)] for s in self.histories if self.speaker(s) in agents)

    async def run(self, task: int, team: Team) -> Outcome:
        said = ""
        while said not in self.outcomes:
            before = said
            reply = await team[self.speaker(said)].act(
                said, lambda text, s=before: Score(team=self.value(s + text[0]))
            )
            said += reply.text[0]
        return Outcome(False, self.outcomes[said])

    def update(
        self,
        record: EpisodeRecord,
        spec: EstimatorSpec,
        mode: str | None = None,
        agents: str = "abc",
        scheme: str = "branch",
    ) -> Gradient:
        """The update of a policy of these agents on an episode's rows, as trainer and verl's loss make it.

        `mode` is verl's `loss_agg_mode`; None: the sum over rows with their weights, before any division.
        """
        rows = [row for row in training_rows("u", 0, record, scheme) if row.tags["agent"] in agents]
        tags = [row.tags for row in rows]
        tokens = torch.tensor([len(row.generation.token_ids) for row in rows])
        advantages = policy_advantages(tags, spec).double()
        weights = weights_of(tags)
        factors = weights if mode is None else loss_weights(weights, tokens, mode)
        total: Gradient = defaultdict(lambda: np.zeros(len(self.replies)))
        for row, factor, advantage in zip(rows, factors.tolist(), advantages.tolist(), strict=True):
            said, length = "".join(map(chr, row.prompt_ids)), len(row.generation.token_ids)
            divisor = {
                None: 1.0,
                "token-sum": 1.0,
                "token-mean": float(tokens.sum()),
                "seq-mean-token-sum": float(len(rows)),
                "seq-mean-token-mean": float(len(rows) * length),
            }[mode]
            k = self.replies.index(row.generation.text[0])
            # The first token decides, so the others' log-probs have no gradient.
            total[self.parameters(said)] += factor * advantage * self.score(said, k) / divisor
        return dict(total)


class Strata:
    """Gives the K candidates of a decision in exact proportion to the policy, in an order of its own."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._asked: Counter[str] = Counter()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return [ord(char) for message in messages for char in message["content"]]

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        said = "".join(map(chr, prompt_ids))
        number = self._asked[decision_id]
        self._asked[decision_id] += 1
        strata = [k for k, count in enumerate(self.tables.counts[said]) for _ in range(count)]
        return self._say(said, strata[(number + zlib.crc32(decision_id.encode())) % len(strata)])

    def _say(self, said: str, k: int) -> Generation:
        text = self.tables.replies[k] * self.tables.tokens[self.tables.speaker(said)]
        return Generation([ord(char) for char in text], [0.0] * len(text), text)


class _Draws:
    """A sequence of draws, each of one of n: the prefix is given, and what follows is 0."""

    def __init__(self) -> None:
        self.made: list[tuple[int, Sequence[float]]] = []
        self._next = 0

    def draw(self, shares: Sequence[float]) -> int:
        if self._next == len(self.made):
            self.made.append((_likely(shares, 0), shares))
        self._next += 1
        return self.made[self._next - 1][0]

    def advance(self) -> bool:
        """Goes to the next sequence; False after the last."""
        self._next = 0
        while self.made:
            last, shares = self.made.pop()
            if (following := _likely(shares, last + 1)) < len(shares):
                self.made.append((following, shares))
                return True
        return False


def _likely(shares: Sequence[float], first: int) -> int:
    return next((k for k in range(first, len(shares)) if shares[k] > 0), len(shares))


class Enumerated(Strata):
    """Samples what `draws` says."""

    def __init__(self, tables: Tables, draws: _Draws) -> None:
        super().__init__(tables)
        self.draws = draws

    async def generate(self, decision_id: str, prompt_ids: list[int], seed: int | None) -> Generation:
        said = "".join(map(chr, prompt_ids))
        return self._say(said, self.draws.draw(self.tables.policy[said]))


async def expected(
    play_one: Callable[[_Draws], Awaitable[EpisodeRecord]], update: Callable[[EpisodeRecord], Gradient]
) -> tuple[Gradient, float, int]:
    """Returns the expectation of an update over all samples, the probability that the episode does not fail, by which
    it is not divided, and the number of sequences of samples."""
    total: Gradient = {}
    draws, played, number = _Draws(), 0.0, 0
    while True:
        try:
            record = await play_one(draws)
        except EpisodeFailed:
            record = None
        probability = float(np.prod([shares[k] for k, shares in draws.made]))
        number += 1
        if record is not None:
            played += probability
            for key, value in update(record).items():
                total[key] = total.get(key, 0.0) + probability * value
        if not draws.advance():
            return total, played, number


async def branched(
    tables: Tables, sampler: Strata, options: BranchSettings, k: int | Mapping[str, int], frozen: Sequence[str] = ()
) -> EpisodeRecord:
    """Plays an episode with branches; every agent has a policy of its name."""
    of = TeamOptions(candidates=k) if isinstance(k, int) else TeamOptions(agent_candidates=k)

    def make(mode: PlayMode) -> Team:
        return _team(tables, sampler, of, mode)

    return await play_branched(tables, 0, make, options, 0, frozen)


async def tree(tables: Tables, sampler: Strata, **options: Any) -> EpisodeRecord:
    """Plays an episode with candidates at every decision, scored by their exact values."""
    return await play(tables, 0, _team(tables, sampler, TeamOptions(**options)))


def _team(tables: Tables, sampler: Strata, options: TeamOptions, mode: PlayMode = TREE) -> Team:
    return Team(dict.fromkeys(tables.agents, sampler), options, mode)


def assert_equal(found: Gradient, wanted: Gradient, scale: float = 1.0) -> None:
    """Asserts that a gradient is `scale` times another, to float32's rounding of advantages."""
    size = max(float(np.abs(value).max()) for value in wanted.values()) * scale
    for key in found.keys() | wanted.keys():
        zero = np.zeros_like(next(iter(wanted.values())))
        np.testing.assert_allclose(found.get(key, zero), scale * wanted.get(key, zero), atol=1e-5 * size, rtol=0)


def cosine(found: Gradient, wanted: Gradient) -> float:
    keys = sorted(wanted, key=str)
    one, other = (np.concatenate([gradient[key] for key in keys]) for gradient in (found, wanted))
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))
