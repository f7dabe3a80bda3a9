"""From what a user wrote in `at_grpo.estimator` (a text or a section) to the fields of an estimator."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from verl_atgrpo.train.estimators.presets import presets
from verl_atgrpo.train.estimators.spec import CONFIG_KEY, EstimatorSpec, refuse


def resolve_spec(choice: str | Mapping[str, Any]) -> EstimatorSpec:
    """Returns the spec of a configured estimator: a preset, or a mapping of fields with its `preset` or a `name`.

    In a mapping `agents: {<agent>: {<field>: <value>, ...}}` changes fields for single agents. Raises ValueError for
    an unknown preset or key, and a value that is invalid, missing or without effect, with what would do.
    """
    options = dict(choice if isinstance(choice, Mapping) else {"preset": choice})
    base = _base(options)
    overrides, valid = options.pop("agents", None), _fields_of(base)
    _check_keys(options, CONFIG_KEY, valid, ("preset", "name", *valid, "agents"))
    spec = _complete(replace(base, **_without_scale(options)))
    if overrides is None:
        _check_scale(options, spec)
        return spec
    if not isinstance(overrides, Mapping) or not overrides:
        refuse("agents", f"{overrides!r} is not a mapping of agents to fields, such as {{planner: {{scale: none}}}}")
    # Where an agent has the preset's scale again, it has the preset's scope of it, too.
    scope = options.get("scale_scope", base.scale_scope)
    return replace(spec, agents={str(name): _of_agent(spec, str(name), own, scope) for name, own in overrides.items()})


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
        refuse("name", f"{name!r} has no effect beside preset: {preset}; remove one of them")
    if not isinstance(name, str) or not name:
        refuse("name", f"{name!r} is not a text")
    if name in presets():
        taken = ", ".join(presets())
        refuse("name", f"{name!r} is a preset; use preset: {name}, or a name that is not one of {taken}")
    return EstimatorSpec(name=name)


def _fields_of(spec: EstimatorSpec) -> tuple[str, ...]:
    return tuple(item.name for item in fields(spec) if item.name not in ("name", "agents", "parts"))


def _check_keys(options: Mapping[str, Any], key: str, valid: tuple[str, ...], named: tuple[str, ...]) -> None:
    for option in options:
        if option not in valid:
            raise ValueError(f"{key}: unknown key {option!r}; valid keys: {', '.join(named)}")


def _complete(spec: EstimatorSpec) -> EstimatorSpec:
    for option in ("main_agent", "sub_calls"):
        if spec.unit == "call" and getattr(spec, option) is None:
            refuse(option, f"missing; {spec.name!r} (unit: call) needs main_agent: <agent> and sub_calls: <number>")
    return spec


def _without_scale(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options, and with `scale: none` the scope that a preset's scale had no more."""
    return {**({"scale_scope": "group"} if options.get("scale") == "none" else {}), **options}


def _check_scale(options: Mapping[str, Any], spec: EstimatorSpec) -> None:
    for option in ("ddof", "eps"):
        if option in options and spec.scale == "none" and (option == "ddof" or spec.by_task == "none"):
            refuse(option, f"{options[option]!r} has no effect with scale: none; remove it")


def _of_agent(spec: EstimatorSpec, agent: str, options: Any, scope: str) -> EstimatorSpec:
    key = f"{CONFIG_KEY}.agents.{agent}"
    valid = tuple(name for name in _fields_of(spec) if name not in ("by_task", "main_agent"))
    if not isinstance(options, Mapping) or not options:
        raise ValueError(f"{key}: {options!r} is not a mapping of fields; valid keys: {', '.join(valid)}")
    _check_keys(options, key, valid, valid)
    if agent == spec.main_agent and "sub_calls" in options:
        raise ValueError(f"{key}.sub_calls: {options['sub_calls']!r} has no effect for the main agent; remove it")
    try:
        scaled = {"scale_scope": scope} if options.get("scale", "none") != "none" else {}
        own = _complete(replace(spec, **{**scaled, **_without_scale(options)}))
        _check_scale(options, own)
        return own
    except ValueError as error:
        # A spec does not know its place in the configuration.
        raise ValueError(key + str(error).removeprefix(CONFIG_KEY)) from None
