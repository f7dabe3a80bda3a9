"""Training tasks that are half solved come first, and the order follows from seed and results alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from verl_atgrpo.play.task_order import HalfSolvedFirst


def played(order: HalfSolvedFirst, results: dict[int, list[bool]]) -> HalfSolvedFirst:
    """Plays all tasks once, so that none is new, and these tasks with these results."""
    order.learn([(task, False) for task in [order.next() for _ in range(order.state()["tasks"])]])
    order._results[:] = 0
    order.learn((task, success) for task, given in results.items() for success in given)
    order.metrics()
    return order


def chosen(order: HalfSolvedFirst, number: int) -> Counter[int]:
    """How often each task is chosen, of so many one after the other, whose results are not added."""
    counts: Counter[int] = Counter()
    for _ in range(number):
        order._in_flight[:] = False
        counts[order.next()] += 1
    return counts


def test_half_solved_tasks_come_often_and_solved_and_hopeless_ones_rarely() -> None:
    order = played(HalfSolvedFirst(3, 0), {0: [True] * 20, 1: [False] * 20, 2: [True, False] * 10})
    counts = chosen(order, 400)
    assert counts[2] > 350


def test_old_results_fade() -> None:
    order = played(HalfSolvedFirst(2, 0), {0: [False] * 50 + [True] * 20, 1: [True] * 50 + [True, False] * 10})
    assert chosen(order, 200)[1] > 180


def test_every_other_task_is_new_until_all_were_tried_and_each_is_tried_once() -> None:
    order = HalfSolvedFirst(20, 0)
    seen: list[int] = []
    for _ in range(10):
        step = [order.next() for _ in range(4)]
        order.learn((task, task % 2 == 0) for task in step)
        new = [task for task in step if task not in seen]
        # In the first step nothing else is there.
        assert len(new) == (4 if not seen else min(2, 20 - len(seen)))
        seen += new
    assert sorted(seen) == list(range(20)) != seen


@pytest.mark.parametrize(("tasks", "least"), [(500, 0.6), (20_000, 0.35)])
def test_half_solved_tasks_are_found_among_any_number(tasks: int, least: float) -> None:
    """One task in five is half solved, the others always or never; half of the submissions are new tasks."""
    order, rng = HalfSolvedFirst(tasks, 0), random.Random(0)
    shares = []
    for step in range(60):
        submitted = [order.next() for _ in range(32)]
        if step >= 50:
            shares += [task % 5 == 0 for task in submitted]
        chances = {0: 0.5, 1: 0.0, 2: 1.0, 3: 0.02, 4: 0.98}
        order.learn((task, rng.random() < chances[task % 5]) for task in submitted for _ in range(4))
    assert sum(shares) / len(shares) > least


def test_a_task_in_flight_is_not_submitted_again_before_all_others() -> None:
    order = HalfSolvedFirst(5, 3)
    first = [order.next() for _ in range(5)]
    assert sorted(first) == [0, 1, 2, 3, 4]
    order.learn([(first[0], True)])
    assert order.next() == first[0]
    assert sorted(order.next() for _ in range(5)) == [0, 1, 2, 3, 4]


def test_a_task_whose_episodes_failed_comes_again() -> None:
    """It has no results, so it may be half solved; the others are always solved."""
    order = HalfSolvedFirst(20, 0)
    first = [order.next() for _ in range(8)]
    order.learn([(task, True) for task in first[1:] for _ in range(20)])
    order.set_in_flight(first[1:4])
    again = [order.next() for _ in range(8)]
    assert first[0] in again and {*first[1:4]}.isdisjoint(again)
    assert order.metrics()["tasks/tried_share"] == 8 / 20


def test_a_task_that_always_fails_fades() -> None:
    """Among tasks that are always solved an unknown one would be nearest to one half for ever."""
    order, failing, seen = HalfSolvedFirst(100, 0), {3, 50, 77}, []
    for _ in range(150):
        step = [order.next() for _ in range(8)]
        seen.append(sum(task in failing for task in step))
        order.learn((task, True) for task in step if task not in failing for _ in range(4))
        order.set_in_flight(())
    assert sum(seen[:50]) > 0 and sum(seen[-50:]) < sum(seen[:50]) / 2


def test_the_order_follows_from_the_seed_and_is_checkpointed() -> None:
    one, same, other = (HalfSolvedFirst(50, seed) for seed in (1, 1, 2))
    begun = [[order.next() for _ in range(10)] for order in (one, same, other)]
    assert begun[0] == begun[1] != begun[2]
    one.learn((task, task % 2 == 0) for task in begun[0])
    resumed = HalfSolvedFirst(50, 1)
    resumed.restore(one.state())
    assert [resumed.next() for _ in range(10)] == [one.next() for _ in range(10)]
    for wrong in ({"level": 1}, HalfSolvedFirst(49, 1).state()):
        with pytest.raises(ValueError, match=r"^at_grpo\.task_order=half_solved: the checkpoint has no such order"):
            resumed.restore(wrong)


def test_metrics_tell_what_was_chosen() -> None:
    order = HalfSolvedFirst(1, 0)
    order.learn([(order.next(), True)])
    assert order.metrics() == {"tasks/tried_share": 1.0}
    order.next()
    assert order.metrics()["tasks/expected_success"] == pytest.approx(2 / 3)
    assert "tasks/expected_success" not in order.metrics()


def test_the_trainer_submits_them(rollout: Any) -> None:
    from fakes.fake_trainer import FakeTrainer

    order = HalfSolvedFirst(48, 0)
    steps = FakeTrainer(rollout, levels=order, tasks=48).run(6)
    # The first four are new, of later ones every other.
    assert len(set(rollout.submitted[:24])) == 4 + 5 * 2
    # Every episode of the fake is solved.
    assert steps[-1]["tasks/expected_success"] > 0.5
    assert steps[-1]["tasks/tried_share"] == pytest.approx(14 / 48)
