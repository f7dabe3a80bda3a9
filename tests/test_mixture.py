"""Mixtures: tasks in exact shares, agents by their part, and what a recipe says of parts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from fractions import Fraction
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_atgrpo import Environment, EnvironmentConfigError, Outcome, Score, ScriptedTeam, Split, Team, make, play
from verl_atgrpo.play import contamination, registry
from verl_atgrpo.play.environment_check import check_declared, check_first_tasks
from verl_atgrpo.play.mixture import Mixture, PartTeam
from verl_atgrpo.play.nested import row_at
from verl_atgrpo.play.types import TeamOptions, for_agent, names_of


class Sums(Environment):
    """Seven training sums, three validation sums; an asker and a solver, who has two candidates."""

    agents = ("asker", "solver")
    schemes: ClassVar = {"solver": ("tree",)}

    def __init__(self, offset: int = 0, tasks: int = 7) -> None:
        if offset > 9:
            raise EnvironmentConfigError(f"at_grpo.environment.offset={offset}: at most 9")
        self._offset, self._tasks = offset, tasks

    def task(self, split: Split, index: int) -> int:
        return self._offset + index + (100 if split == "val" else 0)

    def fingerprint(self, task: int) -> str:
        return str(task)

    def num_tasks(self, split: Split) -> int:
        return self._tasks if split == "train" else 3

    async def run(self, task: int, team: Team) -> Outcome:
        asked = await team.asker.act(f"ask {task}")
        answer = await team["solver"].act(asked.text, lambda text: Score(local=float(text == "1")), candidates=2)
        return Outcome(success=answer.text == "1", metrics={"asked": task})


class Sets(Sums):
    """The same from two data sets."""

    def data_sets(self, split: Split) -> Mapping[str, int]:
        return {"old": 2, "new": 1} if split == "val" else {}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY, "sums": Sums, "sets": Sets})


def mixture(**parts: Any) -> Mixture:
    made = make("mixture", parts=parts)
    assert isinstance(made, Mixture)
    return made


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any),
    st.integers(0, 200),
    st.integers(1, 64),
)
def test_any_tasks_in_a_row_are_in_the_shares_of_the_weights(weights: list[int], start: int, number: int) -> None:
    parts = {f"p{index}": {"name": "sums", "weight": weight} for index, weight in enumerate(weights)}
    made = mixture(**parts)
    counts = Counter(made.task("train", index).part for index in range(start, start + number))
    for name, part in parts.items():
        share = Fraction(int(part["weight"]), sum(weights)) * number
        # Less than one task too few or too many at each end.
        assert abs(counts[name] - share) < 2, (name, counts)
    assert sum(counts.values()) == number


def test_the_order_is_that_of_the_largest_deficit() -> None:
    made = mixture(a={"name": "sums", "weight": 2}, b={"name": "sums"}, never={"name": "sums", "weight": 0})
    # Deficits before each task: (2/3, 1/3), (1/3, 2/3), (1, 0), and so on.
    assert "".join(made.task("train", index).part for index in range(9)) == "abaabaaba"
    # Asked out of order, as another worker does.
    again = mixture(a={"name": "sums", "weight": 2}, b={"name": "sums"}, never={"name": "sums", "weight": 0})
    assert again.task("train", 7) == made.task("train", 7)


def test_a_part_with_few_tasks_begins_again_and_leaves_none_out() -> None:
    made = mixture(a={"name": "sums"}, b={"name": "sums", "offset": 9})
    played = [made.task("train", index) for index in range(28)]
    assert Counter(one.task for one in played if one.part == "a") == dict.fromkeys(range(7), 2)
    assert made.num_tasks("train") == 14 and made.ordered
    # As many as the part with the most tasks for its share needs.
    weighted = mixture(a={"name": "sums", "weight": 3}, b={"name": "sums", "offset": 9})
    assert weighted.num_tasks("train") == 28
    assert len({one.task for one in (weighted.task("train", index) for index in range(28)) if one.part == "b"}) == 7
    assert mixture(a={"name": "sums"}, walk={}).num_tasks("train") is None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 4096, 10_007])
def test_data_are_not_played_in_the_order_of_the_file(size: int) -> None:
    rows = [row_at(place, size) for place in range(size)]
    assert sorted(rows) == list(range(size)) and row_at(size, size) == rows[0]
    if size >= 100:
        # Any tenth of the tasks is of all tenths of the file.
        assert {row * 10 // size for row in rows[: size // 5]} == set(range(10))


def test_a_part_without_tasks_is_named() -> None:
    with pytest.raises(EnvironmentConfigError, match=r"^at_grpo\.environment\.parts\.b: 'sums' has no training tasks"):
        mixture(a={"name": "sums"}, b={"name": "sums", "tasks": 0})
    mixture(a={"name": "sums"}, b={"name": "sums", "tasks": 0, "weight": 0})


def test_validation_has_each_parts_tasks_and_data_sets() -> None:
    made = mixture(a={"name": "sets", "val_tasks": 5}, b={"name": "sets", "val_tasks": 1}, sums=None)
    assert made.num_tasks("val") == 3 + 1 + 3
    assert made.data_sets("val") == {"a.old": 2, "a.new": 1, "b.old": 1, "sums": 3}
    assert [(one.part, one.task) for one in (made.task("val", index) for index in range(7))] == [
        *(("a", 100 + index) for index in range(3)),
        ("b", 100),
        *(("sums", 100 + index) for index in range(3)),
    ]
    with pytest.raises(IndexError):
        made.task("val", 7)
    one = mixture(a={"name": "sets", "val_tasks": 0}, sums=None)
    assert one.data_sets("val") == {"sums": 3} and one.task("val", 0).part == "sums"


def test_tasks_of_two_environments_are_different_problems_and_those_of_one_are_compared() -> None:
    made = mixture(a={"name": "sums"}, b={"name": "sets"})
    first, second = made.task("train", 0), made.task("train", 1)
    assert (first.part, second.part, first.task) == ("a", "b", second.task)
    assert made.fingerprint(first) != made.fingerprint(second)
    assert made.task_key(first) != made.task_key(second)
    # One part may not validate on what another one of the same environment trains on.
    shared = mixture(a={"name": "sums"}, b={"name": "sums", "offset": -100})
    (found, *_) = contamination.overlaps(shared, 14, 6)
    assert (shared.part_of("val", found.val), shared.part_of("train", found.train)) == ("b", "a")
    check_declared(made, "mixture")
    check_first_tasks(made, "mixture")
    assert not list(contamination.overlaps(made, 14, 6))

    class Leaks(Sums):
        def fingerprint(self, task: int) -> str:
            return str(task % 100)

    registry._REGISTRY["leaks"] = Leaks
    assert list(contamination.overlaps(mixture(a={"name": "leaks"}, b={"name": "sums"}), 14, 6))


def test_a_part_is_played_by_its_agents_under_their_own_names() -> None:
    made = mixture(a={"name": "sums"}, b={"name": "sums"})
    scripts = {agent: lambda prompt, number: str(number) for agent in made.agents}
    team = ScriptedTeam(scripts, candidates=3)
    record = asyncio.run(play(made, made.task("train", 1), team))
    assert [(one.agent, one.turn, len(one.candidates)) for one in record.decisions] == [
        ("b.asker", 0, 3),
        ("b.solver", 0, 2),
    ]
    assert record.outcome.success
    assert made.schemes == {"a.solver": ("tree",), "b.solver": ("tree",)}
    seen = PartTeam(team, "b", Sums.agents)
    assert (seen.solver.name, seen["asker"].name, seen.failure) == ("b.solver", "b.asker", None)
    for other in ("a", "nobody"):
        with pytest.raises(AttributeError, match="has no agent"):
            getattr(seen, other)


def test_endpoints_have_the_parts_own_names() -> None:
    asked: list[tuple[object, ...]] = []

    class Served:
        @asynccontextmanager
        async def serve(self, score: Any, *, agents: list[str], **limits: Any) -> AsyncIterator[dict[str, str]]:
            asked.append((agents, limits, None if score is None else score(agents[0], ["messages"], "reply")))
            yield {agent: f"url of {agent}" for agent in agents}

    async def serve(score: Any, **options: Any) -> dict[str, Any]:
        team = PartTeam(Served(), "b", Sums.agents)  # type: ignore[arg-type]
        async with team.serve(score, **options) as urls:
            return dict(urls)

    urls = asyncio.run(serve(lambda agent, messages, reply: (agent, messages, reply), max_turns=2))
    assert urls == {"asker": "url of b.asker", "solver": "url of b.solver"}
    assert asked == [(["b.asker", "b.solver"], {"max_turns": 2}, ("asker", ["messages"], "reply"))]
    assert asyncio.run(serve(None, agents=["solver"])) == {"solver": "url of b.solver"}
    assert asked[1] == (["b.solver"], {}, None)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"^at_grpo\.environment\.parts=\{\}: environments by name"),
        (
            {"a": {"name": "sums", "weight": -1}},
            r"^at_grpo\.environment\.parts\.a\.weight=-1: a number of at",
        ),
        ({"a": {"name": "sums", "weight": float("nan")}}, r"\.a\.weight=nan: a number of at least 0$"),
        ({"a": {"name": "sums", "weight": True}}, r"\.a\.weight=True: a number of at least 0$"),
        ({"a": {"name": "sums", "weight": 0}}, r"^at_grpo\.environment\.parts: all weights are 0; give one"),
        (
            {"a": {"name": "sums", "val_tasks": 0, "weight": 0}, "b": {"name": "sums"}},
            r"\.a: with weight=0 and val_tasks=0 it has no effect; remove it$",
        ),
        ({"a": {"name": "sums", "val_tasks": -1}}, r"\.a\.val_tasks=-1: a whole number of at least 0$"),
        ({"sum": {}}, r"^at_grpo\.environment\.parts\.sum\.name='sum' is unknown: use one of code"),
        ({"a": {"name": "sums", "size": 1}}, r"^at_grpo\.environment\.parts\.a\.size is not an option of 'sums'"),
        ({"a": {"name": "sums", "offset": 10}}, r"^at_grpo\.environment\.parts\.a\.offset=10: at most 9$"),
        ({"a": {"name": 3}}, r"^at_grpo\.environment\.parts\.a\.name=3: the name of an environment$"),
        (
            {"a": {"name": "mixture", "parts": {"sums": {}}}},
            r"^at_grpo\.environment\.parts\.a\.name='mixture' orders its tasks itself, which has no effect within",
        ),
        ({"a.b": {"name": "sums"}}, r"^at_grpo\.environment\.parts\.a\.b: use letters"),
        ({"all": {"name": "sums"}}, r"^at_grpo\.environment\.parts\.all: taken"),
        ({"a": "sums"}, r"^at_grpo\.environment\.parts\.a='sums': a section"),
    ],
)
def test_what_is_no_mixture_is_one_line(parts: Any, message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        make("mixture", parts=parts)


def test_the_narrowest_name_of_an_agent_counts() -> None:
    assert names_of("walk.navigator") == ("walk.navigator", "walk")
    assert names_of("navigator") == ("navigator",)
    given = {"walk": 1, "walk.pacer": 2, "pacer": 3}
    assert [for_agent(given, agent, 0) for agent in ("walk.navigator", "walk.pacer", "pacer", "walks.pacer")] == [
        1,
        2,
        3,
        0,
    ]


def test_candidates_of_a_part() -> None:
    made = mixture(a={"name": "sums"}, b={"name": "sums"})
    team = ScriptedTeam({agent: lambda prompt, number: str(number) for agent in made.agents})
    team._options = TeamOptions(candidates=2, agent_candidates={"b": 5, "b.solver": 9})
    record = asyncio.run(play(made, made.task("train", 1), team))
    # The environment's own number comes before both.
    assert [len(one.candidates) for one in record.decisions] == [5, 2]
