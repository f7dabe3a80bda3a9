"""`verl-atgrpo schema`: a JSON schema of recipes, with which editors complete and check the section `at_grpo`.

It is made of the types, bounds and docstrings that the checks of a run use. Keys of verl are accepted as they are.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import logging
import math
import re
import typing
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from verl_atgrpo.play import registry
from verl_atgrpo.play.types import EnvironmentConfigError
from verl_atgrpo.train.config.schema import AtGrpoConfig
from verl_atgrpo.train.estimators.presets import PRESETS

logger = logging.getLogger(__name__)

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REST = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


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
    estimators = [{"enum": sorted(PRESETS)}, {"type": "string"}, {"$ref": "#/$defs/estimator"}]
    keys["estimator"] = {"description": keys["estimator"]["description"], "anyOf": estimators}
    definitions["PartSettings"]["properties"]["estimator"]["anyOf"] = [*estimators, {"type": "null"}]
    definitions |= {f"environment_{name}": _options(name) for name in names} | {"estimator": _estimator()}
    return {
        "$schema": _DIALECT,
        "title": "A recipe of verl-atgrpo",
        "type": "object",
        "properties": {"at_grpo": section | {"type": ["object", "null"]}},
        "$defs": definitions,
    }


def _options(name: str) -> dict[str, Any]:
    try:
        made = registry.load(name)
    except EnvironmentConfigError as error:  # of another package
        logger.warning(f"its options are not checked: {error}")
        return {}
    function = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError:  # a type that is imported for type checkers alone
        hints = {}
    family = name.rpartition("_")[0]  # a form for a single agent has the options of its team
    team = registry.load(family) if family in registry.registered() else made
    texts = option_docstrings(team) | option_docstrings(made)
    parameters = inspect.signature(made).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    keys = {option: _of_type(hints.get(option, Any)) for option, one in parameters.items() if one.kind not in _REST}
    for option, key in keys.items():
        key |= {"description": texts[option]} if option in texts else {}
        if (default := parameters[option].default) not in (inspect.Parameter.empty, None, math.inf, -math.inf):
            key["default"] = to_jsonable_python(default, fallback=str)
    known = {} if kinds & set(_REST) else {"additionalProperties": _unknown(f"no option of {name}")}
    return {"properties": {"name": {}, **keys}, **known}


def _of_type(hint: Any) -> dict[str, Any]:
    try:
        return TypeAdapter(hint).json_schema()
    except PydanticUserError:  # a type that YAML does not have
        return {}


def _estimator() -> dict[str, Any]:
    kinds = dict.fromkeys(type(preset) for preset in PRESETS.values())
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
    others = ("agents", "parts", "reads")
    keys = {name: TypeAdapter(hint).json_schema() for name, hint in hints.items() if name not in others}
    known = {"properties": {"preset": {"enum": sorted(PRESETS)}}, "required": ["preset"]}
    more = {
        "preset": {"anyOf": [{"enum": sorted(PRESETS)}, {"type": "string"}]},
        "agents": {"type": ["object", "null"]},
    }
    checked = {"properties": {key: {} for key in (*keys, *more)}, "additionalProperties": _unknown("no such field")}
    return {"type": "object", "properties": keys | more, "if": known, "then": checked}


def _unknown(message: str) -> dict[str, Any]:
    """Returns the schema of a key that does not exist, with what editors show; null takes one back."""
    return {"type": "null", "errorMessage": message}


def option_docstrings(cls: Callable[..., Any]) -> dict[str, str]:
    """Returns option of an environment -> its docstring: those under fields, or the `Args:` of its constructor."""
    if not isinstance(cls, type):
        return _argument_docstrings(cls)
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    if "__dataclass_fields__" not in vars(owner):
        return _argument_docstrings(vars(owner)["__init__"])
    fields = [field_docstrings(base) for base in owner.__mro__ if "__dataclass_fields__" in vars(base)]
    return {name: text for texts in reversed(fields) for name, text in texts.items()}


def field_docstrings(cls: type) -> dict[str, str]:
    """Returns field -> the text under it, in the source."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in itertools.pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = _sentence(text)
    return texts


def _argument_docstrings(function: Callable[..., Any]) -> dict[str, str]:
    found = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(function) or "")
    entries = re.split(r"(?m)^    (?=\S)", found[1] if found else "")[1:]
    return {name: _sentence(meaning) for name, _, meaning in (entry.partition(":") for entry in entries)}


def _sentence(meaning: str) -> str:
    line = " ".join(meaning.split())
    return line if line[:1] in "`0123456789" else line[:1].upper() + line[1:]
