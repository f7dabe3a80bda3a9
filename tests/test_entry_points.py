"""An installed package brings an environment and an estimator, by entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "1.0"
[project.entry-points."verl_atgrpo.environments"]
{environments}
[project.entry-points."verl_atgrpo.estimators"]
{estimators}
[tool.setuptools]
py-modules = ["{name}"]
"""
MODULE = """
from verl_atgrpo import Environment, Outcome
from verl_atgrpo.train.estimators.spec import EstimatorSpec


class Coins(Environment):
    agents = ("guesser",)

    def __init__(self, sides: int = 2) -> None:
        self.sides = sides

    def task(self, split, index):
        return f"{split} {index}"

    def fingerprint(self, task):
        return task

    async def run(self, task, team):
        return Outcome(False)


halved = EstimatorSpec(name="halved", scale="none", eps=0.5)
"""


def installed(folder: Path, name: str, environments: str = "", estimators: str = "") -> dict[str, str]:
    """Installs a package beside this one; returns the environment variables of a process that has both."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(PROJECT.format(name=name, environments=environments, estimators=estimators))
    (source / f"{name}.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths}


def answer(code: str, variables: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_package_brings_an_environment_and_an_estimator(tmp_path: Path) -> None:
    variables = installed(tmp_path, "coins", 'coins = "coins:Coins"', 'halved = "coins:halved"')
    code = """
from verl_atgrpo.train.config.section import parse_section
from verl_atgrpo.play.registry import registered
settings = parse_section({"environment": {"name": "coins", "sides": 6}, "estimator": "halved"})
environment = settings.make_environment()
print(type(environment).__name__, environment.sides, settings.spec.eps, {"coins", "math"} <= {*registered()})
"""
    assert answer(code, variables) == "Coins 6 0.5 True"


@pytest.mark.slow
def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    variables = installed(tmp_path, "coins", 'sudoku = "coins:Coins"', 'rloo = "coins:halved"')
    code = """
from verl_atgrpo import make
from verl_atgrpo.train.estimators.choice import resolve_spec
for attempt in (lambda: make("sudoku"), lambda: resolve_spec("rloo")):
    try:
        attempt()
    except ValueError as error:
        print(error)
"""
    environment, estimator = answer(code, variables).splitlines()
    assert environment.startswith("at_grpo.environment.name='sudoku': the entry point 'coins:Coins'")
    assert estimator.startswith("at_grpo.estimator='rloo': the entry point 'coins:halved'")
