"""Valid and invalid configured estimators, with the messages of the latter."""

import dataclasses
import importlib
import importlib.metadata
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_atgrpo.train.estimators.advantages import team_advantages
from verl_atgrpo.train.estimators.arithmetic import deviations, group_sum
from verl_atgrpo.train.estimators.choice import resolve_spec
from verl_atgrpo.train.estimators.presets import ENTRY_POINTS, PRESETS, presets
from verl_atgrpo.train.estimators.spec import EstimatorSpec, Labels


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "gae",
            r"^at_grpo\.estimator: unknown preset 'gae'; "
            r"valid presets: at_grpo, grpo, dr_grpo, rloo, mas_grpo, dr_mas, gigpo, m_grpo, rae "
            r"\(or name: <a name of your own>, and fields\)$",
        ),
        (None, r"^at_grpo\.estimator: unknown preset None; valid presets: at_grpo, "),
        ({"scale": "std"}, r"^at_grpo\.estimator: unknown preset None; valid presets: at_grpo, "),
        (
            {"preset": "grpo", "centre": "mean"},
            r"^at_grpo\.estimator: unknown key 'centre'; "
            r"valid keys: preset, name, unit, center, scale, ddof, eps, singleton, center_scope, scale_scope, "
            r"discount, main_agent, sub_calls, step_weight, step_gamma, step_scope, by_task, agents$",
        ),
        (
            {"preset": "grpo", "name": "mine"},
            r"^at_grpo\.estimator\.name: 'mine' has no effect beside preset: grpo; remove one of them$",
        ),
        (
            {"preset": "grpo", "unit": "token"},
            r"^at_grpo\.estimator\.unit='token': one of row, trajectory, call$",
        ),
        (
            {"preset": "grpo", "center": 0},
            r"^at_grpo\.estimator\.center=0: one of mean, leave_one_out, none$",
        ),
        ({"preset": "grpo", "scale": None}, r"^at_grpo\.estimator\.scale=None: one of std, none$"),
        (
            {"preset": "grpo", "singleton": ["zero"]},
            r"^at_grpo\.estimator\.singleton=\['zero'\]: one of zero, raw$",
        ),
        (
            {"preset": "dr_mas", "center_scope": "team"},
            r"^at_grpo\.estimator\.center_scope='team': one of group, agent$",
        ),
        (
            {"preset": "dr_mas", "scale_scope": None},
            r"^at_grpo\.estimator\.scale_scope=None: one of group, agent$",
        ),
        (
            {"preset": "dr_mas", "scale": "none", "scale_scope": "agent"},
            r"^at_grpo\.estimator\.scale_scope: 'agent' has no effect with scale: none; set scale_scope: group$",
        ),
        ({"preset": "grpo", "ddof": 2}, r"^at_grpo\.estimator\.ddof=2: one of 0, 1$"),
        ({"preset": "grpo", "ddof": True}, r"^at_grpo\.estimator\.ddof=True: one of 0, 1$"),
        ({"preset": "grpo", "eps": -1e-6}, r"^at_grpo\.estimator\.eps=-1e-06: a number, at least 0$"),
        ({"preset": "grpo", "eps": "1e-6"}, r"^at_grpo\.estimator\.eps='1e-6': a number, at least 0$"),
        ({"preset": "grpo", "eps": math.inf}, r"^at_grpo\.estimator\.eps=inf: a number, at least 0$"),
        ({"preset": "grpo", "eps": math.nan}, r"^at_grpo\.estimator\.eps=nan: a number, at least 0$"),
        ({"preset": ["grpo"]}, r"^at_grpo\.estimator: unknown preset \['grpo'\]; valid presets: at_grpo, "),
    ],
)
def test_invalid_config_names_key_value_and_choices(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_spec(value)


def test_valid_config() -> None:
    assert resolve_spec("rloo") == PRESETS["rloo"]
    mapping: Mapping[str, Any] = {"preset": "grpo", "singleton": "raw", "eps": 0}
    assert resolve_spec(mapping) == EstimatorSpec(name="grpo", singleton="raw", eps=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["grpo"].eps = 1.0  # type: ignore[misc]


# --- without a preset, and of single agents


def test_a_spec_without_a_preset() -> None:
    own = {"name": "mine", "center": "leave_one_out", "scale": "std", "ddof": 0}
    assert resolve_spec(own) == EstimatorSpec(name="mine", center="leave_one_out", ddof=0)
    assert resolve_spec({"name": "mine"}) == dataclasses.replace(PRESETS["at_grpo"], name="mine")
    full = {"name": "mine", "unit": "call", "main_agent": "a", "sub_calls": 3, "agents": {"b": {"sub_calls": 1}}}
    assert resolve_spec(full).agents["b"].sub_calls == 1


def test_needs_are_those_of_all_agents() -> None:
    assert {name: spec.needs for name, spec in PRESETS.items()} == {
        **dict.fromkeys(["at_grpo", "grpo", "dr_grpo", "rloo"], frozenset()),
        "mas_grpo": {"trajectory"},
        "dr_mas": {"agent"},
        "rae": {"baseline"},
        "gigpo": {"trajectory", "left", "anchor"},
        "m_grpo": {"trajectory", "agent", "turn", "left"},
    }
    assert resolve_spec({"preset": "gigpo", "step_scope": "agent"}).needs >= {"agent"}
    assert resolve_spec({"preset": "grpo", "agents": {"a": {"ddof": 0}}}).needs == {"agent"}
    assert resolve_spec({"preset": "grpo", "agents": {"a": {"unit": "trajectory"}}}).needs == {"agent", "trajectory"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"name": "grpo", "scale": "none"},
            r"\.name: 'grpo' is a preset; use preset: grpo, or a name that is not one",
        ),
        ({"name": ""}, r"\.name: '' is not a text$"),
        ({"name": 3}, r"\.name: 3 is not a text$"),
        ({"name": "mine", "centre": "mean"}, r": unknown key 'centre'; valid keys: preset, name, unit, center,"),
        ({"preset": "gigpo", "step_weight": -1}, r"\.step_weight=-1: a number, at least 0$"),
        ({"preset": "gigpo", "step_weight": True}, r"\.step_weight=True: a number, at least 0$"),
        ({"preset": "gigpo", "step_gamma": 0}, r"\.step_gamma=0: a number above 0 and at most 1$"),
        ({"preset": "gigpo", "step_gamma": 1.5}, r"\.step_gamma=1.5: a number above 0 and at most 1$"),
        ({"preset": "dr_mas", "discount": 0}, r"\.discount=0: a number above 0 and at most 1$"),
        (
            {"preset": "mas_grpo", "discount": 0.5},
            r"\.discount: 0.5 gives an episode's rows rewards of their own; set ",
        ),
        ({"preset": "rae", "discount": 0.5}, r"\.discount: 0.5 has no effect with rae, whose formula does not read "),
        ({"preset": "gigpo", "step_scope": "task"}, r"\.step_scope='task': one of group, agent$"),
        (
            {"preset": "gigpo", "step_weight": 0},
            r"\.step_gamma: 0.95 has no effect with step_weight: 0; set step_gamma: 1, or a step_weight above 0$",
        ),
        ({"preset": "grpo", "step_scope": "agent"}, r"\.step_scope: 'agent' has no effect with step_weight: 0; set "),
        ({"preset": "grpo", "main_agent": "a"}, r"\.main_agent: 'a' has no effect with unit: row; set unit: call$"),
        (
            {"preset": "mas_grpo", "sub_calls": 2},
            r"\.sub_calls: 2 has no effect with unit: trajectory; set unit: call$",
        ),
        (
            "m_grpo",
            r"\.main_agent: missing; 'm_grpo' \(unit: call\) needs main_agent: <agent> and sub_calls: <number>$",
        ),
        ({"preset": "m_grpo", "main_agent": "a"}, r"\.sub_calls: missing; 'm_grpo' \(unit: call\) needs main_agent:"),
        ({"preset": "m_grpo", "main_agent": "a b", "sub_calls": 2}, r"\.main_agent='a b': an agent's name, or null$"),
        ({"preset": "m_grpo", "main_agent": "a.", "sub_calls": 2}, r"\.main_agent='a\.': an agent's name, or null$"),
        (
            {"preset": "m_grpo", "main_agent": "a", "sub_calls": 0},
            r"\.sub_calls=0: a whole number, at least 1, or",
        ),
        (
            {"preset": "m_grpo", "main_agent": "a", "sub_calls": 2.0},
            r"\.sub_calls=2.0: a whole number, at least 1, or",
        ),
        (
            {"preset": "m_grpo", "main_agent": "a", "sub_calls": 2, "center": "leave_one_out"},
            r"\.center: 'leave_one_out' leaves out a copy and keeps its twins with unit: call; set center: mean$",
        ),
        (
            {"preset": "m_grpo", "main_agent": "a", "sub_calls": 2, "singleton": "raw"},
            r"\.singleton: 'raw' has no meaning with unit: call, where a row has copies; set singleton: zero$",
        ),
        (
            {"preset": "m_grpo", "main_agent": "a", "sub_calls": 2, "step_weight": 1},
            r"\.step_weight: 1 cannot be had with unit: call; set unit: trajectory or row$",
        ),
        ({"preset": "grpo", "agents": {}}, r"\.agents: \{\} is not a mapping of agents to fields, such as \{planner:"),
        ({"preset": "grpo", "agents": "tool"}, r"\.agents: 'tool' is not a mapping of agents to fields"),
        ({"preset": "grpo", "agents": {"a": {}}}, r"\.agents\.a: \{\} is not a mapping of fields; valid keys: unit, "),
        ({"preset": "grpo", "agents": {"a": "rloo"}}, r"\.agents\.a: 'rloo' is not a mapping of fields; valid keys: "),
        (
            {"preset": "grpo", "agents": {"a": {"preset": "rloo"}}},
            r"\.agents\.a: unknown key 'preset'; valid keys: unit",
        ),
        ({"preset": "grpo", "agents": {"a": {"agents": {}}}}, r"\.agents\.a: unknown key 'agents'; valid keys: unit"),
        ({"preset": "grpo", "agents": {"a": {"scale": "sd"}}}, r"\.agents\.a\.scale='sd': one of std, none$"),
        (
            {"preset": "dr_grpo", "agents": {"a": {"scale_scope": "agent"}}},
            r"\.agents\.a\.scale_scope: 'agent' has no effect with scale: none; set scale_scope: group$",
        ),
        (
            {"preset": "grpo", "agents": {"a": {"unit": "call", "sub_calls": 2}}},
            r"\.agents\.a\.main_agent: missing; 'grpo' \(unit: call\) needs main_agent: ",
        ),
        (
            {"preset": "m_grpo", "main_agent": "a", "sub_calls": 2, "agents": {"b": {"main_agent": "b"}}},
            r"\.agents\.b: unknown key 'main_agent'; valid keys: unit, ",
        ),
        (
            {"preset": "m_grpo", "main_agent": "a", "sub_calls": 2, "agents": {"a": {"sub_calls": 3}}},
            r"\.agents\.a\.sub_calls: 3 has no effect for the main agent; remove it$",
        ),
    ],
)
def test_what_means_nothing_is_refused_with_one_line(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^at_grpo\.estimator{message}") as caught:
        resolve_spec(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scope", ["center_scope", "scale_scope"])
def test_episodes_cannot_be_counted_among_an_agents_rows(scope: str) -> None:
    message = r"^at_grpo\.estimator\.unit: 'trajectory' counts episodes, but .* counts an agent's rows; set unit: row$"
    with pytest.raises(ValueError, match=message):
        resolve_spec({"preset": "mas_grpo", scope: "agent"})
    assert resolve_spec({"preset": "mas_grpo", "unit": "row", scope: "agent"}).unit == "row"
    assert resolve_spec({"preset": "grpo", "unit": "trajectory"}).unit == "trajectory"


# --- presets of installed packages

MINE = EstimatorSpec(name="mine", scale="none")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """A mapping that a test fills: name of an entry point -> what it loads."""
    points: dict[str, object] = {}

    class Point(importlib.metadata.EntryPoint):
        def load(self) -> object:
            spec = points[self.name]
            if isinstance(spec, Exception):
                raise spec
            return spec

    def entry_points(*, group: str) -> list[Point]:
        assert group == ENTRY_POINTS
        return [Point(name, "package:spec", group) for name in points]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    presets.cache_clear()
    yield points
    presets.cache_clear()


@pytest.mark.parametrize(("option", "value"), [("ddof", 0), ("eps", 0.1)])
def test_details_of_a_scale_that_is_none_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"estimator\.{option}: {value} has no effect with scale: none; remove it"):
        resolve_spec({"preset": "dr_grpo", option: value})
    with pytest.raises(ValueError, match=rf"agents\.a\.{option}: {value} has no effect with scale: none; remove it"):
        resolve_spec({"preset": "grpo", "agents": {"a": {"scale": "none", option: value}}})
    assert resolve_spec({"preset": "dr_grpo", "eps": 0.1, "by_task": "rows"}).eps == 0.1
    assert resolve_spec({"preset": "dr_grpo", option: value, "agents": {"a": {"scale": "std"}}}).scale == "none"


def test_an_agent_that_has_the_presets_scale_again_has_its_scope() -> None:
    choice = {"preset": "dr_mas", "scale": "none", "agents": {"a": {"scale": "std"}}}
    spec = resolve_spec(choice)
    assert (spec.scale_scope, spec.agents["a"].scale_scope) == ("group", "agent")
    rows = [{"group": "t", "agent": agent} for agent in "aabb"]
    found = team_advantages(torch.tensor([0.0, 1, 0, 100], dtype=torch.float64), rows, spec)
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, -50, 50], abs=1e-4)


def test_presets_of_installed_packages(installed: dict[str, object]) -> None:
    installed |= {"mine": MINE, "grpo": PRESETS["grpo"]}
    assert presets() == {**PRESETS, "mine": MINE}
    assert resolve_spec({"preset": "mine", "singleton": "raw"}) == dataclasses.replace(MINE, singleton="raw")
    with pytest.raises(ValueError, match=r"\.name: 'mine' is a preset; use preset: mine"):
        resolve_spec({"name": "mine"})


@pytest.mark.parametrize(
    ("name", "loaded", "message"),
    [
        ("mine", PRESETS["grpo"], r"is no EstimatorSpec\(name='mine', \.\.\.\)$"),
        ("mine", {"name": "mine"}, r"is no EstimatorSpec\(name='mine', \.\.\.\)$"),
        (
            "mine",
            ImportError("no torchx"),
            r"cannot be loaded \(ImportError: no torchx\); mend or uninstall its package$",
        ),
        ("mine", AttributeError("spec"), r"cannot be loaded \(AttributeError: spec\); mend or uninstall its package$"),
        ("grpo", MINE, r"has the name of another preset; uninstall its package$"),
    ],
)
def test_an_installed_preset_that_is_refused(
    installed: dict[str, object], name: str, loaded: object, message: str
) -> None:
    installed[name] = loaded
    with pytest.raises(
        ValueError, match=rf"^at_grpo\.estimator='{name}': the entry point 'package:spec' .* {message}"
    ):
        resolve_spec("at_grpo")


# --- an estimator is a file and an entry


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_in_the_file_of_its_name_with_its_source(name: str) -> None:
    paper = importlib.import_module(f"verl_atgrpo.train.estimators.{name}")
    assert paper.PRESET is PRESETS[name]
    assert "arXiv" in paper.__doc__.partition("Source:")[2]


def test_configurations_are_read_without_torch() -> None:
    code = "import sys, verl_atgrpo.train.estimators.choice; print({'torch', 'verl', 'numpy'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverTheMean(EstimatorSpec):
    """A formula that no field expresses: the distance from the mean, divided by a power of it."""

    reads = ("eps",)
    power: float = 1.0

    def formula(self, values: Tensor, labels: Labels) -> Tensor:
        group, size, deviation = deviations(values, labels["groups"])
        return deviation / ((group_sum(values, group, len(size)) / size)[group] ** self.power + self.eps)


class Broken(EstimatorSpec):
    """A formula that forgets the rows."""

    def formula(self, values: Tensor, labels: Labels) -> Tensor:
        return values.mean()[None]


def test_a_formula_of_its_own(installed: dict[str, object]) -> None:
    installed |= {"mine": OverTheMean(name="mine"), "broken": Broken(name="broken")}
    # Group g: 1, 2, 6, mean 3; group h: 2, 0, mean 1.
    rows = [{"group": group, "agent": agent} for group, agent in ("ga", "ha", "gb", "ga", "hb")]
    rewards = torch.tensor([1, 2, 2, 6, 0], dtype=torch.float64)

    def of(choice: Any) -> list[float]:
        values: list[float] = team_advantages(rewards, rows, resolve_spec(choice)).tolist()
        return values

    assert of("mine") == pytest.approx([-2 / 3, 1, -1 / 3, 1, -1])
    assert of({"preset": "mine", "power": 2}) == pytest.approx([-2 / 9, 1, -1 / 9, 1 / 3, -1])
    assert of({"preset": "mine", "agents": {"b": {"power": 0}}}) == pytest.approx([-2 / 3, 1, -1, 1, -1])
    with pytest.raises(
        ValueError, match=r"^estimator 'broken': its formula returns torch.float64 \(1,\), not float64 "
    ):
        of("broken")
    with pytest.raises(
        ValueError, match=r"unknown key 'powr'; valid keys: preset, .*, step_scope, by_task, power, agents$"
    ):
        resolve_spec({"preset": "mine", "powr": 2})
    with pytest.raises(ValueError, match=r"unknown key 'power'"):
        resolve_spec({"preset": "grpo", "power": 2})
    assert resolve_spec({"preset": "mine", "eps": 0.5}).eps == 0.5
    with pytest.raises(ValueError, match=r"^at_grpo\.estimator\.scale: 'none' has no effect with mine, whose formula"):
        resolve_spec({"preset": "mine", "scale": "none"})
