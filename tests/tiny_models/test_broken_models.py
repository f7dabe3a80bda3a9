"""`make-model` in places with damaged or foreign files, and when writing breaks off."""

from __future__ import annotations

import functools
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import LINES, in_place_of, refused, safetensors, small_model

pytest.importorskip("transformers")

from verl_atgrpo.cli import main
from verl_atgrpo.lab.tiny_models import smollm2, warm_start
from verl_atgrpo.lab.tiny_models.warm_start import WarmStart

Capture = pytest.CaptureFixture[str]
KNOWN: dict[str, Any] = {"parameters": 4, "seconds": 1.0, "tasks": 200, "success": 0.25}
NEW = safetensors(b"newer")


class Saved:
    """Stands for a model and its tokenizer."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def parameters(self) -> list[Any]:
        return []

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / "model.safetensors").write_bytes(NEW)
        if self.fails:
            raise OSError(28, "No space left on device")


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "train", lambda *_: pytest.fail("it trains"))


def trains(monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
    monkeypatch.setattr(warm_start, "train", lambda *_: (Saved(), Saved(fails)))
    monkeypatch.setattr(warm_start, "LocalPolicy", lambda *_: None)
    monkeypatch.setattr(warm_start, "evaluate", lambda *_: [])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A complete starting model, with a file of the user's beside it."""
    folder = small_model(tmp_path / "model")
    settings = WarmStart.of("plan_path")
    known = {**KNOWN, "settings": {**asdict(settings), "options": dict(settings.demonstrator.options)}}
    (folder / "warm_start.json").write_text(json.dumps(known))
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.mark.parametrize("name", LINES)
def test_a_broken_description(name: str, model: Path, tmp_path: Path, capsys: Capture, no_training: None) -> None:
    (model / "warm_start.json").write_bytes(LINES[name])
    refused(["make-model", model], tmp_path, capsys, model / "warm_start.json", "--force")


@pytest.mark.parametrize(
    ("key", "value"), [("parameters", "4"), ("success", "high"), ("seconds", None), ("tasks", -1), ("settings", [])]
)
def test_a_wrong_value(key: str, value: Any, model: Path, tmp_path: Path, capsys: Capture, no_training: None) -> None:
    file = model / "warm_start.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    refused(["make-model", model], tmp_path, capsys, file, key, "--force")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_model_is_not_kept(
    file: str, model: Path, tmp_path: Path, capsys: Capture, no_training: None
) -> None:
    (model / file).write_bytes((model / file).read_bytes()[:-1])
    refused(["make-model", model], tmp_path, capsys, model / file, "--force")
    (model / "config.json").unlink()
    refused(["make-model", model], tmp_path, capsys, model / "config.json", "--force")


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "tokenizer_config.json", "x.gguf"],
)
@pytest.mark.parametrize("command", ["make-model", "make-smollm2"])
def test_a_foreign_model_is_not_overwritten(
    command: str, name: str, tmp_path: Path, capsys: Capture, no_training: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / name).write_text('{"model_type": "qwen3"}' if name == "config.json" else "{}")
    monkeypatch.setattr(smollm2, "_weights", lambda: pytest.fail("it converts"))
    if (command, name) == ("make-smollm2", "config.json"):  # kept, and no SmolLM2
        refused([command, folder], tmp_path, capsys, folder, "another model (qwen3)")
        return
    refused([command, folder], tmp_path, capsys, folder, name, "did not make", "name another folder")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seed", "1"], "seed=0, not 1"),
        (["--untied"], "tied=True, not False"),
        (["--environment", "sudoku"], "environment='plan_path', not 'sudoku'"),
        (["--environment", "sudoku", "--seed", "3"], "environment='plan_path'"),
    ],
)
def test_a_starting_model_of_other_settings_is_not_overwritten(
    arguments: list[str], told: str, model: Path, tmp_path: Path, capsys: Capture, no_training: None
) -> None:
    refused(["make-model", model, *arguments], tmp_path, capsys, model / "warm_start.json", told, "--force")


def test_a_folder_with_other_files_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    trains(monkeypatch)
    assert main(["make-model", str(tmp_path)]) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_ended_leaves_nothing_partial(
    how: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    request: pytest.FixtureRequest,
) -> None:
    if how == signal.SIGINT:  # ignored in tests that run in the background
        request.addfinalizer(functools.partial(signal.signal, how, signal.signal(how, signal.default_int_handler)))

    def ended(*_: Any) -> Any:
        assert [path.name for path in tmp_path.iterdir()], "it has a temporary folder by now"
        os.kill(os.getpid(), how)

    before = signal.getsignal(how)
    monkeypatch.setattr(warm_start, "train", ended)
    with pytest.raises(SystemExit) as caught:
        main(["make-model", str(tmp_path / "model")])
    assert caught.value.code == 128 + how and not list(tmp_path.iterdir())
    assert signal.getsignal(how) == before and "Traceback" not in capsys.readouterr().err


def test_a_home_in_an_option_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    refused(["export", "~/run/global_step_1", "~/out"], tmp_path, capsys, tmp_path / "home/run/global_step_1")


@pytest.mark.parametrize("place", ["file", "file/model", "loop"])
def test_a_place_that_cannot_be_written_is_found_before_the_training(
    place: str, tmp_path: Path, capsys: Capture, no_training: None
) -> None:
    (tmp_path / "file").write_text("mine")
    in_place_of(tmp_path / "loop", "loop")
    refused(["make-model", tmp_path / place], tmp_path, capsys, tmp_path / place.partition("/")[0])


def test_a_model_that_breaks_off_leaves_the_earlier_one(
    model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains(monkeypatch, fails=True)
    refused(["make-model", model, "--force"], tmp_path, capsys, "No space left", model)
    refused(["make-model", tmp_path / "new/model"], tmp_path, capsys, "No space left", tmp_path / "new/model")


def test_a_model_replaces_the_earlier_one_and_no_other_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(monkeypatch)
    assert main(["make-model", str(model), "--force"]) == 0
    assert (model / "model.safetensors").read_bytes() == NEW and (model / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in model.iterdir()) == [
        "config.json",
        "model.safetensors",
        "notes.txt",
        "tokenizer.json",
        "warm_start.json",
    ]


def test_a_move_that_breaks_off_does_not_leave_a_model_that_passes_for_complete(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains(monkeypatch)
    replace = warm_start.move_into.__globals__["os"].replace

    def broken(source: Path, target: Path) -> None:
        if target.name == "model.safetensors":
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(warm_start.move_into.__globals__["os"], "replace", broken)
    with pytest.raises(SystemExit):
        main(["make-model", str(model), "--force"])
    assert not (model / "warm_start.json").exists()
    assert not any(path.name.startswith(".") for path in model.iterdir())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chess", "use one of plan_path, sudoku"),
        ("verl_atgrpo.nowhere:SHOWN", "No module named"),
        ("json:dumps", "the module json has no Demonstrator dumps"),
        ("../x:y", "use one of"),
    ],
)
def test_what_is_no_demonstrator_is_refused(name: str, told: str, tmp_path: Path, capsys: Capture) -> None:
    refused(["make-model", tmp_path / "model", "--environment", name], tmp_path, capsys, name, told)
