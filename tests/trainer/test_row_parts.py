"""The driver's computations on parts of a policy's rows, compared with verl's own on all rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from fakes.local_queue import LocalQueue
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.rows import batch as batches
from verl_atgrpo.train.rows import queue as trainer_queue
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.rows.step_rows import StepRows
from verl_atgrpo.train.trainer.metrics import training_metrics
from verl_atgrpo.train.trainer.update_inputs import (
    bypass_old_log_probs,
    write_advantages,
    write_old_log_probs,
    write_ref_log_probs,
)

TIMING = {"gen": 3.0, "adv": 1.0, "update_actor": 5.0, "step": 10.0}
RESPONSES = (3, 1, 7, 2, 5, 5, 4, 6, 2, 3, 1, 8)
PADDING = 3


def rows_with_padding(seed: int = 0, padding_rows: int = PADDING) -> tuple[KVBatchMeta, dict[str, dict[str, Any]]]:
    """Rows in groups of three, and padding as verl's."""
    generator = torch.Generator().manual_seed(seed)
    keys, tags, rows = [], [], {}
    for number, response in enumerate((*RESPONSES, *[1] * padding_rows)):
        padding = number >= len(RESPONSES)
        prompt = 127 if padding else 2 + number % 4
        group = "t0.0.a.0" if padding else f"t{number // 3}.0.a.0"
        reward = 0.1 * (number % 5) - 0.2
        log_probs = -torch.rand(prompt + response, generator=generator)
        noise = 0.3 * torch.randn(response, generator=generator)
        mask = torch.full((response,), int(not padding))
        scores = torch.zeros(response)
        scores[-1] = 0.0 if padding else reward
        key = f"{'pad' if padding else 't'}_{number}_0"
        rows[key] = {
            "prompts": torch.ones(prompt, dtype=torch.int64),
            "responses": torch.ones(response, dtype=torch.int64),
            "response_mask": mask,
            "rm_scores": scores,
            "uid": "pad" if padding else group,
            "num_turns": 0 if padding else 1 + number % 3,
            "log_probs": log_probs,
            "entropy": torch.rand(prompt + response, generator=generator),
            "rollout_log_probs": torch.zeros(1) if padding else log_probs[prompt - 1 : -1] + noise,
        }
        keys.append(key)
        tags.append(
            {
                "group": group,
                "policy": "p",
                "reward": reward,
                "prompt_len": prompt,
                "response_len": response,
                "seq_len": prompt + response,
                "num_turns": 1 + number % 3,
                "min_global_steps": 1 + number % 2,
                "max_global_steps": 2,
                **({"is_padding": True} if padding else {}),
            }
        )
    order = np.random.default_rng(seed).permutation(len(keys)).tolist()
    batch = KVBatchMeta(keys=[keys[row] for row in order], tags=[tags[row] for row in order], partition_id="train")
    return batch, rows


def job(correction: dict[str, Any], mode: str, scale: int | None) -> Any:
    return OmegaConf.create(
        {
            "algorithm": {
                "adv_estimator": "at_grpo",
                "at_grpo_estimator": "at_grpo",
                "use_kl_in_reward": False,
                "gamma": 1.0,
                "lam": 1.0,
                "rollout_correction": {"bypass_mode": False, "rollout_is": None, "rollout_rs": None, **correction},
            },
            "actor_rollout_ref": {
                "actor": {"loss_agg_mode": mode, "loss_scale_factor": scale},
                "rollout": {"n": 1, "temperature": 1.0, "calculate_log_probs": True},
                "model": {},
            },
        }
    )


def verls_trainer(config: Any) -> Any:
    """verl's trainer with the attributes that its functions use; the workers' results are in the queue already."""
    trainer = object.__new__(Trainer)
    trainer.__dict__.update(
        config=config,
        use_critic=False,
        ref_in_actor=False,
        actor_rollout_wg=SimpleNamespace(compute_log_prob=lambda rows: rows),
        ref_policy_wg=SimpleNamespace(compute_ref_log_prob=lambda rows: rows),
        _rollout_moe_lb_metrics_accumulator=None,
        _get_n_gpus_for_throughput=lambda: 2,
    )
    return trainer


class Trainer(PPOTrainer):  # type: ignore[misc]
    """verl's, without its abstract methods."""


Trainer.__abstractmethods__ = frozenset()
CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"rollout_is": "token", "rollout_is_threshold": 1.2},
    {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3"},
    {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
    {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
    {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.7_1.3,0.1"},
    {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.6_1.6"},
    {"bypass_mode": True},
]
NOISE = ("_std", "eff_sample_size")
"""Metrics with cancellation in verl's float32 arithmetic, compared with a larger tolerance."""


def queued(
    monkeypatch: pytest.MonkeyPatch, padding_rows: int = PADDING
) -> tuple[KVBatchMeta, dict[str, dict[str, Any]]]:
    """Puts rows with padding into a local queue."""
    batch, rows = rows_with_padding(padding_rows=padding_rows)
    queue = LocalQueue()
    queue.kv_batch_put(batch.keys, "train", tags=batch.tags)
    queue.fields["train"].update(rows)
    monkeypatch.setattr(tq, "kv_batch_get", queue.kv_batch_get)
    monkeypatch.setattr(tq, "kv_batch_put", queue.kv_batch_put)
    return batch, rows


def compared(monkeypatch: pytest.MonkeyPatch, config: Any, tokens: int) -> tuple[Any, Any, list[int]]:
    """Runs verl's step and ours on the same rows; returns both metrics and the numbers of rows that ours fetched.

    Only ours has padding, which enters nothing.
    """
    results = []
    fetches: list[int] = []
    for mine in (False, True):
        batch, rows = queued(monkeypatch, PADDING if mine else 0)

        def get(keys: list[str], fetched: Any = tq.kv_batch_get, **options: Any) -> Any:
            fetches.append(len(keys))
            return fetched(keys, **options)

        fetches.clear()
        monkeypatch.setattr(tq, "kv_batch_get", get)
        found: dict[str, float] = {}
        if mine:
            monkeypatch.setattr(batches, "TOKENS", tokens)
            batch = Batch(batch.keys, batch.tags)
            correction = config.algorithm.rollout_correction
            if correction.bypass_mode:
                bypass_old_log_probs(batch)
            else:
                found.update(write_old_log_probs(batch, config.actor_rollout_ref.actor))
            write_ref_log_probs(batch)
            found.update(
                write_advantages(batch, PRESETS["at_grpo"], config.actor_rollout_ref.actor.loss_agg_mode, correction)
            )
            found.update(training_metrics(batch.tags, TIMING, 3, 1, 2))
        else:
            verls = verls_trainer(config)
            for compute in (verls._compute_old_log_prob, verls._compute_ref_log_prob, verls._compute_advantage):
                compute(batch, metrics=found)
            verls._compute_metrics(batch, found, TIMING, global_steps=3, epoch=1)
        results.append((found, rows))
    (verls_metrics, verls_rows), (mine_metrics, own_rows) = results
    for key, row in verls_rows.items():
        # `returns` are for a critic; nobody reads the written entropies, which the tags have.
        for field in row.keys() - {"returns", "uid", "num_turns", "entropy"}:
            value, own = row[field], own_rows[key][field]
            # The rounding of a sum over padded tokens depends on the padding's width, and verl's rewards are float32.
            close = torch.allclose if field in ("rollout_is_weights", "advantages") else torch.equal
            assert close(own, value), (key, field)
    written = set.intersection(*(set(row) for row in own_rows.values()))
    assert all(set(row) == written for row in own_rows.values()), "TransferQueue needs a field in every row"
    assert not any(row["advantages"].any() for key, row in own_rows.items() if key.startswith("pad"))
    return verls_metrics, mine_metrics, fetches


def test_entropy_of_a_row_goes_into_its_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    verls, rows = queued(monkeypatch)
    batch = Batch(verls.keys, verls.tags)
    monkeypatch.setattr(batches, "TOKENS", 20)
    whole = {key: row["entropy"].clone() for key, row in rows.items()}
    write_old_log_probs(batch, OmegaConf.create({"loss_agg_mode": "token-mean", "loss_scale_factor": None}))
    for key, tags in zip(batch.keys, batch.tags, strict=True):
        first = tags["prompt_len"] - 1  # a token's entropy is at the place of the token before it
        expected = whole[key][first : first + tags["response_len"]].mean().item()
        assert tags["entropy"] == pytest.approx(expected), key


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("tokens", [10**6, 30], ids=["one part", "parts"])
def test_a_step_equals_verls_own(monkeypatch: pytest.MonkeyPatch, correction: dict[str, Any], tokens: int) -> None:
    verls, mine, fetches = compared(monkeypatch, job(correction, "token-mean", None), tokens)
    assert mine.keys() == verls.keys()
    for name, value in verls.items():
        tolerance = 1e-4 if name.endswith(NOISE) else 1e-6
        assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    whole = correction.get("rollout_rs") or correction.get("rollout_is_batch_normalize")
    if tokens == 30 and not whole:
        assert max(fetches) <= 4


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_entropy_of_parts_adds_up_in_every_aggregation_mode(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    verls, mine, _ = compared(monkeypatch, job({}, mode, None), 30)
    assert mine["actor/entropy"] == pytest.approx(verls["actor/entropy"], rel=1e-6)


@pytest.mark.parametrize("scale", [None, 16])
def test_the_entropy_is_scaled_by_the_longest_response_or_the_factor(
    monkeypatch: pytest.MonkeyPatch, scale: int | None
) -> None:
    verls, mine, _ = compared(monkeypatch, job({}, "seq-mean-token-sum-norm", scale), 30)
    assert mine["actor/entropy"] == pytest.approx(verls["actor/entropy"], rel=1e-6)


def test_every_row_is_in_one_part_and_every_part_has_a_real_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"response_len": 10, "is_padding": row % 4 != 0} for row in range(40)]
    batch = Batch(map(str, range(40)), rows)
    assert len(list(batch.parts())) == 1
    monkeypatch.setattr(batches, "TOKENS", 20)
    found = list(batch.parts())
    assert sorted(int(key) for part in found for key in part.keys) == list(range(40))
    assert len(found) == 10
    assert all(any(not tags["is_padding"] for tags in part.tags) for part in found)
    assert [len(part) for part in batch.real.parts()] == [2, 2, 2, 2, 2]


def test_a_batch_and_its_view_for_workers_copy_no_tags() -> None:
    class Uncopied(dict[str, Any]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("tags were copied")

    tags: list[Any] = [Uncopied(seq_len=row) for row in range(6)]
    batch = Batch([str(row) for row in range(6)], tags)
    view = batch.for_workers(temperature=1.0)
    chunks = view.chunk(2)
    assert chunks[0].fields == list(batches.FIELDS)
    assert [chunk.keys for chunk in chunks] == [["0", "1", "2"], ["3", "4", "5"]]
    assert chunks[1].extra_info == {"temperature": 1.0}
    assert (batch.extra_info, batch.tags) == ({}, tags)
    batch.reorder([5, 4, 3, 2, 1, 0])
    assert [tags["seq_len"] for tags in batch.tags] == [5, 4, 3, 2, 1, 0]
    assert view.keys[0] == "0"


def test_workers_get_what_the_driver_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    verls, _ = queued(monkeypatch)
    batch = Batch(verls.keys, verls.tags)
    write_old_log_probs(batch, OmegaConf.create({"loss_agg_mode": "token-mean", "loss_scale_factor": None}))
    write_ref_log_probs(batch)
    assert batch.for_workers().fields == [*batches.FIELDS, "old_log_probs", "ref_log_prob"]


def test_what_is_written_to_a_part_only_workers_of_its_batch_get(monkeypatch: pytest.MonkeyPatch) -> None:
    verls, _ = queued(monkeypatch)
    step = StepRows(verls.keys, [{**tags, "policy": str(row % 2)} for row, tags in enumerate(verls.tags)])
    batch, other = step.rows_for({"0"}), step.rows_for({"1"})
    monkeypatch.setattr(batches, "TOKENS", 20)
    for part in batch.real.parts():
        part.put(old_log_probs=part.fetch("rollout_log_probs")["rollout_log_probs"])
    assert batch.for_workers().fields == [*batches.FIELDS, "old_log_probs"]
    assert other.for_workers().fields == list(batches.FIELDS)


def test_the_trainer_polls_less_often_if_a_poll_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    costs = iter([0.01, 3.0, 0.02])
    buffer = SimpleNamespace(poll_interval=None)

    def poll() -> None:
        clock[0] += next(costs)

    monkeypatch.setattr(trainer_queue.time, "perf_counter", lambda: clock[0])
    buffer._sync_metadata_from_transfer_queue = poll
    trainer_queue.pace(buffer, 0.2, check=lambda: None)  # type: ignore[arg-type]
    intervals = []
    for _ in range(3):
        buffer._sync_metadata_from_transfer_queue()
        intervals.append(buffer.poll_interval)
    assert intervals == pytest.approx([0.2, 12.0, 0.2])
