"""Adapters that share a base, with FSDP2 and real optimizer steps on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")
pytest.importorskip("peft")

from fakes.adapter_runs import Run, check
from fakes.fsdp_rows import join, save_model, some_rows, spawn

from verl_atgrpo.train.config.policies import ADAPTER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def _work(rank: int, ranks: int, port: int, model: str, out: str) -> None:
    join(rank, ranks, port)
    check(rank, ranks, model, Path(out))
    torch.distributed.destroy_process_group()


def test_adapters_train_beside_others_as_they_do_alone(model: Path, tmp_path: Path) -> None:
    spawn(_work, 2, str(model), str(tmp_path))  # on one rank: benchmarks/one_gpu/numbers.py, whose test runs it


def test_what_is_saved_is_an_adapter_of_peft(model: Path, tmp_path: Path) -> None:
    """peft reads it without us, and computes what the engine does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spawn(_save, 1, str(model), str(tmp_path))
    assert json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        model
    )
    net = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path / ADAPTER
    )
    (prompt, response), *_ = some_rows(0)
    with torch.no_grad():
        logits = net(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
    ours = torch.load(tmp_path / "log_probs.pt")[len(prompt) - 1 : len(prompt + response) - 1]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def _save(rank: int, ranks: int, port: int, model: str, out: str) -> None:
    join(rank, ranks, port)
    run = Run(rank, ranks, model, ["small", "large"])
    for seed in (1, 2):
        run.train("large", seed)
    run.engine.save_adapter("large", Path(out))
    torch.save(run.infer(0), Path(out) / "log_probs.pt")
    torch.distributed.destroy_process_group()
