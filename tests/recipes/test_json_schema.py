"""The schema that editors read: it is that of the code, accepts every recipe, and refuses what a run would refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import pytest
import yaml

from verl_atgrpo import Environment, cli, recipes
from verl_atgrpo.lab.json_schema import recipe_schema
from verl_atgrpo.play import registry

FOLDER = Path(recipes.__file__).parent
FILE = FOLDER / "at_grpo.schema.json"
FILES = sorted(FOLDER.rglob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    content = json.loads(FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(content)
    return jsonschema.Draft202012Validator(content)


def test_the_file_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert capsys.readouterr().out == FILE.read_text(), "run `verl-atgrpo schema > recipes/at_grpo.schema.json`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_recipe_names_it_and_is_accepted(file: Path, schema: jsonschema.Draft202012Validator) -> None:
    (line,) = [
        line for line in file.read_text().splitlines()[:2] if line.startswith("# yaml-language-server: $schema=")
    ]
    assert (file.parent / line.partition("=")[2]).resolve() == FILE.resolve()
    assert list(schema.iter_errors(yaml.safe_load(file.read_text()))) == []


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"candidats": 4}, "$.at_grpo"),
        ({"candidates": 1}, "$.at_grpo.candidates"),
        ({"candidates": {"all": 4, "planner": "8"}}, "$.at_grpo.candidates"),
        ({"scheme": "trees"}, "$.at_grpo.scheme"),
        ({"policies": {"coder": {"lora": {"rank": 0}}}}, "$.at_grpo.policies"),
        ({"opponents": {"choose": "best"}}, "$.at_grpo.opponents"),
        ({"environment": {"name": "walk", "sizes": 3}}, "$.at_grpo.environment.sizes"),
        ({"estimator": {"preset": "dr_mas", "centre": "none"}}, "$.at_grpo.estimator"),
        ({"estimator": {"preset": "dr_mas", "center": "median"}}, "$.at_grpo.estimator"),
        ({"parts": {"walk": {"estimator": {"preset": "grpo", "centre": "none"}}}}, "$.at_grpo.parts"),
        ({"environment": {"name": "walk", "size": 1}}, "$.at_grpo.environment.size"),
        ({"environment": {"name": "connect_four", "opponent": "me"}}, "$.at_grpo.environment.opponent"),
    ],
)
def test_what_a_run_would_refuse_is_refused(
    section: dict[str, Any], path: str, schema: jsonschema.Draft202012Validator
) -> None:
    (error,) = schema.iter_errors({"at_grpo": section})
    assert error.json_path == path


@pytest.mark.parametrize(
    "section",
    [
        None,
        {"environment": {"name": "my_module:Mine", "anything": 3}},
        {"environment": {"name": "walk", "tool": None}},  # takes back an option of another recipe
        {"estimator": {"preset": "dr_mas", "center_scope": "group", "agents": None}},
        {"parts": {"walk": {"estimator": None}, "search": {"estimator": "rae"}}},
        {"estimator": {"preset": "rae", "decay": 0.9}},
        {"estimator": {"preset": "of_a_package", "its_field": 1}},
    ],
)
def test_what_a_run_accepts_is_accepted(section: Any, schema: jsonschema.Draft202012Validator) -> None:
    assert list(schema.iter_errors({"at_grpo": section, "trainer": {"total_training_steps": 3}})) == []


def test_options_have_their_texts(schema: jsonschema.Draft202012Validator) -> None:
    definitions = schema.schema["$defs"]  # type: ignore[index]
    for name, options in definitions.items():
        for key, option in options["properties"].items():
            if name.startswith("environment_") and key != "name":
                assert option.get("description"), f"{name}: {key}"
    shared = definitions["environment_connect_four"]["properties"]["opening"]["description"]
    assert shared == "Most random moves at the start of a training game."


class Theirs(Environment):
    """An environment of another package."""

    def __init__(self, folder: Path = Path("x"), limit: float = math.inf, judge: Event | None = None) -> None: ...


def factory(size: int = 3, **more: Any) -> Environment:
    """Args:
    size: how large.
    """
    raise NotImplementedError


def test_environments_of_other_packages_are_described_as_far_as_they_can_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`Event` has no type in YAML, `folder` and `limit` no default in JSON, and `broken` cannot be imported."""
    more = {"theirs": Theirs, "factory": factory, "broken": "no_such_module:Theirs"}
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY, **more})
    made = json.loads(json.dumps(recipe_schema(), allow_nan=False))
    found = jsonschema.Draft202012Validator(made)

    def accepted(**environment: Any) -> bool:
        return found.is_valid({"at_grpo": {"environment": environment}})

    assert accepted(name="theirs", folder="y", judge=3) and not accepted(name="theirs", size=3)
    assert accepted(name="factory", size=4, other=1) and not accepted(name="factory", size="four")
    assert accepted(name="broken", any=1) and "no_such_module" in caplog.text
    assert made["$defs"]["environment_theirs"]["properties"]["folder"]["default"] == "x"
