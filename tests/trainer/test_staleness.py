"""Staleness metrics by hand, and the difference between servers and actor over fresh rows only."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

import transfer_queue as tq

from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.rows import batch as batches
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.serving.served_weights import ServedWeights
from verl_atgrpo.train.trainer import policy_unit
from verl_atgrpo.train.trainer.metrics import PROBS_DIFF, staleness_metrics
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit, Update
from verl_atgrpo.train.trainer.update_inputs import ProbsDifference


def row(group: str, first: int, last: int, resumed: int = 0, policy: str = "shared") -> dict[str, Any]:
    return {
        "group": group,
        "policy": policy,
        "min_global_steps": first,
        "max_global_steps": last,
        "resumed": resumed,
        "temperature": 1.0,
    }


def test_metrics_of_a_step() -> None:
    rows = [
        *(row("fresh", 6, 6) for _ in range(2)),
        row("mixed", 5, 5),
        row("mixed", 5, 6, resumed=1),
        row("old", 4, 4),
        # Resumed with the same version: interrupted again before the first token with new weights.
        row("old", 4, 4, resumed=1),
        # The same label with another policy is another group.
        row("fresh", 5, 5, policy="other"),
        row("fresh", 5, 5, policy="other"),
    ]
    assert staleness_metrics(rows, 7) == {
        "team/staleness_mean": (0 + 0 + 1 + 1 + 2 + 2 + 1 + 1) / 8,
        "team/staleness_max": 2.0,
        "team/candidates_resumed_share": 2 / 8,
        "team/groups_mixed_versions_share": 1 / 4,
    }


def test_without_rows_of_a_trainable_policy_there_are_no_metrics() -> None:
    assert staleness_metrics([], 7) == {}


def test_a_group_with_two_versions_is_mixed() -> None:
    rows = [row("task", 1, 1), row("task", 2, 2)]
    assert staleness_metrics(rows, 3)["team/groups_mixed_versions_share"] == 1.0


@pytest.mark.parametrize(
    ("mode", "versions", "expected"),
    [
        ("colocate_async", [(2, 2), (1, 1), (1, 2), (2, 2)], 0.25),  # the second and third differ by more
        ("colocate_async", [(1, 1), (1, 1), (2, 2), (1, 1)], 0.5),  # the actor's probability is lower
        ("colocate_async", [(2, 2), (2, 2), (1, 1), (1, 1)], 0.5),
        ("colocate_async", [(2, 2), (1, 1), (1, 1), (1, 1)], 0.0),
        ("colocate_async", [(1, 1)] * 4, None),
        # In sync mode an older version is a defect, and must be visible.
        ("sync", [(1, 1)] * 4, 0.5),
    ],
)
@pytest.mark.parametrize("tokens", [batches.TOKENS, 1], ids=["one part", "a row a part"])
def test_the_difference_to_the_servers_is_over_fresh_rows(
    monkeypatch: pytest.MonkeyPatch, tokens: int, mode: str, versions: list[tuple[int, int]], expected: float | None
) -> None:
    monkeypatch.setattr(batches, "TOKENS", tokens)
    # Response by response, of different lengths: probabilities of the server, and of the actor. The last is padding.
    served = [[0.5], [0.5, 0.5], [1.0], [0.25, 0.5], [1.0]]
    actor = [[0.5], [1.0, 0.5], [0.5], [0.5, 0.5], [0.125]]
    whole = [[*one, 1.0] for one in actor]  # with a prompt of one token

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        logs = {"log_probs": whole, "entropy": whole, "rollout_log_probs": served}
        rows = {name: [torch.tensor([math.log(p) for p in one]) for one in column] for name, column in logs.items()}
        rows["response_mask"] = [torch.full((len(one),), int(row < 4)) for row, one in enumerate(served)]
        return {
            name: torch.nested.as_nested_tensor([rows[name][int(key)] for key in keys], layout=torch.jagged)
            for name in select_fields
        }

    monkeypatch.setattr(tq, "kv_batch_get", get)
    monkeypatch.setattr(tq, "kv_batch_put", lambda **_: None)
    monkeypatch.setattr(policy_unit.update_inputs, "write_advantages", lambda *given: {})
    tags: list[dict[str, Any]] = [
        {**row("g", *version), "seq_len": 2, "response_len": len(one)}
        for version, one in zip([*versions, (2, 2)], served, strict=True)
    ]

    class Unit(PolicyUnit):
        name, use_reference_policy = "shared", False

        def __init__(self) -> None:
            self._sync_mode = mode == "sync"
            actor = SimpleNamespace(loss_agg_mode="token-mean", loss_scale_factor=None)
            self.config = SimpleNamespace(algorithm={}, actor_rollout_ref=SimpleNamespace(actor=actor))  # type: ignore[assignment]
            self.actor_rollout_wg = SimpleNamespace(compute_log_prob=lambda rows: rows)
            self._spec = PRESETS["at_grpo"]
            self._served = ServedWeights(self.name, "bfloat16")

        def _deal(self, update: Update, seed: int) -> None:
            update.rows.keys.append("4")
            update.rows.tags.append({**tags[4], "is_padding": True})

        def _update_actor(self, update: Update) -> dict[str, Any]:
            return {}

        def _add_metrics(self, update: Update, output: dict[str, Any], began: float) -> None: ...

    batch = Batch(["0", "1", "2", "3"], tags[:4])
    metrics = Unit().train(batch, 3).metrics
    assert metrics.get(PROBS_DIFF) == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("order", [1, -1])
def test_a_log_prob_that_is_no_number_is_no_agreement(order: int) -> None:
    found = ProbsDifference()
    for actor in (torch.tensor([0.5, math.nan]), torch.tensor([0.5, 0.25]))[::order]:
        found.add(actor, torch.tensor([0.5, 0.5]), torch.tensor([True, True]))
    assert math.isnan(found.metrics()[PROBS_DIFF])
