"""Figures of an evaluation, with intervals.

Tasks are independent, episodes of one task are not. So every mean is the mean over tasks of the mean over a task's
episodes, and intervals are of tasks' means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from verl_atgrpo.lab.evaluation.intervals import LEVEL, Array, mean_interval, ratio_interval
from verl_atgrpo.lab.evaluation.results import EpisodeRow
from verl_atgrpo.lab.report import counted
from verl_atgrpo.play import ratings


@dataclass(frozen=True)
class Estimate:
    """A figure and its closed interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
    """Figures of an evaluation."""

    tasks: int
    episodes: tuple[int, int]
    """Fewest and most episodes per task."""
    success: Estimate
    """avg@n: the mean success of an episode."""
    pass_at: dict[int, Estimate]
    """k -> probability that at least one of k episodes of a task is solved."""
    by_turn: dict[int, Estimate]
    """t -> share of episodes that are solved with at most t decisions of any agent."""
    by_data_set: dict[str, Estimate]
    """Data set -> mean success on its tasks that were played; empty if there is only one data set."""
    by_seed: dict[int, float]
    """Seed -> mean success."""
    tokens_per_solved: Estimate
    """Generated tokens of all episodes per solved episode; infinite if none is solved."""
    all_tokens_per_solved: Estimate
    """As above, including prompt tokens."""
    failed: dict[str, int]
    """Reason -> number of failed episodes, which count as not solved."""
    truncated: float
    """Share of answers that were cut off at the length limit."""


def pass_at_k(episodes: int, solved: int, k: int) -> float:
    """Returns the unbiased estimate 1 - C(n - c, k) / C(n, k) of pass@k (Chen et al. 2021, arXiv 2107.03374).

    `episodes` is n, those of one task, `solved` is c. Raises ValueError unless k is from 1 to n.
    """
    if not 1 <= k <= episodes:
        raise ValueError(
            f"pass@{k} needs at least {k} episodes of every task and k of at least 1, there are {episodes}"
        )
    if episodes - solved < k:
        return 1.0
    # C(n - c, k) / C(n, k) as a product, which does not overflow.
    return float(1.0 - np.prod(1.0 - k / np.arange(episodes - solved + 1, episodes + 1)))


def by_task(rows: Iterable[EpisodeRow]) -> dict[int, list[EpisodeRow]]:
    """Returns task -> its episodes, both sorted."""
    ordered = sorted(rows, key=lambda row: row.key)
    return {task: list(mine) for task, mine in groupby(ordered, key=lambda row: row.task)}


def figures(
    rows: Sequence[EpisodeRow], ks: Sequence[int] | None = None, data_sets: Mapping[str, int] | None = None
) -> Figures:
    """Returns the figures of an evaluation.

    Args:
        rows: its episodes.
        ks: values of k for pass@k; None for the powers of two from 2 to the episodes that every task has (pass@1 is
            avg@n).
        data_sets: name -> number of tasks, as `Environment.data_sets` returns it.

    Raises ValueError if there is no episode, or if a task has fewer episodes than a k.
    """
    if not rows:
        raise ValueError("there is no episode")
    tasks = by_task(rows)
    counts = [len(mine) for mine in tasks.values()]
    ks = [1 << power for power in range(1, min(counts).bit_length())] if ks is None else ks
    turns = range(1, max(1, *(row.turns for row in rows)) + 1)
    columns = np.array([_numbers(mine, ks, turns) for mine in tasks.values()]).T
    shares = [_mean(values) for values in columns[2:]]
    seeds = sorted({row.seed for row in rows})
    answers = sum(agent.decisions for row in rows for agent in row.agents.values())
    return Figures(
        tasks=len(tasks),
        episodes=(min(counts), max(counts)),
        success=shares[0],
        pass_at=dict(zip(ks, shares[1:], strict=False)),
        by_turn=dict(zip(turns, shares[1 + len(ks) :], strict=True)),
        by_data_set=_by_data_set(rows, data_sets or {}),
        by_seed={seed: success_by_task(row for row in rows if row.seed == seed).mean() for seed in seeds},
        tokens_per_solved=_ratio(columns[0], columns[2]),
        all_tokens_per_solved=_ratio(columns[1], columns[2]),
        failed=dict(Counter(row.failed.reason for row in rows if row.failed is not None)),
        truncated=sum(agent.truncated for row in rows for agent in row.agents.values()) / max(1, answers),
    )


def _numbers(mine: Sequence[EpisodeRow], ks: Sequence[int], turns: Sequence[int]) -> list[float]:
    """Returns the columns of a task: means over its episodes (both numbers of tokens first), and pass@k."""
    solved = sum(row.success for row in mine)
    return [
        sum(row.generated_tokens for row in mine) / len(mine),
        sum(row.generated_tokens + row.prompt_tokens for row in mine) / len(mine),
        solved / len(mine),
        *(pass_at_k(len(mine), solved, k) for k in ks),
        *(sum(row.success and row.turns <= turn for row in mine) / len(mine) for turn in turns),
    ]


def _by_data_set(rows: Sequence[EpisodeRow], data_sets: Mapping[str, int]) -> dict[str, Estimate]:
    found = {name: [row for row in rows if row.task in places] for name, places in _places(data_sets)}
    return {name: _mean(success_by_task(mine)) for name, mine in found.items() if mine}


def _places(data_sets: Mapping[str, int]) -> Iterator[tuple[str, range]]:
    """Yields every data set with its tasks, which come one set after another."""
    end = 0
    for name, size in data_sets.items():
        yield name, range(end, end + size)
        end += size


def _mean(values: Array, low: float = 0.0) -> Estimate:
    """Returns the mean of one number of every task, from `low` to 1."""
    ends = mean_interval(values, low)
    return Estimate(float(values.mean()), float(ends[0]), float(ends[1]))


def _ratio(amounts: Array, success: Array) -> Estimate:
    """Returns the amount per solved episode; infinite if none is solved."""
    low, high = ratio_interval(amounts, success)
    solved = float(success.mean())
    return Estimate(float(amounts.mean()) / solved if solved else math.inf, float(low), float(high))


def success_by_task(rows: Iterable[EpisodeRow]) -> Array:
    """Returns the mean success of every task, sorted by task."""
    return np.array([np.mean([row.success for row in mine]) for mine in by_task(rows).values()])


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two evaluations."""

    tasks: int
    """Number of common tasks."""
    left_out: tuple[int, int]
    """Number of tasks in the first only, and in the second only."""
    first: float
    second: float
    """Mean success on the common tasks."""
    difference: Estimate
    """Second minus first."""
    better: int
    worse: int
    equal: int
    """Number of tasks on which the second's mean success is higher, lower, equal."""
    failed: tuple[int, int]
    """Failed episodes of the first and of the second, which count as not solved."""
    by_data_set: dict[str, tuple[float, float, Estimate]]
    """Data set, or part of a mixture -> both means and their difference."""


def compare(
    first: Iterable[EpisodeRow],
    second: Iterable[EpisodeRow],
    data_sets: Mapping[str, int] | None = None,
    *,
    common_only: bool = False,
) -> Comparison:
    """Returns the comparison of two evaluations on the same tasks, matched by fingerprint.

    Their episodes per task may differ. `data_sets` (name -> number of tasks) are the first's. Raises ValueError if
    there is no common task, or if the tasks differ without `common_only`, which compares on the common ones.
    """
    first, second = list(first), list(second)
    a, b = _success_by_problem(first), _success_by_problem(second)
    common = sorted(a.keys() & b.keys())
    left_out = len(a) - len(common), len(b) - len(common)
    if not common:
        raise ValueError(f"no task of the first ({len(a)}) is also one of the second ({len(b)})")
    if any(left_out) and not common_only:
        raise ValueError(
            f"the tasks are not the same: {len(common)} are common, {left_out[0]} in the first only, {left_out[1]} in "
            "the second only; compare on the common ones with --common"
        )
    pairs = np.array([[a[problem][1], b[problem][1]] for problem in common])
    gains = pairs[:, 1] - pairs[:, 0]
    by_data_set: dict[str, tuple[float, float, Estimate]] = {}
    for name, places in _places(data_sets or {}):
        mine = [number for number, problem in enumerate(common) if a[problem][0] in places]
        if mine:
            one, other = map(float, pairs[mine].mean(axis=0))
            by_data_set[name] = one, other, _mean(gains[mine], low=-1.0)
    return Comparison(
        tasks=len(common),
        left_out=left_out,
        first=float(pairs[:, 0].mean()),
        second=float(pairs[:, 1].mean()),
        difference=_mean(gains, low=-1.0),
        better=int((gains > 0).sum()),
        worse=int((gains < 0).sum()),
        equal=int((gains == 0).sum()),
        failed=(_failed(first), _failed(second)),
        by_data_set=by_data_set,
    )


def _failed(rows: Iterable[EpisodeRow]) -> int:
    return sum(row.failed is not None for row in rows)


def _success_by_problem(rows: Iterable[EpisodeRow]) -> Mapping[tuple[str, int], tuple[int, float]]:
    """Returns (fingerprint, number of earlier tasks with it) -> task, mean success: problems may repeat."""
    seen: Counter[str] = Counter()
    found = {}
    for task, mine in by_task(rows).items():
        fingerprint = mine[0].fingerprint
        found[fingerprint, seen[fingerprint]] = task, float(np.mean([row.success for row in mine]))
        seen[fingerprint] += 1
    return found


# ---------------------------------------------------------------------- as text


def figures_table(figures: Figures) -> str:
    """Returns an evaluation's figures as text, one per line."""
    fewest, most = figures.episodes
    n = str(most) if fewest == most else f"{fewest}..{most}"
    each = counted(most, "episode") if fewest == most else f"{n} episodes"
    lines = [
        ("tasks", f"{figures.tasks}, {each} each; intervals: {LEVEL:.0%}, over tasks"),
        (f"avg@{n}", _share(figures.success)),
        *((f"  {name}", _share(estimate)) for name, estimate in figures.by_data_set.items()),
        *((f"pass@{k}", _share(estimate)) for k, estimate in figures.pass_at.items()),
        *((f"solved within {counted(turn, 'turn')}", _share(estimate)) for turn, estimate in figures.by_turn.items()),
        ("generated tokens per solved episode", _tokens(figures.tokens_per_solved)),
        ("with the prompts' tokens", _tokens(figures.all_tokens_per_solved)),
        ("answers cut off at the limit", f"{figures.truncated:.1%}"),
    ]
    if len(figures.by_seed) > 1:
        lines.append(("by seed", ", ".join(f"{seed}: {share:.1%}" for seed, share in figures.by_seed.items())))
    if figures.failed:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(figures.failed.items()))
        number = sum(figures.failed.values())
        lines.append(("failed", f"{number} ({reasons}): counted as not solved; run again to retry"))
    return _table(lines)


def comparison_table(comparison: Comparison, first: str, second: str) -> str:
    """Returns the comparison of the files `first` and `second` as text, one figure per line."""
    left, right = comparison.left_out
    lines = [
        ("tasks", f"{comparison.tasks} in both; interval: {LEVEL:.0%}, paired by task"),
        (first, f"{comparison.first:.1%}"),
        (second, f"{comparison.second:.1%}"),
        ("difference", _points(comparison.difference)),
        *(
            (f"  {name}", f"{one:.1%}, {other:.1%}: {_points(difference)}")
            for name, (one, other, difference) in comparison.by_data_set.items()
        ),
        ("tasks better, worse, equal", f"{comparison.better}, {comparison.worse}, {comparison.equal}"),
    ]
    if any(comparison.failed):
        one, other = comparison.failed
        lines.append(("failed episodes", f"{one} of the first, {other} of the second: counted as not solved"))
    if left or right:
        lines.append(("tasks left out", f"{left} of the first, {right} of the second"))
    return _table(lines)


def _points(difference: Estimate) -> str:
    low, high = 100 * difference.low, 100 * difference.high
    return f"{100 * difference.value:+.1f} points  [{low:+.1f}, {high:+.1f}]"


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.1%}  [{estimate.low:.1%}, {estimate.high:.1%}]"


def _tokens(estimate: Estimate) -> str:
    value = "none: nothing is solved" if math.isinf(estimate.value) else f"{estimate.value:,.1f}"
    high = "unbounded" if math.isinf(estimate.high) else f"{estimate.high:,.1f}"
    return f"{value}  [{estimate.low:,.1f}, {high}]"


def _table(lines: Iterable[tuple[str, str]]) -> str:
    pairs = list(lines)
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)


def games(rows: Iterable[EpisodeRow], other: str, players: Collection[str]) -> str:
    """Returns how games against another source of answers ended, and the difference in Elo points, as text.

    A game is won with a `team_reward` above 0 and drawn with 0; failed episodes are no games, nor are those in which
    none of the `players` answers, the names under which the other source does.
    """
    answered = (row for row in rows if any(agent.policy in players for agent in row.agents.values()))
    played = [row for row in answered if row.failed is None]
    if not played:
        return f"against {other}: no game, all failed"
    shares = ratings.results(row.team_reward for row in played)
    # A task counts as one game: those of the same task may be alike.
    scores = [[ratings.score_of(row.team_reward) for row in mine] for mine in by_task(played).values()]
    score = _mean(np.array([math.fsum(each) / len(each) for each in scores]))
    points, low, high = (ratings.points(share) for share in (score.value, score.low, score.high))
    won, drawn, lost = (f"{shares[name]:.1%}" for name in ("win", "draw", "loss"))
    return (
        f"against {other}: {won} won, {drawn} drawn, {lost} lost of {counted(len(played), 'game')}; "
        f"{points:+.0f} Elo points, 95% interval {low:+.0f} to {high:+.0f}"
    )
