"""Writes docs/configuration.md from the code: schema, dataclasses, constructors, recipe and checks.

Run `python scripts/config_reference.py` after a change of any of them; a test compares. To document another section,
add it to SECTIONS. Needs neither verl nor a model.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from config_reference_text import HEAD, OF_BASE, OF_ENVIRONMENTS, OF_KEYS, OF_PRESETS, OF_REFUSALS, OF_WIRING, WIRED
from message_templates import templates_of

from verl_atgrpo.config import mode_check
from verl_atgrpo.config.key_check import POLICY
from verl_atgrpo.config.key_table import TABLE, Default, Like, Row, without_braces
from verl_atgrpo.config.kinds import words
from verl_atgrpo.config.schema import (
    AgentAnswers,
    AtGrpoConfig,
    BranchSettings,
    GroupFilter,
    Lora,
    PolicySettings,
    RecordSettings,
    Section,
    ValidationAnswers,
)
from verl_atgrpo.environments.ports.replayed_game import ReplayedGame
from verl_atgrpo.estimators.presets import PRESETS
from verl_atgrpo.estimators.spec import EstimatorSpec
from verl_atgrpo.play import registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
SECTIONS: tuple[tuple[str, type], ...] = (
    ("at_grpo", AtGrpoConfig),
    ("at_grpo.policies.<name>", PolicySettings),
    ("at_grpo.policies.<name>.lora", Lora),
    ("at_grpo.sampling.<agent>", AgentAnswers),
    ("at_grpo.sampling.<agent>.validation", ValidationAnswers),
    ("at_grpo.estimator", EstimatorSpec),
    ("at_grpo.branch", BranchSettings),
    ("at_grpo.group_filter", GroupFilter),
    ("at_grpo.record", RecordSettings),
)
WRITTEN = {
    (EstimatorSpec, "name"): [
        "`preset`",
        ", ".join(f"`{name}`" for name in PRESETS),
        "",
        "What the other keys change. `name` with a name of your own instead starts from the defaults below.",
    ]
}
"""Rows of fields that users write differently."""
SHARED_ARGUMENTS: Mapping[str, Callable[..., Any]] = {"ReplayedGame": ReplayedGame.set_rules}
"""What "as in `...`" in the documentation of an argument refers to."""


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    parts += [field_section(prefix, cls) for prefix, cls in SECTIONS]
    parts += [OF_PRESETS, preset_table()]
    parts += [OF_ENVIRONMENTS, *environment_sections()]
    parts += [OF_BASE, base_table(), OF_WIRING, wiring_table(), OF_KEYS, *key_sections(), OF_REFUSALS, refusals()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *([literal(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def literal(text: str) -> str:
    """Returns a text with HTML (outside of code) and cell separators escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part[:1] == "`" else part.replace("<", "&lt;") for part in parts).replace("|", "\\|")


# ---------------------------------------------------------------------- sections and dataclasses


def field_section(prefix: str, cls: type) -> str:
    """Returns the section of a model or dataclass; raises ValueError for a field without a docstring."""
    rows = []
    for name, hint, default, text in fields_of(cls):
        if not text:
            raise ValueError(f"{cls.__name__}.{name} has no docstring under it, which the docs need")
        row = [f"`{name}`", code_words(words(hint)), default, one_line(text)]
        rows.append(WRITTEN.get((cls, name), row))
    head = f"## `{prefix}`\n\n{one_line(inspect.getdoc(cls) or '', first=True)}\n\n"
    return head + table(("key", "value", "default", "meaning"), rows)


def fields_of(cls: type) -> Iterator[tuple[str, Any, str, str]]:
    """Yields name, annotation, default as YAML and docstring of each field."""
    if issubclass(cls, Section):
        for name, field in cls.model_fields.items():
            default = "" if field.is_required() else yaml_words(field.default)
            yield name, field.rebuild_annotation(), default, field.description or ""
        return
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body
    texts = {
        item.target.id: str(below.value.value)
        for item, below in itertools.pairwise(body)
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        made = {} if item.default_factory is dataclasses.MISSING else item.default_factory()
        default = made if item.default is dataclasses.MISSING else item.default
        yield item.name, hints[item.name], yaml_words(default), texts.get(item.name, "")


def code_words(text: str) -> str:
    """Returns the words for a value with the choices in code."""
    return re.sub(
        r"one of ([\w+, -]+?)(?=, or null|\)|$)",
        lambda found: ", ".join(f"`{choice}`" for choice in found[1].split(", ")),
        text,
    ).replace("or null", "or `null`")


def yaml_words(value: object) -> str:
    """Returns a value in a recipe's syntax."""
    if isinstance(value, Section):
        return "its defaults"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"`{text}`"


def preset_table() -> str:
    """Returns the fields that the estimator presets change."""
    rows = []
    plain = EstimatorSpec(name="")
    for name, spec in PRESETS.items():
        changed = {
            item.name: getattr(spec, item.name)
            for item in dataclasses.fields(spec)
            if item.name != "name" and getattr(spec, item.name) != getattr(plain, item.name)
        }
        rows.append([f"`{name}`", ", ".join(f"`{key}: {yaml_words(value)[1:-1]}`" for key, value in changed.items())])
    return table(("preset", "what it sets"), rows)


# ---------------------------------------------------------------------- environments


def environment_sections() -> Iterator[str]:
    """Yields the options of every registered environment; those with the same constructor together."""
    together: dict[str, tuple[type, list[str]]] = {}
    for name in registry.registered():
        cls = typing.cast(type, registry.load(name))
        together.setdefault(cls.__init__.__qualname__, (cls, []))[1].append(name)
    for cls, names in together.values():
        title = ", ".join(f"`{name}`" for name in names)
        family = names[0].rpartition("_")[0]
        if family in registry.registered() and not argument_docstrings(cls.__init__):
            theirs = inspect.signature(typing.cast(type, registry.load(family))).parameters
            left = [f"`{name}`" for name in theirs if name not in inspect.signature(cls).parameters]
            but = f" but for {' and '.join(left)}, which may be null" if left else ""
            what = (inspect.getdoc(cls) or "").splitlines()[0]
            yield f"### {title}\n\n{what} The options are those of `{family}`{but}."
            continue
        yield f"### {title}\n\n" + table(("option", "value", "default", "meaning"), list(option_rows(cls)))


def option_rows(cls: type) -> Iterator[list[str]]:
    """Yields the arguments of an environment's constructor."""
    texts = argument_docstrings(cls.__init__)
    hints = typing.get_type_hints(cls.__init__, include_extras=True)
    for name, parameter in inspect.signature(cls).parameters.items():
        if name not in texts:
            raise ValueError(f"{cls.__name__}: the docstring of __init__ has no argument {name}")
        default = "" if parameter.default is parameter.empty else yaml_words(parameter.default)
        yield [f"`{name}`", code_words(words(hints[name])), default, texts[name]]


def argument_docstrings(function: Callable[..., Any]) -> dict[str, str]:
    """Returns argument -> its text in the `Args:` of a docstring."""
    text = inspect.getdoc(function) or ""
    found = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", text)
    texts: dict[str, str] = {}
    for entry in re.split(r"(?m)^    (?=\S)", found[1] if found else "")[1:]:
        names, _, meaning = entry.partition(":")
        elsewhere = re.fullmatch(r"as in `(\w+)`\.", one_line(meaning))
        for name in names.split(", "):
            shared = SHARED_ARGUMENTS.get(elsewhere[1]) if elsewhere else None
            texts[name] = argument_docstrings(shared)[name] if shared else sentence(one_line(meaning))
    return texts


def one_line(text: str, first: bool = False) -> str:
    """Returns a text without line breaks; its first paragraph alone if asked."""
    return " ".join((text.split("\n\n")[0] if first else text).split())


def sentence(text: str) -> str:
    """Returns a text with a capital."""
    return text if text[:1] in "`0123456789" else text[:1].upper() + text[1:]


# ---------------------------------------------------------------------- verl's keys


def base_table() -> str:
    """Returns the keys of verl that at_grpo_trainer.yaml sets."""
    recipe = yaml.safe_load((ROOT / "recipes" / "at_grpo_trainer.yaml").read_text())
    rows = [
        [f"`{key}`", yaml_words(value)] for key, value in flat(recipe) if not key.startswith(("at_grpo.", "defaults"))
    ]
    return table(("key", "value"), rows)


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by their dotted keys."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def wiring_table() -> str:
    """Returns the table of the keys that `wire` sets; raises ValueError if WIRED has others."""
    tree = ast.parse((ROOT / "verl_atgrpo" / "trainer" / "dataset.py").read_text())
    wire = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "wire")
    targets = [target for node in ast.walk(wire) if isinstance(node, ast.Assign) for target in node.targets]
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    keys = {ast.unparse(name).removeprefix("config.") for name in names if ast.unparse(name).startswith("config.")}
    names = {"[SECTION]": ".at_grpo", "[SIZES]": ".at_grpo_tasks", "[DATA_SETS]": ".at_grpo_data_sets"}
    written = {re.sub(r"\[.*\]", lambda name: names.get(name[0], name[0]), key) for key in keys}
    if written != set(WIRED):
        raise ValueError(f"WIRED does not fit trainer/dataset.py: {sorted(written ^ set(WIRED))}")
    return table(("key", "is set to"), [[f"`{key}`", meaning] for key, meaning in WIRED.items()])


def key_sections() -> Iterator[str]:
    """Yields the table of verl's keys, section by section."""
    for prefix, section in TABLE.items():
        rows = [
            [", ".join(f"`{name}`" for name in without_braces(row.pattern)), row.status, key_words(row)]
            for row in section
        ]
        yield f"### {f'`{prefix}`' if prefix else 'Whole sections'}\n\n" + table(("key", "here", ""), rows)


def key_words(row: Row) -> str:
    """Returns a row's third column."""
    parts = []
    if row.kind is not None:
        parts.append(code_words(words(row.kind)))
    if row.values:
        parts.append(f"but for {' or '.join(map(value_words, row.values))}")
    if row.beside is not None:
        key, kind = row.beside
        needed = words(kind)
        parts.append(f"with `{key}`: {code_words(needed) if ' ' in needed else f'`{needed}`'}; refused without")
    parts += filter(None, (row.text, row.remedy))
    if row.reader:
        parts.append(f"read by `{row.reader.rpartition(':')[2].rpartition('.')[2]}`")
    return "; ".join(parts)


def value_words(value: object) -> str:
    """Returns an accepted value of a row in words."""
    if isinstance(value, Default):
        return "verl's default"
    return f"what `{value.key}` is" if isinstance(value, Like) else yaml_words(value)


def refusals() -> str:
    """Returns the messages of the checks, without values."""
    found: list[str] = []
    for name in ("run_check", "policy_check", "mode_check", "machine_check"):
        module = importlib.import_module(f"verl_atgrpo.config.{name}")
        source = Path(typing.cast(str, module.__file__)).read_text()
        found += [template.readable for template in templates_of(source, module.__dict__, raised="ConfigError")]
    found += [
        f"{rule.key.replace(POLICY, '…')}=…{rule.why.format(mode=' or '.join(rule.modes))}"
        for rule in mode_check.RULES
    ]
    return "\n".join(f"- {literal(text)}" for text in found if not text.startswith("…=…"))


if __name__ == "__main__":
    PAGE.write_text(page())
