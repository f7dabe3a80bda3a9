"""Packed trees through transformers models against each row alone: log-probs, entropies and gradients."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fakes.packed_trees import trees_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from verl_atgrpo.train.engine.prefix_tree import forward
from verl_atgrpo.train.engine.prefix_tree.forward import Packed, log_probs, model_inputs

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "windows everywhere": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=4)
    ),
    "windows in some layers": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
}


FAST = {("qwen3", "sdpa"), ("llama", "sdpa")}


@functools.cache
def model(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def some_rows(seed: int) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    stems = [[rng.randrange(40) for _ in range(rng.randrange(1, 12))] for _ in range(3)]
    rows = []
    for _ in range(rng.randrange(1, 14)):
        prompt = rng.choice(stems) + [rng.randrange(3) for _ in range(rng.randrange(4))]
        rows.append((prompt + [rng.randrange(3) for _ in range(rng.randrange(1, 6))], len(prompt)))
    return rows


def gradient(net: Any, loss: Any) -> Any:
    net.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, attention, marks=[pytest.mark.slow] if (name, attention) not in FAST else [])
        for name in MODELS
        for attention in ("sdpa", "eager")
    ],
)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 1 << 30),
    budget=st.integers(8, 80),
    temperature=st.sampled_from([(1.0,), (0.6,), (1.0, 0.6, 2.5)]),
    most=st.sampled_from([3 * SIZES["vocab_size"], forward.MOST]),
)
def test_a_tree_gives_what_its_rows_give_alone(
    name: str, attention: str, seed: int, budget: int, temperature: tuple[float, ...], most: int
) -> None:
    """Rows may share tokens and differ in temperature, as those of two agents with one prompt do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "MOST", most)
        compare_with_rows(name, attention, seed, budget, temperature)


def compare_with_rows(name: str, attention: str, seed: int, budget: int, temperature: tuple[float, ...]) -> None:
    net = model(name)
    net.set_attn_implementation(attention)
    rows = some_rows(seed)
    weights = torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(seed))
    got: dict[int, tuple[Any, Any]] = {}
    for tree in trees_of(rows, budget):
        packed = Packed.of(tree, "cpu")
        logits = net(**model_inputs(packed, net.config), use_cache=False).logits[0]
        assert len(logits) == len(packed.nodes)
        of_rows = torch.tensor([temperature[row % len(temperature)] for row in tree.rows])
        given = temperature[0] if len(temperature) == 1 else of_rows
        mine = log_probs(logits, packed, given, entropy=True).values()
        for row, *parts in zip(tree.rows, *(each.split(packed.counts) for each in mine), strict=True):
            got[int(row)] = tuple(parts)
    loss = sum((weights[row] * torch.stack([each.sum() for each in parts])).sum() for row, parts in got.items())
    packed_gradient = gradient(net, loss)

    plain_loss = torch.zeros(())
    for row, (ids, prompt) in enumerate(rows):
        logits = net(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1] / temperature[row % len(temperature)]
        # From torch's own distribution.
        distribution = torch.distributions.Categorical(logits=logits)
        plain = distribution.log_prob(torch.tensor(ids[prompt:])), distribution.entropy()
        for ours, theirs in zip(got[row], plain, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        plain_loss = plain_loss + (weights[row] * torch.stack([each.sum() for each in plain])).sum()
    plain_gradient = gradient(net, plain_loss)
    assert (packed_gradient - plain_gradient).norm() <= 1e-5 * plain_gradient.norm()


@pytest.mark.parametrize("gradients", [False, True])
def test_few_distributions_are_in_memory_at_once(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 those of a whole micro-batch are larger than a GPU."""
    rows = [([1, number, *range(20)], 2) for number in range(30)]
    (tree,) = trees_of(rows, 10_000)
    packed = Packed.of(tree, "cpu")
    logits = torch.randn(len(packed.nodes), 200, dtype=torch.bfloat16, requires_grad=gradients)
    monkeypatch.setattr(forward, "MOST", 64 * 200 + 199)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
                largest = max(largest, made.numel())
            return made

    with Watch():
        loss = sum(log_probs(logits, packed, 0.7, entropy=True).values()).sum()
        if gradients:
            loss.backward()
    assert len(logits) > 500 and largest == 64 * 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_attn_implementation": "flash_attention_2"}, "'flash_attention_2' takes no tree's mask"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_what_knows_no_tree_is_refused(change: dict[str, Any], message: str) -> None:
    config = transformers.Qwen3Config(**SIZES, head_dim=8)
    config._attn_implementation = "sdpa"
    for name, value in change.items():
        setattr(config, name, value)
    (tree,) = trees_of([([1, 2, 3], 1)], 10)
    with pytest.raises(ValueError, match=message):
        model_inputs(Packed.of(tree, "cpu"), config)


def test_short_trees_have_no_kernel_for_decoding() -> None:
    """On an H100 that kernel could not be compiled for sizes below 128 that vary (benchmarks/one_gpu/numbers.py)."""
    config = transformers.Qwen3Config(**SIZES, head_dim=8)
    (tree,) = trees_of([([1, 2, 3], 1)], 10)
    config._attn_implementation = "flex_attention"
    assert model_inputs(Packed.of(tree, "cpu"), config)["kernel_options"] == {"FORCE_USE_FLEX_ATTENTION": True}
    config._attn_implementation = "sdpa"
    assert "kernel_options" not in model_inputs(Packed.of(tree, "cpu"), config)
