"""The resource table of docs/cluster.md: what the script prints, whose formulas agree with others' figures."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("verl")

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import recipe_resources
from recipe_resources import SHAPES, Shape
from recipe_table import Job


def job(recipe: str, added: str = "") -> Job:
    """Returns the table's job with this recipe that adds this."""
    return next(one for one in recipe_resources.gpu_jobs() if one.recipe == recipe and added in str(one))


@pytest.fixture(scope="module")
def table() -> str:
    return recipe_resources.table()


@pytest.mark.slow  # every recipe is composed: a third of a second each
def test_the_docs_have_the_table_that_the_script_prints(table: str) -> None:
    assert table in (ROOT / "docs" / "cluster.md").read_text()


@pytest.mark.parametrize("shape", [*SHAPES.values(), Shape(2, 32, 48, 4, 2, 16, 100, tied=False)])
def test_parameters_are_those_of_the_model_that_transformers_builds(shape: Shape) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_cards_figures() -> None:
    # Total and non-embedding parameters as the model cards round them.
    small, large = SHAPES["Qwen/Qwen3-1.7B"], SHAPES["Qwen/Qwen3-8B"]
    assert round(small.parameters / 1e9, 1) == 1.7
    assert round((small.parameters - small.vocabulary * small.hidden) / 1e9, 1) == 1.4
    assert round(large.parameters / 1e9, 1) == 8.2
    assert round((large.parameters - 2 * large.vocabulary * large.hidden) / 1e9, 2) == 6.95
    assert (small.kv_bytes, large.kv_bytes) == (114_688, 147_456)


def test_figures_of_one_recipe_by_hand() -> None:
    need = recipe_resources.needs(job("plan_path_qwen3_1p7b", "+placement=split"), 80.0)
    assert (need.policies, need.devices, need.servers, need.colocated) == (2, 4, 4, False)
    assert need.states == pytest.approx(16 * 8.1907e9 / 4, rel=1e-4)
    assert need.share == 48e9
    assert need.kv_tokens == pytest.approx((48e9 - 2 * 8.1907e9) / 147_456, rel=1e-4)
    # 214,426 tokens hold 17 decisions of 4096 + 4 x 2048 tokens.
    assert (need.in_flight, need.wanted) == (4 * 17 * 4, 512)


def test_figures_of_adapters_on_one_base_by_hand() -> None:
    need = recipe_resources.needs(job("plan_path_qwen3_8b_adapters"), 80.0)
    # 7 matrices of each of 36 layers: rank x (inputs + outputs).
    of_layer = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12_288))
    assert need.adapters == 2 * 36 * of_layer
    assert need.states == (4 * SHAPES["Qwen/Qwen3-8B"].parameters + 16 * need.adapters) // 8
    assert need.resident == (4 * SHAPES["Qwen/Qwen3-8B"].parameters + 12 * need.adapters) // 8
    assert (need.policies, need.devices, need.servers) == (2, 8, 8)


def test_an_adapter_has_as_many_parameters_as_pefts() -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    shape = Shape(2, 32, 48, 4, 2, 16, 100, tied=False)
    config = transformers.Qwen3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
        made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(4) == trained


@pytest.mark.slow
def test_every_gpu_job_is_in_the_table(table: str) -> None:
    found = recipe_resources.gpu_jobs()
    for name, times in Counter(map(recipe_resources.name, found)).items():
        assert table.count(f"`{name}`") == times
    assert len(found) >= 21
