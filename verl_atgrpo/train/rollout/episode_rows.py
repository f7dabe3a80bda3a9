"""Converts an episode's record to rows of the trainer's queue: keys, tags, rewards and tensors.

A row is one candidate. Its key orders it within the episode, its group names the rows that it is compared with, and
its tags hold what the update and the metrics need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from verl_atgrpo.play.types import Candidate, Decision, EpisodeRecord, Generation
from verl_atgrpo.train.config.chat_rules import hindsight_ids
from verl_atgrpo.train.estimators.labels import anchor_of
from verl_atgrpo.train.estimators.spec import Need
from verl_atgrpo.train.rows.batch import jagged


@dataclass(frozen=True)
class Row:
    """One candidate, ready to be written to the trainer's queue."""

    key: str
    """`{uid}_{session}_{index}`, verl's convention; `uid` has no underscore."""
    group: str
    """Goes into verl's `uid` field, by which advantages are grouped."""
    prompt_ids: list[int]
    generation: Generation
    reward: float
    tags: dict[str, Any]


def training_rows(
    uid: str,
    session: int,
    record: EpisodeRecord,
    scheme: str,
    needs: Collection[Need] = (),
    episode_reward: str = "outcome",
    episodes: int = 1,
) -> Iterator[Row]:
    """Yields a row for every candidate of an episode's trained decisions.

    `tree`, `branch`: the group is the decision and the reward is the candidate's own.
    `parallel`: the group is the task, and the reward is the `outcome`'s, the sum of all answers' `scores`, or the
    candidate's `own`, as `episode_reward` says.

    `episodes` is the number of them that the task has. `needs` are the labels that the estimator reads beside the
    group. `left` counts decisions that started after this
    one had ended: which of two agents that act at the same time is faster says nothing.
    """
    trained = [(place, *one) for place, one in enumerate(_numbered(record)) if one[1].trained]
    whole = record.outcome.team_reward
    if episode_reward == "scores":
        # In the order in which decisions end, so rounding must not tell.
        whole = math.fsum(decision.candidates[decision.committed].reward for _, _, decision in trained)
    for place, first, decision in trained:
        group = uid if scheme == "parallel" else f"{uid}.{session}.{decision.name}"
        left = {"left": sum(later.after > place for _, _, later in trained)} if "left" in needs else {}
        anchor = {"anchor": anchor_of(decision.prompt_ids)} if "anchor" in needs else {}
        for number, candidate in enumerate(decision.candidates):
            reward = whole if scheme == "parallel" and episode_reward != "own" else candidate.reward
            tags = {
                **_tags(record, decision, candidate),
                "group": group,
                "candidate": number,
                "committed": number == decision.committed,
                "reward": reward,
                # However many candidates it has, a decision counts once, and a task, however many episodes it has.
                "weight": decision.weight / (len(decision.candidates) * episodes),
                "resumed": candidate.generation.resumed,
                "episode": f"{uid}_{session}",
                **left,
                **anchor,
            }
            key = f"{uid}_{session}_{first + number}"
            yield Row(key, group, decision.prompt_ids, candidate.generation, reward, tags)


def untrained_rows(uid: str, session: int, record: EpisodeRecord, scheme: str) -> Iterator[Row]:
    """Yields the rows of decisions that are not trained on, for the records: drafts, and what branches start from.

    The reward is the candidate's own in `tree`, the episode's in the others, where scores may not have been called.
    """
    for first, decision in _numbered(record):
        for number, candidate in enumerate(() if decision.trained else decision.candidates):
            key, committed = f"{uid}_{session}_{first + number}", number == decision.committed
            reward = candidate.reward if scheme == "tree" else record.outcome.team_reward
            tags = {**_tags(record, decision, candidate), "trained": False, "committed": committed, "reward": reward}
            yield Row(key, uid, decision.prompt_ids, candidate.generation, reward, tags)


def _numbered(record: EpisodeRecord) -> Iterator[tuple[int, Decision]]:
    """Yields every decision with the number of its first candidate in the episode."""
    first = 0
    for decision in record.decisions:
        yield first, decision
        first += len(decision.candidates)


def validation_rows(uid: str, session: int, record: EpisodeRecord) -> Iterator[Row]:
    """Yields a row for every committed answer. verl takes an episode's score from its last row."""
    for index, decision in enumerate(record.decisions):
        candidate = decision.candidates[decision.committed]
        tags = {**_tags(record, decision, candidate), "committed": True, "reward": candidate.reward}
        reward = record.outcome.team_reward
        yield Row(f"{uid}_{session}_{index}", uid, decision.prompt_ids, candidate.generation, reward, tags)


def _tags(record: EpisodeRecord, decision: Decision, candidate: Candidate) -> dict[str, Any]:
    return {
        "agent": decision.agent,
        "turn": decision.turn,
        "scope": decision.scope,
        "policy": decision.policy,
        "team_reward": candidate.score.team,
        "local_reward": candidate.score.local,
        "truncated": candidate.generation.truncated,
        "temperature": candidate.generation.temperature,
        "episode_success": record.outcome.success,
        "episode_reward": record.outcome.team_reward,
    }


def failed_validation_row(uid: str, session: int, policy: str, token_id: int) -> Row:
    """Returns the row of a failed validation episode: no text, no reward, no success."""
    tags = {"failed": True, "policy": policy, "episode_success": False, "episode_reward": 0.0}
    return Row(f"{uid}_{session}_0", uid, [token_id], Generation([token_id], [0.0], ""), 0.0, tags)


def critic_rows(
    uid: str,
    session: int,
    record: EpisodeRecord,
    critic: str | None,
    tokenizers: Mapping[str, Any],
    hindsight: str,
    agents: Collection[str],
    longest: int,
) -> Iterator[Row]:
    """Yields a row for every trained decision of these agents, in an episode of one candidate each (`parallel`).

    `critic` is the policy that finds candidates likely or not; with None the agent's own policy reads the prompt and
    `QUESTION`. `tokenizers` are those of the policies. What the environment says of the task in hindsight stands
    before the prompt. Of a row of more than `longest` tokens the beginning of the prompt is left out, then the
    hindsight's end.
    """
    total = sum(len(decision.candidates) for decision in record.decisions)
    told_by = cache(lambda policy: hindsight_ids(tokenizers[policy], hindsight))
    for number, (first, decision) in enumerate(_numbered(record)):
        if not decision.trained or decision.scope or decision.agent not in agents:
            continue
        policy = critic or decision.policy
        tokenizer, answer = tokenizers[policy], decision.candidates[0].generation.token_ids
        told, asked = told_by(policy), list[int]()
        if critic is None:
            question = QUESTION.format(agent=decision.agent, turn=decision.turn + 1)
            asked = tokenizer.encode(question, add_special_tokens=False)
            answer = [tokenizer.eos_token_id]
        before = told[: longest - len(asked) - len(answer)]
        room = longest - len(before) - len(asked) - len(answer)
        shown = decision.prompt_ids[-room:] if room > 0 else []
        tags = {
            CRITIC: f"{uid}_{session}_{first}",
            "cut": len(before) + len(shown) < len(told) + len(decision.prompt_ids),
            "agent": decision.agent,
            "turn": decision.turn,
            "candidate": 0,
            "scope": "",
            "policy": policy,
            "temperature": 1.0,
            "group": uid,
            "episode": f"{uid}_{session}",
            "order": decision.order,
            "place": number,
            "after": decision.after,
            "episode_success": record.outcome.success,
            "episode_reward": record.outcome.team_reward,
        }
        answered = Generation(list(answer), [], "")
        yield Row(f"{uid}_{session}_{total + number}", uid, [*before, *shown, *asked], answered, 0.0, tags)


SUBMISSION = "submission"
"""Field of a submitted training task, and tag of its rows: its number of earlier submissions in the same step."""
RECORDED = "recorded"
"""Field of a submitted training task: whether rows that are not trained on are written, for the records."""
OPPONENT = "opponent"
"""Field of a submitted training task, and tag of its rows: who answers for the other side (`play.opponents`)."""
WHOLE = "whole"
"""Tag: whether all rows of the row's episode were written."""
QUESTION = "\n{agent}, turn {turn}. Success?"
"""What a critic of kind `value` reads after a prompt, which may not say how many turns are left."""
CRITIC = "critic"
"""Tag of a critic's row: the key of the candidate's row."""
PositionIds = Callable[[Tensor], Tensor]
"""Token ids of one row (T,) -> its positions, the last dimension T."""


def episode_fields(
    rows: Sequence[Row], turns: int, info: dict[str, float], data_source: str, position_ids: PositionIds | None = None
) -> TensorDict:
    """Returns the fields of an episode's rows that verl's V1 trainer and workers read, with batch size (N,).

    Equal to what `verl.utils.tensordict_utils.list_of_dict_to_tensordict` makes of `AgentLoopOutput`s, without the
    fields that are not read after the rollout (`metrics`, `multi_modal_inputs`, `session_id`, `index`,
    `global_steps`). Token ids and masks are int64, log-probs and rewards float32, (N, T) if all rows have the same
    length and jagged otherwise; the others are non-tensors. Log-probs are left out if a row has none, since
    TransferQueue needs a field for every row of a batch.

    `turns` is the number of decisions, `info` every row's `reward_extra_info`, `data_source` the name that validation
    reports the task under, `position_ids` for models whose positions are not 0, 1, 2, ... Raises ValueError if there
    is no row, or an answer has no token to place its reward on.
    """
    if not rows:
        raise ValueError("the episode has no row: run() made no decision")
    answers = [row.generation.token_ids for row in rows]
    lengths = np.fromiter(map(len, answers), dtype=np.int64)
    if not lengths.all():
        raise ValueError(f"row {rows[int(lengths.argmin())].key!r}: the answer has no token")
    # Candidates of a decision share its prompt.
    prompts = {id(row.prompt_ids): torch.from_numpy(np.array(row.prompt_ids, dtype=np.int64)) for row in rows}
    of_rows = [prompts[id(row.prompt_ids)] for row in rows]
    prompt_lengths = np.fromiter(map(len, of_rows), dtype=np.int64)
    total = lengths + prompt_lengths
    responses = _flat(answers, np.int64, int(lengths.sum()))
    sequences = list(
        chain.from_iterable(zip(of_rows, torch.split_with_sizes(responses, lengths.tolist()), strict=True))
    )
    input_ids = torch.cat(sequences)
    if position_ids is None:
        starts = np.cumsum(total) - total
        positions = _column(torch.from_numpy(np.arange(total.sum()) - np.repeat(starts, total)), total)
    else:
        positions = _stack([position_ids(ids) for ids in torch.split_with_sizes(input_ids, total.tolist())])
    mask = _column(torch.ones_like(responses), lengths)
    scores = torch.zeros(len(responses))
    scores[torch.from_numpy(np.cumsum(lengths) - 1)] = torch.tensor([row.reward for row in rows], dtype=torch.float32)
    versions = {
        version: {"min_global_steps": version[0], "max_global_steps": version[1], "reward_extra_info": info}
        for version in (row.generation.weights_version for row in rows)
    }
    fields: dict[str, Any] = {
        "prompts": _column(torch.cat(of_rows), prompt_lengths),
        "responses": _column(responses, lengths),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": _column(scores, lengths),
        "input_ids": _column(input_ids, total),
        "position_ids": positions,
        "num_turns": _stack_of([turns] * len(rows)),
        "extra_fields": _stack_of([row.generation.weights_version for row in rows], versions),
        "uid": _stack_of([row.group for row in rows]),
        "data_source": _stack_of([data_source] * len(rows)),
    }
    if all(row.generation.log_probs for row in rows):
        log_probs = _flat([row.generation.log_probs for row in rows], np.float32, len(responses))
        fields["rollout_log_probs"] = _column(log_probs, lengths)
    return TensorDict(fields, batch_size=[len(rows)])


def _flat(lists: Iterable[Iterable[float]], dtype: Any, count: int) -> Tensor:
    # Several times faster than torch.tensor, which checks the type of every element.
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), dtype=dtype, count=count))


def _column(values: Tensor, lengths: Any) -> Tensor:
    """Splits values into rows of these lengths: (N, T), jagged if the lengths differ."""
    if (lengths == lengths[0]).all():
        return values.view(len(lengths), -1)
    return jagged(values, torch.from_numpy(lengths))


def _stack(rows: list[Tensor]) -> Tensor:
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(rows)
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _stack_of(values: Sequence[Any], contents: Mapping[Any, Any] | None = None) -> NonTensorStack:
    """Stacks values, or the `contents` of them; wraps once per distinct value, since wrapping is slow."""
    wrapped = {value: NonTensorData(contents[value] if contents else value) for value in dict.fromkeys(values)}
    return NonTensorStack(*(wrapped[value] for value in values))
