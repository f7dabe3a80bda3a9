"""Adapters in vLLM for CPU: grouped products give vLLM's numbers, and rows without an adapter stay as they are."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.punica_wrapper.punica_selector import get_punica_wrapper

from verl_atgrpo.cpu.grouped_adapters import LONG, GroupedPunicaWrapper, groups_of
from verl_atgrpo.platform_choice import wants_cpu

RANK, INPUTS, VOCABULARY = 4, 24, 40
NONE = 0
"""vLLM's number for "no adapter"; slots have -1."""


def wrappers(tokens: list[int], samples: list[int], slots: int) -> tuple[PunicaWrapperCPU, GroupedPunicaWrapper]:
    """vLLM's and ours for a batch; adapter n is in slot n - 1."""
    made = PunicaWrapperCPU(512, 64, "cpu"), GroupedPunicaWrapper(512, 64, "cpu")
    for wrapper in made:
        mapping = LoRAMapping(tuple(tokens), tuple(samples), is_prefill=True)
        wrapper.update_metadata(mapping, list(range(1, slots + 1)), slots + 1, VOCABULARY)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16,), (32, 8, 8)], ids=["one", "qkv"])
@pytest.mark.parametrize(
    ("tokens", "slots"),
    [
        ([1] * 9, 1),
        ([2] * 9, 3),
        ([1] * 5 + [2] * 4, 2),
        ([1, 2, 3, 1, 2, 3, 1, 1, 3], 3),
        ([number % 7 + 1 for number in range(60)], 7),
        ([1] * 2 * LONG + [2] * LONG + [1], 2),
    ],
    ids=["all of one", "all of the second", "one after the other", "in turn", "seven", "long runs"],
)
def test_linear_layers_have_vllms_numbers(
    tokens: list[int], slots: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    theirs, ours = wrappers(tokens, tokens[:3], slots)
    torch.manual_seed(0)
    x = torch.randn(len(tokens), INPUTS, dtype=dtype)
    down = tuple(torch.randn(slots, 1, RANK, INPUTS, dtype=dtype) for _ in sizes)
    up = tuple(torch.randn(slots, 1, size, RANK, dtype=dtype) for size in sizes)
    expected = torch.randn(len(tokens), sum(sizes), dtype=dtype)
    got = expected.clone()
    theirs.add_lora_linear(expected, x, down, up, 0.5, sizes)
    ours.add_lora_linear(got, x, down, up, 0.5, sizes)
    # Ours may round once where vLLM rounds the product and then the sum.
    rounding = 2 * max(torch.finfo(dtype).eps, 1e-6) * float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=rounding)


def test_head_and_embedding_have_vllms_numbers() -> None:
    tokens = [1, 1, 2, 2, 2, 1]
    theirs, ours = wrappers(tokens, [2, 1, 2], 2)
    torch.manual_seed(0)
    down, up = torch.randn(2, 1, RANK, INPUTS), torch.randn(2, 1, VOCABULARY, RANK)
    up[0] = 0  # an adapter without a part in the head
    hidden, expected = torch.randn(3, INPUTS), torch.randn(3, VOCABULARY)
    got = expected.clone()
    theirs.add_lora_logits(expected, hidden, down, up, 0.5)
    ours.add_lora_logits(got, hidden, down, up, 0.5)
    torch.testing.assert_close(got, expected)

    embedded, expected, up = (
        torch.randn(len(tokens), RANK),
        torch.randn(len(tokens), INPUTS),
        torch.randn(2, 1, INPUTS, RANK),
    )
    got = expected.clone()
    theirs.add_lora_embedding(expected, embedded, up, add_inputs=True)
    ours.add_lora_embedding(got, embedded, up, add_inputs=True)
    torch.testing.assert_close(got, expected)


def test_rows_without_an_adapter_stay_as_they_are() -> None:
    tokens = [NONE, 1, NONE, 2, 2]
    _, ours = wrappers(tokens, [NONE, 2], 2)
    x, down, up = torch.randn(5, INPUTS), torch.randn(2, 1, RANK, INPUTS), torch.randn(2, 1, 16, RANK)
    y, logits = torch.zeros(5, 16), torch.zeros(2, 16)
    ours.add_lora_linear(y, x, (down,), (up,), 1.0, (16,))
    ours.add_lora_logits(logits, x[:2], down, up, 1.0)
    assert [bool(row.any()) for row in y] == [False, True, False, True, True]
    assert [bool(row.any()) for row in logits] == [False, True]


def test_another_adapters_infinite_weights_reach_nobody_else() -> None:
    _, ours = wrappers([1, 2, 1], [1], 2)
    down, up = torch.randn(2, 1, RANK, INPUTS), torch.randn(2, 1, 16, RANK)
    down[1], up[1] = float("inf"), float("nan")
    y = torch.zeros(3, 16)
    ours.add_lora_linear(y, torch.randn(3, INPUTS), (down,), (up,), 1.0, (16,))
    assert [bool(row.isfinite().all()) for row in y] == [True, False, True]


def test_a_batch_has_one_product_for_each_adapter_however_its_tokens_are_mixed() -> None:
    slots = torch.tensor([-1, 2, 0, 2, 0, 0, -1, 2] * LONG)
    groups = groups_of(slots)
    assert [slot for slot, _ in groups] == [0, 2]
    assert [slots[rows].tolist() for _, rows in groups] == [[0] * 3 * LONG, [2] * 3 * LONG]
    assert groups_of(torch.tensor([-1, -1])) == []


def test_long_runs_have_a_product_each() -> None:
    runs = [(1, LONG), (-1, LONG), (0, 2 * LONG - 1), (1, 1)]
    slots = torch.tensor([slot for slot, length in runs for _ in range(length)])
    assert groups_of(torch.tensor([1, 1, 0])) == [(1, slice(0, 2)), (0, slice(2, 3))], (
        "short, but all of their adapter's"
    )
    rows = [slice(0, LONG), slice(2 * LONG, 4 * LONG - 1), slice(4 * LONG - 1, 4 * LONG)]
    assert groups_of(slots) == list(zip([1, 0, 1], rows, strict=True))


@pytest.mark.skipif(not wants_cpu(), reason="not in CPU mode")
def test_vllm_takes_ours_in_cpu_mode() -> None:
    assert type(get_punica_wrapper(8, 8, "cpu")) is GroupedPunicaWrapper
