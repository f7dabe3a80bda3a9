"""Every row is decoded with its policy's tokenizer, and rows in another order than announced end the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer)
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_atgrpo.train.config.section import parse_section
from verl_atgrpo.train.rows.queue import on_validation_sample
from verl_atgrpo.train.trainer.dataset import TeamTokenizer
from verl_atgrpo.train.trainer.trainer import AtGrpoTrainer


class Letters:
    """Decodes ids as letters from `first` on; 9 is a special token."""

    def __init__(self, first: str) -> None:
        self.first = ord(first)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(self.first + token) for token in ids if not (skip_special_tokens and token == 9))


TAGS = [
    {"policy": "coder", "prompt_len": 2, "response_len": 2},
    {"policy": "planner", "prompt_len": 3, "response_len": 1},
]


@pytest.fixture
def tokenizer() -> TeamTokenizer:
    return TeamTokenizer({"coder": Letters("a"), "planner": Letters("A")})


def decode(tokenizer: TeamTokenizer, *texts: list[int]) -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]


def test_rows_are_decoded_in_order_prompts_first(tokenizer: TeamTokenizer) -> None:
    for _ in range(2):
        tokenizer.expect(TAGS)
        assert decode(tokenizer, [0, 1, -1], [0, 1, 2]) == ["ab", "ABC"]
        assert decode(tokenizer, [2, 9], [3, -1]) == ["c", "D"]
        tokenizer.check_complete()


def test_a_text_of_another_row_is_an_error(tokenizer: TeamTokenizer) -> None:
    tokenizer.expect(TAGS)
    with pytest.raises(RuntimeError, match="a text of 3 tokens where one of 2 was expected"):
        decode(tokenizer, [0, 1, 2])


def test_a_text_that_was_not_announced_is_an_error(tokenizer: TeamTokenizer) -> None:
    tokenizer.expect([])
    with pytest.raises(RuntimeError, match="a text of 1 tokens where one of 0 was expected"):
        decode(tokenizer, [0])


@pytest.mark.parametrize("then", ["check_complete", "expect"])
def test_a_text_that_is_left_out_is_an_error(tokenizer: TeamTokenizer, then: str) -> None:
    tokenizer.expect(TAGS)
    decode(tokenizer, [0, 1], [0, 1, 2], [2, 9])
    with pytest.raises(RuntimeError, match="verl has not decoded 1 texts of the rows that it sampled"):
        getattr(tokenizer, then)(*([TAGS] if then == "expect" else []))


class Validating(AtGrpoTrainer):
    """The trainer with what a validation uses."""

    def __init__(self, tokenizer: TeamTokenizer, partition: str) -> None:
        self.settings = parse_section({"environment": {"name": "plan_path"}})
        self.tokenizer, self.recorder, self.global_steps = tokenizer, None, 7
        self.reports = 0
        batch = KVBatchMeta(keys=["u_0_0", "u_0_1"], tags=TAGS, partition_id=partition)
        self.replay_buffer = SimpleNamespace(sample=lambda **_: (batch, {}))
        on_validation_sample(self.replay_buffer, self.on_validation_sample)

    def collect_report(self) -> None:
        self.reports += 1


@pytest.mark.parametrize("texts", [2, 3, 4])
def test_a_validation_decodes_the_rows_that_it_samples(
    monkeypatch: pytest.MonkeyPatch, tokenizer: TeamTokenizer, texts: int
) -> None:
    def validate(self: Any) -> dict[str, float]:
        self.replay_buffer.sample(global_steps=7, partition_id="val", batch_size=1)
        decode(self.tokenizer, *[[0, 1], [0, 1, 2], [2, 9], [3]][:texts])
        return {"val-core/plan_path/acc/mean@1": 1.0}

    monkeypatch.setattr(PPOTrainer, "_validate", validate)
    trainer = Validating(tokenizer, "val")
    if texts == 4:
        assert trainer._validate() == {"val-core/plan_path/acc/mean@1": 1.0}
    else:
        with pytest.raises(RuntimeError, match=f"verl has not decoded {4 - texts} texts"):
            trainer._validate()
    assert trainer.reports == 1


def test_training_rows_are_not_announced_when_they_are_sampled(tokenizer: TeamTokenizer) -> None:
    Validating(tokenizer, "train").replay_buffer.sample()
    tokenizer.check_complete()
