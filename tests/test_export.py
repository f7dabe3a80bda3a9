"""Every policy of a checkpoint as a Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.broken_files import safetensors, small_model

pytest.importorskip("verl")

from verl_atgrpo.export import export


def checkpoint(root: Path, *names: str) -> Path:
    """A step whose policies were saved as whole models."""
    step = root / "global_step_2"
    for name in names:
        small_model(step / "policies" / name / "huggingface", name.encode())
    (step / "policies.json").write_text(json.dumps({name: f"policies/{name}" for name in names}))
    return step


def test_every_policy_gets_a_folder_of_its_name(tmp_path: Path) -> None:
    step = checkpoint(tmp_path, "coder", "planner")
    written = export(step, tmp_path / "out")
    assert {name: (folder / "model.safetensors").read_bytes() for name, folder in written.items()} == {
        "coder": safetensors(b"coder"),
        "planner": safetensors(b"planner"),
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["coder", "planner"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    step = checkpoint(tmp_path, "coder", "planner")
    (tmp_path / "out/planner").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="planner exists"):
        export(step, tmp_path / "out")
    assert not (tmp_path / "out/coder").exists()


def test_a_step_that_was_not_saved_to_its_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "global_step_3/policies/coder").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"global_step_3 has no policies\.json"):
        export(tmp_path / "global_step_3", tmp_path / "out")


def test_shards_of_another_backend_are_refused(tmp_path: Path) -> None:
    step = checkpoint(tmp_path, "coder")
    (step / "policies/coder/huggingface/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"coder has no FSDP shards: use python -m verl\.model_merger"):
        export(step, tmp_path / "out")
