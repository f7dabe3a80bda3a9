"""What the driver computes of a policy's rows, part by part, against verl's own functions, which take all at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_atgrpo.estimators.spec import PRESETS
from verl_atgrpo.trainer import queue as trainer_queue
from verl_atgrpo.trainer.metrics import training_metrics
from verl_atgrpo.trainer.policy_unit import PolicyUnit
from verl_atgrpo.trainer.update import balanced, write_advantages

TIMING = {"gen": 3.0, "adv": 1.0, "update_actor": 5.0, "step": 10.0}
ANSWERS = (3, 1, 7, 2, 5, 5, 4, 6, 2, 3, 1, 8)
PADDING = 3


class Queue:
    """TransferQueue's rows in a dict; what is fetched at a time is written down."""

    def __init__(self, rows: dict[str, dict[str, Any]]) -> None:
        self.rows = rows
        self.fetches: list[int] = []

    def get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        assert partition_id == "train"
        self.fetches.append(len(keys))
        fields: dict[str, Any] = {}
        for field in select_fields:
            values = [self.rows[key][field] for key in keys if field in self.rows[key]]
            if len(values) == len(keys):
                tensors = isinstance(values[0], Tensor)
                fields[field] = (
                    torch.nested.as_nested_tensor(values, layout=torch.jagged) if tensors else NonTensorStack(*values)
                )
        return TensorDict(fields, batch_size=[len(keys)])

    def put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        for field, values in fields.items():
            for key, value in zip(keys, values.unbind(), strict=True):
                self.rows[key][field] = value
        return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition_id)


def made(seed: int = 0) -> tuple[KVBatchMeta, dict[str, dict[str, Any]]]:
    """Rows of groups of three, then padding as verl makes it."""
    draw = torch.Generator().manual_seed(seed)
    keys, tags, rows = [], [], {}
    for number, answer in enumerate((*ANSWERS, *[1] * PADDING)):
        padding = number >= len(ANSWERS)
        prompt = 127 if padding else 2 + number % 4
        group = "t0.0.a.0" if padding else f"t{number // 3}.0.a.0"
        reward = 0.1 * (number % 5) - 0.2
        log_probs = -torch.rand(prompt + answer, generator=draw)
        noise = 0.3 * torch.randn(answer, generator=draw)
        mask = torch.full((answer,), int(not padding))
        scores = torch.zeros(answer)
        scores[-1] = 0.0 if padding else reward
        key = f"{'pad' if padding else 't'}_{number}_0"
        rows[key] = {
            "prompts": torch.ones(prompt, dtype=torch.int64),
            "responses": torch.ones(answer, dtype=torch.int64),
            "response_mask": mask,
            "rm_scores": scores,
            "uid": "pad" if padding else group,
            "num_turns": 0 if padding else 1 + number % 3,
            "log_probs": log_probs,
            "entropy": torch.rand(prompt + answer, generator=draw),
            "rollout_log_probs": torch.zeros(1) if padding else log_probs[prompt - 1 : -1] + noise,
        }
        keys.append(key)
        tags.append(
            {
                "group": group,
                "policy": "p",
                "reward": reward,
                "prompt_len": prompt,
                "response_len": answer,
                "seq_len": prompt + answer,
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


def owner(kind: type, config: Any) -> Any:
    """A trainer or policy with what its functions read, whose workers compute nothing: it is in the queue."""
    it = object.__new__(kind)
    it.__dict__.update(
        config=config,
        use_critic=False,
        ref_in_actor=False,
        actor_rollout_wg=SimpleNamespace(compute_log_prob=lambda rows: rows),
        ref_policy_wg=SimpleNamespace(compute_ref_log_prob=lambda rows: rows),
        _rollout_moe_lb_metrics_accumulator=None,
        _get_n_gpus_for_throughput=lambda: 2,
    )
    return it


class Trainer(PPOTrainer):  # type: ignore[misc]
    """verl's, without its abstract functions."""


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
"""Differences of near numbers in float32, in verl's own arithmetic: compared less closely."""


def compared(monkeypatch: pytest.MonkeyPatch, config: Any, tokens: int) -> tuple[Any, Any, Queue]:
    """Does verl's step and ours on the same rows; returns both metrics and our queue."""
    results = []
    for mine in (False, True):
        batch, rows = made()
        queue = Queue(rows)
        monkeypatch.setattr(tq, "kv_batch_get", queue.get)
        monkeypatch.setattr(tq, "kv_batch_put", queue.put)
        found: dict[str, float] = {}
        if mine:
            monkeypatch.setattr(trainer_queue, "TOKENS", tokens)
            unit = owner(PolicyUnit, config)
            correction = config.algorithm.rollout_correction
            found.update(unit._old_log_probs(batch, correction))
            unit._ref_log_probs(batch)
            found.update(write_advantages(batch, PRESETS["at_grpo"], correction))
            found.update(training_metrics(batch.tags, TIMING, 3, 1, 2))
        else:
            verls = owner(Trainer, config)
            for compute in (verls._compute_old_log_prob, verls._compute_ref_log_prob, verls._compute_advantage):
                compute(batch, metrics=found)
            verls._compute_metrics(batch, found, TIMING, global_steps=3, epoch=1)
        results.append((found, queue))
    (verls_metrics, verl_queue), (mine_metrics, queue) = results
    for key, row in verl_queue.rows.items():
        # Nobody but a critic reads `returns`.
        for field in row.keys() - {"returns", "uid", "num_turns"}:
            value, own = row[field], queue.rows[key][field]
            # A sum over tokens and what they are padded with is rounded by the padding's width, in verl, too.
            close = torch.allclose if field == "rollout_is_weights" else torch.equal
            assert close(own, value), (key, field)
    return verls_metrics, mine_metrics, queue


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("tokens", [10**6, 30], ids=["one part", "parts"])
def test_a_step_is_verls_own(monkeypatch: pytest.MonkeyPatch, correction: dict[str, Any], tokens: int) -> None:
    verls, mine, queue = compared(monkeypatch, job(correction, "token-mean", None), tokens)
    assert mine.keys() == verls.keys()
    for name, value in verls.items():
        tolerance = 1e-4 if name.endswith(NOISE) else 1e-6
        assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    whole = correction.get("rollout_rs") or correction.get("rollout_is_batch_normalize")
    if tokens == 30 and not whole:
        assert max(queue.fetches) <= 4


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_entropy_of_parts_adds_up_however_it_is_averaged(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    verls, mine, _ = compared(monkeypatch, job({}, mode, None), 30)
    assert mine["actor/entropy"] == pytest.approx(verls["actor/entropy"], rel=1e-6)


@pytest.mark.parametrize("scale", [None, 16])
def test_the_entropy_is_scaled_by_the_longest_answer_or_the_factor(
    monkeypatch: pytest.MonkeyPatch, scale: int | None
) -> None:
    verls, mine, _ = compared(monkeypatch, job({}, "seq-mean-token-sum-norm", scale), 30)
    assert mine["actor/entropy"] == pytest.approx(verls["actor/entropy"], rel=1e-6)


def test_parts_hold_every_row_once_and_each_a_real_one() -> None:
    rows = [{"response_len": 10, "is_padding": row % 5 != 0} for row in range(40)]
    found = trainer_queue.parts(rows, tokens=20)
    assert sorted(row for part in found for row in part) == list(range(40))
    assert len(found) == 8
    assert all(any(not rows[row]["is_padding"] for row in part) for part in found)
    assert [len(part) for part in trainer_queue.parts(rows[::5], tokens=20)] == [2, 2, 2, 2]
    assert len(trainer_queue.parts(rows, tokens=10**6)) == 1


def test_a_batch_and_its_view_for_workers_copy_no_tags() -> None:
    class Uncopied(dict[str, Any]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("tags were copied")

    tags: list[Any] = [Uncopied(seq_len=row) for row in range(6)]
    batch = trainer_queue.batch_of([str(row) for row in range(6)], tags, "train")
    view = trainer_queue.for_workers(batch, temperature=1.0)
    chunks = view.chunk(2)
    assert [chunk.keys for chunk in chunks] == [["0", "1", "2"], ["3", "4", "5"]]
    assert chunks[1].extra_info == {"temperature": 1.0}
    assert (batch.extra_info, batch.tags) == ({}, tags)
    batch.reorder([5, 4, 3, 2, 1, 0])
    assert [tags["seq_len"] for tags in batch.tags] == [5, 4, 3, 2, 1, 0]
    assert view.keys[0] == "0"


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_get_the_rows_that_verl_gives_them(ranks: int) -> None:
    lengths = np.random.default_rng(ranks).integers(1, 5000, size=240).tolist()
    verls = object.__new__(Trainer)
    verls.__dict__.update(
        config=OmegaConf.create({"trainer": {"critic_warmup": 1}}),
        global_steps=0,  # no update yet: the rows need not fill mini-batches
        use_critic=False,
        tokenizer=SimpleNamespace(eos_token_id=0),
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": list(range(ranks))}),
    )
    rows = [str(row) for row in range(len(lengths))]
    batch = KVBatchMeta(keys=rows, tags=[{"seq_len": length} for length in lengths], partition_id="train")
    found: dict[str, float] = {}
    verls._balance_batch(batch, found)
    order, balance = balanced(lengths, ranks)
    assert [str(row) for row in order] == batch.keys
    assert balance == pytest.approx(found)


def test_the_trainer_looks_less_often_where_a_look_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    buffer = SimpleNamespace(costs=[0.01, 3.0, 0.02], looks=0, poll_interval=None)

    def look() -> None:
        clock[0] += buffer.costs[buffer.looks]
        buffer.looks += 1

    monkeypatch.setattr(trainer_queue.time, "perf_counter", lambda: clock[0])
    buffer._sync_metadata_from_transfer_queue = look
    trainer_queue.pace(buffer, 0.2, check=lambda: None)  # type: ignore[arg-type]
    intervals = []
    for _ in range(3):
        buffer._sync_metadata_from_transfer_queue()
        intervals.append(buffer.poll_interval)
    assert intervals == pytest.approx([0.2, 12.0, 0.2])
