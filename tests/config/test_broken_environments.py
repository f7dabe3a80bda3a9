"""Environments with a defect: one line with the environment, what was asked of it and the place, before Ray."""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from verl_atgrpo import Environment, EnvironmentConfigError, Outcome, Split, Team, recipes
from verl_atgrpo.play.environment_check import check_declared, check_first_tasks
from verl_atgrpo.play.scripted import ScriptedPolicy
from verl_atgrpo.play.team import check_agents
from verl_atgrpo.play.types import TeamOptions
from verl_atgrpo.play.user_code import asking
from verl_atgrpo.train.config.run_check import check_run_or_exit


class Sound(Environment):
    """Tasks that are their numbers."""

    agents: Any = ("solo",)

    def task(self, split: Split, index: int) -> Any:
        return f"{split} {index}"

    def fingerprint(self, task: Any) -> str:
        return str(task)

    async def run(self, task: Any, team: Any) -> Outcome:
        return Outcome(False)


class RaisesAtTheStart(Sound):
    def __init__(self) -> None:
        raise LookupError("no data\nhere")


class Exits(Sound):
    def __init__(self) -> None:
        sys.exit("usage: me")


class Abstract(Environment):
    agents = ("solo",)


class NoAgents(Environment):
    task = Sound.task
    fingerprint = Sound.fingerprint
    run = Sound.run


class AgentsRaise(Sound):
    @property
    def agents(self) -> Any:  # type: ignore[override]
        return {}["agents"]


class Agents(Sound):
    def __init__(self, agents: Any) -> None:
        self.agents = agents


class NotAsync(Sound):
    def run(self, task: Any, team: Any) -> Any:  # type: ignore[override]
        return Outcome(False)


class AsyncTask(Sound):
    async def task(self, split: str, index: int) -> Any:  # type: ignore[override]
        return index


class Generator(Sound):
    async def run(self, task: Any, team: Any) -> Any:  # type: ignore[override]
        yield Outcome(False)


class Sized(Sound):
    def __init__(self, size: Any) -> None:
        self.size = size

    def num_tasks(self, split: Split) -> Any:
        return self.size


class SizeRaises(Sound):
    def num_tasks(self, split: Split) -> int:
        return len(open("/nowhere").read())


class Sets(Sound):
    def data_sets(self, split: Split) -> Any:
        return ["a", "b"]


class TaskRaises(Sound):
    def task(self, split: Split, index: int) -> Any:
        return [][index]


class LaterTaskRaises(Sound):
    def task(self, split: Split, index: int) -> Any:
        return f"{split} {index}" if index < 7 else 1 / 0


class TaskExits(Sound):
    def task(self, split: Split, index: int) -> Any:
        raise SystemExit(3)


class NumberAsFingerprint(Sound):
    def fingerprint(self, task: Any) -> Any:
        return hash(task)


class OtherEachTime(Sound):
    def task(self, split: Split, index: int) -> Any:
        return random.random()

    def fingerprint(self, task: Any) -> Any:
        return f"{task}"


class AddressAsKey(Sound):
    def task(self, split: Split, index: int) -> Any:
        return (object(),)

    def fingerprint(self, task: Any) -> Any:
        return "always the same"

    def task_key(self, task: Any) -> Any:
        return str(task)


class TextRaises(Sound):
    def dedup_text(self, task: Any) -> str:
        return task.text  # type: ignore[no-any-return]


HERE = r" \(.*test_broken_environments\.py:\d+\)"


@functools.cache
def _recipe() -> Any:
    config = recipes.compose("plan_path_cpu", ("at_grpo.train_tasks=64", "at_grpo.val_tasks=8"))
    OmegaConf.set_struct(config, False)
    return config


def refusal(name: str, **options: Any) -> str:
    config = copy.deepcopy(_recipe())
    config.at_grpo.environment = {"name": name, **options}
    with pytest.raises(SystemExit) as caught:
        check_run_or_exit(config)
    message = str(caught.value)
    assert message.startswith(f"verl-atgrpo: at_grpo.environment.name={name!r}: ") and "\n" not in message
    return message


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (RaisesAtTheStart, rf"making it raised LookupError: no data here{HERE}"),
        (Exits, rf"making it raised SystemExit: usage: me{HERE}"),
        (Abstract, r"making it raised TypeError: Can't instantiate abstract class Abstract"),
        (NoAgents, r"reading agents raised AttributeError: 'NoAgents' object has no attribute 'agents'"),
        (AgentsRaise, rf"reading agents raised KeyError: 'agents'{HERE}"),
        (NotAsync, r"NotAsync\.run is not async: write async def run"),
        (Generator, r"Generator\.run is not async"),
        (AsyncTask, r"AsyncTask\.task is async: write def task"),
        (SizeRaises, rf"num_tasks\('train'\) raised FileNotFoundError: .*{HERE}"),
        (Sets, r"Sets\.data_sets\('train'\) is \['a', 'b'\]: name -> number"),
        (TaskRaises, rf"task\('train', 0\) raised IndexError: list index out of range{HERE}"),
        (LaterTaskRaises, rf"making its tasks raised ZeroDivisionError: division by zero{HERE}"),
        (TaskExits, rf"task\('train', 0\) raised SystemExit: 3{HERE}"),
        (NumberAsFingerprint, r"NumberAsFingerprint\.fingerprint of task \(train, 0\) is -?\d+: return a text"),
        (
            OtherEachTime,
            r"OtherEachTime\.fingerprint of task \(train, 0\) is '0\.\d+', and another text when",
        ),
        (
            AddressAsKey,
            r"AddressAsKey\.task_key of task \(train, 0\) is '.*', and another text when the task is made again: draw",
        ),
        (TextRaises, rf"dedup_text of task \(train, 0\) raised AttributeError: .*{HERE}"),
    ],
)
def test_a_broken_environment_is_one_line(kind: type[Environment], told: str) -> None:
    assert re.search(f": {told}", refusal(f"{__name__}:{kind.__name__}"))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import no_such_package_at_all", "No module named 'no_such_package_at_all'"),
        ("import broken_module.part", "No module named 'broken_module.part'"),
        ("1 / 0", r"importing broken_module raised ZeroDivisionError: division by zero \(.*broken_module\.py:1\)"),
        ("def f(:\n    pass", r"importing broken_module raised SyntaxError: .*broken_module\.py, line 1"),
        ("import sys; sys.exit(2)", r"importing broken_module raised SystemExit: 2 \(.*broken_module\.py:1\)"),
        ("import json\nx = json.loads('{')", r"JSONDecodeError: .* \(.*broken_module\.py:2\)"),
        ("\traise KeyError", r"raised IndentationError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    source: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert re.search(told, refusal("broken_module:Env"))


@pytest.mark.parametrize("module", ["not_there", "not_there.inside"])
def test_a_module_that_is_not_there_may_be_put_on_the_path(module: str) -> None:
    told = refusal(f"{module}:Env")
    assert told.endswith(
        "No module named 'not_there'; put the folder that it is in on the path: export PYTHONPATH=<folder>"
    )


@pytest.mark.parametrize("size", [64.0, "64", True, -1, [64], 1e3])
def test_a_number_of_tasks_is_whole(size: Any) -> None:
    with pytest.raises(EnvironmentConfigError, match=r"Sized\.num_tasks\('train'\) is .*: return a whole number"):
        check_declared(Sized(size), "sized")


@pytest.mark.parametrize("size", [None, 0, 1, 10**6])
def test_a_number_of_tasks_may_be_any(size: Any) -> None:
    check_declared(Sized(size), "sized")
    check_first_tasks(Sized(size), "sized")


BAD_NAMES = [
    *("tool-user", "tool user", "", "1st", "_private", "_started", "__dict__", "all", "serve", "settle", "close"),
    *("policy_name", "counts", "decisions", "failure", "as_acted", "generated_tokens", 5, None),
]


@pytest.mark.parametrize("agents", ["planner", (), None, {"planner"}, {"planner": 1}, 5, ("solo", "solo")])
def test_agents_are_a_tuple_of_distinct_names(agents: Any) -> None:
    with pytest.raises(EnvironmentConfigError, match=r"^at_grpo\.environment\.name='mine': Agents\.agents"):
        check_declared(Agents(agents), "mine")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_of_an_agent_means_nothing_else(name: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        check_agents(("solo", name))


def test_every_attribute_of_a_team_is_refused_as_an_agent() -> None:
    team = Team({"solo": ScriptedPolicy(lambda prompt, k: "")}, TeamOptions())
    for name in {*dir(team), *vars(team)}:
        with pytest.raises(ValueError, match=re.escape(repr(name))):
            check_agents((name,))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "verl_atgrpo"):
        yield caplog


def test_the_traceback_is_logged_for_who_asks(logged: pytest.LogCaptureFixture) -> None:
    refusal(f"{__name__}:TaskRaises")
    assert "return [][index]" in logged.text


def test_an_environments_own_refusal_is_not_changed() -> None:
    error = EnvironmentConfigError("at_grpo.environment.size=5: odd")
    with pytest.raises(EnvironmentConfigError) as caught, asking("mine", "making it"):
        raise error
    assert caught.value is error
