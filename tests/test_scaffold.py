"""`verl-atgrpo new`: what it writes can be installed, passes its own test, and trains."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.recorded_run import write_run
from omegaconf import OmegaConf
from training_jobs import FRESH, SMALL, Start, finish

from verl_atgrpo import cli
from verl_atgrpo.lab.report.records import find, read
from verl_atgrpo.lab.scaffold import new

ROOT = Path(__file__).parents[1]


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A new package in `tmp_path/crane_team`; the folder that it is installed into."""
    new("crane_team", tmp_path)
    run(tmp_path / "crane_team", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target=../site", ".")
    return tmp_path / "site"


def test_the_command_writes_a_package_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert cli.main(["new", "crane_team", f"--folder={tmp_path}", f"--model={model}"]) == 0
    made = tmp_path / "crane_team"
    names = ["crane_team.py", "crane_team_cpu.yaml", "pyproject.toml", "test_crane_team.py"]
    assert sorted(path.name for path in made.iterdir()) == names
    texts = [(made / name).read_text() for name in names]
    assert not any("my_team" in text or "MyTeam" in text or "MODEL" in text for text in texts)
    assert f"path: {model} " in texts[1] and 'crane_team = "crane_team:CraneTeam"' in texts[2]
    assert sum(text.count("CHANGE") for text in texts) > 10
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        f"    cd {made} && pip install -e . && python -m pytest -q",
        "    python -m verl.trainer.main_ppo --config-dir=. --config-name=crane_team_cpu",
    ]


def test_the_name_of_the_pages_can_be_used(tmp_path: Path) -> None:
    new("my_team", tmp_path)
    assert "class MyTeam(Environment):" in (tmp_path / "my_team/my_team.py").read_text()


@pytest.mark.parametrize("model", ["my_team_model", "a #1", "x: y", "MODEL "])
def test_a_model_is_written_as_it_was_given(model: str, tmp_path: Path) -> None:
    folder = tmp_path / model
    folder.mkdir()
    said = new("crane_team", tmp_path / "a b", str(folder))
    recipe = OmegaConf.load(tmp_path / "a b/crane_team/crane_team_cpu.yaml")
    assert recipe.actor_rollout_ref.model.path == str(folder)
    assert f"cd '{tmp_path}/a b/crane_team' &&" in said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("My_team", "use small letters"),
        ("a-b", "use small letters"),
        ("class", "use small letters"),
        ("true", "use small letters"),
        ("on", "use small letters"),
        ("_x", "use small letters"),
        ("x_", "use small letters"),
        ("none", "Python or the package has this name"),
        ("call", "Python or the package has this name"),
        ("walk", "an environment has this name"),
        ("random", "a module has this name"),
        ("pytest", "a module has this name"),
        ("there", "there exists; remove it"),
    ],
)
def test_names_that_are_taken_are_refused(
    name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["new", name, f"--folder={tmp_path}"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and reason in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


@pytest.mark.slow
def test_its_own_test_passes_and_its_environment_has_a_name(installed: Path) -> None:
    assert "1 passed" in run(installed.parent / "crane_team", "pytest", "-q", "-p", "no:cacheprovider")
    (found,) = importlib.metadata.distributions(name="crane_team", path=[str(installed)])
    (point,) = found.entry_points
    assert (point.group, point.name) == ("verl_atgrpo.environments", "crane_team")


@pytest.mark.slow
def test_the_guide_for_coding_assistants_is_short_and_its_commands_run(installed: Path, tmp_path: Path) -> None:
    guide = (ROOT / "AGENTS.md").read_text()
    assert len(guide.split()) <= 400
    write, check, train, debug = re.findall(r"(?ms)^```sh\n(.*?)^```$", guide)
    made = tmp_path / "crane_team"
    (printed,) = [line.strip() for line in new("my_team", tmp_path / "other").splitlines() if "main_ppo" in line]
    assert train.strip() == printed
    write_run(made / "runs/my_team/checkpoints")
    commands = (check + debug).replace("my_team", "crane_team").replace("runs/crane_team", "runs/my_team")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", commands],
        cwd=made,
        env={**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join((str(installed), str(ROOT)))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout and "0 with equal keys or fingerprints" in done.stdout
    assert (made / "runs/my_team/report.html").is_file()
    assert "verl-atgrpo new my_team" in write


@pytest.mark.slow
@pytest.mark.training
def test_it_trains_and_trackers_get_metrics_and_replies(
    installed: Path, start: Start, tied_model: Path, tmp_path: Path
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    job = start(
        "crane_team_cpu",
        tmp_path,
        tied_model,
        f"--config-dir={tmp_path / 'crane_team'}",
        *SMALL,
        "at_grpo.val_tasks=4",
        "data.max_prompt_length=200",  # of a tokenizer of letters
        "actor_rollout_ref.rollout.max_model_len=205",
        # The estimator that needs the most tags of a row.
        "at_grpo.scheme=parallel",
        "at_grpo.estimator=gigpo",
        "trainer.total_training_steps=1",
        "trainer.test_freq=1",
        "trainer.log_val_generations=3",
        "trainer.logger=[console,file,tensorboard,wandb]",
        PYTHONPATH=os.pathsep.join((str(installed), str(ROOT))),
        TENSORBOARD_DIR=str(tmp_path / "board"),
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
    )
    data = finish(job, tmp_path)[1]
    assert math.isfinite(data["actor/pg_loss"])
    assert data["team/episodes"] == 4 * 4
    assert data["training/rollout_probs_diff_max"] < FRESH
    board = events.EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("agent/porter/reward", "agent/driver/reward", "val-core/crane_team/acc/mean@1"):
        (scalar,) = board.Scalars(name)
        assert (scalar.step, scalar.value) == (1, pytest.approx(data[name]))
    (event,) = board.Tensors("val/decisions/text_summary")
    assert event.step == 1 and event.tensor_proto.string_val[0].count(b"A guest waits") == 3
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/*.table.json")
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    episodes = sorted(read(find(tmp_path)).episodes.items())
    played = [one for (split, *_), decisions in episodes if split == "val" for one in decisions][:3]
    assert [(row["task"], row["agent"], row["turn"], row["prompt"], row["reply"]) for row in rows] == [
        (one["task"], one["agent"], one["turn"], one["prompt"], one["candidates"][0]["text"]) for one in played
    ]
    assert all(0 <= row["team_score"] <= 1 and row["step"] == 1 and row["committed"] for row in rows)
