"""Figures of an evaluation, compared with results by hand and with enumeration of all outcomes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations, product

import pytest

from verl_atgrpo.lab.evaluation.figures import (
    Figures,
    by_task,
    compare,
    comparison_table,
    figures,
    figures_table,
    pass_at_k,
)
from verl_atgrpo.lab.evaluation.results import AgentUsage, EpisodeRow, Failure


def row(
    task: int,
    sample: int,
    success: bool,
    *,
    turns: int = 1,
    tokens: int = 10,
    seed: int = 0,
    fingerprint: str | None = None,
    failed: Failure | None = None,
    truncated: int = 0,
) -> EpisodeRow:
    usage = AgentUsage(policy="p", decisions=turns, prompt_tokens=100, generated_tokens=tokens, truncated=truncated)
    return EpisodeRow(
        task=task,
        fingerprint=fingerprint or f"problem {task}",
        seed=seed,
        sample=sample,
        success=success,
        team_reward=float(success),
        metrics={},
        turns=turns,
        decisions=turns,
        agents={"a": usage},
        failed=failed,
        seconds=0.1,
    )


def rows_of(*tasks: Iterable[bool]) -> list[EpisodeRow]:
    return [row(task, sample, bool(won)) for task, mine in enumerate(tasks) for sample, won in enumerate(mine)]


def test_the_share_of_truncated_answers_is_of_all_answers() -> None:
    cut = [row(0, 0, True, turns=3, truncated=1), row(1, 0, False, turns=1)]
    assert figures(cut).truncated == 1 / 4
    # An episode may fail before its first answer.
    assert figures([row(0, 0, False, turns=0, failed=Failure("engine", "died"))]).truncated == 0


@pytest.mark.parametrize("episodes", range(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_episodes_that_hold_a_solved_one(episodes: int) -> None:
    for solved, k in product(range(episodes + 1), range(1, episodes + 1)):
        choices = list(combinations([True] * solved + [False] * (episodes - solved), k))
        assert pass_at_k(episodes, solved, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    chance, n, k = Fraction(1, 3), 5, 3
    mean = sum(
        math.comb(n, c) * chance**c * (1 - chance) ** (n - c) * Fraction(pass_at_k(n, c, k)) for c in range(n + 1)
    )
    assert float(mean) == pytest.approx(float(1 - (1 - chance) ** k))


def test_pass_at_k_of_very_many_episodes_is_finite() -> None:
    exact = 1 - Fraction(math.comb(99_000, 50_000), math.comb(100_000, 50_000))
    assert pass_at_k(100_000, 1_000, 50_000) == pytest.approx(float(exact))
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5)


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_k_episodes(k: int) -> None:
    with pytest.raises(ValueError, match=rf"pass@{k} needs .* there are 2"):
        pass_at_k(2, 1, k)
    with pytest.raises(ValueError, match=rf"pass@{k} needs"):
        figures(rows_of([1, 0], [1, 1, 1]), ks=[k])


def test_a_tasks_episodes_are_in_order() -> None:
    rows = [row(task, sample, True, seed=seed) for task in (2, 0) for seed in (7, 5) for sample in (1, 0)]
    found = by_task(rows)
    assert list(found) == [0, 2]
    assert [(each.seed, each.sample) for each in found[2]] == sorted((each.seed, each.sample) for each in rows[:4])
    assert [each.key for task in found.values() for each in task] == sorted(each.key for each in rows)


def test_intervals_are_over_tasks_not_episodes() -> None:
    alike = figures(rows_of(*[[1] * 8] * 5, *[[0] * 8] * 5)).success
    mixed = figures(rows_of(*[[1, 0] * 4] * 10)).success
    single = figures(rows_of(*[[1]] * 5, *[[0]] * 5)).success
    assert alike.value == mixed.value == 0.5
    assert alike == single  # as with ten episodes, not with eighty
    assert 0 < mixed.high - mixed.low < (alike.high - alike.low) / 2


@pytest.mark.parametrize("won", [0, 1])
@pytest.mark.parametrize(("tasks", "each"), [(1, 1), (2, 1), (50, 1), (50, 4), (200, 16)])
def test_no_figure_is_without_an_interval(won: int, tasks: int, each: int) -> None:
    rows = rows_of(*[[won] * each] * tasks)
    found = figures(rows, data_sets={"first": 1, "rest": tasks})
    shares = [found.success, *found.pass_at.values(), *found.by_turn.values(), *found.by_data_set.values()]
    for estimate in [*shares, compare(rows, rows).difference]:
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.high - estimate.low > 1 / (tasks + 2)
    for tokens in (found.tokens_per_solved, found.all_tokens_per_solved):
        assert tokens.low < tokens.high
    assert not re.search(r"\[(\S+), \1\]", figures_table(found))


def test_an_interval_by_hand() -> None:
    # 0, 0, 0, 1 and the added 0 and 1: mean 1/3, variance 6/5 x 2/9, t of 5 degrees of freedom is 2.5706.
    found = figures(rows_of([0], [0], [0], [1])).success
    half = 2.5706 * math.sqrt(6 / 5 * 2 / 9 / 6)
    assert (found.value, found.low) == (0.25, 0)
    assert found.high == pytest.approx(1 / 3 + half, abs=1e-4)
    # Gains 1, 0, 0, 0 and the added 1 and -1: mean 1/6, sum of squares 3 - 6/36.
    gained = compare(rows_of([0], [0], [0], [1]), rows_of([1], [0], [0], [1])).difference
    half = 2.5706 * math.sqrt((3 - 1 / 6) / 30)
    assert (gained.low, gained.high) == pytest.approx((1 / 6 - half, 1 / 6 + half), abs=1e-4)


def by_hand() -> list[EpisodeRow]:
    return [
        row(0, 0, True, turns=1, tokens=10),
        row(0, 1, True, turns=3, tokens=30),
        row(1, 0, False, turns=4, tokens=40),
        row(1, 1, True, turns=2, tokens=20),
        row(2, 0, False, turns=4, tokens=40),
        row(2, 1, False, turns=1, tokens=4, failed=Failure("timeout", "no answer")),
    ]


def test_figures_by_hand() -> None:
    found = figures(by_hand())
    assert (found.tasks, found.episodes) == (3, (2, 2))
    assert found.success.value == pytest.approx(3 / 6)
    assert {k: estimate.value for k, estimate in found.pass_at.items()} == pytest.approx({2: 2 / 3})
    shares = {turn: estimate.value for turn, estimate in found.by_turn.items()}
    assert shares == pytest.approx({1: 1 / 6, 2: 2 / 6, 3: 3 / 6, 4: 3 / 6})
    assert found.tokens_per_solved.value == pytest.approx(144 / 3)
    assert found.all_tokens_per_solved.value == pytest.approx((144 + 600) / 3)
    assert found.failed == {"timeout": 1}
    assert found.tokens_per_solved.high == math.inf  # success may be 0


def test_figures_are_deterministic_for_any_order_of_lines() -> None:
    assert figures(by_hand()) == figures(by_hand()[::-1])


def test_tasks_have_equal_weight_for_any_number_of_episodes() -> None:
    assert figures(rows_of([1, 1, 1, 0], [0])).success.value == pytest.approx(3 / 8)
    assert figures(rows_of([1, 1, 1, 0], [0])).pass_at == {}
    assert list(figures(rows_of([1] * 9, [0] * 8)).pass_at) == [2, 4, 8]


def test_by_seed() -> None:
    rows = [row(0, 0, True, seed=5), row(1, 0, False, seed=5), row(0, 0, True, seed=7), row(1, 0, True, seed=7)]
    assert figures(rows).by_seed == {5: 0.5, 7: 1.0}
    assert "by seed" in figures_table(figures(rows))


def test_each_data_set_has_its_own_figure() -> None:
    rows = rows_of([1, 0], [1, 1], [0, 0], [0, 1])
    found = figures(rows, data_sets={"first": 2, "second": 1, "not played": 0, "rest": 5})
    assert {name: estimate.value for name, estimate in found.by_data_set.items()} == {
        "first": 3 / 4,
        "second": 0,
        "rest": 1 / 2,
    }
    assert found.by_data_set["first"] == figures(rows[:4]).success
    lines = [line.split("  ")[:2] for line in figures_table(found).splitlines()]
    assert ["", "second"] in lines
    assert figures(rows).by_data_set == {}


def test_without_solved_episodes_the_table_says_so() -> None:
    found: Figures = figures(rows_of([0, 0], [0, 0]))
    assert found.tokens_per_solved.value == math.inf
    assert re.search(r"none: nothing is solved  \[[\d.]+, unbounded\]", figures_table(found))
    assert "nan" not in figures_table(found)
    with pytest.raises(ValueError, match="no episode"):
        figures([])


def test_one_turn_and_one_episode_are_singular() -> None:
    text = figures_table(figures([row(0, 0, True, turns=1), row(1, 0, True, turns=2)]))
    assert "2, 1 episode each;" in text
    assert [line.partition("  ")[0] for line in text.splitlines() if "solved within" in line] == [
        "solved within 1 turn",
        "solved within 2 turns",
    ]
    assert "3, 2 episodes each;" in figures_table(figures(by_hand()))


def test_failed_episodes_and_unbounded_intervals_are_in_the_table() -> None:
    def failed(sample: int, reason: str) -> EpisodeRow:
        return row(1, sample, False, failed=Failure(reason, "why"))

    table = figures_table(figures([row(0, 0, True), failed(0, "engine"), failed(1, "timeout"), failed(2, "engine")]))
    assert "3 (engine 2, timeout 1): counted as not solved" in table
    assert re.search(r"tokens per solved episode +[\d.]+  \[[\d.]+, unbounded\]", table)
    assert "failed" not in figures_table(figures([row(0, 0, True)]))


def test_a_paired_difference_by_hand() -> None:
    first, second = rows_of([1, 0], [0, 0], [1, 1], [0, 1]), rows_of([1], [1], [0], [1])
    found = compare(first, second)
    assert (found.tasks, found.first, found.second) == (4, 0.5, 0.75)
    assert (found.better, found.worse, found.equal) == (3, 1, 0)
    assert found.difference.value == pytest.approx((0.5 + 1 - 1 + 0.5) / 4)
    assert found.difference.low < 0 < found.difference.high
    table = comparison_table(found, "a", "b")
    assert "+25.0 points" in table and "failed" not in table


def test_a_comparison_says_how_many_episodes_failed() -> None:
    late = Failure("rate_limit", "why")
    first = [row(0, 0, True), row(1, 0, True)]
    found = compare(iter(first), iter([row(0, 0, False, failed=late), row(1, 0, False, failed=late)]))
    assert "0 of the first, 2 of the second: counted as not solved" in comparison_table(found, "a", "b")


def test_data_sets_and_parts_are_compared_each() -> None:
    """By the first's numbers of tasks; the second has the tasks in another order, and not those of the last set."""
    first = [row(task, 0, task < 2, fingerprint=name) for task, name in enumerate("abcde")]
    second = [row(task, 0, name != "a", fingerprint=name) for task, name in enumerate("dcab")]
    found = compare(first, second, {"walk": 2, "search": 2, "rest": 1}, common_only=True)
    one, other, difference = found.by_data_set["walk"]
    assert (one, other, difference.value) == (1.0, 0.5, -0.5)
    assert found.by_data_set["search"][:2] == (0.0, 1.0) and list(found.by_data_set) == ["walk", "search"]
    assert re.search(r"^  walk +100\.0%, 50\.0%: -50\.0 points  \[", comparison_table(found, "x", "y"), re.MULTILINE)


def test_pairing_removes_the_variance_between_tasks() -> None:
    hard_and_easy = [[1] * 4] * 30 + [[0, 0, 0, 1]] * 30
    better = [[1] * 4] * 30 + [[0, 0, 1, 1]] * 30
    found = compare(rows_of(*hard_and_easy), rows_of(*better)).difference
    assert found.value == pytest.approx(0.125)
    assert found.low > 0  # the two intervals themselves overlap widely
    assert figures(rows_of(*hard_and_easy)).success.high > figures(rows_of(*better)).success.low


def test_tasks_are_matched_by_fingerprint_not_by_index() -> None:
    first = [row(0, 0, True, fingerprint="x"), row(1, 0, False, fingerprint="y")]
    second = [row(0, 0, False, fingerprint="y"), row(1, 0, True, fingerprint="x"), row(2, 0, True, fingerprint="z")]
    with pytest.raises(ValueError, match=r"2 are common, 0 in the first only, 1 in the second only"):
        compare(first, second)
    found = compare(first, second, common_only=True)
    assert (found.equal, found.left_out) == (2, (0, 1))
    assert "tasks left out" in comparison_table(found, "a", "b")
    with pytest.raises(ValueError, match="no task"):
        compare(first, [row(0, 0, True, fingerprint="w")], common_only=True)


def test_a_repeated_problem_is_paired_twice() -> None:
    rows = [row(0, 0, True, fingerprint="x"), row(1, 0, False, fingerprint="x")]
    assert compare(rows, rows).equal == 2
