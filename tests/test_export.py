"""Every policy of a checkpoint as a Hugging Face model."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_files import safetensors, saved_step

pytest.importorskip("verl")

from verl_atgrpo.lab.export import export
from verl_atgrpo.lab.tiny_models.tiny import build_model, build_tokenizer


def checkpoint(root: Path, *names: str) -> Path:
    return saved_step(root / "global_step_2", *names)


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


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, "No space left on device"),
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EIO, "Input/output error"),
        (errno.EACCES, "Permission denied"),
        (errno.EFBIG, "File too large"),
    ],
)
@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_file_that_cannot_be_copied_is_named(
    number: int, why: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own error is a list of tuples."""
    step, copy = checkpoint(tmp_path, "coder"), shutil.copy2

    def fails(source: str, target: str, **more: Any) -> Any:
        if Path(source).name == broken:
            raise OSError(number, why, target)
        return copy(source, target, **more)

    monkeypatch.setattr(shutil, "copy2", fails)
    monkeypatch.setattr(shutil.copytree, "__defaults__", (False, None, fails, False, False))
    with pytest.raises(
        OSError, match=rf"{broken} cannot be copied to .*MiB are free \(1 files in all\): .*{why}"
    ) as caught:
        export(step, tmp_path / "out")
    assert "(" not in str(caught.value).partition(" in all")[2]
    assert not list((tmp_path / "out").glob("*"))


def test_a_step_that_was_not_saved_to_its_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "global_step_3/policies/coder").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"global_step_3 has no policies\.json"):
        export(tmp_path / "global_step_3", tmp_path / "out")


def test_shards_of_another_backend_are_refused(tmp_path: Path) -> None:
    step = checkpoint(tmp_path, "coder")
    (step / "policies/coder/huggingface/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"coder has no FSDP shards: use python -m verl\.model_merger"):
        export(step, tmp_path / "out")


def test_an_adapter_on_a_shared_base_is_merged_and_kept(tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base, step = tmp_path / "base", tmp_path / "global_step_2"
    tokenizer = build_tokenizer(())
    tokenizer.save_pretrained(base)
    build_model(tokenizer, seed=0, hidden=16, layers=1).save_pretrained(base)
    made = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    made.save_pretrained(step / "policies/coder/lora_adapter")
    tokenizer.chat_template = "own"  # as `model.custom_chat_template` sets it
    tokenizer.save_pretrained(step / "policies/coder/lora_adapter")
    (step / "policies.json").write_text(json.dumps({"coder": "policies/coder"}))
    folder = export(step, tmp_path / "out")["coder"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, made(ids).logits, atol=2e-2, rtol=0)  # bfloat16
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == "own"
    assert (folder / "lora_adapter/adapter_model.safetensors").is_file()
    # A base that is not there any more is told before anything is written.
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"adapter_config\.json: its base model is not in .*base any more"):
        export(step, tmp_path / "again")
    assert not (tmp_path / "again").exists()
