"""Servers that sample with other weights than the actor has are named; rounding is not."""

from __future__ import annotations

import logging
import math

import pytest
from omegaconf import OmegaConf

from verl_atgrpo import platform_choice
from verl_atgrpo.train.serving.served_weights import ServedWeights, ServedWeightsError, computing_dtype


@pytest.mark.parametrize(
    ("dtype", "figures", "warned"),
    [
        # SmolLM2 on an H200, steps 1 to 20.
        ("bfloat16", [0.077, 0.121, 0.079, 0.096, 0.078, 0.093, 0.062, 0.062, 0.173, 0.060, 0.107], []),
        ("float16", [0.0153, 0.0121, 0.0075, 0.0155, 0.001, 0.035, 0.0356, 0.0452, 0.0105], []),
        ("float32", [0.006, 0.006, 0.02], []),  # an H200's float32, whose kernels round
        ("float32", [3e-9, 7e-9, 3e-5, 5.6e-5], []),  # the CPU's
        ("float32", [3e-9, 3e-3], [2]),  # a head that was not tied again
        ("float32", [1e-6, 7e-3, 8e-3, 1e-6, 7e-3], [2, 5]),  # once while it lasts
        ("bfloat16", [0.08, 0.42], [2]),  # weights of the step before, rounded
        ("bfloat16", [0.9, 0.9, 0.95], [1]),  # wrong from the first step on, or since it was resumed
        ("bfloat16", [0.2, 0.49, 0.51], [3]),
        ("float16", [0.2, 0.1, 0.16], [1, 3]),
        ("float32", [0.04, 0.04], [1]),
        ("float16", [0.015, 0.3], [2]),
        ("float16", [0.001, 0.0099], []),
        ("bfloat16", [0.004, 0.06], [2]),
        ("fp8_e4m3", [0.04, 0.19, 0.21], [3]),  # as bfloat16
        ("float32", [2e-3, 9e-3], []),  # within five times the model's own
        ("float32", [2e-3, 1.1e-2], [2]),
    ],
)
def test_what_rounding_does_not_explain_is_a_warning(
    dtype: str, figures: list[float], warned: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    watch = ServedWeights("planner", dtype)
    with caplog.at_level(logging.WARNING):
        for step, figure in enumerate(figures, 1):
            watch.look(figure, step)
    assert [record.getMessage().partition(" in step ")[2].split()[0] for record in caplog.records] == [
        str(step) for step in warned
    ]
    assert all("policy 'planner'" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("figures", [[0.42], [1e-5, 0.42], [3e-9, 1e-4, 0.051], [0.02, 0.06], [0.9], [1e-5, math.nan]])
def test_in_float32_other_weights_end_the_run(figures: list[float]) -> None:
    """`lora.merge` served weights in bfloat16: .42 in the second step."""
    watch = ServedWeights("shared", "float32")
    for step, figure in enumerate(figures[:-1], 1):
        watch.look(figure, step)
    with pytest.raises(ServedWeightsError, match=rf"policy 'shared': in step {len(figures)} .* differs by"):
        watch.look(figures[-1], len(figures))
    ServedWeights("shared", "bfloat16").look(figures[-1], 1)


@pytest.mark.parametrize(
    ("precision", "server", "dtype"),
    [
        ({"param_dtype": "fp32", "reduce_dtype": "fp32"}, "float32", "float32"),
        ({"param_dtype": "fp32"}, "bfloat16", "bfloat16"),
        ({"param_dtype": "bf16"}, "float32", "bfloat16"),
        ({"param_dtype": "fp16"}, "float16", "float16"),
        ({"param_dtype": "fp16"}, "float32", "float16"),
        ({"param_dtype": "float32"}, "half", "float16"),
        ({"param_dtype": 32}, "float32", "float32"),
        ({"param_dtype": 16}, "float16", "float16"),
        (None, "float32", "bfloat16"),  # verl's default
        ({"param_dtype": "fp32"}, "auto", "auto"),
    ],
)
def test_the_coarser_dtype_counts(precision: dict[str, object] | None, server: str, dtype: str) -> None:
    policy = OmegaConf.create({"actor": {"fsdp_config": {"mixed_precision": precision}}, "rollout": {"dtype": server}})
    assert computing_dtype(policy) == dtype


def test_on_a_gpu_float32_ends_the_run_where_tf32_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_choice, "wants_cpu", lambda: False)
    ServedWeights("planner", "float32").look(0.2, 1)
    with pytest.raises(ServedWeightsError):
        ServedWeights("planner", "float32").look(0.4, 1)
