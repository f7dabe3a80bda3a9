"""Curricula: which level is played when, what moves it, and that a resumed one goes on as it would have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo import Environment, EnvironmentConfigError, Outcome, Score, ScriptedTeam, Split, Team, make, play
from verl_atgrpo.play import contamination, registry
from verl_atgrpo.play.curriculum import Curriculum, LevelOrder
from verl_atgrpo.play.environment_check import check_declared, check_first_tasks
from verl_atgrpo.play.nested import Shares
from verl_atgrpo.play.task_order import HalfSolvedFirst


class Count(Environment):
    """Count to a number; four training tasks of each size, and two validation tasks more than its size."""

    agents = ("counter",)

    def __init__(self, size: int = 1, players: int = 1) -> None:
        if size > 9:
            raise EnvironmentConfigError(f"at_grpo.environment.size={size}: at most 9")
        self.size = size
        self.agents = ("counter", "second")[:players]  # type: ignore[misc]

    def task(self, split: Split, index: int) -> tuple[int, str, int]:
        return self.size, split, index

    def fingerprint(self, task: tuple[int, str, int]) -> str:
        return str(task)

    def num_tasks(self, split: Split) -> int:
        return 4 if split == "train" else 2 + self.size

    async def run(self, task: tuple[int, str, int], team: Team) -> Outcome:
        reply = await team.counter.act(f"count to {task[0]}", lambda text: Score(local=1.0))
        return Outcome(success=reply.text == str(task[0]))


class Nested(Count):
    """The same with an option that is a section."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY, "count": Count, "nested": Nested})


def curriculum(sizes: Sequence[int] = (1, 2, 3), **options: Any) -> Curriculum:
    made = make("curriculum", of={"name": "count"}, levels=[{"size": size} for size in sizes], **options)
    assert isinstance(made, Curriculum)
    return made


def play_step(order: LevelOrder, tasks: int, success: Any) -> Counter[int]:
    """Plays a step's tasks; `success` is a level's. Returns the tasks of each level."""
    indices = [order.next() for _ in range(tasks)]
    order.learn([(index, success(index % 3)) for index in indices])
    return Counter(index % 3 for index in indices)


def test_the_level_rises_with_success_and_keeps_a_share_of_what_was_learned() -> None:
    order = LevelOrder(curriculum(window=8, review=0.25), 300)
    assert play_step(order, 8, lambda level: True) == {0: 8}
    assert order.level == 1
    # Three of four tasks are of the level itself, one of those before it.
    assert play_step(order, 8, lambda level: level == 0) == {0: 2, 1: 6}
    assert order.level == 1  # six results, not yet eight
    assert play_step(order, 4, lambda level: True) == {0: 1, 1: 3}
    # Of the last eight three: five wrong ones are left.
    assert (order.level, order.metrics()) == (1, {"curriculum/level": 1.0, "curriculum/success": 0.375})
    play_step(order, 12, lambda level: True)
    assert order.level == 2
    # An eighth for each of the two easier ones.
    assert play_step(order, 16, lambda level: level != 2) == {0: 2, 1: 2, 2: 12}
    assert order.level == 1
    assert order.metrics() == {"curriculum/level": 1.0, "curriculum/success": 0.0}, "that by which it has changed"


def test_the_last_level_stays_when_it_is_solved_and_the_first_when_it_is_not() -> None:
    order = LevelOrder(curriculum(window=2, review=0), 300)
    for _ in range(5):
        play_step(order, 2, lambda level: False)
    assert order.level == 0
    for _ in range(5):
        play_step(order, 2, lambda level: True)
    assert order.level == 2
    assert play_step(order, 4, lambda level: True) == {2: 4}


@pytest.mark.parametrize(("solved", "level"), [(2, 1), (1, 0), (8, 1), (9, 2)])
def test_bounds_are_passed_not_met(solved: int, level: int) -> None:
    order = LevelOrder(curriculum(window=10, review=0), 300)
    play_step(order, 10, lambda level: True)
    assert order.level == 1
    results = iter([True] * solved + [False] * (10 - solved))
    play_step(order, 10, lambda level: next(results))
    assert order.level == level


def test_episodes_of_another_level_do_not_count() -> None:
    order = LevelOrder(curriculum(window=2), 300)
    started = [order.next() for _ in range(4)]
    order.learn([(index, True) for index in started[:2]])
    assert order.level == 1
    # In flight since before the level rose.
    order.learn([(index, False) for index in started[2:]])
    assert order.level == 1


def test_a_lucky_streak_within_a_step_does_not_move_the_level() -> None:
    # Episodes of a task follow each other: some tasks are solved by all of theirs.
    order = LevelOrder(curriculum(window=4, review=0), 300)
    streaks = [True] * 8 + [False] * 8 + [True] * 4
    order.learn([(order.next(), success) for success in streaks])
    assert (order.level, order.metrics()["curriculum/success"]) == (0, 0.6)
    # A step with more episodes than the window counts whole.
    order.learn([(order.next(), success) for success in [False] * 3 + [True] * 17])
    assert order.level == 1


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60))
def test_a_resumed_order_goes_on_as_it_would_have(results: list[bool], stop: int) -> None:
    order = LevelOrder(curriculum(window=4), 30)
    told: list[int] = []
    resumed: LevelOrder | None = None
    for number, result in enumerate(results):
        if number == stop:
            resumed = LevelOrder(curriculum(window=4), 30)
            resumed.restore(order.state())
        index = order.next()
        told.append(index)
        order.learn([(index, result)])
        if resumed is not None:
            assert resumed.next() == index
            resumed.learn([(index, result)])
            assert (resumed.level, resumed.state()) == (order.level, order.state())
    assert all(0 <= index < 30 for index in told)


def test_a_state_of_other_levels_is_refused() -> None:
    order = LevelOrder(curriculum(), 30)
    with pytest.raises(ValueError, match=r"^at_grpo\.environment\.levels: the checkpoint has 2 levels, the recipe 3;"):
        order.restore(LevelOrder(curriculum((1, 2)), 30).state())
    for state in ({"_snapshot": {}}, HalfSolvedFirst(30, 0).state()):
        with pytest.raises(ValueError, match=r"^at_grpo\.environment\.name=curriculum: the checkpoint's tasks were"):
            order.restore(state)


def test_indices_name_levels_and_validation_is_the_last() -> None:
    made = curriculum()
    assert [(one.level, one.task) for one in (made.task("train", index) for index in (0, 1, 2, 3, 14))] == [
        (0, (1, "train", 0)),
        (1, (2, "train", 0)),
        (2, (3, "train", 0)),
        (0, (1, "train", 3)),  # not in the order of a file
        (2, (3, "train", 0)),  # the fifth of four
    ]
    assert [made.task("val", index).task for index in range(5)] == [(3, "val", index) for index in range(5)]
    assert (made.num_tasks("train"), made.num_tasks("val"), made.ordered) == (12, 5, True)
    check_declared(made, "curriculum")
    check_first_tasks(made, "curriculum")
    assert not list(contamination.overlaps(made, 12, 5))
    assert {made.task("train", index).task for index in range(12)} == {
        (size, "train", task) for size in (1, 2, 3) for task in range(4)
    }


def test_levels_without_end_have_tasks_of_their_own() -> None:
    made = make("curriculum", of={"name": "walk"}, levels=[{"size": 4}, {"size": 5}])
    tasks = [made.task("train", index) for index in (0, 1, 4000)]
    assert [one.task.size for one in tasks] == [4, 5, 4]
    assert made.num_tasks("val") is None


def test_options_that_are_sections_are_merged() -> None:
    made = make(
        "curriculum",
        of={"name": "nested", "data": {"path": "p", "where": {"a": 1}}},
        levels=[
            {"data": {"where": {"level": 1}}},
            {"data": {"path": "q"}},
            {"data": None},
        ],
    )
    assert [level.data for level in made.levels] == [
        {"path": "p", "where": {"a": 1, "level": 1}},
        {"path": "q", "where": {"a": 1}},
        None,
    ]


def test_a_level_that_has_a_validation_task_is_found() -> None:
    class Leaks(Count):
        def fingerprint(self, task: tuple[int, str, int]) -> str:
            return f"{task[2]}"

    registry._REGISTRY["leaks"] = Leaks
    made = make("curriculum", of={"name": "leaks"}, levels=[{"size": 1}, {"size": 2}])
    assert list(contamination.overlaps(made, 4, 2))


def test_an_episode_is_one_of_its_level() -> None:
    made = curriculum()
    team = ScriptedTeam({"counter": lambda prompt, number: prompt[-1]})
    record = asyncio.run(play(made, made.task("train", 1), team))
    assert record.outcome.success
    assert "".join(map(chr, record.decisions[0].prompt_ids)) == "count to 2"


def test_shares_keep_what_changed_weights_owe() -> None:
    shares = Shares([0.0, 0.0])
    assert [shares.next([3, 1]) for _ in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]
    assert [shares.next([0, 1]) for _ in range(2)] == [1, 1]
    assert Shares(shares.credit).next([1, 1]) == shares.next([1, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [{"size": 1}]}, r"^at_grpo\.environment\.levels=\[\{'size': 1\}\]: two levels or more"),
        ({"levels": "ab"}, r"^at_grpo\.environment\.levels='ab': two levels or more"),
        ({"lower": 0.8}, r"^at_grpo\.environment\.lower=0\.8 is not below upper=0\.8$"),
        ({"upper": 1}, r"^at_grpo\.environment\.upper=1: no success is above it; set it below 1, such as 0\.8$"),
        ({"upper": 1.2}, r"^at_grpo\.environment\.upper=1\.2: a number from 0 to 1$"),
        ({"review": 1}, r"^at_grpo\.environment\.review=1 leaves no tasks of the level itself"),
        ({"review": float("nan")}, r"^at_grpo\.environment\.review=nan: a number from 0 to 1$"),
        ({"window": 0}, r"^at_grpo\.environment\.window=0: a whole number from 1 to 1,000,000$"),
        ({"of": {}}, r"^at_grpo\.environment\.of=\{\}: an environment, such as"),
        ({"levels": [{"size": 1}, 2]}, r"^at_grpo\.environment\.levels\[1\]=2: options of 'count', such as"),
        ({"levels": [{}, {"name": "walk"}]}, r"^at_grpo\.environment\.levels\[1\]=\{'name': 'walk'\}: options of"),
        ({"levels": [{"size": 10}, {}]}, r"^at_grpo\.environment\.levels\[0\]\.size=10: at most 9$"),
        ({"of": {"name": "cuont"}}, r"^at_grpo\.environment\.of\.name='cuont' is unknown"),
        ({"of": {"name": "count", "sizes": 1}}, r"^at_grpo\.environment\.of\.sizes is not an option of 'count'"),
        ({"levels": [{}, {"sizes": 1}]}, r"^at_grpo\.environment\.levels\[1\]\.sizes is not an option of 'count'"),
        (
            {"of": {"name": "curriculum", "of": {"name": "count"}}, "levels": [{"levels": [{}, {}]}] * 2},
            r"^at_grpo\.environment\.of\.name='curriculum' orders its tasks itself",
        ),
        ({"levels": [{"players": 2}, {}]}, r"^at_grpo\.environment\.levels\[0\] has the agents counter, second, the"),
    ],
)
def test_what_is_no_curriculum_is_one_line(options: Any, message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        make("curriculum", **{"of": {"name": "count"}, "levels": [{"size": 1}, {"size": 2}], **options})
