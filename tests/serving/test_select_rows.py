"""Rows of a batch are selected as verl selects them, without touching the others."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import index_select_tensor_dict, nested_tensor_from_tensor_list

from verl_atgrpo.serving import select_rows


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
        select_rows.selecting(index_select_tensor_dict)(rows, indices),
    )
    assert found is not None
    tu.assert_tensordict_eq(found, expected)
    for name in ("input_ids", "equal"):
        assert torch.equal(found[name].to_padded_tensor(-1), expected[name].to_padded_tensor(-1))


def test_no_batch_has_no_rows() -> None:
    assert select_rows.selecting(index_select_tensor_dict)(None, [0]) is None


def test_the_work_is_that_of_the_selected_rows() -> None:
    select = select_rows.selecting(index_select_tensor_dict)

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


def test_verls_function_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tu, "index_select_tensor_dict", index_select_tensor_dict)
    select_rows.replace(tu)
    mine = tu.index_select_tensor_dict
    select_rows.replace(tu)
    assert tu.index_select_tensor_dict is mine is not index_select_tensor_dict
    (first, second) = tu.make_iterator(batch(4), mini_batch_size=2, epochs=1)
    assert first["temperature"].tolist() == [0, 1] and second["temperature"].tolist() == [2, 3]
