"""A policy's update, reference, checkpoints and start, with in-process workers.

The update is compared with gradient descent written out here, on a lookup table as the model.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import ray
import torch
import transfer_queue as tq
import verl.trainer.ppo.v1  # noqa: F401  (loads the trainer, and the unit with it)
from fakes.clock import Clock
from fakes.in_process_workers import InProcessWorkers, process_group, save_model_folder
from fakes.local_queue import LocalQueue
from omegaconf import OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_atgrpo import recipes
from verl_atgrpo.play.types import Generation
from verl_atgrpo.train.config.schema import ConfigError, CriticSettings
from verl_atgrpo.train.config.section import read_section
from verl_atgrpo.train.engine.arrival import ARRIVED, CHANGED, figures, sums
from verl_atgrpo.train.estimators.presets import PRESETS
from verl_atgrpo.train.estimators.value import Moments
from verl_atgrpo.train.rollout.episode_rows import Row, episode_fields
from verl_atgrpo.train.rows.batch import Batch
from verl_atgrpo.train.rows.row_advantages import policy_advantages
from verl_atgrpo.train.serving.client import DecisionClient, balancer_class
from verl_atgrpo.train.serving.health import PolicyFailed
from verl_atgrpo.train.serving.workers import PolicyWorker
from verl_atgrpo.train.trainer import checkpoints, policy_unit
from verl_atgrpo.train.trainer.critic_unit import CriticUnit, mix_scores
from verl_atgrpo.train.trainer.metrics import PROBS_DIFF
from verl_atgrpo.train.trainer.policies import TeamSync
from verl_atgrpo.train.trainer.policy_unit import PolicyUnit
from verl_atgrpo.train.trainer.update_inputs import deal
from verl_atgrpo.train.trainer.value_critic import ValueCritic

VOCABULARY = 102
RATE = 0.5
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
KL = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.7}
LORA = {f"{MODEL}.lora_rank": 4}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tables are small
    with process_group():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    save_model_folder(folder)
    config = recipes.compose("plan_path_cpu", [f"{MODEL}.path={folder}"])
    OmegaConf.resolve(config)
    sections = ("actor_rollout_ref", "algorithm", "at_grpo", "data", "global_profiler", "trainer")
    return OmegaConf.create({name: config[name] for name in sections})


def job(recipe: Any, **changes: Any) -> Any:
    """The recipe with three optimizer steps per epoch, without clipping."""
    config = pickle.loads(pickle.dumps(recipe))  # several times faster than a deep copy
    defaults = {
        "data.train_batch_size": 6,
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{ACTOR}.optim.lr": RATE,
        f"{ACTOR}.optim.clip_grad": 1e9,
        f"{ACTOR}.clip_ratio_low": 0.9,
        f"{ACTOR}.clip_ratio_high": 9.0,
        f"{ACTOR}.clip_ratio_c": 99.0,
        "algorithm.rollout_correction.bypass_mode": False,
    }
    for key, value in {**defaults, **changes}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


class Policy:
    """A unit with in-process workers, and its queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Any, trainable: bool = True, ranks: int = 1) -> None:
        self.queue = LocalQueue()
        self.rows = self.queue.fields["train"]
        """Key -> field -> value."""
        for name in ("kv_batch_get", "kv_batch_put"):
            monkeypatch.setattr(tq, name, getattr(self.queue, name))
        self.temperatures = [1.0]
        """Of the rows, in turns."""
        self.temperature_of: dict[str, float] = {}
        self.start = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.placed: list[Any] = []
        self.group: Any = None

        class Group:
            """A fake `RayWorkerGroup` with in-process workers of the given class."""

            def __init__(group, resource_pool: Any, ray_cls_with_init: Any, device_name: str, **options: Any) -> None:
                group.workers = ray_cls_with_init
                self.group = group
                self.placed.append((resource_pool, device_name, options))

            def spawn(group, prefix_set: set[str]) -> dict[str, InProcessWorkers]:
                assert prefix_set == set(group.workers)
                return {
                    role: InProcessWorkers(
                        worker.kwargs["config"], worker.kwargs["role"], self.queue, self.start, ranks
                    )
                    for role, worker in group.workers.items()
                }

        monkeypatch.setattr(policy_unit, "RayWorkerGroup", Group)
        monkeypatch.setattr(policy_unit, "create_colocated_worker_cls", lambda class_dict: class_dict)
        self.unit = PolicyUnit(
            "coder",
            config,
            "coder_folder",
            trainable,
            first_replica=3,
            settings=read_section(config),
        )
        self.unit.place("pool")  # type: ignore[arg-type]
        self.workers: Any = self.unit.actor_rollout_wg

    @property
    def weights(self) -> Tensor:
        """The trained policy's logits (last token, next token)."""
        logits: Tensor = self.workers.table.logits.detach().clone()
        return logits

    def log_probs(self, table: Tensor, key: str) -> Tensor:
        """Log-probs of a row's response at its temperature: (T,)."""
        row = self.rows[key]
        tokens = row["input_ids"].tolist()
        prompt = len(row["prompts"])
        return torch.stack(
            [
                torch.log_softmax(table[tokens[place - 1]] / self.temperature_of[key], dim=0)[tokens[place]]
                for place in range(prompt, len(tokens))
            ]
        )

    def entropies(self, table: Tensor, key: str) -> Tensor:
        """Entropies of a response's sampling distributions: (T,)."""
        row = self.rows[key]
        last = row["input_ids"].tolist()[len(row["prompts"]) - 1 : -1]
        chances = torch.softmax(table[last] / self.temperature_of[key], dim=-1)
        return -(chances * chances.log()).sum(dim=-1)

    def play(self, rows: int, step: int = 1) -> Batch:
        """Puts a step's rows into the queue: groups of two with different rewards, responses of one to four tokens."""
        generator = torch.Generator().manual_seed(0)  # the same responses in every step
        new = []
        for number in range(rows):
            prompt = [5 + number % 7, 20 + number % 3]
            answer = torch.randint(2, VOCABULARY, (1 + number % 4,), generator=generator).tolist()
            tags = {
                "group": f"t{number // 2}.0.a.0",
                "episode": f"t{number // 2}_0",
                "agent": "a",
                "turn": 0,
                "scope": "",
                "policy": "coder",
                "reward": float(number % 2),
                "prompt_len": len(prompt),
                "response_len": len(answer),
                "seq_len": len(prompt) + len(answer),
                "num_turns": 1,
                "min_global_steps": step - 1,
                "max_global_steps": step - 1,
                "temperature": self.temperatures[number % len(self.temperatures)],
            }
            generation = Generation(answer, [-1.0] * len(answer), "", weights_version=(step - 1, step - 1))
            new.append(Row(f"t{step}-{number}_0_0", tags["group"], prompt, generation, tags["reward"], tags))
        keys = [row.key for row in new]
        self.queue.kv_batch_put(keys, "train", episode_fields(new, 1, {}, "test"))
        self.temperature_of |= {row.key: row.tags["temperature"] for row in new}
        for key in keys:
            # As from a server with the policy's weights.
            self.rows[key]["rollout_log_probs"] = self.log_probs(self.weights, key)
        return Batch(keys, [row.tags for row in new])

    def train(self, rows: int, step: int = 1) -> tuple[Batch, dict[str, Any]]:
        update = self.unit.train(self.play(rows, step), step)
        return update.rows, update.metrics


Make = Callable[..., Policy]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> Make:
    """Returns a function that makes a policy of the recipe with changes."""

    def made(trainable: bool = True, ranks: int = 1, temperatures: Sequence[float] = (1.0,), **changes: Any) -> Policy:
        policy = Policy(monkeypatch, job(recipe, **changes), trainable, ranks)
        policy.temperatures = list(temperatures)
        return policy

    return made


def descended(policy: Policy, start: Tensor, batch: Batch, steps: Sequence[Sequence[str]], rows: int) -> Tensor:
    """Gradient descent on the configured loss, one step for each element of `steps` (keys of rows)."""
    actor = policy.unit.config.actor_rollout_ref.actor
    advantages = {key: tags["advantage"] for key, tags in zip(batch.keys, batch.tags, strict=True)}
    real = {key for key, tags in zip(batch.keys, batch.tags, strict=True) if not tags.get("is_padding")}
    before = {key: policy.log_probs(start, key) for key in real}
    reference = {key: policy.log_probs(policy.start, key) for key in real}
    table = start.clone().requires_grad_()
    for keys in steps:
        loss, tokens = torch.zeros(()), 0
        for key in real & set(keys):
            now = policy.log_probs(table, key)
            of_tokens = -advantages[key] * (now - before[key]).exp()
            of_tokens = of_tokens - actor.entropy_coeff * policy.entropies(table, key)
            if actor.use_kl_loss:
                apart = reference[key] - now
                of_tokens = of_tokens + actor.kl_loss_coef * (apart.exp() - apart - 1)
            loss = loss + of_tokens.sum()
            tokens += len(now)
        # Divided by the mean number of rows per optimizer step, so every row has the same weight.
        loss = loss / (tokens if actor.loss_agg_mode == "token-mean" else rows / 3)
        (gradient,) = torch.autograd.grad(loss, table)
        table = (table - RATE * gradient).detach().requires_grad_()
    return table.detach()


@pytest.mark.parametrize(
    ("mode", "changes", "rows"),
    [
        ("token-mean", {}, 10),
        ("seq-mean-token-sum", {}, 10),  # two rows of padding
        ("seq-mean-token-sum", {}, 12),
        ("token-mean", {"temperatures": [0.4]}, 6),
        ("seq-mean-token-sum", {"temperatures": [0.4, 1.0, 2.5]}, 10),
        ("seq-mean-token-sum", {f"{ACTOR}.ppo_epochs": 2}, 6),
        ("token-mean", {f"{ACTOR}.entropy_coeff": 0.3}, 6),
        ("seq-mean-token-sum", {**KL, **LORA}, 6),
        ("token-mean", {**KL, "temperatures": [2.5]}, 7),
    ],
    ids=str,
)
def test_an_update_is_gradient_descent_on_the_configured_loss(
    make: Make, mode: str, changes: dict[str, Any], rows: int
) -> None:
    policy = make(**{f"{ACTOR}.loss_agg_mode": mode, **changes})
    actor, engine = policy.unit.config.actor_rollout_ref.actor, policy.workers.engine
    for step in (1, 2) if actor.use_kl_loss else (1,):  # in the second, the policy differs from its reference
        start = policy.weights
        engine.steps.clear()
        batch, metrics = policy.train(rows, step)
        assert len(engine.steps) == 3 * actor.ppo_epochs == metrics["team/optimizer_steps"]
        for epoch in range(actor.ppo_epochs):
            taken = engine.steps[3 * epoch : 3 * epoch + 3]
            # In the driver's order of rows and padding.
            assert [key for keys in taken for key in keys] == batch.keys
            assert len({len(keys) for keys in taken}) == 1
        expected = descended(policy, start, batch, engine.steps, rows)
        torch.testing.assert_close(policy.weights, expected, rtol=1e-4, atol=1e-6)
        assert not torch.equal(expected, start)
        assert engine.schedule_steps == step
        if LORA.items() <= changes.items():
            assert torch.equal(policy.workers.table.base, policy.start)


@pytest.mark.parametrize("temperatures", [[1.0], [0.4], [1.0, 0.4, 3.0]], ids=str)
def test_log_probs_are_at_the_temperatures_of_the_rows(make: Make, temperatures: list[float]) -> None:
    policy = make(temperatures=temperatures, **KL)
    policy.train(6)
    changed = policy.weights
    batch, metrics = policy.train(6, step=2)
    entropies = []
    for key in batch.keys:
        torch.testing.assert_close(policy.rows[key]["old_log_probs"], policy.log_probs(changed, key))
        torch.testing.assert_close(policy.rows[key]["ref_log_prob"], policy.log_probs(policy.start, key))
        entropies.append(policy.entropies(changed, key))
    assert metrics[PROBS_DIFF] < 1e-6
    assert metrics["actor/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)


def test_an_adapters_reference_is_its_base_model(make: Make) -> None:
    policy = make(**KL, **LORA)
    assert "ref" not in policy.workers.role
    policy.train(6)
    assert not torch.equal(policy.weights, policy.start)
    batch, metrics = policy.train(6, step=2)
    for key in batch.keys:
        torch.testing.assert_close(policy.rows[key]["ref_log_prob"], policy.log_probs(policy.start, key))
    assert metrics["actor/kl_loss"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "trainable", "role"),
    [
        ({}, True, "actor_rollout"),
        (KL, True, "actor_rollout_ref"),
        (KL, False, "actor_rollout"),
        ({**KL, **LORA}, True, "actor_rollout"),
    ],
)
def test_workers_have_a_reference_model_only_if_needed(
    make: Make, changes: dict[str, Any], trainable: bool, role: str
) -> None:
    policy = make(trainable=trainable, **changes)
    assert policy.workers.role == role
    assert policy.unit.ref_policy_wg is policy.workers
    # The number of the policy's first server, so that weights are not sent to another policy's.
    worker = policy.group.workers[role]
    assert worker.kwargs["first_replica"] == 3
    assert issubclass(worker.cls.__ray_metadata__.modified_class, PolicyWorker)
    assert policy.placed == [("pool", "cpu", {})]


def test_without_a_kl_loss_no_reference_log_probs_are_computed(make: Make) -> None:
    policy = make()
    update = policy.unit.train(policy.play(6), 1)
    assert not any("ref_log_prob" in policy.rows[key] for key in update.rows.keys)
    assert update.timing.keys() == {"deal", "old_log_prob", "adv", "update_actor"}


def test_an_update_is_timed_and_counted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.5])
    monkeypatch.setattr(policy_unit, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    policy = make(**KL)
    batch = policy.play(7)
    tokens = sum(tags["seq_len"] for tags in batch.tags)
    trained, metrics, timing = policy.unit.train(batch, 1)
    assert timing.keys() == {"deal", "old_log_prob", "ref", "adv", "update_actor"}
    assert metrics["team/tokens"] == tokens
    assert metrics["team/padding_rows"] == 2 == sum(tags.get("is_padding", False) for tags in trained.tags)
    # The step's metrics are of these.
    assert all({"entropy", "advantage", "trained_tokens"} <= tags.keys() for tags in batch.tags)
    assert metrics["team/update_seconds"] == 3.5
    assert {"perf/mfu/actor", "actor/pg_loss", "actor/grad_norm", "global_seqlen/mean"} <= metrics.keys()
    assert "actor/mfu" not in metrics


def test_a_timer_runs_during_every_call_of_an_update(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(temperatures=[1.0, 0.5], **KL)
    batch = policy.play(7)
    clock = Clock(monkeypatch)
    clock.costs(tq, "kv_batch_get", "kv_batch_put")
    clock.costs(policy.workers, "compute_log_prob", "compute_ref_log_prob", "update_actor")
    clock.costs(policy.workers.engine, "optimizer_step")
    update = policy.unit.train(batch, 1)
    assert len(clock.called) == 6, "one of them was not called"
    assert sum(update.timing.values()) == update.metrics["team/update_seconds"] == clock.called.total()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_tells_what_arrives_at_the_servers(make: Make, dtype: str) -> None:
    policy = make(**{f"{ROLLOUT}.dtype": dtype})
    before = policy.weights.flatten()
    _, metrics = policy.train(6)
    of_all = figures(sums(before, policy.weights.flatten(), getattr(torch, dtype)))
    assert {key: metrics[f"actor/{key}"] for key in of_all} == of_all
    assert 0 < metrics[f"actor/{CHANGED}"] < 1


def test_updates_that_do_not_arrive_are_watched(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    policy = make(**{f"{ACTOR}.optim.lr": 1e-5, f"{ROLLOUT}.dtype": "bfloat16"})
    policy.workers.table.base.data = policy.start.bfloat16().float()  # as a published checkpoint's
    for step in range(1, 12):
        policy.train(6, step)
    (said,) = [record.getMessage() for record in caplog.records if "arrived" in record.getMessage()]
    assert said.startswith("policy 'coder': of its last 10 updates")


def test_an_update_of_nothing_has_nothing_to_arrive(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    policy = make(**{f"{ACTOR}.optim.lr": 0.0, f"{ROLLOUT}.dtype": "bfloat16"})
    for step in range(1, 12):
        _, metrics = policy.train(6, step)
        assert f"actor/{ARRIVED}" not in metrics and f"actor/{CHANGED}" not in metrics
    assert "arrived" not in caplog.text


@pytest.mark.parametrize("bypass", [True, False])
def test_in_bypass_mode_the_servers_log_probs_are_the_actors(make: Make, bypass: bool) -> None:
    policy = make(**{"algorithm.rollout_correction.bypass_mode": bypass})
    batch = policy.play(6)
    for row in policy.rows.values():
        row["rollout_log_probs"] = row["rollout_log_probs"] - 0.25
    for key in policy.unit.train(batch, 1).rows.keys:
        row = policy.rows[key]
        actual = row["old_log_probs"] - row["rollout_log_probs"]
        torch.testing.assert_close(actual, torch.full_like(actual, 0.0 if bypass else 0.25))


def test_without_a_section_for_correction_the_actor_computes(make: Make) -> None:
    policy = make(**{"algorithm.rollout_correction": None})
    batch, _ = policy.train(6)
    key = batch.keys[0]
    torch.testing.assert_close(policy.rows[key]["old_log_probs"], policy.log_probs(policy.start, key))


def test_mini_batches_have_equal_workload_and_padding_and_differ_between_steps(make: Make) -> None:
    policy = make(ranks=2)
    orders = []
    for step in (1, 2, 2):
        batch, metrics = policy.train(19, step)
        assert len(batch) == 24  # 2 ranks x 3 optimizer steps
        ranks = [batch.tags[:12], batch.tags[12:]]
        for rank in ranks:
            padding = [sum(tags.get("is_padding", False) for tags in rank[row : row + 4]) for row in (0, 4, 8)]
            assert max(padding) - min(padding) <= 1
        # Padding rows are the longest, and count as workload.
        assert metrics["team/padding_rows"] == 5
        work = [sum(tags["seq_len"] for tags in rank) for rank in ranks]
        assert max(work) == metrics["global_seqlen/balanced_max"]
        orders.append([key for key in batch.keys if not key.startswith("pad")])
    assert [key.split("-")[1] for key in orders[0]] != [key.split("-")[1] for key in orders[1]]
    assert orders[1] == orders[2]


def test_ranks_are_queried_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(ranks=2)
    for _ in range(2):
        assert len(policy.train(5)[0]) == 6
        monkeypatch.setattr(policy.workers, "_query_dispatch_info", None)


def test_missing_rows_of_a_worker_are_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make()
    compute = policy.workers.compute_log_prob
    monkeypatch.setattr(policy.workers, "compute_log_prob", lambda batch: compute(batch).keys[1:])
    with pytest.raises(AssertionError):
        policy.train(6)


def test_an_update_needs_a_row_for_every_optimizer_step(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    unit = make().unit
    assert [unit.can_learn_from(rows) for rows in (0, 3, 4)] == [False, True, True]
    assert not caplog.records
    assert not unit.can_learn_from(2)
    assert [record.getMessage() for record in caplog.records] == [
        "policy 'coder' is not updated: it has 2 rows for 3 optimizer steps (data.train_batch_size over "
        "actor.ppo_mini_batch_size)"
    ]
    caplog.clear()
    unit.trainable = False
    assert not any(unit.can_learn_from(rows) for rows in (0, 2, 4))
    assert not caplog.records


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("changes", [{}, LORA], ids=["model", "adapter"])
def test_loaded_weights_are_those_that_were_saved(make: Make, tmp_path: Path, changes: dict[str, Any]) -> None:
    policy = make(**changes)
    policy.train(6)
    saved = policy.weights
    policy.unit.save(str(tmp_path / "global_step_1"), 1)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["weights.pt"]
    policy.train(6, step=2)
    assert not torch.equal(policy.weights, saved)
    resumed = make(**changes)
    resumed.unit.load(str(tmp_path / "global_step_1"))
    assert torch.equal(resumed.weights, saved)
    assert not torch.equal(saved, policy.start)
    # Training continues as without the restart.
    resumed.train(6, step=2)
    assert torch.equal(resumed.weights, policy.weights)


def test_a_resumed_policy_is_trained_with_the_jobs_learning_rate(make: Make, tmp_path: Path) -> None:
    policy = make()
    policy.train(6)
    policy.unit.save(str(tmp_path), 1)
    slower = make(**{f"{ACTOR}.optim.lr": RATE / 10})
    slower.unit.load(str(tmp_path))
    start, (_, metrics) = slower.weights, slower.train(6, step=2)
    assert metrics["actor/lr"] == pytest.approx(RATE / 10)
    assert not torch.equal(slower.weights, start)


def test_a_checkpoint_is_in_the_policys_folder_and_stays_there(make: Make, tmp_path: Path) -> None:
    policy = make()
    step = tmp_path / "global_step_7"
    policy.unit.save(str(step), 7)
    policy.unit.load(str(step))
    assert torch.load(step / "coder_folder" / "weights.pt")["step"] == 7


def test_a_frozen_policy_is_neither_saved_nor_loaded(make: Make, tmp_path: Path) -> None:
    trained = make()
    trained.train(6)
    frozen = make(trainable=False)
    frozen.unit.save(str(tmp_path), 1)
    assert not list(tmp_path.iterdir())
    trained.unit.save(str(tmp_path), 1)
    frozen.unit.load(str(tmp_path))
    assert torch.equal(frozen.weights, frozen.start)
    assert (tmp_path / "coder_folder").exists()


def test_a_dead_worker_is_reported_with_policy_and_action(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make()

    def die(*_: Any, **__: Any) -> None:
        raise ray.exceptions.RayActorError()

    for name in ("compute_log_prob", "save_checkpoint", "load_checkpoint", "reserve_port", "use_port"):
        monkeypatch.setattr(policy.workers, name, die, raising=False)
    acts = {
        "its update": lambda: policy.train(6),
        "saving its checkpoint": lambda: policy.unit.save("somewhere", 1),
        "loading its checkpoint": lambda: policy.unit.load("somewhere"),
        "its start": policy.unit.start,
    }
    for doing, act in acts.items():
        with pytest.raises(PolicyFailed, match=f"policy 'coder': {doing} failed"):
            act()


# ---------------------------------------------------------------- placement and servers


def test_a_tokenizer_without_a_chat_template_is_refused(make: Make, tmp_path: Path) -> None:
    save_model_folder(tmp_path, chat_template=None)
    with pytest.raises(ConfigError, match=rf"policy 'coder': the tokenizer of {tmp_path} has no chat template"):
        make(**{f"{MODEL}.path": str(tmp_path)})


def test_only_in_sync_mode_must_every_row_be_fresh(make: Make) -> None:
    for mode, old in (("sync", True), ("colocate_async", False)):
        policy = make(**{"at_grpo.mode": mode})
        batch = policy.play(6)  # at step 1, sampled with version 0
        assert (PROBS_DIFF in policy.unit.train(batch, 2).metrics) is old


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        (None, {"profile_steps": [2]}),
        ("torch", {"profile_steps": [2]}),
        ("nsys", {"profile_steps": [2], "worker_nsight_options": {"trace": "cuda"}}),
    ],
)
def test_workers_get_the_steps_to_profile(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, tool: str | None, options: dict[str, Any]
) -> None:
    tools = {"nsys": {"worker_nsight_options": {"trace": "cuda"}}}
    config = job(recipe)
    config.global_profiler = {"steps": [2], "tool": tool, "global_tool_config": tools}
    policy = Policy(monkeypatch, config)
    assert policy.placed == [("pool", "cpu", options)]
    assert type(policy.placed[0][2].get("worker_nsight_options", {})) is dict


class Servers:
    """A policy's servers, replicas and weight sync in one object; `state` is their current state."""

    def __init__(self) -> None:
        self.state = "down"
        self.given: dict[str, Any] = {}
        self.version = -1
        self.polls = 0
        self.dead = False
        self.trees_tried = False

    # PolicyServers

    def create(self, **given: Any) -> Servers:
        assert self.state == "loaded", "the model must be loaded before the servers start"
        self.given, self.state = given, "up"
        return self

    def get_replicas(self) -> list[str]:
        assert self.state == "up"
        return ["replica"]

    def get_client(self, client_cls: type) -> Any:
        return client_cls.__name__

    # CheckpointEngineManager

    def sleep_replicas(self) -> None:
        assert self.polls, "dead replicas must be removed first"
        self.state = "asleep"

    def abort_replicas(self) -> None:
        assert self.polls, "dead replicas must be removed first"
        self.state = "interrupted"

    def resume_generation_replicas(self) -> None:
        self.state = "up"

    # Replicas

    def poll(self) -> None:
        if self.dead:
            raise PolicyFailed("policy 'coder': no server is left")
        self.polls += 1

    def push(self, global_steps: int) -> None:
        self.version, self.state = global_steps, "up"

    def revive(self) -> bool:
        was, self.dead = self.dead, False
        return was


@pytest.fixture
def started(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Policy, Servers]:
    policy, servers = make(**{"at_grpo.restart_servers": 1}), Servers()
    monkeypatch.setattr(policy.workers, "reserve_port", lambda: 12345, raising=False)
    monkeypatch.setattr(policy.workers, "use_port", lambda port: setattr(servers, "port", port), raising=False)

    def init_model() -> None:
        assert servers.port == 12345  # type: ignore[attr-defined]
        servers.state = "loaded"

    def tree_refusal() -> list[str | None]:
        assert servers.state == "loaded"
        servers.trees_tried = True
        return [None]

    def manager(config: Any, actor_wg: Any, replicas: list[str]) -> Servers:
        assert (config.backend, actor_wg, replicas) == ("naive", policy.workers, ["replica"])
        return servers

    def watch(name: str, workers: Any, served: Servers, sync: Servers, restarts: int) -> Servers:
        assert (name, workers, served, sync, restarts) == ("coder", policy.workers, servers, servers, 1)
        return servers

    monkeypatch.setattr(policy.workers, "init_model", init_model, raising=False)
    monkeypatch.setattr(policy.workers, "tree_refusal", tree_refusal)
    monkeypatch.setattr(policy_unit, "PolicyServers", servers)
    monkeypatch.setattr(policy_unit, "CheckpointEngineManager", manager)
    monkeypatch.setattr(policy_unit, "Replicas", watch)
    policy.unit.start()
    return policy, servers


@pytest.mark.parametrize(
    ("wanted", "refusal", "shared"),
    [("auto", None, True), (True, None, True), ("auto", "no mask", False), (False, "it was not asked", False)],
)
def test_ranks_are_balanced_by_shared_prompts_where_the_workers_use_trees(
    make: Make, wanted: Any, refusal: str | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make(**{"at_grpo.prefix_tree": wanted})
    monkeypatch.setattr(policy.workers, "tree_refusal", lambda: [None, refusal])
    policy.unit._look_at_trees()
    asked = []
    monkeypatch.setattr(
        policy_unit.update_inputs, "deal", lambda *given, shared: asked.append(shared) or deal(*given, shared=shared)
    )
    policy.train(6)
    assert asked == [shared]
    assert policy.group.workers["actor_rollout"].kwargs["prefix_tree"] is (wanted is not False)


def test_trees_that_must_be_used_and_cannot_end_the_start(make: Make) -> None:
    policy = make(**{"at_grpo.prefix_tree": True})
    with pytest.raises(ConfigError, match=r"^at_grpo\.prefix_tree=True .* policy 'coder': TableEngine .* use auto"):
        policy.unit._look_at_trees()


@pytest.mark.parametrize(("changes", "dithered"), [({}, True), ({"at_grpo.dither": False}, False)])
def test_weights_are_dithered_by_the_runs_seed_where_they_are_trained(
    make: Make, changes: dict[str, Any], dithered: bool
) -> None:
    def seed(**options: Any) -> Any:
        return make(**changes, **options).group.workers["actor_rollout"].kwargs["dither"]

    assert (seed() is not None) is dithered
    assert seed() == seed()
    if dithered:
        assert seed(**{"at_grpo.seed": 1}) != seed()
    assert seed(trainable=False) is None


def test_a_frozen_policys_workers_use_no_trees(make: Make) -> None:
    policy = make(trainable=False)
    assert policy.group.workers["actor_rollout"].kwargs["prefix_tree"] is False


def test_tokens_that_trees_save_are_a_metric(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make()
    assert "team/prefix_tree_ratio" not in policy.train(6)[1]
    update = policy.workers.update_actor

    def with_trees(batch: KVBatchMeta) -> Any:
        output = update(batch)
        output["metrics"].update(row_tokens=[300, 100], model_tokens=[60, 40])  # two optimizer steps
        return output

    monkeypatch.setattr(policy.workers, "update_actor", with_trees)
    metrics = policy.train(6, 2)[1]
    assert metrics["team/prefix_tree_ratio"] == 4.0
    assert not any("_tokens" in name for name in metrics if name.startswith("actor/"))


def test_servers_sleep_after_the_start_on_the_policys_workers(started: tuple[Policy, Servers]) -> None:
    policy, servers = started
    assert servers.state == "asleep" and servers.trees_tried
    assert servers.given == {
        "config": policy.unit.config,
        "worker_group": policy.workers,
        "rollout_resource_pool": "pool",
        "start_rank": 3,
        "load_balancer_cls": balancer_class(policy.unit.config.actor_rollout_ref.rollout),
    }


def test_a_units_calls_reach_its_servers(started: tuple[Policy, Servers]) -> None:
    policy, servers = started
    unit = policy.unit
    unit.push_weights(4)
    assert (servers.version, servers.state) == (4, "up")
    for act, state in (
        (unit.interrupt_servers, "interrupted"),
        (unit.resume_servers, "up"),
        (unit.sleep_servers, "asleep"),
    ):
        servers.polls = 0
        act()
        assert servers.state == state
    assert unit.client() == DecisionClient.__name__
    assert not unit.revive()
    servers.dead = True
    for act in (unit.interrupt_servers, unit.sleep_servers):
        with pytest.raises(PolicyFailed, match="no server is left"):
            act()
    assert servers.state == "asleep"
    assert unit.revive()


@pytest.mark.parametrize("concurrent", [True, False])
def test_the_teams_sync_is_that_of_all_policies(
    monkeypatch: pytest.MonkeyPatch, started: tuple[Policy, Servers], concurrent: bool
) -> None:
    policy, servers = started
    other = copy.copy(policy.unit)
    other.sync = other.replicas = others = Servers()  # type: ignore[assignment]
    sync = TeamSync([policy.unit, other], concurrent)
    for act, state in (
        (lambda: sync.update_weights(6), "up"),
        (sync.abort_replicas, "interrupted"),
        (sync.resume_generation_replicas, "up"),
        (sync.sleep_replicas, "asleep"),
    ):
        act()
        assert (servers.state, others.state) == (state, state)
    assert (servers.version, others.version) == (6, 6)
    servers.dead = True
    with pytest.raises(PolicyFailed, match="no server is left"):
        sync.abort_replicas()
    # Concurrently, all policies have finished before the error is raised; in turns, the next one has not started.
    assert others.state == ("interrupted" if concurrent else "asleep")


def test_a_dead_server_is_reported_with_policy_and_action(started: tuple[Policy, Servers]) -> None:
    policy, servers = started
    unit = policy.unit

    def die(*_: Any) -> None:
        raise ray.exceptions.RayActorError()

    for name in ("sleep_replicas", "abort_replicas", "resume_generation_replicas", "push", "revive"):
        setattr(servers, name, die)
    for doing, act in {
        "putting its servers to sleep": unit.sleep_servers,
        "interrupting its servers": unit.interrupt_servers,
        "resuming its servers": unit.resume_servers,
        "its weight sync": lambda: unit.push_weights(1),
        "restarting its servers": unit.revive,
    }.items():
        with pytest.raises(PolicyFailed, match=f"policy 'coder': {doing} failed"):
            act()


# ---------------------------------------------------------------------- the critic

Asked = tuple[str, int, list[int], float]
"""Episode, last token of the prompt, answer, and team reward, which solves the task above 0."""


def asked(policy: Policy, step: int, *given: Asked) -> Batch:
    """Puts a critic's rows of a step into the queue."""
    made = []
    for number, (episode, last, answer, reward) in enumerate(given):
        tags = {"critic": f"c{number}", "group": episode[0], "episode": episode, "turn": number}
        tags |= {"order": number, "place": number, "after": number, "episode_reward": float(reward)}
        tags |= {"episode_success": reward > 0, "agent": "a", "scope": "", "policy": "coder", "temperature": 1.0}
        tags |= {"cut": False, "prompt_len": 2, "response_len": len(answer), "seq_len": 2 + len(answer)}
        made.append(Row(f"s{step}_0_{number}", episode[0], [3, last], Generation(answer, [], ""), 0.0, tags))
    batch = Batch([row.key for row in made], [row.tags for row in made])
    fields = episode_fields(made, 0, {}, "", lambda ids: torch.arange(3, 3 + len(ids)))
    policy.queue.kv_batch_put(batch.keys, "train", fields, batch.tags)
    policy.temperature_of |= dict.fromkeys(batch.keys, 1.0)
    return batch


class Critic:
    """A critic on the workers of a policy, whose adapter is the critic's."""

    def __init__(self, make: Make, mini_batches: int = 1, **settings: Any) -> None:
        self.policy = make(**{f"{ACTOR}.ppo_mini_batch_size": 6 // mini_batches, **LORA})
        config = self.policy.unit.config
        given = {"kind": "likelihood", "policy": "critic", **settings}
        section, host = read_section(config), self.policy.unit
        made = ("critic", config, "critic", True, section)
        self.unit = CriticUnit(*made, host=host, critic=CriticSettings(**given))

    def ask(self, step: int, *rows: Asked) -> tuple[Batch, dict[str, Any]]:
        """Scores rows, and trains on them."""
        batch = asked(self.policy, step, *rows)
        update = self.unit.train(batch, step)
        self.returned = {key for key in update.rows.keys if key.startswith("s")}
        return batch, update.metrics

    def ratio(self, key: str) -> float:
        """The mean log-ratio of a row's answer between the table as it is and its base."""
        now, base = self.policy.weights, self.policy.start
        return float((self.policy.log_probs(now, key) - self.policy.log_probs(base, key)).mean())


ASKED: list[Asked] = [("a0", 5, [77], True), ("a0", 6, [77], True), ("a1", 7, [77], False)]


def scores_of(rows: Batch) -> dict[str, float]:
    real = rows.real
    return {key: tags["score"] for key, tags in zip(real.keys, real.tags, strict=True) if "score" in tags}


def test_a_value_critic_reads_with_the_base_and_learns_after_it_has_scored(make: Make, tmp_path: Path) -> None:
    policy = make(**LORA)
    with torch.no_grad():
        policy.workers.table.adapter += 5.0  # what is trained is not read
    settings = CriticSettings(lam=0.0, decay=0.5)
    critic = ValueCritic(settings, [policy.unit])
    first = asked(policy, 1, *ASKED)
    update = critic.train(first, 1)
    assert not any("score" in tags for tags in first.tags), "before the first episodes nothing is known"
    assert update.metrics == {"rows": 3.0, "cut_share": 0.0}
    seen = Moments.of(policy.start[[5, 6, 7]], torch.tensor([1.0, 1.0, 0.0]))
    second = asked(policy, 2, ("a0", 6, [77], True), ("a0", 7, [77], True), ("b0", 5, [77], False))
    metrics = critic.train(second, 2).metrics
    values = seen.values(policy.start[[6, 7, 5]]).tolist()
    expected = {"s2_0_0": values[1] - values[0], "s2_0_1": 1 - values[1], "s2_0_2": -values[2]}
    assert scores_of(second) == pytest.approx(expected, abs=1e-6)
    assert 0 < values[1] < values[0] < 1, "it has learned something"
    assert metrics["brier"] == pytest.approx(((1 - values[0]) ** 2 + (1 - values[1]) ** 2 + values[2] ** 2) / 3)

    seen = seen.then(Moments.of(policy.start[[6, 7, 5]], torch.tensor([1.0, 1.0, 0.0])), 0.5)
    where = OmegaConf.create({"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_from_path": None})
    checkpoints.save(where, [], 2, {}, states={"critic": critic.state()})
    kept = checkpoints.load(where, []).states["critic"]
    again, other = (ValueCritic(CriticSettings(lam=0.0, hindsight=one), [policy.unit]) for one in (True, False))
    for one in (again, other):
        one.restore(kept)
    assert again.steps == 2 and other.steps == 0, "its warm-up begins anew, too"
    older = ValueCritic(settings, [policy.unit])
    older.restore({name: value for name, value in kept.items() if name != "steps"})
    assert older.steps == 0 and older.state()["seen"].keys() == again.state()["seen"].keys()
    last = float(seen.values(policy.start[[5]]))
    for one, expected in ((again, {"s3_0_0": pytest.approx(-last, abs=1e-6)}), (other, {})):
        third = asked(policy, 3, ("a0", 5, [77], False))
        update = one.train(third, 3)
        assert {*third.keys} < {*update.rows.keys}, "its rows are removed, with their padding"
        assert scores_of(third) == expected, "prompts without hindsight are others"


def test_where_all_episodes_earn_the_same_no_score_is_a_signal(make: Make) -> None:
    """In float32 .1 is another number, and a division by the spread would make 1e-9 an advantage."""
    policy = make(**LORA)
    critic = ValueCritic(CriticSettings(lam=0.5), [policy.unit])
    for step in (1, 2, 3):
        rows = asked(policy, step, ("a0", 5, [77], 0.1), ("a0", 6, [77], 0.1), ("b0", 7, [77], 0.1))
        critic.train(rows, step)
        tags = [{**one, "reward": one.get("score", 0.0)} for one in rows.real.tags]
    assert len(scores_of(rows)) == 3
    assert policy_advantages(tags, PRESETS["dr_mas"]).tolist() == [0.0] * 3


def test_a_constant_reward_is_named_after_ten_steps(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    policy = make(**LORA)
    for rewards in ((0.0, 0.0), (0.0, 1.0)):
        critic = ValueCritic(CriticSettings(), [policy.unit])
        for step in range(12):
            critic.train(asked(policy, step, ("a0", 5, [77], rewards[0]), ("a1", 6, [77], rewards[1])), step)
    warned = [record.message for record in caplog.records if record.message.startswith("critic: in 10 steps")]
    assert len(warned) == 1 and "Outcome.team_reward" in warned[0]


def test_the_first_reward_of_another_size_is_a_share_of_the_range(make: Make) -> None:
    policy = make(**LORA)
    critic = ValueCritic(CriticSettings(), [policy.unit])
    critic.train(asked(policy, 1, ("a0", 5, [77], 0), ("a1", 6, [77], 0)), 1)
    metrics = critic.train(asked(policy, 2, ("a0", 5, [77], 100), ("a1", 6, [77], 0)), 2).metrics
    assert metrics["brier"] == pytest.approx(0.5)


def test_parts_of_a_mixture_have_values_of_their_own(make: Make) -> None:
    policy = make(**LORA)
    critic = ValueCritic(CriticSettings(lam=0.0), [policy.unit])
    for step in (1, 2):
        rows = asked(policy, step, ("a0", 5, [77], 1), ("b0", 6, [77], 100), ("b1", 7, [77], -100))
        for tags, part in zip(rows.tags, ("walk", "game", "game"), strict=True):
            tags["agent"] = f"{part}.guide"
        metrics = critic.train(rows, step).metrics
    scores = scores_of(rows)
    assert scores["s2_0_0"] == pytest.approx(0) and 0 < scores["s2_0_1"] < 100
    # In shares of each part's rewards an error is at most 1.
    assert metrics["brier"] < 1
    # A part that is new has no scores yet, and those of the others stay as they are.
    rows = asked(policy, 3, ("a0", 5, [77], 1), ("c0", 6, [77], 50))
    rows.tags[0]["agent"], rows.tags[1]["agent"] = "walk.guide", "late.guide"
    critic.train(rows, 3)
    assert scores_of(rows).keys() == {"s3_0_0"}


def test_states_that_are_not_finite_end_the_run(make: Make) -> None:
    policy = make(**LORA)
    with torch.no_grad():
        policy.workers.table.base[5] = torch.nan
    with pytest.raises(RuntimeError, match=r"^policy 'coder': in step 4 its base makes hidden states that are not fi"):
        ValueCritic(CriticSettings(), [policy.unit]).train(asked(policy, 4, *ASKED), 4)


def test_without_a_pair_no_step_is_made_and_rows_are_returned(make: Make) -> None:
    """Momentum alone would move it."""
    critic = Critic(make)
    alike = [("a0", 5, [7], True), ("b0", 5, [8], False)]
    for step in (1, 2):
        _, metrics = critic.ask(step, *alike)
        assert "team/updated" not in metrics
    assert not critic.policy.workers.engine.steps
    assert critic.returned == {"s2_0_0", "s2_0_1"}


def test_each_optimizer_step_has_the_gradient_of_the_critic_as_it_is(make: Make) -> None:
    """Two tasks in two steps of a pass: the second step is that of a critic that has made the first."""
    tasks: list[Asked] = [("a0", 5, [7], True), ("a1", 5, [8], False), ("b0", 5, [9], True), ("b1", 5, [7], False)]
    critic = Critic(make, mini_batches=2)
    _, metrics = critic.ask(1, *tasks)
    steps = [[int(key[-1]) for key in keys if key.startswith("s")] for keys in critic.policy.workers.engine.steps]
    assert sorted(map(sorted, steps)) == [[0, 1], [2, 3]], "a task is in one of them"
    assert metrics["team/optimizer_steps"] == 2.0 and metrics["team/tokens"] == 12.0
    again = Critic(make)
    for number, rows in enumerate(steps):
        again.ask(number, *(tasks[row] for row in rows))
    assert torch.allclose(critic.policy.weights, again.policy.weights, atol=1e-6)


def test_each_pass_has_the_gradient_of_the_critic_as_it_is(make: Make) -> None:
    once = Critic(make)
    once.ask(1, *ASKED)
    once.ask(2, *ASKED)
    twice = Critic(make, epochs=2)
    _, metrics = twice.ask(1, *ASKED)
    assert metrics["team/optimizer_steps"] == 2.0 == len(twice.policy.workers.engine.steps)
    assert torch.allclose(once.policy.weights, twice.policy.weights, atol=1e-6)


def test_a_likelihood_learns_from_pairs_of_answers_of_any_length(make: Make) -> None:
    critic = Critic(make)
    pairs = [("a0", 5, [7, 8, 9], True), ("a1", 5, [10], False), ("b0", 6, [11, 12], True)]
    rows, metrics = critic.ask(1, *pairs)
    assert {*scores_of(rows).values()} == {0.0} and metrics["accuracy"] == 0.5
    ratios = [critic.ratio(f"s1_0_{number}") for number in range(3)]
    assert ratios[0] > 0 > ratios[1] and ratios[2] == 0
    # The mean over tokens: each of three counts a third of the one on the other side.
    delta = critic.policy.weights - critic.policy.start
    assert float(delta[7, 8]) == pytest.approx(-float(delta[5, 10]) / 3, rel=0.2)


def test_a_critic_without_pairs_is_named_after_ten_steps(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    critic = Critic(make)
    for step in range(12):
        critic.ask(step, ("a0", 5, [7], True), ("b0", 5, [8], False))
    warned = [record.message for record in caplog.records if "no two episodes" in record.message]
    assert len(warned) == 1 and warned[0].startswith("critic 'critic': in 10 steps")


def test_scores_are_added_to_the_rewards_of_their_rows() -> None:
    rows = Batch(["a", "b"], [{"reward": 1.0}, {"reward": 2.0}])
    scored = Batch(["x", "pad"], [{"critic": "b", "score": 1.0}, {"critic": "b", "is_padding": True}])
    rows.tag(group=["task", "task"])
    mix_scores(rows, scored, weight=0.5)
    other = {"reward": 1.5, "group": "task", "critic_score": 1.0, "without_critic": 2.0}
    assert rows.tags == [{"reward": 1.0, "group": "task.unscored"}, other]


@pytest.mark.parametrize("warm_up", [False, True])
def test_rewards_are_not_compared_with_scores(warm_up: bool) -> None:
    """An agent that acts inside scores has none. Two episodes, one solved: of each a solver's row and a judge's."""
    agents = ["solver", "judge"] * 2
    tags = [{"reward": reward, "group": "t", "policy": "p"} for reward in (1.0, 1.0, 0.0, 0.0)]
    for row, (tag, agent) in enumerate(zip(tags, agents, strict=True)):
        tag |= {"agent": agent, "episode": f"e{row // 2}", "turn": 0, "scope": ""}
    rows = Batch(list("abcd"), tags)
    scored = Batch(["x", "y"], [{"critic": "a", "score": 0.3}, {"critic": "c", "score": -0.7}])
    mix_scores(rows, scored, 0.0 if warm_up else 1.0)
    assert policy_advantages(rows.tags, PRESETS["dr_grpo"]).tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5])
