"""Specifications of estimators, and the published estimators as presets.

`kernel` computes them. Nothing here imports verl or torch.
"""

import functools
import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn, get_args, get_origin

CONFIG_KEY = "at_grpo.estimator"
"""The user's key, in every error message."""

Unit = Literal["row", "trajectory", "call"]
Center = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "none"]
Singleton = Literal["zero", "raw"]
Scope = Literal["group", "agent"]
Need = Literal["trajectory", "agent", "left", "anchor"]


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec:
    """How the rewards of a group become advantages.

    Raises:
        ValueError: a field has an invalid value, or one without effect beside the others; the message names the
            config key.
    """

    name: str
    """Name of the preset it is based on, or its own; for logs and for verl's `norm_adv_by_std_in_grpo`."""

    unit: Unit = "row"
    """The values of a group. "row": one per row. "trajectory": one per episode, since a shared outcome on every row
    would weight an episode by its number of turns. "call": one per episode for `main_agent`, and for every other agent
    `sub_calls` per episode in which it acted, as if its rows had been copied or dropped."""

    center: Center = "mean"
    """The baseline. "leave_one_out" excludes a row's own reward, so that the gradient is unbiased."""

    scale: Scale = "std"
    """The divisor. "std" gives groups that are nearly solved the largest gradients; "none" does not."""

    ddof: int = 1
    """Subtracted from the count in the variance: 1 as in verl's `torch.std`, 0 for the population variance."""

    eps: float = 1e-6
    """Added to the standard deviation (not to the variance), as in verl."""

    singleton: Singleton = "zero"
    """The advantage of a group of one, which has nothing to be compared with: "zero", or "raw" for its reward, as in
    verl, which reinforces every lone positive reward. The step term is 0 in either case."""

    center_scope: Scope = "group"
    """The rows of the baseline: those of the whole group, or only the row's own agent's among them. A row without
    others there is a singleton."""

    scale_scope: Scope = "group"
    """The rows of the divisor, as in `center_scope`. If they have no spread, values are not scaled."""

    main_agent: str | None = None
    """The agent with one value per episode, with unit "call"."""

    sub_calls: int | None = None
    """D, the number of values per episode of every other agent, with unit "call"."""

    step_weight: float = 0.0
    """Weight of the step term: the advantage of the row's discounted outcome over the group's rows with the same
    prompt, with the same center, scale, ddof and eps."""

    step_gamma: float = 1.0
    """Discount of the outcome per later decision of the episode, in the step term."""

    step_scope: Scope = "group"
    """The rows with the same prompt that the step term compares: the whole group's, or the row's own agent's."""

    agents: Mapping[str, "EstimatorSpec"] = field(default_factory=dict)
    """Agent -> the specification for its rows. Its statistics are over the rows that its own fields select, including
    other agents'."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, valid = getattr(self, item.name), get_args(item.type)
            if get_origin(item.type) is Literal and value not in valid:
                _refuse(item.name, f"{value!r} is not one of {', '.join(valid)}")
        # A bool is an int; a larger ddof would divide by zero in a group of two.
        if isinstance(self.ddof, bool) or self.ddof not in (0, 1):
            _refuse("ddof", f"{self.ddof!r} is not one of 0, 1")
        for key in ("eps", "step_weight"):
            value = getattr(self, key)
            if not _finite(value) or value < 0:
                _refuse(key, f"{value!r} is not a finite number >= 0")
        if not _finite(self.step_gamma) or not 0 < self.step_gamma <= 1:
            _refuse("step_gamma", f"{self.step_gamma!r} is not a number above 0 and at most 1")
        if self.main_agent is not None and not (isinstance(self.main_agent, str) and self.main_agent.isidentifier()):
            _refuse("main_agent", f"{self.main_agent!r} is not an agent's name")
        number = self.sub_calls
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            _refuse("sub_calls", f"{number!r} is not a whole number >= 1")
        self._refuse_without_effect()
        self._refuse_without_sense()

    def _refuse_without_effect(self) -> None:
        if self.scale == "none" and self.scale_scope != "group":
            _refuse("scale_scope", f"{self.scale_scope!r} has no effect with scale: none; set scale_scope: group")
        for key in ("main_agent", "sub_calls"):
            if self.unit != "call" and getattr(self, key) is not None:
                _refuse(key, f"{getattr(self, key)!r} has no effect with unit: {self.unit}; set unit: call")
        for key, neutral in (("step_gamma", 1), ("step_scope", "group")):
            if self.step_weight == 0 and getattr(self, key) != neutral:
                value = f"{getattr(self, key)!r} has no effect with step_weight: 0"
                _refuse(key, f"{value}; set {key}: {neutral}, or a step_weight above 0")

    def _refuse_without_sense(self) -> None:
        if self.unit == "trajectory" and "agent" in self.scopes:
            _refuse("unit", "'trajectory' counts episodes, but the scope agent counts an agent's rows; set unit: row")
        if self.unit != "call":
            return
        if self.center == "leave_one_out":
            _refuse(
                "center", "'leave_one_out' leaves out a copy and keeps its twins with unit: call; set center: mean"
            )
        if self.singleton == "raw":
            _refuse("singleton", "'raw' has no meaning with unit: call, where a row has copies; set singleton: zero")
        if self.step_weight:
            _refuse("step_weight", f"{self.step_weight!r} cannot be had with unit: call; set unit: trajectory or row")

    @property
    def scopes(self) -> frozenset[Scope]:
        """The scopes of its statistics, without the step term's."""
        return frozenset((self.center_scope, self.scale_scope) if self.scale == "std" else (self.center_scope,))

    @property
    def needs(self) -> frozenset[Need]:
        """The labels of a row that it needs beside the group."""
        needs: set[Need] = set()
        if self.unit == "trajectory":
            needs.add("trajectory")
        if self.unit == "call":
            needs |= {"trajectory", "agent", "left"}
        if self.step_weight:
            needs |= {"left", "anchor"}
        if "agent" in (*self.scopes, self.step_scope) or self.agents:
            needs.add("agent")
        return frozenset(needs.union(*(spec.needs for spec in self.agents.values())))


def _refuse(key: str, why: str) -> NoReturn:
    raise ValueError(f"{CONFIG_KEY}.{key}: {why}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


PRESETS: Mapping[str, EstimatorSpec] = MappingProxyType(
    {
        "at_grpo": EstimatorSpec(name="at_grpo"),
        "grpo": EstimatorSpec(name="grpo"),
        "dr_grpo": EstimatorSpec(name="dr_grpo", scale="none"),
        "rloo": EstimatorSpec(name="rloo", center="leave_one_out", scale="none"),
        "mas_grpo": EstimatorSpec(name="mas_grpo", unit="trajectory"),
        "dr_mas": EstimatorSpec(name="dr_mas", center_scope="agent", scale_scope="agent"),
        "gigpo": EstimatorSpec(name="gigpo", unit="trajectory", step_weight=1.0, step_gamma=0.95),
        "m_grpo": EstimatorSpec(name="m_grpo", unit="call", ddof=0, center_scope="agent", scale_scope="agent"),
    }
)
"""Published estimators. `at_grpo` and `grpo` have the same arithmetic; their rows' group keys differ.

The ablation of `dr_mas`, (mu, s), (mu_k, s), (mu, s_k) and (mu_k, s_k), is its two scopes set to `group` or `agent`.
All four count rows; `mas_grpo` counts trajectories. `m_grpo` also needs `main_agent` and `sub_calls`.
"""

ENTRY_POINTS = "verl_atgrpo.estimators"
"""Group of entry points with which installed packages register presets: a name and "module:spec"."""


@functools.cache
def presets() -> Mapping[str, EstimatorSpec]:
    """Returns `PRESETS` and the presets of installed packages.

    Raises:
        ValueError: an entry point's name is taken, it cannot be loaded, or it is no spec of that name.
    """
    found = dict(PRESETS)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            spec = point.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"{CONFIG_KEY}={point.name!r}: the entry point {point.value!r} (group {ENTRY_POINTS}) cannot be "
                f"loaded ({type(error).__name__}: {error}); mend or uninstall its package"
            ) from error
        if point.name in found and found[point.name] != spec:
            raise ValueError(
                f"{CONFIG_KEY}={point.name!r}: the entry point {point.value!r} (group {ENTRY_POINTS}) has the name of "
                "another preset; uninstall its package"
            )
        if not isinstance(spec, EstimatorSpec) or spec.name != point.name:
            raise ValueError(
                f"{CONFIG_KEY}={point.name!r}: the entry point {point.value!r} (group {ENTRY_POINTS}) is no "
                f"EstimatorSpec(name={point.name!r}, ...)"
            )
        found[point.name] = spec
    return found


_FIELDS = tuple(item.name for item in fields(EstimatorSpec) if item.name not in ("name", "agents"))
_OF_AN_AGENT = tuple(name for name in _FIELDS if name != "main_agent")


def resolve_spec(choice: str | Mapping[str, Any]) -> EstimatorSpec:
    """Returns the spec of a configured estimator.

    Args:
        choice: a preset; or `{preset: <name>, <field>: <value>, ...}`; or, without a preset,
            `{name: <name>, <field>: <value>, ...}`. In both mappings, `agents: {<agent>: {<field>: <value>, ...}}`
            changes fields for single agents.

    Raises:
        ValueError: unknown preset or key, or a value that is invalid, missing or without effect; one line with the
            config key, the value and the valid ones.
    """
    options = dict(choice if isinstance(choice, Mapping) else {"preset": choice})
    base = _base(options)
    overrides = options.pop("agents", None)
    _check_keys(options, CONFIG_KEY, _FIELDS, ("preset", "name", *_FIELDS, "agents"))
    spec = _complete(replace(base, **options))
    if overrides is None:
        return spec
    if not isinstance(overrides, Mapping) or not overrides:
        _refuse("agents", f"{overrides!r} is not a mapping of agents to fields, such as {{planner: {{scale: none}}}}")
    return replace(spec, agents={str(agent): _of_agent(spec, str(agent), own) for agent, own in overrides.items()})


def _base(options: dict[str, Any]) -> EstimatorSpec:
    """Removes `preset` or `name` from the options and returns the spec that the other options change."""
    name, preset = options.pop("name", None), options.pop("preset", None)
    if name is None:
        if not isinstance(preset, str) or preset not in presets():
            raise ValueError(
                f"{CONFIG_KEY}: unknown preset {preset!r}; valid presets: {', '.join(presets())} "
                "(or name: <a name of your own>, and fields)"
            )
        return presets()[preset]
    if preset is not None:
        _refuse("name", f"{name!r} has no effect beside preset: {preset}; remove one of them")
    if not isinstance(name, str) or not name:
        _refuse("name", f"{name!r} is not a text")
    if name in presets():
        valid = ", ".join(presets())
        _refuse("name", f"{name!r} is a preset; use preset: {name}, or a name that is not one of {valid}")
    return EstimatorSpec(name=name)


def _check_keys(options: Mapping[str, Any], key: str, valid: tuple[str, ...], named: tuple[str, ...]) -> None:
    for option in options:
        if option not in valid:
            raise ValueError(f"{key}: unknown key {option!r}; valid keys: {', '.join(named)}")


def _complete(spec: EstimatorSpec) -> EstimatorSpec:
    for option in ("main_agent", "sub_calls"):
        if spec.unit == "call" and getattr(spec, option) is None:
            _refuse(option, f"missing; {spec.name!r} (unit: call) needs main_agent: <agent> and sub_calls: <number>")
    return spec


def _of_agent(spec: EstimatorSpec, agent: str, options: Any) -> EstimatorSpec:
    key = f"{CONFIG_KEY}.agents.{agent}"
    if not isinstance(options, Mapping) or not options:
        raise ValueError(f"{key}: {options!r} is not a mapping of fields; valid keys: {', '.join(_OF_AN_AGENT)}")
    _check_keys(options, key, _OF_AN_AGENT, _OF_AN_AGENT)
    if agent == spec.main_agent and "sub_calls" in options:
        raise ValueError(f"{key}.sub_calls: {options['sub_calls']!r} has no effect for the main agent; remove it")
    try:
        return _complete(replace(spec, **options))
    except ValueError as error:
        # A spec does not know its place in the configuration.
        raise ValueError(key + str(error).removeprefix(CONFIG_KEY)) from None


def configured_spec(choice: str | Mapping[str, Any], norm_by_std: bool = True) -> EstimatorSpec:
    """Returns the spec of a configured estimator with verl's switch `algorithm.norm_adv_by_std_in_grpo` applied.

    False sets `scale: none` in the presets `at_grpo` and `grpo`, unless the mapping (or that of an agent in it) sets
    `scale` or `scale_scope` itself. Raises as `resolve_spec` does.
    """
    spec = resolve_spec(choice)
    if norm_by_std or not follows_verls_switch(choice):
        return spec
    agents = {
        agent: own if _sets_scale(choice["agents"][agent]) else replace(own, scale="none")  # type: ignore[index]
        for agent, own in spec.agents.items()
    }
    return replace(spec, scale="none", agents=agents)


def follows_verls_switch(choice: str | Mapping[str, Any]) -> bool:
    """Returns whether `algorithm.norm_adv_by_std_in_grpo: false` sets `scale: none` in a configured estimator.

    It does with the presets `at_grpo` and `grpo`, unless the mapping sets the scale. Raises as `resolve_spec` does.
    """
    return resolve_spec(choice).name in ("at_grpo", "grpo") and not _sets_scale(choice)


def _sets_scale(options: str | Mapping[str, Any]) -> bool:
    return isinstance(options, Mapping) and ("scale" in options or "scale_scope" in options)
