"""docs/estimators.md names every preset and every field, and what it shows would be accepted."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from verl_atgrpo.estimators.spec import PRESETS, EstimatorSpec

TEXT = (Path(__file__).parents[2] / "docs" / "estimators.md").read_text()


def first_cells(heading: str) -> set[str]:
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {name for row in re.findall(r"(?m)^\| (`[^|]*) \|", section) for name in re.findall(r"`(\w+)`", row)}


def test_every_preset_and_every_field_is_documented() -> None:
    assert first_cells("Presets") == set(PRESETS)
    assert first_cells("Fields") == {field.name for field in fields(EstimatorSpec)} - {"name"}


@pytest.mark.parametrize("example", re.findall(r"(?ms)^```yaml\n(.*?)^```$", TEXT))
def test_the_documented_examples_are_accepted(example: str) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    from verl_atgrpo.config.run_check import check_estimator_agents
    from verl_atgrpo.config.schema import AtGrpoConfig

    section = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.create(example))["at_grpo"]
    settings = AtGrpoConfig.from_mapping({"environment": {"name": "plan_path"}, **section})
    check_estimator_agents(settings, settings.make_environment())
