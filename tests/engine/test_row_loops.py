"""What replaces verl's loops over rows gives what they give, without touching other rows."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional
from verl.utils.tensordict_utils import index_select_tensor_dict, nested_tensor_from_tensor_list
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding

from verl_atgrpo.train.engine import row_loops

VERLS_LOG_PROBS = torch_functional.logprobs_from_logits_v2


def batch(rows: int) -> Any:
    """Rows with fields of every kind that verl knows."""
    generator = torch.Generator().manual_seed(rows)

    def texts(*shape: int) -> list[Any]:
        return [torch.randn(*shape, 1 + row % 5, generator=generator) for row in range(rows)]

    return TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(texts(), layout=torch.jagged),
            "equal": torch.nested.as_nested_tensor([torch.arange(3)] * rows, layout=torch.jagged),
            "position_ids": nested_tensor_from_tensor_list(texts(3)),  # (N, 3, T), of Qwen-VL
            "temperature": torch.arange(rows),
            "uid": NonTensorStack(*map(str, range(rows))),
            "mini_batch_size": NonTensorData(7),
        },
        batch_size=[rows],
    )


@pytest.mark.parametrize("indices", [[0], [4, 1, 8], [2, 2], torch.tensor([8, 7]), list(range(9))], ids=str)
def test_rows_are_those_that_verl_selects(indices: Any) -> None:
    rows = batch(9)
    expected, found = (
        index_select_tensor_dict(rows, indices),
        row_loops.selecting(index_select_tensor_dict)(rows, indices),
    )
    assert found is not None
    tu.assert_tensordict_eq(found, expected)
    for name in ("input_ids", "equal"):
        assert torch.equal(found[name].to_padded_tensor(-1), expected[name].to_padded_tensor(-1))


def test_no_batch_has_no_rows() -> None:
    assert row_loops.selecting(index_select_tensor_dict)(None, [0]) is None


def test_the_work_is_that_of_the_selected_rows() -> None:
    select = row_loops.selecting(index_select_tensor_dict)

    def calls(rows: int) -> int:
        data, counted = batch(rows).select("input_ids", "equal", "temperature"), 0

        def count(*_: Any) -> None:
            nonlocal counted
            counted += 1

        select(data, [1, 0])  # caches
        sys.setprofile(count)
        select(data, [3, 2])
        sys.setprofile(None)
        return counted

    assert calls(8) == calls(400)


@pytest.mark.parametrize("lengths", [[(3, 1)], [(2, 4), (1, 1), (5, 2)], [(1, 3), (4, 3)]], ids=str)
@pytest.mark.parametrize("shape", [(), (2,)], ids=["log-probs", "several values a token"])
@pytest.mark.parametrize("longest", [None, 6])
@pytest.mark.parametrize("nested", [True, False])
def test_responses_and_their_gradients_are_those_that_verl_cuts_out(
    lengths: list[tuple[int, int]], shape: tuple[int, ...], longest: int | None, nested: bool
) -> None:
    def jagged(counts: list[int]) -> Any:
        return torch.nested.as_nested_tensor([torch.ones(count) for count in counts], layout=torch.jagged)

    data = TensorDict(
        {"prompts": jagged([prompt for prompt, _ in lengths]), "responses": jagged([answer for _, answer in lengths])},
        batch_size=[len(lengths)],
    )
    if longest is not None:
        tu.assign_non_tensor(data, max_response_len=longest)
    totals = [prompt + answer for prompt, answer in lengths]
    found = []
    for pad in (no_padding_2_padding, row_loops.padding_responses(_fail)):
        values = torch.randn(sum(totals), *shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
        offsets = torch.tensor([0, *totals]).cumsum(0)
        padded = pad(torch.nested.nested_tensor_from_jagged(values, offsets) if nested else values, data)
        (padded * torch.arange(padded.numel()).view_as(padded)).sum().backward()
        found.append((padded, values.grad))
    for expected, own in zip(*found, strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (1,)])
def test_log_probs_and_their_gradients_are_those_that_verl_computes_row_by_row(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_loops, "MOST", 30)  # three tokens at a time
    drawn = torch.Generator().manual_seed(0)
    labels = torch.randint(10, shape, generator=drawn)
    values, found = 5 * torch.randn(*shape, 10, generator=drawn), []
    for compute in (VERLS_LOG_PROBS, row_loops.log_probs):
        logits = values.to(dtype).requires_grad_()
        made = compute(logits, labels)
        (made * torch.arange(made.numel()).view_as(made)).sum().backward()
        found.append((made, logits.grad))
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected)


def _fail(*_: Any) -> Any:
    raise AssertionError("verl's own is called")


def test_verls_functions_are_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tu, "index_select_tensor_dict", index_select_tensor_dict)
    monkeypatch.setattr(losses, "no_padding_2_padding", no_padding_2_padding)
    monkeypatch.setattr(torch_functional, "logprobs_from_logits_v2", torch_functional.logprobs_from_logits_v2)
    row_loops.replace(tu, losses, torch_functional)
    mine = tu.index_select_tensor_dict, losses.no_padding_2_padding
    row_loops.replace(tu, losses, torch_functional)
    assert torch_functional.logprobs_from_logits_v2 is row_loops.log_probs
    assert (tu.index_select_tensor_dict, losses.no_padding_2_padding) == mine
    assert index_select_tensor_dict not in mine and no_padding_2_padding not in mine
    (first, second) = tu.make_iterator(batch(4), mini_batch_size=2, epochs=1)
    assert first["temperature"].tolist() == [0, 1] and second["temperature"].tolist() == [2, 3]
