"""How much of an update arrives at the servers: by hand, and with verl's worker and engines on one rank and two."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from fakes.fsdp_rows import batch, join, make, save_model, some_rows, spawn
from fakes.in_process_workers import process_group
from omegaconf import OmegaConf

from verl_atgrpo.train.engine import arrival
from verl_atgrpo.train.engine.arrival import ARRIVED, CHANGED, ArrivalWatch, figures, sample, served_dtype, sums

HALF = torch.bfloat16
ALL, PART = {ARRIVED: 1.0, CHANGED: 1.0}, pytest.approx


def of(before: Sequence[float], after: Sequence[float], dtype: Any = HALF) -> dict[str, float]:
    return figures(sums(torch.tensor(before), torch.tensor(after), dtype))


@pytest.mark.parametrize(
    ("before", "after", "dtype", "expected"),
    [
        # bfloat16's numbers around 1 are 2^-7 apart above it and 2^-8 below it.
        ([1.0], [1 + 2**-9], HALF, {ARRIVED: 0.0, CHANGED: 0.0}),
        ([1.0], [1 + 2**-7], HALF, ALL),
        ([1.0], [1 + 2**-8 + 2**-12], HALF, {ARRIVED: PART(2**-7 / (2**-8 + 2**-12)), CHANGED: 1.0}),
        # Half of the weights move by 1 and arrive, the others by 2^-9 and do not.
        ([1.0, 1.0], [2.0, 1 + 2**-9], HALF, {ARRIVED: PART(1 / (1 + 2**-18)), CHANGED: 0.5}),
        # One of two equal changes crosses half a spacing, and goes twice as far.
        ([1.0, 1 + 2**-9], [1 + 2**-8, 1 + 2**-9 + 2**-8], HALF, {ARRIVED: PART(1.0), CHANGED: 0.5}),
        # A spacing against a change in the other direction does not count as arrived.
        ([1 + 2**-9, 1 + 2**-8], [1 + 2**-9 - 2**-10] * 2, HALF, {ARRIVED: 0.0, CHANGED: 0.0}),
        ([1.0, 0.5], [1 + 2**-9, 0.5], torch.float32, {ARRIVED: 1.0, CHANGED: 0.5}),
        ([1.0], [1 + 2**-9], torch.float16, ALL),
        # No weight moved, as at a learning rate of 0: nothing could arrive.
        ([1.0, 2.0], [1.0, 2.0], HALF, {}),
        ([1.0], [float("nan")], HALF, {}),
    ],
)
def test_what_arrives(before: list[float], after: list[float], dtype: Any, expected: dict[str, float]) -> None:
    assert of(before, after, dtype) == expected


def test_ranks_are_added_up() -> None:
    one, other = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0])
    total = sums(one, one + 2**-9, HALF) + sums(other, other + 2**-7, HALF)
    assert figures(total) == {ARRIVED: PART(2**-14 / (2**-14 + 3 * 2**-18)), CHANGED: 0.25}


def test_on_the_dtypes_numbers_nothing_arrives_and_between_them_the_mean_does() -> None:
    """The reason for not comparing norms: in both cases rounding is far coarser than the update."""
    torch.manual_seed(0)
    between = torch.randn(2**18) * 0.05
    on, update = between.to(HALF).float(), 2e-6 * torch.randn(2**18)
    stuck, drifting = (figures(sums(weights, weights + update, HALF)) for weights in (on, between))
    assert stuck[ARRIVED] < 0.05 and stuck[CHANGED] < 0.01
    assert drifting[ARRIVED] == pytest.approx(1.0, abs=0.1) and drifting[CHANGED] < 0.05
    rounded = (between + update).to(HALF).float() - between.to(HALF).float()
    assert rounded.norm() > 3 * update.norm()


@pytest.mark.parametrize("most", [1, 7, 10, 97, 500, 1009, 2000])
@pytest.mark.parametrize("cut", [[1009], [4, 1, 0, 3, 1001], [1] * 9 + [1000], [500, 509], [0, 1009, 0]])
def test_every_p_th_weight_is_taken_wherever_tensors_end(most: int, cut: list[int]) -> None:
    everything = torch.arange(1009.0)
    taken = sample(everything.split(cut), most)
    gaps = set(taken.diff().int().tolist())
    assert len(taken) <= most and len(gaps) <= 1
    if gaps:
        (gap,) = gaps
        assert taken[0] < gap and 1009 - taken[-1] <= gap  # from end to end
        assert all(gap % divisor for divisor in range(2, gap))
        assert gap < 2 * max(1, -(-1009 // most))
    assert torch.equal(taken, sample(everything.split(cut), most))
    if most >= 1009:
        assert torch.equal(taken, everything)


def test_columns_of_a_matrix_are_taken_equally_often() -> None:
    """Every 64th weight of a matrix of 64 columns would be one column's."""
    rows, columns = 4096, 64
    matrix = torch.arange(float(columns)).expand(rows, columns)
    counts = torch.bincount(sample([matrix], rows).int(), minlength=columns)
    assert counts.min() >= 0.8 * rows / columns


def test_memory_is_bounded_whatever_the_model() -> None:
    weights = [torch.zeros(1).expand(3, 10**9), torch.zeros(1, dtype=HALF).expand(10**8)]
    views = [weight.as_strided((weight.numel(),), (0,)) for weight in weights]
    taken = sample(views)
    assert arrival.MOST * 0.99 < len(taken) <= arrival.MOST and taken.dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("auto", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("half", torch.float16),
        ("float32", torch.float32),
        ("float", torch.float32),
    ],
)
def test_every_dtype_of_a_server_is_known(given: str, dtype: Any) -> None:
    assert served_dtype(OmegaConf.create({"dtype": given})) == dtype


@pytest.mark.parametrize(
    ("parts", "warned"),
    [
        ([0.02] * 9, []),
        ([0.02] * 30, [10]),  # once
        ([0.9] * 10 + [0.02] * 20, [18]),  # the last ten
        # SmolLM2, steps 1 to 12: bfloat16 at 1e-5 and 5e-5, float16 at 1e-5.
        ([0.022, 0.068, 0.03, 0.188, 0.083, 0.069, 0.181, 0.215, 0.187, 0.171, 0.166, 0.162], [10]),
        ([0.084, 0.253, 0.546, 0.345, 0.292, 0.762, 0.729, 0.652, 0.634, 0.605, 0.586, 0.651], []),
        ([0.175, 0.505, 0.226, 1.267, 0.558, 0.528, 0.949, 1.109, 0.951, 0.913, 0.903, 0.874], []),
        ([-0.1, 0.1] * 5, [10]),
        ([1.0] * 40, []),
    ],
)
def test_updates_that_do_not_arrive_are_a_warning(
    parts: list[float], warned: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    watch, seen = ArrivalWatch("planner", HALF), []
    for step, part in enumerate(parts, 1):
        with caplog.at_level(logging.WARNING):
            watch.look(part, 0.013)
        seen += [step] * len(caplog.records)
        caplog.clear()
    assert seen == warned


def test_the_warning_has_the_figures_and_what_helps(caplog: pytest.LogCaptureFixture) -> None:
    watch = ArrivalWatch("planner", torch.float16)
    for _ in range(10):
        watch.look(0.021, 0.013)
    (record,) = caplog.records
    said = record.getMessage()
    assert "policy 'planner': of its last 10 updates 2.1% arrived" in said and "changed 1.3% of their weights" in said
    assert "float16 rounds the rest away" in said
    for key in ("rollout.dtype", "model.lora_rank", "actor.optim.lr", "data.train_batch_size"):
        assert key in said


# ------------------------------------------------------------ verl's worker


def _worker(engine: Any, section: Any, config: Any) -> Any:
    """verl's worker with an engine, as `init_model` leaves it."""
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    from verl_atgrpo.train.engine.worker import TrainerWorker

    actor, worker = object.__new__(TrainingWorker), object.__new__(TrainerWorker)
    actor.model_config, actor.engine, actor.engine_config = {}, engine, section.engine
    actor.profiler = worker.profiler = DistProfiler(rank=0)
    actor.device_name, actor.flops_counter = "cpu", None
    actor.loss_fn = functools.partial(ppo_loss, config=section)
    worker.config, worker.actor, worker.enable_routing_replay = config, actor, False
    return worker


LORA = ["actor_rollout_ref.model.lora_rank=4"]
KINDS: dict[str, tuple[list[str], int | None]] = {"model": ([], None), "adapter": (LORA, None), "dithered": ([], 7)}
"""What is trained -> overrides and the dither's seed."""


def _updates(rank: int, ranks: int, port: int, model: str, out: str) -> None:
    """Writes the updates of each kind."""
    join(rank, ranks, port)
    done = {kind: _update(rank, ranks, model, *given) for kind, given in KINDS.items()}
    torch.save(done, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _update(rank: int, ranks: int, model: str, overrides: Sequence[str], seed: int | None) -> dict[Any, Any]:
    """Updates once with each rate and server's dtype; returns the metrics, and those of all weights of the model.

    With a seed weights are dithered before; how many that moved is returned, too.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_atgrpo import recipes

    config = recipes.compose("plan_path_cpu", [f"actor_rollout_ref.model.path={model}", *overrides]).actor_rollout_ref
    done = {}
    for rate, dtype in itertools.product((1e-6, 1e-2), ("bfloat16", "float32")):
        config.actor.optim.lr, config.rollout.dtype = rate, dtype
        engine, section = make(FSDPEngineWithLMHead, config)
        worker, rows = _worker(engine, section, config), batch(some_rows(rank), rank, ranks)
        with engine.eval_mode():
            engine.infer_batch(rows)  # leaves whole parameters in FSDP2's root
        start = _whole(engine)
        worker._dither = seed
        worker._dither_weights()
        before = _whole(engine)
        served = served_dtype(config.rollout)
        moved = float((before != start).float().mean())
        assert torch.equal(before.to(served), start.to(served))
        tu.assign_non_tensor(rows, mini_batch_size=len(rows) // 2 * ranks)
        metrics = worker.update_actor(rows)["metrics"]
        after = _whole(engine)
        expected = figures(sums(before, after, served))
        done[rate, dtype] = {key: metrics[key] for key in expected}, expected, moved
    return done


def _whole(engine: Any) -> Any:
    """All weights that are trained; the head is the embedding."""
    weights, adapter = engine.get_per_tensor_param(base_sync_done=True)
    trained = (weight for name, weight in weights if "lora" in name or not (adapter or "lm_head" in name))
    return torch.cat([weight.detach().reshape(-1).clone() for weight in trained])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are bfloat16's numbers, as published checkpoints have them."""
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path_factory.mktemp("model"))
    AutoModelForCausalLM.from_pretrained(folder, dtype=HALF).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def updates(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Any, Any]]:
    """The updates of each kind, which are the same on both ranks."""
    out = tmp_path_factory.mktemp("updates")
    spawn(_updates, 2, str(model), str(out))
    done, other = (torch.load(out / f"{rank}.pt") for rank in range(2))
    assert done == other
    found: dict[str, dict[Any, Any]] = done
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_workers_update_tells_what_arrives(updates: dict[str, dict[Any, Any]], kind: str) -> None:
    done = updates[kind]
    for metrics, expected, moved in done.values():
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert moved == 0
    little, much = (done[rate, "bfloat16"][0] for rate in (1e-6, 1e-2))
    if kind == "model":  # an adapter's weights begin at 0 or between the dtype's numbers
        assert little[ARRIVED] < 0.05 and little[CHANGED] < 0.05
    assert much[ARRIVED] > 0.9 and much[CHANGED] > 0.4
    assert all(done[rate, "float32"][0][ARRIVED] == pytest.approx(1) for rate in (1e-6, 1e-2))


@pytest.mark.slow
def test_small_updates_of_dithered_weights_arrive(updates: dict[str, dict[Any, Any]]) -> None:
    done = updates["dithered"]
    assert done[1e-6, "bfloat16"][2] > 0.9 and done[1e-6, "float32"][2] == 0
    # Of this model's few weights a small part crosses a boundary, so that the mean is known coarsely.
    assert done[1e-6, "bfloat16"][0][ARRIVED] == pytest.approx(1, abs=0.5)


@pytest.fixture
def group() -> Iterator[None]:
    with process_group():
        yield


@pytest.mark.parametrize("original", [False, True])
def test_flat_parameters_are_looked_at_as_they_are_trained(group: None, original: bool) -> None:
    """FSDP1's, whichever pass was the last; frozen ones are in verl's optimizers, too, and do not count."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    values = torch.cat([weight.detach().reshape(-1) for weight in layers.parameters()])
    wrap = functools.partial(
        FullyShardedDataParallel,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(param_dtype=HALF),
        use_orig_params=original,
    )
    layers[1] = wrap(layers[1])
    model = wrap(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def looked_at() -> Any:
        return sample(arrival.trained_weights(optimizer))

    assert torch.equal(looked_at(), values)
    with torch.no_grad():
        model(torch.ones(1, 8))
    assert torch.equal(looked_at(), values)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    moved = looked_at()
    assert moved.shape == values.shape and not torch.equal(moved, moved.to(HALF).float())
    assert (moved != values).double().mean() > 0.9
    layers[1].requires_grad_(False)
    assert torch.equal(looked_at(), moved[:72])
