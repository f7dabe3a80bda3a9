"""The fields of an episode's rows, made column by column, against verl's own way: row by row, then stacked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from tensordict import NonTensorStack
from torch import Tensor
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.utils.model import compute_position_id_with_mask
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_atgrpo.play.types import Generation
from verl_atgrpo.train.rollout.episode_rows import Row, episode_fields, failed_validation_row
from verl_atgrpo.train.rollout.worker import TeamRolloutWorker

UNREAD = {"metrics", "multi_modal_inputs", "session_id", "index", "global_steps"}
"""What verl's own loop writes and nothing in its V1 trainer, workers and engines reads, or reads with a default."""


def verls_own(rows: list[Row], turns: int, info: dict[str, float], data_source: str) -> Any:
    fields = []
    for row in rows:
        first, last = row.generation.weights_version
        output = AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.generation.token_ids,
            response_mask=[1] * len(row.generation.token_ids),
            response_logprobs=row.generation.log_probs or None,
            reward_score=row.reward,
            num_turns=turns,
            metrics=AgentLoopMetrics(),
            extra_fields={"min_global_steps": first, "max_global_steps": last, "reward_extra_info": info},
        )
        field = output.as_dict()
        input_ids = torch.cat([field["prompts"], field["responses"]])
        field.update(
            input_ids=input_ids,
            position_ids=compute_position_id_with_mask(torch.ones_like(input_ids)[None]).squeeze(0),
            multi_modal_inputs={},
            loss_mask=field["response_mask"],
            uid=row.group,
            session_id=0,
            index=7,
            data_source=data_source,
            global_steps=3,
        )
        fields.append(field)
    return list_of_dict_to_tensordict(fields)


def row(number: int, prompt: list[int], answer: int, reward: float = 0.0, log_probs: bool = True) -> Row:
    ids = [100 + number * 10 + position for position in range(answer)]
    probs = [-0.1 * (number + position) - 1e-9 for position in range(answer)] if log_probs else []
    versions = (number // 2, number)
    return Row(f"t_0_{number}", f"t.0.a.{number // 2}", prompt, Generation(ids, probs, "", weights_version=versions),
               reward, {})  # fmt: skip


def decisions(*lengths: tuple[int, list[int]], log_probs: bool = True) -> list[Row]:
    """Rows of decisions given as (length of the prompt, lengths of the answers)."""
    rows: list[Row] = []
    for prompt_length, answers in lengths:
        prompt = list(range(prompt_length))
        rows += [row(len(rows) + n, prompt, answer, 0.3 * answer - 1, log_probs) for n, answer in enumerate(answers)]
    return rows


def assert_same(mine: Any, theirs: Any) -> None:
    assert set(mine.keys()) == set(theirs.keys()) - UNREAD
    assert mine.batch_size == theirs.batch_size
    for key in mine.keys():  # noqa: SIM118 - iterating a TensorDict is over its rows
        ours, verls = mine.get(key), theirs.get(key)
        assert type(ours) is type(verls), key
        if isinstance(ours, NonTensorStack):
            assert ours.tolist() == verls.tolist()
            assert [type(value) for value in ours.tolist()] == [type(value) for value in verls.tolist()]
            continue
        assert (ours.dtype, ours.is_nested, ours.layout) == (verls.dtype, verls.is_nested, verls.layout), key
        assert ours.is_contiguous()
        if ours.is_nested and ours.dim() == 2:
            assert torch.equal(ours.to_padded_tensor(0), verls.to_padded_tensor(0)), key
        for mine_row, their_row in zip(ours.unbind(), verls.unbind(), strict=True):
            assert torch.equal(mine_row, their_row), key


@pytest.mark.parametrize(
    "rows",
    [
        decisions((5, [3, 1, 7]), (9, [2, 2, 4])),
        decisions((5, [3, 3]), (5, [3, 3])),  # dense: all prompts and all answers are equally long
        decisions((4, [3, 3]), (6, [3, 3])),
        decisions((2, [4]), (4, [2])),  # equal sums of unequal parts
        decisions((5, [3])),
        decisions((5, [3, 1]), (9, [2]), log_probs=False),
        [failed_validation_row("t", 0, "shared", 2)],
    ],
)
def test_fields_are_what_verl_makes_of_the_same_rows(rows: list[Row]) -> None:
    # Keys of several metrics, as a validation row has them.
    info = {"acc": 1.0, "failed": 0.0, "moves": 3.0}
    assert_same(episode_fields(rows, 4, info, "turns"), verls_own(rows, 4, info, "turns"))


def test_a_row_without_log_probs_takes_the_field_off_all() -> None:
    rows = [*decisions((5, [3, 1])), row(2, [1], 2, log_probs=False)]
    assert "rollout_log_probs" not in episode_fields(rows, 1, {}, "turns")


def test_an_answer_without_tokens_is_an_error_and_not_its_neighbours_reward() -> None:
    with pytest.raises(ValueError, match="row 't_0_1': the answer has no token"):
        episode_fields(decisions((5, [3, 0, 2])), 1, {}, "turns")


def test_an_episode_without_a_decision_is_an_error_of_its_author() -> None:
    with pytest.raises(ValueError, match=r"run\(\) made no decision"):
        episode_fields([], 0, {}, "turns")


def test_a_processor_with_positions_of_its_own_is_asked_for_every_row() -> None:
    """Some vision models number tokens in several ways at once, also where there is no picture."""

    class Worker(TeamRolloutWorker):  # type: ignore[misc]
        def __init__(self) -> None:
            self.processor = SimpleNamespace(get_rope_index=None)

        def _compute_position_ids(self, ids: Tensor, mask: Tensor, _: Any) -> Tensor:
            assert ids.shape == mask.shape
            return torch.stack([ids, ids * 2], dim=1)  # (1, 2, T)

    for rows in (decisions((5, [3, 1])), decisions((5, [3, 3]))):
        fields = Worker()._fields(rows, 1, {}, {"data_source": "turns"})
        assert [positions.tolist() for positions in fields["position_ids"].unbind()] == [
            [ids.tolist(), (ids * 2).tolist()] for ids in fields["input_ids"].unbind()
        ]
