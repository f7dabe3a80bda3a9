"""Training tasks that are half solved come first, and the order follows from seed and results alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from verl_atgrpo.play.task_order import HalfSolvedFirst


def played(order: HalfSolvedFirst, results: dict[int, list[bool]]) -> HalfSolvedFirst:
    for task, given in results.items():
        for success in given:
            order.add(task, success)
    return order


def chosen(order: HalfSolvedFirst, number: int) -> Counter[int]:
    """How often each task is chosen, of so many one after the other, whose results are not added."""
    counts: Counter[int] = Counter()
    for _ in range(number):
        task = order.next()
        counts[task] += 1
        order._waiting[task] = 0
    return counts


def test_half_solved_tasks_come_often_and_solved_and_hopeless_ones_rarely() -> None:
    order = played(HalfSolvedFirst(4, 0), {0: [True] * 20, 1: [False] * 20, 2: [True, False] * 10})
    counts = chosen(order, 400)
    # Task 3 was never tried: its draw is anywhere.
    assert counts[2] > 200
    assert counts[3] > 20
    assert counts[0] + counts[1] < 20


def test_old_results_fade() -> None:
    order = played(HalfSolvedFirst(2, 0), {0: [False] * 50 + [True] * 20, 1: [True] * 50 + [True, False] * 10})
    assert chosen(order, 200)[1] > 180


def test_a_task_in_flight_is_not_submitted_again_before_all_others() -> None:
    order = HalfSolvedFirst(5, 3)
    first = [order.next() for _ in range(5)]
    assert sorted(first) == [0, 1, 2, 3, 4]
    order.add(first[0], True)
    assert order.next() == first[0]


def test_the_order_follows_from_the_seed_and_is_checkpointed() -> None:
    one, same, other = (played(HalfSolvedFirst(50, seed), {7: [True, False]}) for seed in (1, 1, 2))
    begun = [[order.next() for _ in range(10)] for order in (one, same, other)]
    assert begun[0] == begun[1] != begun[2]
    for task in begun[0]:
        one.add(task, task % 2 == 0)
    resumed = HalfSolvedFirst(50, 1)
    resumed.restore(one.state())
    assert [resumed.next() for _ in range(10)] == [one.next() for _ in range(10)]
    for wrong in ({"level": 1}, HalfSolvedFirst(49, 1).state()):
        with pytest.raises(ValueError, match=r"^at_grpo\.task_order=half_solved: the checkpoint has no such order"):
            resumed.restore(wrong)


def test_metrics_tell_what_was_chosen() -> None:
    order = played(HalfSolvedFirst(4, 0), {0: [True]})
    assert order.metrics() == {"tasks/tried_share": 0.25}
    for _ in range(4):
        order.next()
    # (1 + 1) / 3 for task 0, one half for the three others.
    assert order.metrics()["tasks/expected_success"] == pytest.approx((2 / 3 + 3 * 0.5) / 4)
    assert "tasks/expected_success" not in order.metrics()


def test_the_trainer_submits_them(rollout: Any) -> None:
    from fakes.fake_trainer import FakeTrainer

    order = played(HalfSolvedFirst(48, 0), {task: [True] * 9 for task in range(44)})
    steps = FakeTrainer(rollout, levels=order, tasks=48).run(3)
    assert len({44, 45, 46, 47} & set(rollout.submitted[:6])) > 2
    # Every episode of the fake is solved.
    assert steps[-1]["tasks/expected_success"] > 0.5
    assert order._solved[rollout.submitted[0]] > 0
