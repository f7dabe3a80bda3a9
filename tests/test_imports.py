"""The import graph of the package: its folders, who imports whom, and that what was put in order stays so."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "verl_atgrpo"
ROOT = Path(__file__).parents[1]
Graph = Mapping[str, set[str]]

LAYERS = ("train", "lab")
"""Folders whose folders are nodes of the graph."""
THIRD_PARTY = {"aiohttp", "annotated_types", "numpy", "openai", "pydantic", "pydantic_core"}
"""What `play` imports beside the standard library: for endpoints, types of options and arguments, and for ratings."""


def sources() -> Iterator[tuple[str, Path]]:
    """Yields every module of the package by its dotted name, also those in the folders that it links to."""
    for folder in (ROOT / PACKAGE, ROOT / "environments", ROOT / "recipes"):
        base = ROOT if folder.name == PACKAGE else ROOT / PACKAGE
        for path in folder.rglob("*.py"):
            parts = (base / path.relative_to(ROOT)).relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), path


MODULES = dict(sources())


def imports_of(path: Path) -> Iterator[str]:
    """Yields what a module imports, anywhere in it: in functions and for annotations, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, path
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in MODULES else node.module


def graph(node_of: Callable[[str], str]) -> Graph:
    """Returns the arrows between nodes; `node_of` is the node of a module."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        arrows[node_of(module)] |= {node_of(name) for name in imports_of(path) if name in MODULES} - {node_of(module)}
    return arrows


def folder_of(module: str) -> str:
    """Returns the folder of a module within the package, or the name of a module that is in none."""
    parts = module.split(".")
    if len(parts) > 2 and parts[1] in LAYERS:
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else module


def on_circles(arrows: Graph) -> set[str]:
    """Returns the nodes from which an arrow leads back to themselves."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        ahead = list(arrows[start])
        while ahead:
            node = ahead.pop()
            if node not in found:
                found.add(node)
                ahead += arrows.get(node, ())
        return found

    return {node for node in arrows if node in reached(node)}


def test_no_folder_and_no_module_is_on_a_circle() -> None:
    arrows = graph(folder_of)
    for node in sorted(arrows):
        print(f"{node}: {', '.join(sorted(arrows[node])) or '-'}")  # noqa: T201  (pytest -rP shows it)
    assert not on_circles(arrows) | on_circles(graph(lambda module: module))


def test_training_knows_nothing_of_the_lab() -> None:
    for node, imported in graph(folder_of).items():
        assert not node.startswith("train") or not any(name.startswith("lab") for name in imported), node


def test_the_sandbox_is_independent() -> None:
    assert graph(folder_of)["sandbox"] == {"platform_choice"}


def test_rows_alone_touch_transfer_queue() -> None:
    users = {name for name, path in MODULES.items() if "transfer_queue" in imports_of(path)}
    assert users == {"verl_atgrpo.train.rows.batch", "verl_atgrpo.train.rows.queue"}


def test_play_imports_nothing_of_the_rest() -> None:
    assert graph(folder_of)["play"] == set()
    of_play = {name: path for name, path in MODULES.items() if folder_of(name) == "play"}
    outside = {name.split(".")[0] for path in of_play.values() for name in imports_of(path)}
    assert outside - set(sys.stdlib_module_names) - {PACKAGE} == THIRD_PARTY


def test_environments_know_nothing_of_training_and_of_the_lab() -> None:
    of_environments = {node: found for node, found in graph(folder_of).items() if node.startswith("environments")}
    others = set().union(*of_environments.values()) - of_environments.keys()
    assert others == {PACKAGE, "files", "kinds", "play", "sandbox"}


def test_a_circle_and_what_leads_to_it_are_told_apart() -> None:
    assert on_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == {"b", "c", "d"}


def test_a_team_plays_where_neither_torch_nor_verl_can_be_imported() -> None:
    modules = sorted(name for name in MODULES if folder_of(name) in ("play", "quoting", "tools"))
    code = f"""
import asyncio, importlib, sys
for blocked in ("ray", "torch", "transfer_queue", "transformers", "verl", "vllm"):
    sys.modules[blocked] = None
from verl_atgrpo import ScriptedTeam, make, play
for module in {modules}:
    importlib.import_module(module)
environment = make("plan_path", size=4, tool="moves", style="compact", max_turns=2)
team = ScriptedTeam({{"tool_user": lambda prompt, k: "R", "planner": lambda prompt, k: "UD"[k]}}, candidates=2)
record = asyncio.run(play(environment, environment.task("train", 0), team))
sys.stdout.write(f"{{len(record.decisions)}} {{len(record.decisions[0].candidates)}}")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    decisions, candidates = map(int, done.stdout.split())
    assert decisions in (2, 4)
    assert candidates == 2


@pytest.mark.parametrize("imported_first", ["verl_atgrpo", "verl_atgrpo.play.tools", "verl_atgrpo.play.environment"])
def test_play_is_the_function_in_the_package_and_the_folder_for_imports_of_its_modules(imported_first: str) -> None:
    code = f"""
import {imported_first}
from verl_atgrpo import play
from verl_atgrpo.play import environment, seeds
assert play is environment.play, play
import verl_atgrpo.play.contamination
assert verl_atgrpo.play is play
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
