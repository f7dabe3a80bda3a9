"""`export` of checkpoints that are truncated, corrupt, foreign or hostile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import LINES, in_place_of, refused, safetensors, small_model

pytest.importorskip("verl")

from verl_atgrpo.cli import main
from verl_atgrpo.lab import export as exports

Capture = pytest.CaptureFixture[str]
MODEL = Path("policies/planner/huggingface")


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A complete checkpoint of two policies; what breaks is always the second one."""
    step = tmp_path / "run/global_step_2"
    for name in ("coder", "planner"):
        small_model(step / f"policies/{name}/huggingface")
    (step / "policies.json").write_text(json.dumps({name: f"policies/{name}" for name in ("coder", "planner")}))
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/key").write_text("secret")
    return step


def command(step: Path) -> list[object]:
    return ["export", step, step.parents[1] / "new/out"]


BROKEN: list[tuple[str | Path, str]] = [
    (file, name) for file in ("policies.json", MODEL / "config.json") for name in LINES
]
# What a tokenizer's JSON has is its library's affair.
BROKEN += [(MODEL / "tokenizer.json", name) for name in LINES if name not in ("list", "other object", "key twice")]


@pytest.mark.parametrize(("file", "name"), BROKEN)
def test_a_broken_document(file: Path, name: str, step: Path, tmp_path: Path, capsys: Capture) -> None:
    (step / file).write_bytes(LINES[name])
    refused(command(step), tmp_path, capsys, step / file)


@pytest.mark.parametrize(
    "folder",
    ["../../secret", "policies/../../../secret", "/etc", "", "\0", "policies/absent", "policies.json", 7, None, ["a"]],
)
def test_a_policy_in_no_folder_of_the_checkpoint(folder: Any, step: Path, tmp_path: Path, capsys: Capture) -> None:
    file = step / "policies.json"
    file.write_text(json.dumps({"coder": "policies/coder", "planner": folder}))
    if folder == "":  # the checkpoint itself, which has no model
        refused(command(step), tmp_path, capsys, step, "has no FSDP shards")
    else:
        refused(command(step), tmp_path, capsys, file, "planner")


@pytest.mark.parametrize(
    "name", ["../../escaped", "/tmp/escaped", "..", ".", "", "a/b", "a\nb", "<img src=x>", "\x1b[31m", "a\0b", "a b"]
)
def test_a_policy_whose_name_is_no_name(name: str, step: Path, tmp_path: Path, capsys: Capture) -> None:
    file = step / "policies.json"
    file.write_text(json.dumps({"coder": "policies/coder", name: "policies/planner"}))
    refused(command(step), tmp_path, capsys, file, "use letters, digits and underscores")


WEIGHTS = safetensors()
DAMAGE = {
    "empty": b"",
    "cut in the header": WEIGHTS[:20],
    "cut in the weights": WEIGHTS[:-1],
    "longer": WEIGHTS + b"x",
    "text": b"version https://git-lfs.github.com/spec/v1\n",
    "a header of exabytes": b"\xff" * 64,
    "a header that is no JSON": (8).to_bytes(8, "little") + b'{"a": 1,',
    "a nested header": (20_000).to_bytes(8, "little") + b"[" * 20_000,
    "offsets beyond the end": WEIGHTS.replace(b"4]}", b"9]}"),
    "zeros": bytes(100),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights(name: str, step: Path, tmp_path: Path, capsys: Capture) -> None:
    file = step / MODEL / "model.safetensors"
    file.write_bytes(DAMAGE[name])
    refused(command(step), tmp_path, capsys, file)


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
@pytest.mark.parametrize("file", ["policies.json", MODEL / "config.json", MODEL / "model.safetensors"])
def test_something_else_in_place_of_a_file(file: Path, kind: str, step: Path, tmp_path: Path, capsys: Capture) -> None:
    in_place_of(step / file, kind)
    refused(command(step), tmp_path, capsys, step, Path(file).name)


@pytest.mark.parametrize("shard", ["absent.safetensors", "../../coder/huggingface/config.json", "/etc/passwd", 7])
def test_an_index_that_names_no_shard(shard: Any, step: Path, tmp_path: Path, capsys: Capture) -> None:
    file = step / MODEL / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"weight": shard}}))
    refused(command(step), tmp_path, capsys, file)


@pytest.mark.parametrize("link", ["policies/planner", MODEL, MODEL / "notes.txt", MODEL / "config.json"])
def test_a_link_out_of_the_checkpoint(link: Path, step: Path, tmp_path: Path, capsys: Capture) -> None:
    if (step / link).is_dir():
        shutil.rmtree(step / link)
        (step / link).symlink_to(tmp_path / "secret")
    else:
        (step / link).unlink(missing_ok=True)
        (step / link).symlink_to(tmp_path / "secret/key")
    refused(command(step), tmp_path, capsys, step)


def test_no_checkpoint(step: Path, tmp_path: Path, capsys: Capture) -> None:
    for folder in (tmp_path / "absent", step / "policies", step / "policies.json"):
        refused(["export", folder, tmp_path / "out"], tmp_path, capsys, folder, "policies.json")
    (step / "policies.json").write_text("{}")
    refused(command(step), tmp_path, capsys, step / "policies.json", "nothing to export")


@pytest.mark.parametrize("out", ["run/global_step_2/policies.json", "there"])
def test_a_place_that_is_taken(out: str, step: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/planner").symlink_to("nowhere")
    refused(["export", step, tmp_path / out], tmp_path, capsys, tmp_path / out)


def test_a_copy_that_breaks_off_leaves_nothing(
    step: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copy2

    def full(source: str, target: str, **options: Any) -> Any:
        if "planner" in str(source) and str(source).endswith("model.safetensors"):
            Path(target).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return copy(source, target, **options)

    copytree = shutil.copytree
    monkeypatch.setattr(exports.shutil, "copytree", lambda *a, **k: copytree(*a, **k, copy_function=full))
    refused(command(step), tmp_path, capsys, "No space left")
    (tmp_path / "there").mkdir()
    refused(["export", step, tmp_path / "there"], tmp_path, capsys, "No space left")


def test_shards_that_cannot_be_merged(
    step: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = step / "policies/planner"
    shutil.rmtree(source / "huggingface")
    (source / "fsdp_config.json").write_text("{")
    refused(command(step), tmp_path, capsys, source / "fsdp_config.json")
    (source / "fsdp_config.json").write_text('{"world_size": 2}')
    error = "Traceback (most recent call last):\n  File x\nEOFError: Ran out of input\n"
    failed = subprocess.CompletedProcess([], 1, "loading\n", error)
    monkeypatch.setattr(exports.subprocess, "run", lambda *_, **__: failed)
    refused(command(step), tmp_path, capsys, source, "(EOFError: Ran out of input)")

    def half(arguments: list[str], **_: Any) -> Any:
        small_model(Path(arguments[-1]) / "x").rename(Path(arguments[-1]) / "y")
        (Path(arguments[-1]) / "config.json").write_text('{"model_type": "qwen3"}')
        (Path(arguments[-1]) / "model.safetensors").write_bytes(WEIGHTS[:-2])
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(exports.subprocess, "run", half)
    refused(command(step), tmp_path, capsys, "model.safetensors: not whole safetensors")


def test_a_link_inside_the_checkpoint_is_exported_as_a_file(step: Path, tmp_path: Path) -> None:
    (step / MODEL / "config.json").unlink()
    os.symlink("../../coder/huggingface/config.json", step / MODEL / "config.json")
    assert main([str(argument) for argument in command(step)]) == 0
    written = tmp_path / "new/out/planner/config.json"
    assert not written.is_symlink() and json.loads(written.read_text()) == {"model_type": "qwen3"}
