"""`verl-atgrpo schema`: a JSON schema of recipes, with which editors complete and check the section `at_grpo`.

It is made of the types, bounds and docstrings that the checks of a run use. Keys of verl are accepted as they are.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from verl_atgrpo.play import registry
from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.estimators.presets import PRESETS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> dict[str, Any]:
    """Returns the schema: the section's keys, and each environment's options where `environment.name` names it.

    No key is required: a recipe may be based on another one.
    """
    section = AtGrpoConfig.model_json_schema()
    definitions = section.pop("$defs")
    for one in (section, *definitions.values()):
        one.pop("required", None)
        for prop in one.get("properties", {}).values():
            prop.pop("title", None)
            if "description" in prop:
                prop["description"] = " ".join(prop["description"].split())
    names = list(registry.registered())
    named = {name: {"properties": {"name": {"const": name}}, "required": ["name"]} for name in names}
    keys = section["properties"]
    keys["environment"] = {
        "description": keys["environment"]["description"],
        "type": "object",
        "properties": {"name": {"anyOf": [{"enum": names}, {"type": "string"}]}},  # or one of your own
        "allOf": [{"if": one, "then": {"$ref": f"#/$defs/environment_{name}"}} for name, one in named.items()],
    }
    keys["estimator"] = {
        "description": keys["estimator"]["description"],
        "anyOf": [{"enum": sorted(PRESETS)}, {"type": "string"}, {"$ref": "#/$defs/estimator"}],
    }
    definitions |= {f"environment_{name}": _options(name) for name in names} | {"estimator": _estimator()}
    return {
        "$schema": _DIALECT,
        "title": "A recipe of verl-atgrpo",
        "type": "object",
        "properties": {"at_grpo": section | {"type": ["object", "null"]}},
        "$defs": definitions,
    }


def _options(name: str) -> dict[str, Any]:
    cls = typing.cast(type, registry.load(name))
    init: Any = cls.__init__  # type: ignore[misc]
    hints = typing.get_type_hints(init, include_extras=True)
    family = name.rpartition("_")[0]  # a form for a single agent has the options of its team
    team: Any = registry.load(family) if family in registry.registered() else cls
    texts = argument_docstrings(team.__init__) | argument_docstrings(init)
    parameters = inspect.signature(cls).parameters
    keys = {option: TypeAdapter(hints[option]).json_schema() if option in hints else {} for option in parameters}
    for option, key in keys.items():
        key |= {"description": texts[option]} if option in texts else {}
        if parameters[option].default not in (inspect.Parameter.empty, None):
            key["default"] = parameters[option].default
    return {"properties": {"name": {}, **keys}, "additionalProperties": _unknown(f"no option of {name}")}


def _estimator() -> dict[str, Any]:
    kinds = dict.fromkeys(type(preset) for preset in PRESETS.values())
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    others = ("agents", "parts", "reads")
    keys = {name: TypeAdapter(hint).json_schema() for name, hint in hints.items() if name not in others}
    known = {"properties": {"preset": {"enum": sorted(PRESETS)}}, "required": ["preset"]}
    more = {"preset": {"anyOf": [{"enum": sorted(PRESETS)}, {"type": "string"}]}, "agents": {"type": "object"}}
    checked = {"properties": {key: {} for key in (*keys, *more)}, "additionalProperties": _unknown("no such field")}
    return {"type": "object", "properties": keys | more, "if": known, "then": checked}


def _unknown(message: str) -> dict[str, Any]:
    """Returns the schema of a key that does not exist, with what editors show; null takes one back."""
    return {"type": "null", "errorMessage": message}


def argument_docstrings(function: Callable[..., Any]) -> dict[str, str]:
    """Returns argument -> its text in the `Args:` of a docstring; "as in `Name`" is that of a class in its module."""
    text = inspect.getdoc(function) or ""
    found = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", text)
    texts: dict[str, str] = {}
    for entry in re.split(r"(?m)^    (?=\S)", found[1] if found else "")[1:]:
        names, _, meaning = entry.partition(":")
        elsewhere = re.fullmatch(r"as in `(\w+)`\.", " ".join(meaning.split()))
        shared = _shared(function, elsewhere[1]) if elsewhere else None
        for name in names.split(", "):
            texts[name] = shared[name] if shared else _sentence(meaning)
    return texts


def _sentence(meaning: str) -> str:
    line = " ".join(meaning.split())
    return line if line[:1] in "`0123456789" else line[:1].upper() + line[1:]


def _shared(function: Callable[..., Any], name: str) -> dict[str, str]:
    cls = getattr(sys.modules[function.__module__], name)
    return argument_docstrings(getattr(cls, "set_rules", cls.__init__))
