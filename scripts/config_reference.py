"""Writes docs/configuration.md from the code: schema, dataclasses, constructors, recipe and checks.

Run `python scripts/config_reference.py` after a change of any of them; a test compares. To document another section,
add it to SECTIONS. Needs neither verl nor a model.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from config_reference_text import (
    GROUPS,
    HEAD,
    OF_ENVIRONMENTS,
    OF_KEYS,
    OF_SEVERAL,
)

from verl_atgrpo.kinds import words
from verl_atgrpo.lab.json_schema import field_docstrings, option_docstrings
from verl_atgrpo.play import registry
from verl_atgrpo.train.config.schema import (
    AgentSampling,
    AtGrpoConfig,
    BranchSettings,
    CriticSettings,
    GroupFilter,
    Lora,
    Opponents,
    PartSettings,
    PolicySettings,
    RecordSettings,
    SamplingSettings,
    Section,
)

SHORTER = (
    (r"a (whole )?number, at least (-?[\d.,]+) and at most ([\d.,]+)", "\\2\N{EN DASH}\\3"),
    (r"a (whole )?number above (-?[\d.,]+) and at most (?=\d)", r"above \2, at most "),
    (r"a (whole )?number above (-?[\d.,]+)", r"above \2"),
    (r"a (whole )?number, at least (-?\d+)", r"\2 or more"),
    (r"auto or true or false", "`auto`, true, false"),
    (r"a text that is not empty", "a text"),
    (r"list \(each: [^)]*\)", "list"),
    (r"\ba (?=text|section|number|whole|list)", ""),
)
"""What types accept, in fewer words than messages have."""
AS_IN_SECTION = "As in `at_grpo`."
"""The text of keys that mean what they mean at the top; the page has one line for all of a section."""
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("at_grpo", AtGrpoConfig),
    ("at_grpo.policies.<name>", PolicySettings),
    ("at_grpo.policies.<name>.lora", Lora),
    ("at_grpo.sampling.<agent>", AgentSampling),
    ("at_grpo.sampling.<agent>.validation", SamplingSettings),
    ("at_grpo.branch", BranchSettings),
    ("at_grpo.group_filter", GroupFilter),
    ("at_grpo.critic", CriticSettings),
    ("at_grpo.parts.<part>", PartSettings),
    ("at_grpo.opponents", Opponents),
    ("at_grpo.record", RecordSettings),
)


def page() -> str:
    """Returns the whole page."""
    parts = [HEAD]
    parts += [field_section(prefix, cls) for prefix, cls in SECTIONS]
    parts += [OF_ENVIRONMENTS, *environment_sections()]
    parts.append(OF_KEYS)
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def bullets(lines: Iterable[str]) -> str:
    """Returns a list in Markdown, in lines of any length."""
    return "\n".join(map(literal, lines))


def literal(text: str) -> str:
    """Returns a text with HTML (outside of code) escaped, and with links to the pages that it names."""
    parts = re.split(r"(`[^`]*`)", text)
    text = "".join(part if part[:1] == "`" else part.replace("<", "&lt;") for part in parts)
    return re.sub(r"docs/(\w+)\.md", lambda page: f"[{page[1]}]({page[1]}.md)", text)


# ---------------------------------------------------------------------- sections and dataclasses


def field_section(prefix: str, cls: type[Section]) -> str:
    """Returns the keys of a section; raises ValueError for a field without a docstring."""
    rows, alike = [], []
    for name, field in cls.model_fields.items():
        if not field.description:
            raise ValueError(f"{cls.__name__}.{name} has no docstring under it, which the docs need")
        if field.description == AS_IN_SECTION:
            alike.append(f"`{name}`")
            continue
        if cls is not SamplingSettings or name in cls.__annotations__:  # whose others are those of an agent
            default = "required" if field.is_required() else yaml_words(field.default)
            if cls is AtGrpoConfig and name in GROUPS:
                rows.append(f"\n**{GROUPS[name]}**\n")
            rows.append(entry(name, field.rebuild_annotation(), default, one_line(field.description)))
    if alike:
        rows.append(f"- {', '.join(alike)}: {AS_IN_SECTION[:1].lower()}{AS_IN_SECTION[1:]}")
    purpose = literal(one_line(inspect.getdoc(cls) or "", first=True))
    return f"## `{prefix}`\n\n{purpose}\n\n{bullets(rows).strip()}"


def entry(name: str, hint: Any, default: str, text: str) -> str:
    """Returns the line of a key: its name, what it accepts, its default (first, among choices) and what it means."""
    accepted = words(hint)
    for long, short in SHORTER:
        accepted = re.sub(long, short, accepted)
    if (
        choices := re.fullmatch(r"(?:one of )?([\w+, -]+?)((?:, or null)?)", accepted)
        if "one of" in accepted
        else None
    ):
        names = [f"`{choice}`" for choice in choices[1].split(", ")]
        if default in names and all(name in text for name in names):
            names = [default]  # the text has the others
        accepted = ", ".join(sorted(names, key=lambda choice: choice != default)) + choices[2]
        default = "" if default in names else default
    default = "" if accepted.startswith(default) else default
    accepted = re.sub(r"one of ([\w, ]+?) or ", r"\1 or ", accepted)
    accepted = re.sub(r"section \(each: [^)]*\)", "section", accepted)  # the key's text says more of it
    if default == "`null`":
        accepted, default = accepted.replace(", or null", ""), ""
    told = [part for part in ("" if hint is bool else accepted, default if default != "`{}`" else "") if part]
    return f"- `{name}` ({'; '.join(told)}): {text}"


def yaml_words(value: object) -> str:
    """Returns a value in a recipe's syntax."""
    if isinstance(value, Section):
        return "its defaults"
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"`{text}`"


# ---------------------------------------------------------------------- environments


def environment_sections() -> Iterator[str]:
    """Yields the options of every registered environment, and before them those that several have in common."""
    together: dict[str, tuple[type, list[str]]] = {}
    for name in registry.registered():
        cls = typing.cast(type, registry.load(name))
        together.setdefault(cls.__init__.__qualname__, (cls, []))[1].append(name)
    families = {cls: names[0].rpartition("_")[0] for cls, names in together.values() if not documented(cls)}
    rows = {cls: list(option_rows(cls)) for cls, _ in together.values() if cls not in families}
    uses = Counter(row for of_one in rows.values() for row in of_one)
    common = [row for row, number in uses.items() if number > 1]
    yield OF_SEVERAL + "\n" + bullets(common)
    for cls, names in together.values():
        if cls in families:
            continue
        variants = {name: of for of, others in together.values() if families.get(of) in names for name in others}
        own = [row for row in rows[cls] if row not in common]
        also = ", ".join(row.split()[1] for row in rows[cls] if row in common)
        lines = [f"{'And ' * bool(own)}{also}."] if also else []
        missing: dict[str, list[str]] = {}
        for variant, of in variants.items():
            theirs = inspect.signature(of).parameters
            left = [f"`{name}`" for name in inspect.signature(cls).parameters if name not in theirs]
            missing.setdefault(" and ".join(left), []).append(f"`{variant}`")
        lines += [f"No {left} in {', '.join(of)}." for left, of in missing.items() if left]
        title = ", ".join(f"`{name}`" for name in (*names, *variants))
        yield "\n\n".join(part for part in (f"### {title}", bullets(own), " ".join(lines)) if part)


def documented(cls: type) -> bool:
    """Returns whether the class has options of its own; the form for a single agent says nothing of its team's."""
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    return "__dataclass_fields__" not in vars(owner) or bool(field_docstrings(owner))


def option_rows(cls: type) -> Iterator[str]:
    """Yields the arguments of an environment's constructor."""
    texts = option_docstrings(cls)
    hints = typing.get_type_hints(cls.__init__, include_extras=True)
    for name, parameter in inspect.signature(cls).parameters.items():
        if name not in texts:
            raise ValueError(f"{cls.__name__}: the docstring of __init__ has no argument {name}")
        default = "required" if parameter.default is parameter.empty else yaml_words(parameter.default)
        yield entry(name, hints[name], default, texts[name])


def one_line(text: str, first: bool = False) -> str:
    """Returns a text without line breaks; its first paragraph alone if asked."""
    return " ".join((text.split("\n\n")[0] if first else text).split())


if __name__ == "__main__":
    PAGE.write_text(page())
