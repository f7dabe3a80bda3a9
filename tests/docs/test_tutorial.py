"""docs/tutorial.md works as it stands: its files are saved, and its commands are run, as its reader does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from training_jobs import FRESH, end
from waiting import TRAINING

from verl_atgrpo.lab.tiny_models.demonstrations import DEMONSTRATORS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
SECTIONS = dict(re.findall(r"(?ms)^## ([^\n]*)\n(.*?)(?=^## |\Z)", TEXT))
FILES = {
    "Write the environment": "harbour.py",
    "Play it by hand": "play_harbour.py",
    "Check it": "test_harbour.py",
    "Write the recipe": "harbour.yaml",
}
FAST = ("Play it by hand", "Check it", "Write the recipe")
LONG = ("Choose a model", "Train", "Look at it", "Evaluate")
SUCCESS = "val-core/harbour:Harbour/acc/mean@1"


def blocks(section: str, language: str = "sh") -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", SECTIONS[section])


def run(commands: str, folder: Path) -> str:
    """Runs commands in one shell in `folder` and returns their output."""
    # Of this checkout, wherever the installed package is.
    commands = commands.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT}")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    log = folder / "log"
    with log.open("wb") as out:
        job = subprocess.Popen(
            ["bash", "-eux", "-o", "pipefail", "-c", commands],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = job.wait(timeout=TRAINING)
    finally:
        end(job)
    text = log.read_text(errors="replace")
    assert status == 0, text[-6000:]
    return text


def run_sections(names: Sequence[str], folder: Path) -> str:
    return run("\n".join(block for name in names for block in blocks(name)), folder)


@pytest.fixture
def harbour(tmp_path: Path) -> Path:
    """The folder that the tutorial makes, with its files."""
    _, make_folder = blocks("Install")
    run(make_folder, tmp_path)
    folder = tmp_path / "harbour"
    for section, name in FILES.items():
        (text,) = blocks(section, {"py": "python", "yaml": "yaml"}[name.rpartition(".")[2]])
        assert f"`{name}`" in SECTIONS[section]
        (folder / name).write_text(text)
    return folder


def test_every_block_of_the_tutorial_is_run() -> None:
    with_commands = {name for name in SECTIONS if blocks(name)}
    assert with_commands == {"Install", *FAST, *LONG}
    assert {name for name in SECTIONS if "```" in SECTIONS[name]} == with_commands | set(FILES)
    assert TEXT.count("```") == 2 * (sum(len(blocks(name)) for name in with_commands) + len(FILES))


def test_the_installation_is_a_target_of_make() -> None:
    # A dry run: what it installs takes minutes, and tests run in the environment that it has made.
    make, activate = blocks("Install")[0].splitlines()
    assert subprocess.run([*make.split(), "--dry-run"], cwd=ROOT, capture_output=True).returncode == 0
    assert activate.split() == ["source", f"{make.split()[1].partition('/')[0]}/bin/activate"]


@pytest.mark.slow
def test_the_environment_plays_keeps_the_contract_and_has_disjoint_splits(harbour: Path) -> None:
    pytest.importorskip("verl")
    said = run_sections(FAST, harbour)
    assert "success: True" in said
    assert "1 passed" in said
    summary = r"160 training( \(\d+ different\))? and 64 validation tasks( \(\d+ different\))?: 0 with equal keys"
    assert re.search(summary, said)


def test_the_models_of_the_page_are_those_that_can_be_made() -> None:
    (sentence,) = re.findall(r"on answers to the prompts of ([^.]*)\.", SECTIONS["Choose a model"])
    assert set(re.findall(r"`(\w+)`", sentence)) == set(DEMONSTRATORS)


@pytest.mark.slow
@pytest.mark.training
def test_the_team_is_trained_reported_and_evaluated(harbour: Path, tied_model: Path) -> None:
    pytest.importorskip("vllm")
    from verl_atgrpo.lab.tiny_models.warm_start import WarmStart

    # A barely trained model in the place of the one that takes minutes; make-model keeps what has the same settings.
    model = harbour / "runs/models/plan_path_tiny"
    shutil.copytree(tied_model, model)
    note = json.loads((model / "warm_start.json").read_text())
    note["settings"] |= asdict(WarmStart.of("plan_path"))
    (model / "warm_start.json").write_text(json.dumps(note))

    said = run_sections(LONG, harbour)
    metrics = {
        record["step"]: record["data"]
        for record in map(json.loads, (harbour / "metrics.jsonl").read_text().splitlines())
    }
    assert sorted(metrics) == list(range(13))
    shown = re.findall(r"(?m)^\| (`.*`) \|", SECTIONS["Look at it"])
    for name in re.findall(r"`([^`]*)`", " ".join(shown)):
        assert name in metrics[12], name
    assert max(metrics[step]["training/rollout_probs_diff_max"] for step in range(1, 13)) < FRESH
    success = {step: data[SUCCESS] for step, data in metrics.items() if SUCCESS in data}
    assert sorted(success) == [0, 4, 8, 12]
    assert success[12] > success[0]
    assert "helmsman" in (harbour / "runs/harbour/report.html").read_text()
    # The checkpoint plays as validation did.
    episodes = [json.loads(line) for line in (harbour / "after.jsonl").read_text().splitlines()[1:]]
    assert sum(episode["success"] for episode in episodes) / len(episodes) == pytest.approx(success[12], abs=0.02)
    assert "avg@1" in said
