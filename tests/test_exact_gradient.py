"""The expected update is the exact gradient of the expected outcome, in direction and scale, for every agent."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from fakes.exact_teams import (
    Enumerated,
    Gradient,
    Strata,
    Tables,
    assert_equal,
    branched,
    cosine,
    expected,
    tree,
)

from verl_atgrpo.play import branching
from verl_atgrpo.train.config.schema import BranchSettings
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.estimators.value import scores
from verl_atgrpo.train.rollout.episode_rows import training_rows

RLOO, STD = PRESETS["rloo"], PRESETS["at_grpo"]
NESTED = BranchSettings(at="every", nested=True)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def played(tables: Tables, options: BranchSettings, k: Any, frozen: tuple[str, ...] = ()) -> Any:
    return asyncio.run(branched(tables, Strata(tables), options, k, frozen))


# ------------------------------------------------------------------ a whole tree, in exact proportion


@pytest.mark.parametrize("shared", [False, True], ids=["own tables", "shared logits"])
@pytest.mark.parametrize(
    ("order", "k", "continuations", "replies", "ends"),
    [
        ("ab", 2, 1, "01", ""),
        ("aba", 2, 1, "01", ""),
        ("abab", 2, 2, "01", ""),
        ("abca", 2, 1, "01", "1"),
        ("abcabc", 2, 1, "01", ""),
        ("aba", 3, 1, "01", ""),
        ("abc", 3, 1, "012", ""),
        ("abca", 3, 1, "012", "2"),
        ("aa", 3, 3, "01", ""),
        ("aba", 4, 1, "01", ""),
        ("abc", 4, 3, "012", ""),
        ("aba", 4, 2, "0123", "3"),
        ("ab", 8, 1, "012", ""),
        ("aba", 8, 1, "012", ""),
        ("abc", 8, 1, "01", "0"),
        ("ab", 8, 4, "01", ""),
    ],
)
def test_a_nested_tree_is_the_exact_gradient(
    order: str, k: int, continuations: int, replies: str, ends: str, shared: bool
) -> None:
    """A group in exact proportion to its policy has k / (k - 1) of the gradient that a sampled one has on average.

    Divided by tokens, the update of any set of agents is that of an episode over the episode's expected tokens.
    """
    tables = Tables(order, k, replies, shared, ends)
    record = played(tables, BranchSettings(at="every", nested=True, continuations=continuations), k)
    stratified = k / (k - 1)
    assert_equal(tables.update(record, RLOO), tables.gradient(), stratified)
    for agents in (order, *sorted(set(order))):
        exact, tokens = tables.gradient(agents=agents), tables.mean_tokens(agents)
        assert_equal(tables.update(record, RLOO, "token-mean", agents), exact, stratified / tokens)


@pytest.mark.parametrize("offset", [1e3, 1e6, 1e9, -1e6, -1e9])
def test_an_offset_of_all_outcomes_changes_nothing(offset: float) -> None:
    tables = Tables("aba", 4)
    exact = tables.gradient()
    tables.outcomes = {said: outcome + offset for said, outcome in tables.outcomes.items()}
    assert_equal(tables.update(played(tables, NESTED, 4), RLOO), exact, 4 / 3)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean", "token-sum"])
@pytest.mark.parametrize("k", [2, 4])
def test_other_aggregations_weight_rows_as_documented(mode: str, k: int) -> None:
    tables = Tables("aba", k)
    record = played(tables, NESTED, k)
    rows = len([row for row in training_rows("u", 0, record, "branch")])
    visits, divisor = tables.reached, 3.0
    if mode == "token-sum":
        divisor = 3.0 / rows
    if mode == "seq-mean-token-mean":

        def visits(said: str) -> float:
            return tables.reached(said) / tables.tokens[tables.speaker(said)]

    assert_equal(tables.update(record, RLOO, mode), tables.gradient(visits), k / (k - 1) / divisor)


@pytest.mark.parametrize(("order", "k"), [("aba", 2), ("abc", 3), ("aba", 4), ("ab", 8), ("aab", 4)])
def test_a_standard_deviation_divides_every_group_by_its_own(order: str, k: int) -> None:
    """As without branches: what is estimated is the gradient over the spread of the candidates' values."""
    tables = Tables(order, k, seed=3)

    def over_spread(said: str) -> float:
        worth = [tables.value(said + reply) for reply in tables.replies]
        values = np.repeat(worth, tables.counts[said])
        return tables.reached(said) / (values.std(ddof=1) + STD.eps)

    assert_equal(tables.update(played(tables, NESTED, k), STD), tables.gradient(over_spread))


@pytest.mark.parametrize("order", ["ab", "aba", "abc"])
def test_agents_with_a_k_of_their_own_weigh_the_same(order: str) -> None:
    tables = Tables(order, 2)
    record = played(tables, BranchSettings(at="every", nested=True), {"a": 2, "b": 4, "c": 8})
    update, exact = tables.update(record, RLOO), tables.gradient()
    for agent, k in (("a", 2), ("b", 4), ("c", 8)):
        own = tables.gradient(agents=agent)
        if own:
            assert_equal({key: update[key] for key in own}, own, k / (k - 1))
    assert update.keys() == exact.keys()


@pytest.mark.parametrize(
    ("at", "frozen", "trained"),
    [("every", ("b",), "ac"), ("every", ("a", "c"), "b"), ({"a": 0, "c": 0}, (), "ac"), ({"b": 0, "c": 0}, (), "bc")],
)
def test_only_groups_above_count(at: Any, frozen: tuple[str, ...], trained: str) -> None:
    """A decision that is no branch point has one reply in each continuation, so it is played as a certain one."""
    tables = Tables("abc", 4)
    for said in tables.histories:
        if tables.speaker(said) not in trained:
            tables.policy[said], tables.counts[said] = np.array([0.0, 1.0]), [0, 4]
    record = played(tables, BranchSettings(at=at, nested=True), 4, frozen)
    assert {row.tags["agent"] for row in training_rows("u", 0, record, "branch")} == set(trained)
    assert_equal(tables.update(record, RLOO), tables.gradient(agents=trained), 4 / 3)


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_without_weights_later_agents_would_rule_shared_logits(k: int) -> None:
    tables = Tables("abab" if k < 8 else "aba", k, shared=True, seed=2)
    record = played(tables, NESTED, k)
    assert cosine(tables.update(record, RLOO, "token-mean"), tables.gradient()) > 1 - 1e-6
    for one in record.decisions:
        object.__setattr__(one, "weight", 1.0)
    assert cosine(tables.update(record, RLOO, "token-mean"), tables.gradient()) < 0.95


# ------------------------------------------------------------------ every sequence of samples


def over_all_samples(
    tables: Tables, play: Callable[..., Any], spec: Any = RLOO, scheme: str = "branch"
) -> tuple[Gradient, float]:
    update, probability, _ = asyncio.run(
        expected(
            lambda draws: play(Enumerated(tables, draws)), lambda record: tables.update(record, spec, scheme=scheme)
        )
    )
    return update, probability


BRANCHES = [
    ("ab", 2, NESTED),
    ("aba", 2, BranchSettings(at="every")),
    ("ab", 2, BranchSettings(at="first", continuations=2)),
    ("abc", 3, BranchSettings(at="first")),
    ("abc", 2, BranchSettings(at={"c": 0})),
]


@pytest.mark.parametrize(
    ("order", "k", "options", "shared"),
    [
        *((*one, shared) for one in BRANCHES for shared in (False, True)),
        # Own tables: what shared logits add up is compared here part by part.
        slow("ab", {"a": 3, "b": 2}, NESTED, False),
        slow("aa", 2, BranchSettings(at="every", nested=True, continuations=2), False),
        slow("aba", 2, BranchSettings(at={"a": 0, "b": 0}, nested=True), False),
        slow("ab", 2, BranchSettings(at="every", continuations=3), False),
    ],
    ids=str,
)
def test_the_expected_update_is_the_exact_gradient(
    order: str, k: int | dict[str, int], options: BranchSettings, shared: bool
) -> None:
    tables = Tables(order, 5, shared=shared, seed=1)
    points = {"first": {0}, "every": set(range(len(order)))}
    at = points[options.at] if isinstance(options.at, str) else {order.index(agent) for agent in options.at}
    update, _ = over_all_samples(tables, lambda sampler: branched(tables, sampler, options, k))
    exact = tables.gradient(lambda said: tables.reached(said) * (len(said) in at))
    assert_equal(update, exact)


@pytest.mark.parametrize("ends", ["", "1"])
@pytest.mark.parametrize(("order", "k"), [("aba", 2), ("ab", 3), ("aa", 2)])
def test_a_random_point_stands_for_all_also_where_episodes_differ_in_length(
    order: str, k: int, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(order, 5, ends=ends, seed=4)

    class Drawn:
        def __init__(self, seed: int) -> None:
            pass

        def choice(self, points: list[Any]) -> Any:
            return points[sampler.draws.draw([1 / len(points)] * len(points))]

    async def play(own: Enumerated) -> Any:
        nonlocal sampler
        sampler = own
        return await branched(tables, own, BranchSettings(at="random"), k)

    sampler: Any = None
    monkeypatch.setattr(branching.random, "Random", Drawn)
    update, _ = over_all_samples(tables, play)
    assert_equal(update, tables.gradient())


@pytest.mark.parametrize(("at", "order"), [({"b": 0}, "aba"), ({"c": 0}, "abc"), ({"a": 1}, "aab"), ({"b": 1}, "bab")])
def test_a_point_that_episodes_may_not_reach_is_scaled_by_how_often_they_do(at: dict[str, int], order: str) -> None:
    """Episodes that do not reach it are replaced, so those left are as many."""
    tables = Tables(order, 5, ends="1", seed=5)
    ((agent, turn),) = at.items()
    place = [index for index, one in enumerate(order) if one == agent][turn]
    update, probability = over_all_samples(tables, lambda sampler: branched(tables, sampler, BranchSettings(at=at), 2))
    reached = sum(tables.reached(said) for said in tables.histories if len(said) == place)
    assert probability == pytest.approx(reached) and reached < 0.9
    exact = tables.gradient(lambda said: tables.reached(said) * (len(said) == place))
    assert_equal({key: value / probability for key, value in update.items()}, exact, 1 / reached)


@pytest.mark.parametrize(("order", "k"), [("ab", 2), ("ab", 3), ("ab", 4), ("aba", 2), ("aab", 2)])
@pytest.mark.parametrize("selection", ["greedy", "first", "random"])
def test_greedy_commits_weight_histories_by_how_often_the_best_of_k_reaches_them(
    order: str, k: int, selection: str
) -> None:
    tables = Tables(order, 5, seed=6)

    def best_of_k(said: str) -> list[float]:
        """P(reply is the best of k samples), outcomes being distinct."""
        worth = [tables.value(said + reply) for reply in tables.replies]
        order_of = np.argsort(worth)
        below = np.concatenate([[0.0], np.cumsum(tables.policy[said][order_of])]) ** k
        return [float(np.diff(below)[list(order_of).index(reply)]) for reply in range(len(tables.replies))]

    update, _ = over_all_samples(
        tables, lambda sampler: tree(tables, sampler, candidates=k, selection=selection), scheme="tree"
    )
    wanted = tables.gradient(lambda said: tables.reached(said, best_of_k if selection == "greedy" else None))
    assert_equal(update, wanted)


# ------------------------------------------------------------------ a critic's scores in the place of rewards


def by_critic(tables: Tables, believed: Mapping[str, float], lam: float) -> Gradient:
    """The expected update of whole episodes by the scores of a critic with these values of what was said."""
    total: Gradient = defaultdict(lambda: np.zeros(len(tables.replies)))
    for end, success in tables.outcomes.items():
        rows = [
            {"agent": "a", "episode": end, "order": place, "place": place, "after": place, "episode_reward": success}
            for place in range(len(end))
        ]
        values = torch.tensor([believed[end[:place]] for place in range(len(end))], dtype=torch.float64)
        for place, score in enumerate(scores(values, rows, lam).tolist()):
            said, reply = end[:place], tables.replies.index(end[place])
            total[tables.parameters(said)] += tables.reached(end) * score * tables.score(said, reply)
    return dict(total)


@pytest.mark.parametrize(("shared", "errors"), [(False, [6.07, 3.90, 0.94]), (True, [0.98, 0.63, 0.15])])
def test_an_exact_critic_has_no_bias_and_a_wrong_one_that_of_its_values(shared: bool, errors: list[float]) -> None:
    """`errors`: what a critic of random values makes of the gradient, relative to it, with lambda 0, .5 and .9."""
    tables = Tables("abca", 5, shared=shared, ends="1", seed=1)
    tables.outcomes = {said: float(outcome > 0) for said, outcome in tables.outcomes.items()}
    exact, numbers = tables.gradient(), np.random.default_rng(0)
    right = {said: tables.value(said) for said in tables.histories}
    wrong = {said: float(numbers.uniform(0.05, 0.95)) for said in tables.histories}
    for lam in (0.0, 0.5, 1.0):
        assert_equal(by_critic(tables, right, lam), exact)
    # With lambda 1 its values are a baseline. With 0 the update climbs them, not the outcome.
    assert_equal(by_critic(tables, wrong, 1.0), exact)
    believed = {**wrong, **tables.outcomes}
    climbed: Gradient = defaultdict(lambda: np.zeros(len(tables.replies)))
    for said in tables.histories:
        for k, reply in enumerate(tables.replies):
            worth = tables.reached(said) * tables.policy[said][k] * believed[said + reply]
            climbed[tables.parameters(said)] += worth * tables.score(said, k)
    assert_equal(by_critic(tables, wrong, 0.0), climbed)

    def apart(lam: float) -> float:
        found = by_critic(tables, wrong, lam)
        squares = [((found[key] - exact[key]) ** 2).sum() for key in exact]
        return float(np.sqrt(sum(squares) / sum((one**2).sum() for one in exact.values())))

    assert [apart(lam) for lam in (0.0, 0.5, 0.9)] == pytest.approx(errors, abs=0.01)
