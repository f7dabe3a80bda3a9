"""Every row is decoded with the tokenizer of the policy that wrote it."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from verl_atgrpo.trainer.dataset import TeamTokenizer


class Letters:
    """Decodes ids as letters from `first` on."""

    def __init__(self, first: str) -> None:
        self.first = ord(first)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(self.first + token) for token in ids if not (skip_special_tokens and token == 9))


def test_rows_are_decoded_in_order_prompts_first() -> None:
    tokenizer = TeamTokenizer({"coder": Letters("a"), "planner": Letters("A")})
    for _ in range(2):
        tokenizer.expect([{"policy": "coder"}, {"policy": "planner"}])
        prompts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in ([0, 1, -1], [0, 1, 2])]
        responses = [tokenizer.decode(ids, skip_special_tokens=True) for ids in ([2, 9, -1], [3, 9, -1])]
        assert prompts == ["ab", "ABC"]
        assert responses == ["c", "D"]
