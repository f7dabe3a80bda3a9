"""The documentation follows the code: the reference is up to date, messages exist, pages are reachable."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from verl_atgrpo.train.config import schema
from verl_atgrpo.train.config.verl_key_table import KEY_RULES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def script(name: str) -> types.ModuleType:
    """Imports a module of scripts/, in which scripts find each other."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    return importlib.import_module(name)


# ---------------------------------------------------------------------- the configuration reference


def test_the_configuration_reference_is_what_the_code_says() -> None:
    current = script("config_reference").page()
    assert (DOCS / "configuration.md").read_text() == current, "run python scripts/config_reference.py"


def test_the_table_of_isolation_levels_is_what_the_corpus_says() -> None:
    current = script("sandbox_table").page()
    assert (DOCS / "sandbox.md").read_text() == current, "run python scripts/sandbox_table.py"


class Told(schema.Section):
    """How it is."""

    wide: int
    """How wide."""
    alpha: int = 1
    """As in `at_grpo`."""
    deep: int | None = None
    """How deep it is, for <this>."""
    lists: list[str] | None = None
    """Several."""
    shape: Literal["round", "flat"] = "flat"
    """Which."""


class Untold(schema.Section):
    """Says nothing of its field."""

    secret: int = 0


def test_a_section_gets_a_line_for_each_field() -> None:
    section = script("config_reference").field_section("top", Told)
    assert section.startswith(
        "## `top`\n\nHow it is.\n\n- `wide` (whole number; required): How wide.\n"
        "- `deep` (whole number): How deep it is, for &lt;this>.\n"
    )
    assert "\n- `lists` (list): Several.\n" in section
    assert section.endswith("\n- `shape` (`flat`, `round`): Which.\n- `alpha`: as in `at_grpo`.")


def test_a_field_without_a_text_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Untold\.secret has no docstring"):
        script("config_reference").field_section("top", Untold)


def test_every_section_of_the_schema_is_on_the_page() -> None:
    sections = {cls for cls in vars(schema).values() if isinstance(cls, type) and issubclass(cls, schema.Section)}
    bases = {base for cls in sections for base in cls.__bases__}
    assert sections - bases <= {cls for _, cls in script("config_reference").SECTIONS}


# ---------------------------------------------------------------------- messages that the pages quote


def quoted() -> Iterator[tuple[str, str]]:
    """Yields (page, line) of every message of ours that a page quotes: the blocks ```message."""
    for page in sorted(DOCS.rglob("*.md")):
        for block in re.findall(r"(?ms)^```message\n(.*?)^```$", page.read_text()):
            for line in block.splitlines():
                yield page.name, line.removeprefix("verl-atgrpo: ")


class Anywhere:
    """A place of one of verl's keys with a value that no rule accepts; values in messages are holes."""

    def accepts(self, accepted: Any) -> bool:
        return False

    def shown(self, value: Any) -> str:
        return "{value}"

    def of(self, key: str) -> tuple[str, Any]:
        return key, None


def templates() -> list[Any]:
    found = []
    for path in (path for folder in ("verl_atgrpo", "environments") for path in (ROOT / folder).rglob("*.py")):
        source = path.read_text()
        contained = re.findall(r'with contained\(f?"(.*)"\)', source)  # which says what raised
        source += "".join(f'\nf"{what} raised {{error}}"' for what in contained)
        found += script("message_templates").templates_of(source)
    for rule in KEY_RULES.values():
        if (why := rule.refused(Anywhere())) is not None:  # type: ignore[arg-type]
            found += script("message_templates").templates_of(f'f"{{key}}={{value}}{why}"')
    return found


def test_every_message_that_a_page_quotes_is_one_of_ours() -> None:
    known, messages = templates(), list(quoted())
    assert len(messages) >= 20

    def fits(line: str) -> bool:
        # `option_error` puts the section before an environment's own message.
        texts = {line, line.removeprefix("at_grpo.environment.")}
        return any(template.fits(text) for template in known for text in texts)

    gone = [(page, line) for page, line in messages if not fits(line)]
    assert not gone


def test_a_message_that_is_gone_is_found() -> None:
    (template,) = script("message_templates").templates_of('raise E(f"the number {n} is too large")')
    assert template.fits("the number 3 is too large") and not template.fits("the number 3 is too small")
    assert template.readable == "the number … is too large"


# ---------------------------------------------------------------------- the site


KINDS = ("Tutorial", "How-to", "Reference", "Explanation")


def navigation() -> Iterator[tuple[str, str]]:
    """Yields (section, page) of the site's navigation; a page outside any section has an empty one."""
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        for name, target in entry.items():
            if isinstance(target, str):
                yield "", target
            else:
                yield from ((name, page) for part in target for page in part.values())


def test_every_page_is_in_the_navigation_under_the_kind_that_it_names() -> None:
    assert sorted(page for _, page in navigation()) == sorted(
        str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
    )
    for section, page in navigation():
        text = re.sub(r"(?s)<!--.*?-->\s*", "", (DOCS / page).read_text())
        first_line = re.match(r"# [^\n]+\n\n([^\n]*)", text)
        assert first_line, page
        if section:
            assert section in KINDS
            assert first_line[1].startswith(f"*{section}.* "), page
        else:
            assert page == "index.md"


def test_the_start_page_leads_to_every_page_once() -> None:
    pages = re.findall(r"\]\((\w+\.md)\)", (DOCS / "index.md").read_text())
    assert sorted(pages) == sorted(page for section, page in navigation() if section)


def test_lists_are_set_off_and_nested_as_both_renderers_want() -> None:
    """The code host and mkdocs differ: without a blank line before it, mkdocs shows a list as text."""
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
        for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
            if re.match(r"(- |\d+\. |\|)", line) and before and not re.match(r"( *- |\d+\. |\||  )", before):
                raise AssertionError(f"{page.name}: a blank line is missing before {line!r}")
            assert not re.match(r" {1,3}- ", line), f"{page.name}: indent by four: {line!r}"


def test_links_to_source_lead_to_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    links = script("docs_links")
    config = types.SimpleNamespace(config_file_path=str(ROOT / "mkdocs.yml"), docs_dir=str(DOCS), repo_url="")
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="a.md"))
    text = "[it](../README.md), `[b](../c)`, [there](b.md)\n```\n[x](../y)\n```\n"
    assert links.on_page_markdown(text, page=page, config=config) == text.replace(
        "[it](../README.md)", "it (`README.md`)"
    )
    config.repo_url = "https://host/us/it/"
    to_heading = links.on_page_markdown("[it](../README.md#use)", page=page, config=config)
    assert to_heading == "[it](https://host/us/it/blob/main/README.md#use)"
    with caplog.at_level(logging.WARNING):
        links.on_page_markdown("[gone](../no_such_file.py)", page=page, config=config)
    assert "there is no no_such_file.py" in caplog.text


def test_the_modules_and_tests_of_the_mutation_test_are_there() -> None:
    for module, tests in script("mutation_test").TESTS.items():
        assert (ROOT / "verl_atgrpo" / module).is_file(), module
        for name in tests.split():
            assert [*(ROOT / "tests").rglob(f"test_{name}.py")], f"{module}: {name}"
